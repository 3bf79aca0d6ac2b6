"""Knobs over the memory of the rollout engine and of the weight sync."""
