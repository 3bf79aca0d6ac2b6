"""What RLT needs on one card, by model size: passes are counted on fake tensors at full depth, the rest is arithmetic."""
