"""One token per row from its logits, with the same rules in the same order as vLLM's sampler."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_memopt.rollout.sampling import SamplingSettings

FIXED_POINT = 2.0**48
"""Probability 1 as an integer. The sum over a vocabulary fits in 63 bits."""


class RowSampler:
    """Draws the next token of each row with the row's own generator, so that rows do not influence each other.

    Transformers calls it as a logits processor. It returns scores whose largest entry is the drawn token.

    Args:
        sampling: How tokens are drawn.
        seeds: One seed per row.
        prompt_mask: [rows, prompt width], 1 for a token, 0 for left padding.
        processed: Record log-probs after penalty, temperature and filters, instead of those of the model's own logits.
    """

    def __init__(self, sampling: SamplingSettings, seeds: list[int], prompt_mask: Tensor, processed: bool) -> None:
        """Create one generator per row."""
        self._sampling = sampling
        self._prompt_mask = prompt_mask
        self._processed = processed
        device = prompt_mask.device
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds] if sampling.do_sample else []
        self.log_probs: list[Tensor] = []
        """One [rows] fp32 tensor for each generated token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores whose largest entry is the drawn token.

        Args:
            input_ids: [rows, width], prompt and response so far.
            scores: [rows, vocab].
        """
        raw = scores.float()
        logits = penalized(raw, self._present_tokens(input_ids, raw.shape[-1]), self._sampling.repetition_penalty)
        if self._sampling.do_sample:
            logits = filtered(logits / self._sampling.temperature, self._sampling.top_k, self._sampling.top_p)
        noisy = logits + self._noise(logits) if self._sampling.do_sample else logits
        drawn = noisy.argmax(dim=-1, keepdim=True)
        if self._sampling.log_probs:
            recorded = logits if self._processed else raw
            self.log_probs.append(recorded.log_softmax(dim=-1).gather(-1, drawn)[:, 0])
        return noisy

    def _present_tokens(self, input_ids: Tensor, vocab: int) -> Tensor | None:
        if self._sampling.repetition_penalty == 1.0:
            return None
        mask = torch.ones_like(input_ids)
        mask[:, : self._prompt_mask.shape[1]] = self._prompt_mask
        counts = torch.zeros(input_ids.shape[0], vocab, device=input_ids.device, dtype=mask.dtype)
        return counts.scatter_add_(1, input_ids, mask) > 0

    def _noise(self, logits: Tensor) -> Tensor:
        """Return Gumbel noise [rows, vocab]. The largest entry of logits plus noise is a sample of the softmax."""
        noise = torch.empty_like(logits)
        for row, generator in enumerate(self._generators):
            noise[row].exponential_(generator=generator)
        return -noise.log()


def penalized(logits: Tensor, present: Tensor | None, penalty: float) -> Tensor:
    """Return logits [rows, vocab] with those of present tokens made smaller: divided by ``penalty`` if positive, else multiplied.

    Args:
        logits: [rows, vocab].
        present: bool [rows, vocab], True for the tokens of the row so far. None = no penalty.
        penalty: At least 1.
    """
    if present is None:
        return logits
    return torch.where(present, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filtered(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return logits [rows, vocab] with those outside the top-k, and then outside the nucleus, at minus infinity.

    Ties with the k-th token are kept. The most likely token always stays.
    """
    minus_infinity = float("-inf")
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, minus_infinity)
    if top_p < 1.0:
        ascending, order = logits.sort(dim=-1)
        # Summed as integers: a float cumsum on a GPU has no deterministic kernel.
        shares = (ascending.softmax(dim=-1).double() * FIXED_POINT).long()
        outside = shares.cumsum(dim=-1) <= (1 - top_p) * FIXED_POINT
        outside[:, -1] = False
        logits = logits.masked_fill(outside.gather(-1, order.argsort(dim=-1)), minus_infinity)
    return logits
