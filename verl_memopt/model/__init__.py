"""Models: built from a Hugging Face folder, or made here, tiny and offline."""
