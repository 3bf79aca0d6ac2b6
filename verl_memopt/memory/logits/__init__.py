"""Knobs over the logits of the LM head."""
