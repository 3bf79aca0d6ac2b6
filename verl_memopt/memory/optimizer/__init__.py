"""Knobs over the optimizer's state and its step."""
