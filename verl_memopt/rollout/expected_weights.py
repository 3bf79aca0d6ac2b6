"""The weights that a model expects. Checks a stream of weights name by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from verl_memopt.errors import RolloutError
from verl_memopt.memory.rollout.weight_buckets import Weights, WeightSlice, as_slice, num_rows


@dataclass(frozen=True)
class ExpectedWeights:
    """Names and shapes of the weights that a model needs."""

    shapes: dict[str, torch.Size]
    """Shape of each parameter by its Hugging Face name. Tied parameters appear under their first name."""
    ignored: frozenset[str]
    """Further names of tied parameters, and constant buffers: allowed but not needed."""

    @classmethod
    def of(cls, model: nn.Module) -> ExpectedWeights:
        """Return the names and shapes of a transformers model, which may be on the meta device."""
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        return cls(shapes, frozenset(model.state_dict(keep_vars=True)) - frozenset(shapes))

    def checked(self, weights: Weights) -> Iterator[WeightSlice]:
        """Yield the same stream as slices, without ignored names.

        Raises:
            RolloutError: A name is unknown, has another shape, or repeats rows; or, at the end, a weight is missing.
        """
        received: dict[str, list[tuple[int, int]]] = {name: [] for name in self.shapes}
        for part in map(as_slice, weights):
            if part.name in self.ignored:
                continue
            self._check(part, received)
            received[part.name].append((part.start, part.stop))
            yield part
        missing = [
            name for name, rows in received.items() if sum(stop - start for start, stop in rows) < num_rows(self.shapes[name])
        ]
        if missing:
            examples = ", ".join(missing[:5])
            raise RolloutError(f"weight sync: {len(missing)} weights are missing: {examples}. Send every parameter of the model.")

    def _check(self, part: WeightSlice, received: dict[str, list[tuple[int, int]]]) -> None:
        name = part.name
        if name not in self.shapes:
            raise RolloutError(
                f"weight sync: {name} is not a weight of the engine's model. Trainer and engine must hold the same model."
            )
        expected = self.shapes[name]
        if part.shape != expected:
            raise RolloutError(f"weight sync: {name} has shape {tuple(part.shape)}, the engine expects {tuple(expected)}.")
        if any(part.start < stop and start < part.stop for start, stop in received[name]):
            raise RolloutError(f"weight sync: {name} was sent twice. Trainer and engine must hold the same model.")


def meta_model(folder: str, trust_remote_code: bool) -> nn.Module:
    """Return a transformers model of the folder's config.json with names and shapes but no memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
