"""TRL's own tests and scripts on this package."""
