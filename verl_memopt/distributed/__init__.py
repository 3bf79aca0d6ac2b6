"""Devices, process groups, sharding and checkpoint I/O."""
