"""Tests of the RLT recipe."""
