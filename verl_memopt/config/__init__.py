"""Settings: typed, frozen, composed by Hydra, under verl's key names."""
