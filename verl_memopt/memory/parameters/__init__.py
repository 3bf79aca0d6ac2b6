"""Knobs over the parameters: their place, dtype, sharding and adapters."""
