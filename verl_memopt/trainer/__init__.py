"""The single controller: assembles a run, drives its steps, validates, saves and resumes."""
