"""Data: prompts from files, their order, their token ids, and batches without padding."""
