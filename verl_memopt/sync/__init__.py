"""Transfer of policy weights to the rollout engine, bucket by bucket."""
