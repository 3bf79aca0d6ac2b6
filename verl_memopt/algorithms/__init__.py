"""The mathematics of training: pure functions on tensors for advantages, losses, KL estimates and sums over a mini-batch."""
