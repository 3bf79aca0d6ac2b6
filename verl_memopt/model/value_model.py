"""The critic's model, which computes one value per response token from packed tokens.

The value of a token is computed from the state before it, from which the policy chooses the token (as in verl).
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, PretrainedConfig, PreTrainedModel

from verl_memopt.distributed.device import synchronize
from verl_memopt.errors import ConfigError
from verl_memopt.model.block_options import BlockOptions
from verl_memopt.model.packed_model import PackedModel
from verl_memopt.model.packing import Pack
from verl_memopt.model.prefix_kv import Prefix, PrefixRecorder
from verl_memopt.model.weights import WeightFolder, local_part, local_region

logger = logging.getLogger(__name__)

CRITIC_KEY = "critic.model"
"""Section of the settings for the critic's model."""
STORED_HEADS = ("score", "classifier")
"""Names of the head in folders of transformers' token and sequence classifiers."""


class ValueHead(nn.Module):
    """A linear head with one output. It rests in the dtype of the master weights and computes in fp32."""

    def __init__(self, like: Tensor, hidden_size: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.new_empty(1, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(like.new_empty(1, dtype=dtype))

    def forward(self, states: Tensor) -> Tensor:
        return scalar_head(states, self.weight, self.bias)


class ValueModel(PackedModel):
    """A decoder with a head of one output instead of its LM head. Its forward returns the values of a pack's response tokens."""

    def __init__(self, lm: PreTrainedModel, blocks: Sequence[BlockOptions] | None = None, key: str = CRITIC_KEY) -> None:
        super().__init__(lm, blocks, key)
        # The head is not inside ``lm``. So its parameters have the names of transformers' classifiers, and it gets no adapters.
        lm.set_output_embeddings(nn.Identity())
        self.score = ValueHead(self.embedding_weight, lm.config.hidden_size)

    @property
    def head(self) -> Any:
        return self.score

    def forward(self, pack: Pack, prefix_kv: Prefix | None = None, unpacked: bool = False) -> Any:
        """Return the value estimates as an fp32 tensor [R], one for each response token of the pack.

        ``prefix_kv`` is as in :meth:`verl_memopt.model.packed_model.PolicyModel.forward`. If ``unpacked`` is true, the pack must
        have one row. It is then computed with eager attention, to compare the result with the packed one.
        """
        if isinstance(prefix_kv, PrefixRecorder):
            return self.recorded(pack, prefix_kv)
        if unpacked:
            return self.score(self.unpacked_states(pack))
        return self.read(pack, lambda own, _: (self.score(self.predicting_states(own, prefix_kv)),))[0]


def stored_head(folder: Path, key: str = CRITIC_KEY) -> dict[str, str | None]:
    """Map the names of the value head's parameters to their names in the folder. None = the folder lacks the parameter."""
    weights = WeightFolder(folder, key)
    stored = next((name for name in STORED_HEADS if f"{name}.weight" in weights.names), None)
    if stored is None:
        return {"score.weight": None, "score.bias": None}
    shape = weights.shape(f"{stored}.weight")
    if shape[0] != 1:
        raise ConfigError(
            f"{key}.path={folder}: its head {stored}.weight has {shape[0]} outputs, but a value head has 1. "
            "Give a model with num_labels=1, or a model without this head."
        )
    return {f"score.{part}": name if (name := f"{stored}.{part}") in weights.names else None for part in ("weight", "bias")}


def classifier_config(config: PretrainedConfig) -> PretrainedConfig:
    # Change a copy, because the causal LM still uses its config.
    changed = type(config).from_dict(config.to_dict())
    changed.name_or_path = config.name_or_path
    changed.num_labels = 1
    classes: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(config), None)
    if classes is None:
        logger.warning("transformers has no token classifier of type %s: only this package reads the critic", config.model_type)
    changed.architectures = ["ValueModel" if classes is None else classes.__name__]
    return changed


@contextmanager
def random_head(model: ValueModel, device: torch.device) -> Iterator[None]:
    """Give the head random weights inside the body, so that its values show differences between states.

    All ranks draw the same weights.
    """
    # Keep the sharded parameters, because after a forward the module may have gathered parameters instead.
    sharded = dict(model.score.named_parameters())
    before = {name: local_part(parameter).detach().clone() for name, parameter in sharded.items()}
    with torch.no_grad():
        for name, parameter in sharded.items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
            local_part(parameter).copy_(whole[local_region(parameter)])
        try:
            yield
        finally:
            model.end_pass()
            # Wait for copies from the host of weights that rest there.
            synchronize(device)
            for name, parameter in sharded.items():
                local_part(parameter).copy_(before[name])


# The product of states with one vector, which is one number per token. It is computed in fp32 for states of any dtype.
#
# Plain autograd would keep an fp32 copy of all states for backward. Here backward reads the states themselves, and converts only
# one tile of them to fp32 at a time.
#
# Bytes saved if the states are not fp32: 4 x R x h, for R tokens and a hidden size of h.

TILE_TOKENS = 2048
"""Number of tokens that are converted to fp32 at a time."""


def scalar_head(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute ``states @ weight + bias`` in fp32, [R].

    ``states`` are [R, h], ``weight`` is [1, h], ``bias`` is [1]. Each gets a gradient in its own dtype. The gradient of the
    weight is summed in fp32.
    """
    return _ScalarHead.apply(states, weight, bias)


class _ScalarHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(states)
        # Not in save_for_backward, because FSDP2 frees the weight and gathers it again into the same tensor object.
        ctx.weight, ctx.bias_dtype = weight, bias.dtype
        vector, out = weight[0].float(), states.new_empty(states.shape[0], dtype=torch.float32)
        for rows in _tiles(states):
            torch.mv(states[rows].float(), vector, out=out[rows])
        return out.add_(bias.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (states,), weight = ctx.saved_tensors, ctx.weight
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad
        vector = weight[0].float()
        grad_states = torch.empty_like(states) if needs_states else None
        # Sum over tiles in fp32, and round once.
        grad_vector = torch.zeros_like(vector) if needs_weight else None
        for rows in _tiles(states):
            if grad_states is not None:
                grad_states[rows] = grad[rows, None] * vector
            if grad_vector is not None:
                grad_vector += grad[rows] @ states[rows].float()
        grad_weight = None if grad_vector is None else grad_vector[None].to(weight.dtype)
        return grad_states, grad_weight, grad.sum()[None].to(ctx.bias_dtype) if needs_bias else None


def _tiles(states: Tensor) -> Iterator[slice]:
    for start in range(0, states.shape[0], TILE_TOKENS):
        yield slice(start, start + TILE_TOKENS)
