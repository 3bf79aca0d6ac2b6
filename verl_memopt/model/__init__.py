"""Build models from Hugging Face folders, or make tiny models offline."""
