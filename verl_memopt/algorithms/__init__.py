"""Advantages, clipped losses, KL estimators and global reductions: pure functions on tensors."""
