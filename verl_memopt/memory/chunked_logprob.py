"""Log-probs and entropy from hidden states, chunk by chunk: the [tokens, vocabulary] logits never exist.

Saves: 10 to 16 bytes x response tokens x vocabulary in the update, 4 to 8 in the log-prob passes; what stays is one chunk,
about chunk x vocabulary x 8 bytes (0.6 GiB at 512 x 151,936).
Costs: one more product with the LM head in backward (the logits of a chunk are computed again).
Pairs with: every pass and every other knob; a sharded head is gathered once per pass, not once per chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from verl_memopt.memory.knob import Knob
from verl_memopt.observe.byte_tracker import scope


def head_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
    compiled: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gives the log-prob of each target and, when asked, the entropy of its distribution.

    hidden: [R, H] in the compute dtype. weight: [V, H]; bias: [V] or None. targets: int64 [R].
    Logits are divided by ``temperature`` in fp32. ``chunk_tokens`` of 0 takes all tokens as one chunk.
    Returns fp32 [R] and fp32 [R] or None. Gradients flow to hidden, weight and bias from both outputs.
    """
    chunk = chunk_tokens if chunk_tokens > 0 else max(hidden.shape[0], 1)
    log_probs, entropy = _ChunkedLogProb.apply(hidden, weight, bias, targets, temperature, chunk, with_entropy, compiled)
    return log_probs, entropy if with_entropy else None


class _ChunkedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        scores = _compiled(_chunk_scores) if compiled else _chunk_scores
        log_probs = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        entropy = hidden.new_empty(hidden.shape[0] if with_entropy else 0, dtype=torch.float32)
        log_normalizer = torch.empty_like(log_probs)
        with scope(kind="logits"):
            for rows in _chunks(hidden.shape[0], chunk):
                part = scores(hidden[rows], weight, bias, targets[rows], temperature, with_entropy)
                log_probs[rows], log_normalizer[rows] = part[0], part[1]
                if with_entropy:
                    entropy[rows] = part[2]
        ctx.save_for_backward(hidden, weight, bias, targets, log_normalizer, entropy)
        ctx.temperature, ctx.chunk, ctx.with_entropy, ctx.compiled = temperature, chunk, with_entropy, compiled
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        hidden, weight, bias, targets, log_normalizer, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        logit_grads: Callable[..., Any] = _compiled(_chunk_logit_grads) if ctx.compiled else _chunk_logit_grads
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if bias is not None and needs_bias else None
        with scope(kind="logits"):
            for rows in _chunks(hidden.shape[0], ctx.chunk):
                extra = (entropy[rows], grad_entropy[rows]) if ctx.with_entropy else (None, None)
                grad = logit_grads(
                    hidden[rows], weight, bias, targets[rows], log_normalizer[rows], grad_log_probs[rows], *extra, ctx.temperature
                )
                if grad_hidden is not None:
                    torch.mm(grad, weight, out=grad_hidden[rows])
                if grad_weight is not None:
                    grad_weight.addmm_(grad.t(), hidden[rows])
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _chunks(total: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, total)) for start in range(0, total, chunk))


def _chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Gives fp32 [c, V] logits over temperature; the division is in place where the upcast made a new tensor."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chunk_scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, ...]:
    log_p = _chunk_logits(hidden, weight, bias, temperature)
    log_normalizer = log_p.logsumexp(-1)
    log_p.sub_(log_normalizer[:, None])
    log_probs = log_p.gather(-1, targets[:, None]).squeeze(-1)
    if not with_entropy:
        return log_probs, log_normalizer
    return log_probs, log_normalizer, -log_p.exp().mul_(log_p).sum(-1)


def _chunk_logit_grads(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    log_normalizer: Tensor,
    grad_log_probs: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Gives [c, V] in the compute dtype: the gradient of the undivided logits.

    d log p(y) / d z = onehot(y) - p;  d entropy / d z = -p (log p + entropy), with z = logits / temperature.
    """
    logits = _chunk_logits(hidden, weight, bias, temperature)
    log_p = logits.sub_(log_normalizer[:, None])
    if entropy is None or grad_entropy is None:
        grad = log_p.exp_().mul_(-grad_log_probs[:, None])
    else:
        factor = (log_p + entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_log_probs[:, None])
        grad = log_p.exp_().mul_(factor).neg_()
    grad.scatter_add_(-1, targets[:, None], grad_log_probs[:, None])
    if temperature != 1.0:
        grad.div_(temperature)
    return grad.to(hidden.dtype)


_COMPILED: dict[str, Callable[..., Any]] = {}


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    if function.__name__ not in _COMPILED:
        _COMPILED[function.__name__] = torch.compile(function, dynamic=True)
    return _COMPILED[function.__name__]


KNOB = Knob(
    name="chunked_logprob",
    keys=("actor_rollout_ref.model.logprob_chunk_tokens",),
    on=("actor_rollout_ref.model.logprob_chunk_tokens=512",),
    off=("actor_rollout_ref.model.logprob_chunk_tokens=0",),
)
