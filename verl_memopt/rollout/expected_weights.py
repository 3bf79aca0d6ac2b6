"""The weights a model must be given: a stream of them is checked name by name as it passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from verl_memopt.errors import RolloutError


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

    def checked(self, weights: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """The same stream, cast to dtype one by one and without ignored names.

        Errors: RolloutError at the first name that is unknown, repeated or of another shape, and at the end for those missing.
        """
        missing = dict(self.shapes)
        for name, tensor in weights:
            if name in self.ignored:
                continue
            if name not in missing:
                reason = "came twice" if name in self.shapes else "is no weight of the engine's model"
                raise RolloutError(f"weight sync: {name} {reason}. Trainer and engine must hold the same model.")
            expected = missing.pop(name)
            if tensor.shape != expected:
                raise RolloutError(f"weight sync: {name} has shape {tuple(tensor.shape)}, the engine expects {tuple(expected)}.")
            yield name, tensor.to(dtype)
        if missing:
            few = ", ".join(list(missing)[:5])
            raise RolloutError(f"weight sync: {len(missing)} weights never came: {few}. Send every parameter of the model.")


def meta_model(folder: str, trust_remote_code: bool) -> nn.Module:
    """A transformers model of the folder's config.json that holds names and shapes, and no memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
