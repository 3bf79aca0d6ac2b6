"""Rewards: rules by data source, the user's own functions, and the processes that run them."""
