"""The published RLOO memory experiment: rerun, explained, and improved on. Run ``python -m recipe.rloo.memory_study --help``."""
