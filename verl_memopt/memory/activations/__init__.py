"""Knobs over what a pass keeps for its backward."""
