"""Policy weights to the rollout engine, bucket by bucket."""
