"""Knobs over how rows are put together into micro-batches."""
