"""Benchmarks: what is compared with what, how the work is held equal, and what came out, beside each other."""
