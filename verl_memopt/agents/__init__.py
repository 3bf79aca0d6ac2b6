"""Agents: conversations of several turns, with the tools and environments that answer them."""
