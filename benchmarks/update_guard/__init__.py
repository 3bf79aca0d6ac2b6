"""What it costs to look at the gradient norm before an update."""
