"""The model of every pass: packed tokens in, log-probs (and entropies) of the response tokens out, without whole logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from verl_memopt.errors import ConfigError
from verl_memopt.memory.chunked_logprob_torch import TokenGradient, head_log_probs
from verl_memopt.memory.embedding_gradient import gathered_for_forward
from verl_memopt.memory.logit_tiles import Head, TokenStatistics
from verl_memopt.model.decoder import BlockOptions, Decoder
from verl_memopt.model.families import logit_shape, refused
from verl_memopt.model.packed_model import PackedModel, logits_of_row
from verl_memopt.model.packing import Pack
from verl_memopt.model.prefix_kv import Prefix, PrefixRecorder


class LogProbHead(nn.Module):
    """The LM head. Its forward returns log-probs instead of logits.

    The product runs inside this module's forward, so FSDP2 gathers a head that is a sharding unit of its own.
    """

    def __init__(
        self,
        linear: nn.Linear,
        chunk_tokens: int,
        compiled: bool,
        vocab_tile: int,
        shape: tuple[float, float | None] = (1.0, None),
    ) -> None:
        """Take over the weight and bias of a linear head.

        Args:
            linear: The head.
            chunk_tokens: Response tokens per chunk, 0 = all.
            compiled: Compile the functions of a chunk.
            vocab_tile: Vocabulary entries per tile of a chunk, 0 = where they are free.
            shape: How logits are scaled and capped: :func:`verl_memopt.model.families.logit_shape`.
        """
        super().__init__()
        self.scale, self.cap = shape
        self.weight = linear.weight
        self.bias = linear.bias
        self.chunk_tokens = chunk_tokens
        self.compiled = compiled
        self.vocab_tile = vocab_tile

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        token_gradient: TokenGradient | None = None,
        statistics: TokenStatistics | None = None,
    ) -> Any:
        """Return log-probs and entropies, fp32 [R] each, the latter or None.

        Args:
            hidden: [R, h].
            targets: int64 [R]; None returns the product [..., V], which transformers scales and caps itself.
            temperature: Temperature of the log-probs.
            with_entropy: Compute entropies too.
            token_gradient: Gives the gradients of log-probs and entropies before backward.
            statistics: Is filled, in a pass without gradients.
        """
        if targets is None:
            return linear(hidden, self.weight, self.bias)
        # If this forward computes the head's gradient, backward never reads the weight and need not gather it.
        gathered_for_forward(self, again_in_backward=token_gradient is None)
        chunk, tile = self.chunk_tokens, self.vocab_tile
        # A factor of the logits is a divisor of the temperature; a cap on scaled logits is another cap on unscaled ones.
        cap = None if self.cap is None else self.cap / self.scale
        head = Head(self.weight, self.bias, temperature / self.scale, chunk, tile, with_entropy, self.compiled, cap=cap)
        return head_log_probs(head, hidden, targets, token_gradient, in_place=True, statistics=statistics)


class PolicyModel(PackedModel):
    """A causal LM whose forward returns the log-probs of a pack's response tokens."""

    def __init__(
        self,
        lm: PreTrainedModel,
        chunk_tokens: int,
        compiled: bool,
        vocab_tile: int = 0,
        blocks: Sequence[BlockOptions] | None = None,
    ) -> None:
        """Take over a model.

        Arguments are as in :class:`LogProbHead` and :class:`PackedModel`.

        Raises:
            ConfigError: The model has no list of decoder blocks, or its head is no plain linear layer.
        """
        super().__init__(lm, blocks)
        head = lm.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            reason = f"have a head of class {type(head).__name__}, not a linear layer"
            raise refused(lm.config, str(lm.config.name_or_path), reason)
        lm.set_output_embeddings(LogProbHead(head, chunk_tokens, compiled, vocab_tile, logit_shape(lm.config)))

    @property
    def head(self) -> Any:
        """The LM head, a :class:`LogProbHead`."""
        return self.lm.get_output_embeddings()

    def forward(
        self,
        pack: Pack,
        temperature: float = 1.0,
        with_entropy: bool = False,
        token_gradient: TokenGradient | None = None,
        prefix_kv: Prefix | None = None,
        unpacked: bool = False,
        statistics: TokenStatistics | None = None,
    ) -> Any:
        """Return log-probs fp32 [R] of ``pack.targets``, and their entropies fp32 [R] if requested.

        Args:
            pack: The tokens of a micro-batch, and its targets.
            temperature: Temperature of the log-probs.
            with_entropy: Compute entropies too.
            token_gradient: Gives the gradient of each log-prob before backward, so the head computes its own in forward.
            prefix_kv: The prefix KV for a pack of ``pack_suffixes``; or a recorder for one of ``pack_prompt``, which returns what
                :meth:`PackedModel.recorded` returns instead.
            unpacked: Compute a pack of one row with eager attention and whole logits, for comparisons.
            statistics: As in :class:`LogProbHead`.
        """
        if unpacked:
            return self._unpacked(pack, temperature)
        if isinstance(prefix_kv, PrefixRecorder):
            return self.recorded(pack, prefix_kv)

        def head(own: Pack, places: Tensor | None) -> tuple[Tensor | None, ...]:
            states, gradient = self.predicting_states(own, prefix_kv), _at_places(token_gradient, places)
            log_probs, entropy = self.head(states, own.targets, temperature, with_entropy, gradient, statistics)
            return log_probs, entropy, *(() if statistics is None else statistics.values.values())

        log_probs, entropy, *further = self.read(pack, head)
        if statistics is not None:
            statistics.values = {name: value for name, value in zip(statistics.values, further, strict=True) if value is not None}
        return log_probs, entropy

    def _unpacked(self, row: Pack, temperature: float) -> tuple[Tensor, None]:
        """Return the log-probs of a row alone, in eager attention and from whole logits."""
        if isinstance(self.decoder, Decoder):
            logits = self.head(self.unpacked_states(row))
        else:
            logits = logits_of_row(self.lm, row)[row.predicts]
        return (logits.float() / temperature).log_softmax(-1).gather(-1, row.targets[:, None])[:, 0], None


def _at_places(token_gradient: TokenGradient | None, places: Tensor | None) -> TokenGradient | None:
    """Return the function of a pack's targets as one of those at some places, int64; None stays what it is."""
    if token_gradient is None or places is None:
        return token_gradient
    return lambda rows, log_probs, entropy: token_gradient(places[rows], log_probs, entropy)


DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
}


def dtype_of(name: str, key: str) -> torch.dtype:
    """Return the torch dtype for a setting's spelling.

    Raises:
        ConfigError: The dtype is unknown.
    """
    if name not in DTYPES:
        raise ConfigError(f"{key}={name}: unknown dtype. Use one of {', '.join(DTYPES)}.")
    return DTYPES[name]
