"""The reward of RLT: where an explanation lies, what the student reads, and the formula."""
