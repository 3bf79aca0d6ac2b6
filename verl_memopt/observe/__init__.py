"""What a run shows: bytes, seconds, metrics, charts and the run folder."""
