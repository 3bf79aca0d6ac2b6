"""How a mixture's tokens find their experts, and what an expert computes between its products.

The router computes as transformers does: a softmax in fp32 over all experts, then the k largest, divided by their sum if the
config says so (``norm_topk_prob``). In gpt-oss the softmax is over the k largest logits. GLM-4.5 has sigmoids instead, and a
correction of each that counts only for the choice. A router's weights stay in fp32, as in vLLM; transformers rounds them to the
model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_memopt.memory.fused import over_rows
from verl_memopt.memory.quantized_frozen_torch import PackedExperts
from verl_memopt.memory.recompute_elementwise_torch import SwiGLU, wide_dtype
from verl_memopt.model.router_replay import number_dtype

SWIGLU = SwiGLU()


@dataclass(frozen=True)
class Router:
    top_k: int
    """Number of experts that compute a token."""
    renormalizes: bool
    """Whether the weights of a token's experts are divided by their sum."""
    over_chosen: bool = False
    """Whether the softmax is over the logits of a token's experts alone. The scores are then the logits."""

    def scores(self, normal: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the probabilities of all experts, or their logits, fp32 or wider [T, E].

        ``normal`` are normed rows [T, h]. ``weight`` is [E, h] and ``bias`` [E].
        """
        logits = torch.mm(normal, weight.t(), out=normal.new_empty(normal.shape[0], weight.shape[0]))
        if bias is not None:
            logits.add_(bias)
        wide = wide_dtype(logits.dtype)
        return logits.to(wide) if self.over_chosen else logits.softmax(-1, dtype=wide)

    def choose(self, scores: Tensor) -> Tensor:
        """Return the numbers of the likeliest experts, uint8 or int16 [T, k], the likeliest first."""
        # The largest probabilities where transformers takes these, not logits: ties are then broken as there.
        chosen = scores.topk(self.top_k, dim=-1).indices
        return chosen.to(number_dtype(scores.shape[1]))

    def weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        found = scores.gather(1, chosen.long())
        if self.over_chosen:
            return found.softmax(-1)
        return found / found.sum(-1, keepdim=True) if self.renormalizes else found

    def differentiate(self, grad: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the gradient of the logits [T, E] from that of the weights [T, k]. It overwrites the scores."""
        index = chosen.long()
        if self.over_chosen:
            through = grad * (weights := self.weights(scores, chosen))
            return scores.zero_().scatter_(1, index, through.sub_(weights * through.sum(-1, keepdim=True)))
        found = scores.gather(1, index)
        if self.renormalizes:
            grad = _through_sum(grad, found, found.sum(-1, keepdim=True))
        through = grad * found
        return scores.mul_(through.sum(-1, keepdim=True).neg_()).scatter_add_(1, index, through)


def _through_sum(grad: Tensor, found: Tensor, total: Tensor) -> Tensor:
    # The gradient of `found` from that of found / total.
    return (grad - (grad * found).sum(-1, keepdim=True) / total) / total


SMALLEST_SUM = 1e-20
"""Added to the sum of the sigmoids of a token's experts, as in transformers."""


@dataclass(frozen=True, eq=False)
class SigmoidRouter:
    """The router of GLM-4.5: a sigmoid in fp32 for each expert. Methods are those of :class:`Router`.

    The experts with the largest sum of score and correction are chosen, if they are in the best groups of neighbouring experts.
    What a group is worth is the sum of its two best experts. The weights are the scores without the correction, times a factor.
    """

    top_k: int
    renormalizes: bool
    factor: float
    groups: int
    top_groups: int
    """Number of groups from which a token may choose."""
    correction: Tensor | None = None
    """fp32 [E]. It is not trained."""

    def scores(self, normal: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the sigmoids of all experts, fp32 or wider [T, E]. The product is in fp32 too, as in transformers and vLLM."""
        assert bias is None, "its router has no bias beside the correction"
        wide = wide_dtype(normal.dtype)
        logits = torch.empty(normal.shape[0], weight.shape[0], dtype=wide, device=normal.device)
        return torch.mm(normal.to(wide), weight.to(wide).t(), out=logits).sigmoid_()

    def choose(self, scores: Tensor) -> Tensor:
        """Return the experts with the largest corrected scores in the chosen groups, uint8 or int16 [T, k], in any order."""
        wanted = scores if self.correction is None else scores + self.correction
        if self.top_groups < self.groups:
            by_group = wanted.unflatten(1, (self.groups, -1))
            best = by_group.topk(2, dim=-1).values.sum(-1)
            rest = torch.ones_like(best, dtype=torch.bool)
            rest.scatter_(1, best.topk(self.top_groups, dim=-1, sorted=False).indices, False)
            wanted = by_group.masked_fill(rest[..., None], -torch.inf).flatten(1)
        return wanted.topk(self.top_k, dim=-1, sorted=False).indices.to(number_dtype(scores.shape[1]))

    def weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        found = scores.gather(1, chosen.long())
        return (found / (found.sum(-1, keepdim=True) + SMALLEST_SUM) if self.renormalizes else found) * self.factor

    def differentiate(self, grad: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        index = chosen.long()
        found, grad = scores.gather(1, index), grad * self.factor
        if self.renormalizes:
            grad = _through_sum(grad, found, found.sum(-1, keepdim=True) + SMALLEST_SUM)
        return scores.zero_().scatter_(1, index, grad * found * (1 - found))


@dataclass(frozen=True)
class SiluGate:
    """silu(gate) * up, or what ``glu`` computes, of outputs [r, 2 x I] that have the I columns of gate before those of up."""

    glu: SwiGLU = SWIGLU

    def value(self, both: Tensor, overwrites: bool) -> Tensor:
        """Return the value [r, I], which may overwrite its inputs."""
        gate, up = both.chunk(2, 1)
        return self.glu.compute((gate, up), (), gate if overwrites else None)

    def differentiate(self, grad: Tensor, both: Tensor) -> None:
        """Overwrite ``both`` with its gradient. ``grad`` [r, I] is that of the value."""
        sources = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
        self.glu.differentiate(grad, sources, (), sources, ())


@dataclass(frozen=True)
class ClampedGate:
    """(up + 1) * gate * sigmoid(alpha * gate), of an expert whose outputs [r, 2 x I] have gate and up by turns (gpt-oss).

    Before, gate is cut at ``limit`` from above, and up at ``limit`` from both sides. Methods are those of :class:`SiluGate`.
    """

    alpha: float
    limit: float

    def value(self, both: Tensor, overwrites: bool) -> Tensor:
        del overwrites  # products need columns without gaps
        out = both.new_empty(both.shape[0], both.shape[1] // 2)
        over_rows(_clamped_gate, (both, out), self.alpha, self.limit, narrow=True)
        return out

    def differentiate(self, grad: Tensor, both: Tensor) -> None:
        over_rows(_clamped_gate_gradient, (both, grad), self.alpha, self.limit, narrow=True)


def _clamped_gate(both: Tensor, out: Tensor, alpha: float, limit: float) -> None:
    gate, up = both[:, ::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
    torch.mul(up + 1, gate * torch.sigmoid(gate * alpha), out=out)


def _clamped_gate_gradient(both: Tensor, grad: Tensor, alpha: float, limit: float) -> None:
    first, second = both[:, ::2], both[:, 1::2]
    gate, up = first.clamp(max=limit), second.clamp(-limit, limit)
    share = (gate * alpha).sigmoid_()
    value = gate.mul_(share)
    slope = (1 - share).mul_(value).mul_(alpha).add_(share)
    del share  # in place and freed early, because a tile has room for four tensors
    grad_gate = up.add_(1).mul_(slope).mul_(grad).masked_fill_(first > limit, 0)
    first.copy_(grad_gate)
    second.copy_(value.mul_(grad).masked_fill_((second > limit) | (second < -limit), 0))


@dataclass(frozen=True)
class MixtureKind:
    """How tokens find their experts, and what an expert computes."""

    router: Router | SigmoidRouter
    gate: SiluGate | ClampedGate = SiluGate()
    transposed: bool = False
    """Whether weights of experts are stored as [E, h, 2 x I] and [E, I, h]. Bytes are not."""
    packed: tuple[PackedExperts | None, PackedExperts | None] = (None, None)
    """How the bytes of gate and up, and of down, are decoded. None = the weights are no bytes."""
