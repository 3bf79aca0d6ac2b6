"""One file a memory knob: its settings, what it saves and costs, what it refuses. Nothing here imports torch."""
