"""Settings for known tasks, and the study that goes with one of them."""
