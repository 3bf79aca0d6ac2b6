"""Recipes: what one method adds to the core, each in a folder of its own."""
