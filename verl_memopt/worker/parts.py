"""Compute rows in several passes, because they have more tokens than a pass may have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from verl_memopt.memory.chunked_logprob_torch import TokenGradient
from verl_memopt.memory.logit_tiles import LogitGrads
from verl_memopt.memory.teaching import AnyTeaching
from verl_memopt.model.open_path import OpenPack, PackStep, RunPack
from verl_memopt.model.packed_model import PackedModel
from verl_memopt.model.packing import Pack
from verl_memopt.model.prefix_kv import PrefixKV

Compute: TypeAlias = Callable[[Pack, PrefixKV | None, TokenGradient | None, AnyTeaching | None], tuple[Tensor | None, ...]]
"""Runs a model on a pack, with the prefix KV that it reads, the gradient of each log-prob, if that is known before, and what a
teacher says of the tokens."""


@dataclass(eq=False)
class Parts:
    """The passes of some rows.

    If the gradient of a token depends on other tokens of its row, all values are first computed without a graph. Once the
    gradients are known, all passes run again, each with its backward. Otherwise each pass runs once, with its backward.

    Attributes:
        steps: The packs, on the host or on the device.
        context: Makes the context of each forward that is followed by its backward.
    """

    steps: list[PackStep]
    context: Callable[[], AbstractContextManager[None]] = nullcontext

    def map(self, change: Callable[[Tensor], Tensor]) -> Parts:
        return Parts([step.map(change) for step in self.steps])

    def outputs(
        self, model: PackedModel, compute: Compute, token_gradient: TokenGradient | None, teaching: AnyTeaching | None = None
    ) -> tuple[Tensor | None, ...]:
        """Return the values of all sampled tokens, as leaves of a new graph. ``teaching`` covers these tokens."""
        self._compute, self._learned, self._teaching = compute, token_gradient is not None, teaching
        if token_gradient is None:
            with torch.no_grad():
                found = [
                    (part.entries, compute(part.pack, prefix_kv, None, self._taught(part)))
                    for part, prefix_kv in self.passes(model)
                ]
        else:
            found = [
                (part.entries, self._learn(model, part, prefix_kv, _of_entries(token_gradient, part.entries)))
                for part, prefix_kv in self.passes(model)
            ]
        places = torch.cat([entries for entries, _ in found])
        self._leaves = [_joined(values, places) for values in zip(*(values for _, values in found), strict=True)]
        return tuple(self._leaves)

    def backward(self, model: PackedModel) -> None:
        """Run the backward of all passes from the gradients of the values, if it has not run yet."""
        if self._learned:
            return
        for part, prefix_kv in self.passes(model):
            log_probs, *others = (None if leaf is None or leaf.grad is None else leaf.grad[part.entries] for leaf in self._leaves)
            # A loss of divergences alone has no gradient of log-probs.
            log_probs = torch.zeros(len(part.entries), device=part.entries.device) if log_probs is None else log_probs
            self._learn(model, part, prefix_kv, _known(log_probs, *others))

    def _learn(
        self, model: PackedModel, part: RunPack, prefix_kv: PrefixKV | None, gradient: TokenGradient
    ) -> tuple[Tensor | None, ...]:
        with self.context():
            values = self._compute(part.pack, prefix_kv, gradient, self._taught(part))
        found = tuple(None if value is None else value.detach() for value in values)
        log_probs, entropy = (*found, None)[:2]
        assert log_probs is not None
        pairs = zip(values, gradient(slice(None), log_probs, entropy), strict=False)
        used = [(value, own) for value, own in pairs if value is not None and own is not None]
        torch.autograd.backward([value for value, _ in used], [own for _, own in used])
        model.end_backward()
        return found

    def _taught(self, part: RunPack) -> AnyTeaching | None:
        return None if self._teaching is None else self._teaching.at(part.entries)

    def passes(self, model: PackedModel) -> Iterator[tuple[RunPack, PrefixKV | None]]:
        """Yield each pass and the prefix KV that it reads. Backward of the prefix KV runs if the caller's gradients are on."""
        opened: list[tuple[OpenPack, PrefixKV]] = []
        for step in self.steps:
            above = next((prefix_kv for path, prefix_kv in reversed(opened) if path.is_read), None)
            if isinstance(step, OpenPack):
                opened.append((step, model.open_prefix(step.pack, above if step.is_read else None)))
            elif isinstance(step, RunPack):
                yield step, above
            else:
                path, prefix_kv = opened.pop()
                if torch.is_grad_enabled():
                    model.close_prefix(path.pack, prefix_kv, self.context())
                    model.end_backward()


def _joined(values: Sequence[Tensor | None], places: Tensor) -> Tensor | None:
    present = [some for some in values if some is not None]
    if not present:
        return None
    joined = torch.cat(present)
    return torch.empty_like(joined).index_copy_(0, places, joined).requires_grad_()


def _of_entries(token_gradient: TokenGradient, entries: Tensor) -> TokenGradient:
    return lambda rows, log_probs, entropy: token_gradient(entries[rows], log_probs, entropy)


def _known(log_probs: Tensor, entropy: Tensor | None = None, *others: Tensor | None) -> TokenGradient:
    # The gradients of the outputs, as a function of tokens.
    def at(rows: Any, *_: Any) -> LogitGrads:
        of_others: tuple[Tensor | None, ...] = tuple(None if other is None else other[rows] for other in others)
        return log_probs[rows], None if entropy is None else entropy[rows], *of_others

    return at
