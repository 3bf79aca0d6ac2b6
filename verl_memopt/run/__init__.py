"""What makes a run survive: checkpoints, resume, locks, signals, and the processes that it started."""
