"""Data: prompts from files, the order of prompts, their token ids, and batches without padding."""
