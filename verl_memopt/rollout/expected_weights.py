"""The weights a model must be given: a stream of them is checked name by name as it passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from verl_memopt.errors import RolloutError
from verl_memopt.memory.rollout.weight_buckets import Weights, WeightSlice, as_slice, num_rows


@dataclass(frozen=True)
class ExpectedWeights:
    shapes: dict[str, torch.Size]
    """Each parameter's shape by its Hugging Face name; of tied ones, the first name."""
    ignored: frozenset[str]
    """Further names of tied parameters, and buffers that never change: allowed, not needed."""

    @classmethod
    def of(cls, model: nn.Module) -> ExpectedWeights:
        """What a transformers model expects; it may lie on the meta device."""
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        return cls(shapes, frozenset(model.state_dict(keep_vars=True)) - frozenset(shapes))

    def checked(self, weights: Weights) -> Iterator[WeightSlice]:
        """The same stream as slices, without ignored names.

        Errors: RolloutError at the first name that is unknown, of another shape, or whose rows come twice, and at the end for
        what is missing.
        """
        seen: dict[str, list[tuple[int, int]]] = {name: [] for name in self.shapes}
        for part in map(as_slice, weights):
            if part.name in self.ignored:
                continue
            self._check(part, seen)
            seen[part.name].append((part.start, part.stop))
            yield part
        missing = [name for name, rows in seen.items() if sum(stop - start for start, stop in rows) < num_rows(self.shapes[name])]
        if missing:
            few = ", ".join(missing[:5])
            raise RolloutError(f"weight sync: {len(missing)} weights never came: {few}. Send every parameter of the model.")

    def _check(self, part: WeightSlice, seen: dict[str, list[tuple[int, int]]]) -> None:
        name = part.name
        if name not in self.shapes:
            raise RolloutError(
                f"weight sync: {name} is no weight of the engine's model. Trainer and engine must hold the same model."
            )
        expected = self.shapes[name]
        if part.shape != expected:
            raise RolloutError(f"weight sync: {name} has shape {tuple(part.shape)}, the engine expects {tuple(expected)}.")
        if any(part.start < stop and start < part.stop for start, stop in seen[name]):
            raise RolloutError(f"weight sync: {name} came twice. Trainer and engine must hold the same model.")


def meta_model(folder: str, trust_remote_code: bool) -> nn.Module:
    """A transformers model of the folder's config.json that holds names and shapes, and no memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
