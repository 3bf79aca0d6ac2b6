"""What one update costs a GPU, counted without one: kernel launches, bytes moved, FLOPs, waits. Every figure is an estimate."""
