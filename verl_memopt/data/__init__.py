"""Data: prompts from files, their order, their ids, and batches without padding."""
