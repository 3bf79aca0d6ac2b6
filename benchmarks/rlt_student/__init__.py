"""Benchmarks of the student of RLT: quantised scoring, its ranks, its bytes and its speed."""
