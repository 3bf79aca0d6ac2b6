"""What holds memory, and how to hold less of it: one file for each technique."""
