"""Forward and backward of one group update, side by side with peers: seconds, live bytes, FLOPs and the gradient itself."""
