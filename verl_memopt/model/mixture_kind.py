"""How a mixture's tokens find their experts, and what an expert computes between its products.

The router computes as transformers does: a softmax in fp32 over all experts, then the k largest, divided by their sum if the
config says so (``norm_topk_prob``). In gpt-oss the softmax is over the k largest logits. Its weights stay in fp32, as in vLLM;
transformers rounds them to the model's dtype.
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
            total = found.sum(-1, keepdim=True)
            grad = (grad - (grad * found).sum(-1, keepdim=True) / total) / total
        through = grad * found
        return scores.mul_(through.sum(-1, keepdim=True).neg_()).scatter_add_(1, index, through)


@dataclass(frozen=True)
class SiluGate:
    """silu(gate) * up, of an expert whose outputs [r, 2 x I] have the I columns of gate before those of up."""

    def value(self, both: Tensor, overwrites: bool) -> Tensor:
        """Return the value [r, I], which may overwrite its inputs."""
        gate, up = both.chunk(2, 1)
        return SWIGLU.compute((gate, up), (), gate if overwrites else None)

    def differentiate(self, grad: Tensor, both: Tensor) -> None:
        """Overwrite ``both`` with its gradient. ``grad`` [r, I] is that of the value."""
        sources = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
        SWIGLU.differentiate(grad, sources, (), sources, ())


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

    router: Router
    gate: SiluGate | ClampedGate = SiluGate()
    transposed: bool = False
    """Whether weights of experts are stored as [E, h, 2 x I] and [E, I, h]. Bytes are not."""
    packed: tuple[PackedExperts | None, PackedExperts | None] = (None, None)
    """How the bytes of gate and up, and of down, are decoded. None = the weights are no bytes."""
