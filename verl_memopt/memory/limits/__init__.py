"""Limits of device and host memory, and what to do when they are reached."""
