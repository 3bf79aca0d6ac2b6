"""Data of RLT: questions with known solutions, and the prompts of teacher and student."""
