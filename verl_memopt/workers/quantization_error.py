"""Measure what quantising a frozen model changes in its log-probs."""

from __future__ import annotations

from pathlib import Path

import torch

from verl_memopt.memory.parameters.quantized_frozen import exact_weights
from verl_memopt.memory.parameters.resharding import reshard_units
from verl_memopt.models.build import WeightFolder
from verl_memopt.models.pack import pack_rows
from verl_memopt.models.policy_model import PolicyModel
from verl_memopt.workers.log_probs import pack_log_probs


def quantization_error(policy: PolicyModel, folder: Path, device: torch.device, temperature: float) -> tuple[float, float]:
    """Return the (mean, largest) difference in nats between the log-probs of a quantised model and of its unquantised weights.

    Measured on 4 x 64 random tokens. The unquantised weights are read from the folder, one layer at a time.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(policy.lm.config.vocab_size)
    tokens = torch.randint(vocabulary, (4 * 65,), generator=generator)
    pack = pack_rows(tokens[:4], [1] * 4, tokens[4:], [64] * 4).to(device)
    weights = WeightFolder(folder)
    quantized, _ = pack_log_probs(policy, pack, temperature, False)
    with exact_weights(policy, lambda name: weights.read(name, ()).to(device)):
        exact, _ = pack_log_probs(policy, pack, temperature, False)
    reshard_units(policy)
    difference = (quantized - exact).abs()
    return float(difference.mean()), float(difference.max())
