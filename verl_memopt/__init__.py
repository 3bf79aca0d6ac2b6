"""Reinforcement-learning post-training of language models when device memory is the bottleneck."""

__version__ = "0.1.0"
