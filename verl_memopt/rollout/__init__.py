"""Generation: prompts as token ids in, responses as token ids with their log-probs out."""
