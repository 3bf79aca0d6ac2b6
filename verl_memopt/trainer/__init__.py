"""The driver process of a run: it builds the run, runs its steps, validates, saves checkpoints and resumes."""
