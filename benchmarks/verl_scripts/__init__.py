"""Counts the example scripts of verl that compose with this command line as they are."""
