"""Measurements of a run and their output: bytes, seconds, metrics, charts and the run folder."""
