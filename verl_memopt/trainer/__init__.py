"""The single controller: puts a run together, runs its steps, validates, saves and resumes."""
