"""How far the rollout engine's log-probs are from the trainer's, by dtype."""
