"""RLOO: settings, data, and the memory study."""
