"""Autograd functions and kernels that models and memory knobs call."""

ROWS_OF_BACKWARD = 2048
"""Tokens at most in a tile of a block's products in backward, on a CPU; where it is more, it is still little beside a block."""
