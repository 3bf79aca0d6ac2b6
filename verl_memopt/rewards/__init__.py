"""Rewards: rules by data source, functions of the user's own, and the processes that run them."""
