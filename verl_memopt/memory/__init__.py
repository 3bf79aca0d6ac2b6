"""Techniques that save memory: one file declares each knob, and a file with _torch in its name implements it."""
