"""Reinforcement-learning post-training of language models when device memory is what there is too little of."""

__version__ = "0.1.0"
