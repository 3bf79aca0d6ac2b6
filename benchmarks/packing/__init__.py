"""Micro-batches under a token cap: bins against what no packing can beat, and the time to pack a large batch."""
