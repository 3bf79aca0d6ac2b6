"""The gated delta rule with its convolution over packed rows, prompts and trees (arXiv 2412.06464), as Qwen3.5 has it.

For each head and token, with a state S [Dk, Dv] in fp32:

    S = exp(g) S;   d = beta (v - k S);   S = S + k d;   o = q S

A chunk of C tokens needs its own keys once (an inverse [C, C]) and the state before it. So chunks are computed in batches, and in
a batch a loop over rounds (``state_chunks.py``) hands states on. Forward keeps the inputs, and the states before each batch.
Backward computes a batch again, and goes from the last batch to the first. A chunk that others follow gets the sum of the
gradients of its state and of its last tokens. Bytes: ``plan/formulas.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu, softplus

from verl_memopt.memory.recompute_elementwise_torch import wide_dtype
from verl_memopt.model.state_chunks import SIZES, TAIL, Batch, Part, StateChunks

EPS = 1e-6
"""Added to the sum of squares of a query or key before the root."""

ELEMENTS = {"cpu": 2**23}
"""Device type -> most elements of the temporary tensors of a batch, default 2**26. A batch has at least one chunk."""


class StateRule(Protocol):
    """The rule over the chunks of a pack, as :class:`Rule` computes it."""

    def forward(self, keeps: bool) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]: ...

    def backward(
        self, borders: Sequence[Tensor], grad: Tensor | None, grad_tails: Tensor | None, grad_states: Tensor | None
    ) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class DeltaShape:
    """Heads: Hk heads of queries and keys of size Dk, Hv heads of values of size Dv. Key head j serves Hv / Hk value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    by_kernels: Callable[[StateChunks, DeltaShape, Sequence[Tensor]], StateRule] | None = None
    """Computes the rule by kernels (``delta_kernels.py``). Arguments are those of :class:`Rule`. None = torch's own operators."""

    def rule(self, chunks: StateChunks, tensors: Sequence[Tensor]) -> StateRule:
        return (self.by_kernels or Rule)(chunks, self, tensors)

    def sizes(self, device: torch.device) -> tuple[int, ...]:
        """Return how many tokens a full chunk may have. Kernels cut it themselves, so for them it is a whole call."""
        return SIZES if self.by_kernels is None else (self.most_tokens(device),)

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def state(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim

    def chunk_elements(self, size: int) -> int:
        """Return the elements of the temporary tensors of a chunk of ``size`` tokens in backward."""
        channels, square = 2 * self.keys + self.values, size * size
        small = TAIL * channels + 14 * size * self.value_heads
        inside = small + size * (3 * channels + 2 * self.keys) + (3 * self.value_heads + self.key_heads) * square
        heads = 5 * size * self.values + 2 * self.values * self.key_dim
        at_scores = (5 * self.value_heads + 2 * self.key_heads) * square
        at_end = 2 * size * (channels + self.keys) + (self.value_heads + 2 * self.key_heads) * square
        return inside + heads + max(at_scores, at_end)

    def most_chunks(self, size: int, device: torch.device) -> int:
        return max(ELEMENTS.get(device.type, 2**26) // self.chunk_elements(size), 1)

    def most_tokens(self, device: torch.device) -> int:
        """Return the most tokens of a call of kernels. Its temporary tensors are smaller than those of a batch of as many."""
        return SIZES[0] * self.most_chunks(SIZES[0], device)


def gated_delta_rule(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    chunks: StateChunks,
    shape: DeltaShape,
    given: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of all heads [T, Hv x Dv], and for each result of ``chunks`` its last inputs and its state.

    The last inputs are [results, 3, n], the states fp32 [results, Hv, Dk, Dv].

    Args:
        qkv: [T, n], queries, keys and values of all heads, before the convolution. n = 2 x Hk x Dk + Hv x Dv.
        b: [T, Hv]. Its sigmoid is beta.
        a: [T, Hv]. g = -exp(A_log) softplus(a + dt_bias).
        weights: Filters of the convolution [n, 1, 4], ``A_log`` [Hv] and ``dt_bias`` [Hv].
        chunks: The chunks of the T tokens.
        shape: The heads.
        given: The last inputs [given, 3, n] and the states [given, Hv, Dk, Dv] that are given. None = none.
    """
    if given is None:
        wide = wide_dtype(qkv.dtype)
        given = qkv.new_zeros(0, TAIL, qkv.shape[1]), qkv.new_zeros(0, *shape.state, dtype=wide)
    return _DeltaRule.apply(chunks, shape, qkv, b, a, *weights, *given)


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunks: StateChunks, shape: DeltaShape, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, tails, states, borders = shape.rule(chunks, tensors).forward(any(ctx.needs_input_grad))
        ctx.chunks, ctx.shape = chunks, shape
        ctx.save_for_backward(*tensors, *borders)
        ctx.set_materialize_grads(False)
        return out, tails, states

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_tails: Tensor | None, grad_states: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        rule = ctx.shape.rule(ctx.chunks, saved[:8])
        return None, None, *rule.backward(saved[8:], grad, grad_tails, grad_states)


@dataclass
class _Inside:
    """What the chunks of a batch need of themselves. n chunks, R = Hv / Hk value heads a key head.

    Attributes:
        conv: [n, C + 3, channels], inputs of the convolution.
        mixed: [n, C, channels], its outputs.
        valid: [n, C], 1 for a token, 0 for padding.
        q, k: [n, Hk, 1, C, Dk], normed. ``q_size``, ``k_size``: [n, Hk, 1, C, 1], inverse lengths.
        v: [n, Hk, R, C, Dv].
        beta: [n, Hk, R, C, 1].
        grown: [n, Hk, R, C, 1], the decay from the beginning of the chunk to each token.
        left: [n, Hk, R, C, 1], the decay from each token to the end of the chunk.
        decay: [n, Hk, R, C, C], the decay from token j to token i, 0 for j > i.
        kk: [n, Hk, 1, C, C], products of keys.
        inverse: [n, Hk, R, C, C].
        scores: [n, Hk, R, C, C], products of queries and keys, decayed.
    """

    conv: Tensor
    mixed: Tensor
    valid: Tensor
    q: Tensor
    k: Tensor
    q_size: Tensor
    k_size: Tensor
    v: Tensor
    beta: Tensor
    grown: Tensor
    left: Tensor
    decay: Tensor
    kk: Tensor
    inverse: Tensor
    scores: Tensor

    @property
    def whole(self) -> Tensor:
        # [n, Hk, R, 1, 1], the decay over the chunk.
        return self.grown[..., -1:, :]


class Rule:
    def __init__(self, chunks: StateChunks, shape: DeltaShape, tensors: Sequence[Tensor]) -> None:
        self.chunks, self.shape = chunks, shape
        self.qkv, self.b, self.a, self.filters, self.a_log, self.dt_bias, self.given_tails, self.given_states = tensors
        self.wide = wide_dtype(self.qkv.dtype)
        self.repeats = shape.value_heads // shape.key_heads
        self.split = [shape.keys, shape.keys, shape.values]
        channels = self.qkv.shape[1]
        self.taps = self.filters.view(channels, -1).t().to(self.wide)  # [4, channels]

    @property
    def batches(self) -> tuple[Batch, ...]:
        return self.chunks.batches(self.shape.most_chunks(self.chunks.size, self.qkv.device))

    # Rows of the table of inputs: zeros, given tails, tokens.

    def inputs(self, rows: Tensor) -> Tensor:
        first = self.chunks.first_row
        flat = rows.flatten()
        found = self.qkv.index_select(0, (flat - first).clamp_(min=0))
        if self.chunks.given:
            earlier = self.given_tails.flatten(0, 1).index_select(0, (flat - 1).clamp_(0, first - 2))
            found = torch.where((flat >= first)[:, None], found, earlier.to(found.dtype))
        return found.mul_((flat > 0)[:, None]).view(*rows.shape, self.qkv.shape[1])

    def _at_tokens(self, values: Tensor, own: Tensor) -> Tensor:
        # Rows of a tensor of the tokens [T, m] as [n, C, m]. Padding gets the row of the first token.
        places = (own.flatten() - self.chunks.first_row).clamp_(min=0)
        return values.index_select(0, places).view(*own.shape, values.shape[1])

    def _by_head(self, values: Tensor) -> Tensor:
        # [n, C, Hv] -> [n, Hk, R, C, 1]
        return values.transpose(1, 2).unflatten(1, (self.shape.key_heads, self.repeats))[..., None]

    def _value_heads(self, values: Tensor) -> Tensor:
        # [n, C, Hv x Dv] -> [n, Hk, R, C, Dv]
        heads = values.unflatten(2, (self.shape.key_heads, self.repeats, self.shape.value_dim))
        return heads.permute(0, 2, 3, 1, 4)

    def _tokens(self, heads: Tensor) -> Tensor:
        # [n, Hk, R, C, D] -> [n, C, Hk x R x D]
        return heads.permute(0, 3, 1, 2, 4).flatten(2)

    def inside(self, batch: Batch) -> _Inside:
        shape, size, dtype = self.shape, self.chunks.size, self.qkv.dtype
        rows, own = self.chunks.rows[batch.chunks], self.chunks.own[batch.chunks]
        conv = self.inputs(rows).to(self.wide)
        # Rounded where transformers rounds: after the convolution, after silu, and beta.
        mixed = self.convolved(conv)
        q, k, v = silu(mixed).to(dtype).to(self.wide).split(self.split, 2)
        q, k = (states.unflatten(2, (shape.key_heads, 1, shape.key_dim)).permute(0, 2, 3, 1, 4) for states in (q, k))
        q_size, k_size = ((states.square().sum(-1, keepdim=True) + EPS).rsqrt() for states in (q, k))
        q, k = q * (q_size * shape.key_dim**-0.5), k * k_size
        valid = (own > 0).to(self.wide)
        beta = self._by_head(self._at_tokens(self.b, own).sigmoid().to(self.wide) * valid[..., None])
        decays = -self.a_log.to(self.wide).exp() * softplus(self._at_tokens(self.a, own).to(self.wide) + self.dt_bias)
        exact = self._by_head((decays * valid[..., None]).double().cumsum(1))
        total = exact.to(self.wide)
        # Differences of large sums would lose digits, so what rounding cut off is added to them.
        lost = (exact - total).to(self.wide)
        decay = (total - total.transpose(-1, -2)).add_(lost).sub_(lost.transpose(-1, -2))
        # Masked before exp, which could overflow.
        later = torch.ones(size, size, dtype=torch.bool, device=rows.device).triu(1)
        decay = decay.masked_fill_(later, float("-inf")).exp_()
        left = (total[..., -1:, :] - total).add_(lost[..., -1:, :]).sub_(lost).exp_()
        kk = k @ k.transpose(-1, -2)
        system = (kk * decay).mul_(beta)
        inverse = torch.linalg.solve_triangular(
            system, torch.eye(size, dtype=self.wide, device=rows.device).expand_as(system), upper=False, unitriangular=True
        )
        scores = decay * (q @ k.transpose(-1, -2))
        return _Inside(
            conv, mixed, valid, q, k, q_size, k_size, self._value_heads(v), beta, total.exp(), left, decay, kk, inverse, scores
        )

    def convolved(self, conv: Tensor) -> Tensor:
        # [n, C + 3, channels] -> [n, C, channels], rounded to the dtype of the inputs.
        size = conv.shape[1] - TAIL
        mixed = conv[:, TAIL:] * self.taps[TAIL]
        for tap in range(TAIL):
            mixed.addcmul_(conv[:, tap : tap + size], self.taps[tap])
        return mixed.to(self.qkv.dtype).to(self.wide)

    def first_border(self) -> Tensor:
        heads = self.by_key_head(self.given_states)
        return torch.cat([heads.new_zeros(1, *heads.shape[1:]), heads])

    def _new_values(self, some: _Inside, at: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        # v minus what the state predicts [n, Hk, R, C, Dv], and the values that the chunk adds to the state.
        rest = some.v[at] - some.grown[at] * (some.k[at] @ state)
        return rest, some.inverse[at] @ (some.beta[at] * rest)

    def _next_state(self, some: _Inside, at: slice, state: Tensor, new: Tensor) -> Tensor:
        return some.whole[at] * state + some.k[at].transpose(-1, -2) @ (some.left[at] * new)

    def forward(self, keeps: bool) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return the outputs, the results, and the states before each batch if it ``keeps`` them."""
        shape, chunks = self.shape, self.chunks
        out = self.qkv.new_empty(chunks.tokens, shape.values)
        results = self.qkv.new_empty(len(chunks.results_of), *shape.state, dtype=self.wide)
        border, following, kept = self.first_border(), list[Tensor](), list[Tensor]()
        for batch in self.batches:
            kept += [border] if keeps else []
            some, states, news = self.inside(batch), list[Tensor](), list[Tensor]()
            for part in batch.parts:
                at, state = _within(part, batch), border.index_select(0, part.read)
                _, new = self._new_values(some, at, state)
                states.append(state)
                news.append(new)
                if len(part.passed) or len(part.found):
                    after = self._next_state(some, at, state, new)
                    following.append(after.index_select(0, part.passed))
                    results.index_copy_(0, part.results, after.flatten(1, 2).index_select(0, part.found))
                if part.last:
                    border, following = torch.cat(following) if following else border[:0], []
            state, new = _joined(states), _joined(news)
            heads = (some.grown * (some.q @ state)).add_(some.scores @ new)
            self._write(out, batch, self._tokens(heads))
            del some, states, news, state, new, heads  # freed before the next batch allocates
        return out, self.inputs(chunks.tails), results, kept

    def _write(self, into: Tensor, batch: Batch, values: Tensor) -> None:
        # Write values of the tokens of a batch, [n, C, m] with padding, to their rows of [T, m].
        into.index_copy_(0, batch.tokens, values.flatten(0, 1).index_select(0, batch.places).to(into.dtype))

    def backward(
        self, borders: Sequence[Tensor], grad: Tensor | None, grad_tails: Tensor | None, grad_states: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the eight tensors. ``borders`` are the states before each batch."""
        grads = self.no_gradients(grad_tails)
        results = None if grad_states is None else self.by_key_head(grad_states)
        for batch, before in zip(reversed(self.batches), reversed(borders), strict=True):
            self._batch_backward(batch, before, grad, results, grads)
        return self.collected(grads)

    def no_gradients(self, grad_tails: Tensor | None) -> Gradients:
        # Zeros, but for the tails of the results. ``qkv``, ``b`` and ``a`` are not filled.
        chunks, count = self.chunks, len(self.chunks.rows)
        grads = Gradients(
            qkv=torch.empty_like(self.qkv),
            b=torch.empty_like(self.b),
            a=torch.empty_like(self.a),
            taps=torch.zeros_like(self.taps),
            a_log=torch.zeros_like(self.a_log, dtype=self.wide),
            dt_bias=torch.zeros_like(self.dt_bias, dtype=self.wide),
            tails=self.taps.new_zeros(len(chunks.tail_rows), self.qkv.shape[1]),
            border=self.taps.new_zeros(0),
            reading=self.taps.new_zeros(0),
        )
        if grad_tails is not None:
            grads.tails.index_add_(0, chunks.tail_places[count:].flatten(), grad_tails.flatten(0, 1).to(self.wide))
        return grads

    def by_key_head(self, states: Tensor) -> Tensor:
        # [n, Hv, Dk, Dv] -> [n, Hk, R, Dk, Dv]
        return states.to(self.wide).unflatten(1, (self.shape.key_heads, self.repeats))

    def collected(self, grads: Gradients) -> tuple[Tensor, ...]:
        rows, given = self.chunks.tail_rows, torch.zeros_like(self.given_tails, dtype=self.wide).flatten(0, 1)
        # The row of zeros and rows of other kinds get nothing.
        places = rows - self.chunks.first_row
        of_token = (places >= 0)[:, None]
        grads.qkv.index_add_(0, places.clamp(min=0), (grads.tails * of_token).to(grads.qkv.dtype))
        if self.chunks.given:
            of_given = ((rows > 0) & (places < 0))[:, None]
            given.index_add_(0, (rows - 1).clamp(0, len(given) - 1), grads.tails * of_given)
        return (
            grads.qkv,
            grads.b,
            grads.a,
            grads.taps.t().reshape(self.filters.shape).to(self.filters.dtype),
            grads.a_log.to(self.a_log.dtype),
            grads.dt_bias.to(self.dt_bias.dtype),
            given.view(self.given_tails.shape).to(self.given_tails.dtype),
            grads.border[1:].flatten(1, 2).to(self.given_states.dtype),
        )

    def _batch_backward(
        self,
        batch: Batch,
        before: Tensor,
        grad: Tensor | None,
        results: Tensor | None,
        grads: Gradients,
    ) -> None:
        # ``before`` are the states in the border before the batch.
        some = self.inside(batch)
        mixed = self._heads_backward(some, batch, before, grad, results, grads)
        conv, values = some.conv, some.mixed
        del some  # the convolution's backward needs no more of it
        self._convolution_backward(conv, values, batch, mixed, grads)

    def _heads_backward(
        self,
        some: _Inside,
        batch: Batch,
        before: Tensor,
        grad: Tensor | None,
        results: Tensor | None,
        grads: Gradients,
    ) -> Tensor:
        # Returns the gradient of the activated outputs of the convolution, [n, C, channels].
        state, rest, new = self._again(some, batch, before)
        if grad is None:
            grad_out = torch.zeros_like(new)
        else:
            rows = self._at_tokens(grad, self.chunks.own[batch.chunks]).to(self.wide)
            grad_out = self._value_heads(rows.mul_(some.valid[..., None])).contiguous()
            del rows
        grad_new = some.scores.transpose(-1, -2) @ grad_out
        # The state before a chunk is read by its queries; the loop adds what its keys and the next state give.
        grad_state = some.q.transpose(-1, -2) @ (some.grown * grad_out)
        grad_after, grad_rest, grad_added = torch.zeros_like(state), torch.empty_like(new), torch.empty_like(new)
        for part in reversed(batch.parts):
            at = _within(part, batch)
            after = grad_after[at]
            if len(part.passed):
                after.index_copy_(0, part.passed, grads.border[part.border])
            if results is not None and len(part.found):
                after.index_add_(0, part.found, results.index_select(0, part.results))
            grad_new[at] += some.left[at] * (some.k[at] @ after)
            grad_added[at] = some.inverse[at].transpose(-1, -2) @ grad_new[at]
            grad_rest[at] = some.beta[at] * grad_added[at]
            grad_state[at] += some.whole[at] * after - some.k[at].transpose(-1, -2) @ (some.grown[at] * grad_rest[at])
            if part.last:
                grads.reading = state.new_zeros(part.before, *state.shape[1:])
            grads.reading.index_add_(0, part.read, grad_state[at])
            if part.first:
                grads.border = grads.reading
        del grad_new, grad_state
        return self._inside_backward(some, batch, (state, rest, new), (grad_out, grad_after, grad_rest, grad_added), grads)

    def _again(self, some: _Inside, batch: Batch, border: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Returns for all chunks of a batch the states before them, what these do not predict of the values, and the new values.
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for part in batch.parts:
            at, state = _within(part, batch), border.index_select(0, part.read)
            rest, new = self._new_values(some, at, state)
            found.append((state, rest, new))
            if part is not batch.parts[-1]:
                border = self._next_state(some, at, state, new).index_select(0, part.passed)
        states, rests, news = (_joined(some) for some in zip(*found, strict=True))
        return states, rests, news

    def _inside_backward(
        self,
        some: _Inside,
        batch: Batch,
        values: tuple[Tensor, Tensor, Tensor],
        above: tuple[Tensor, Tensor, Tensor, Tensor],
        grads: Gradients,
    ) -> Tensor:
        # All gradients of the heads of a batch that need no loop.
        (state, rest, new), (grad_out, grad_after, grad_rest, grad_added) = values, above
        grad_scores = grad_out @ new.transpose(-1, -2)
        decayed = grad_scores * some.scores
        grad_qk = grad_scores.mul_(some.decay).sum(2, keepdim=True)
        # The inverse is that of a system whose part below the diagonal is beta kk decay.
        by_beta = (grad_added @ new.transpose(-1, -2)).tril_(-1).neg_().mul_(some.decay)
        grad_kk = (by_beta * some.beta).sum(2, keepdim=True)
        by_beta *= some.kk
        grad_beta = by_beta.sum(-1, keepdim=True) + (grad_added * rest).sum(-1, keepdim=True)
        decayed += by_beta.mul_(some.beta)
        # The gradient of the decay from token j to token i goes to the g of the tokens behind j and up to i. It is summed in this
        # way, because differences of sums would cancel.
        between = decayed.tril_(-1).cumsum_(-1).tril_(-1).sum(-2)[..., :-1, None]
        del by_beta, decayed
        turned = state.transpose(-1, -2)
        read = some.grown * (grad_out @ turned)
        grad_q = read.sum(2, keepdim=True) + grad_qk @ some.k
        from_first = (read * some.q).sum(-1, keepdim=True)
        read = some.grown * (grad_rest @ turned)
        from_first -= (read * some.k).sum(-1, keepdim=True)
        grad_k = grad_qk.transpose(-1, -2) @ some.q + (grad_kk + grad_kk.transpose(-1, -2)) @ some.k - read.sum(2, keepdim=True)
        read = some.left * (new @ grad_after.transpose(-1, -2))
        grad_k += read.sum(2, keepdim=True)
        to_last = (read * some.k).sum(-1, keepdim=True)
        del read
        decays = from_first.flip(-2).cumsum(-2).flip(-2)
        decays += some.whole * (grad_after * state).sum((-1, -2))[..., None, None]
        decays[..., 1:, :] += between.add_(to_last.cumsum(-2)[..., :-1, :])
        self._gates_backward(some, batch, grad_beta, decays, grads)
        scale = self.shape.key_dim**-0.5
        grad_q = some.q_size * (scale * grad_q - some.q * ((some.q * grad_q).sum(-1, keepdim=True) / scale))
        grad_k = some.k_size * (grad_k - some.k * (some.k * grad_k).sum(-1, keepdim=True))
        return torch.cat([self._tokens(heads) for heads in (grad_q, grad_k, grad_rest)], 2)

    def _gates_backward(self, some: _Inside, batch: Batch, beta: Tensor, decays: Tensor, grads: Gradients) -> None:
        # From the gradients of beta and g to those of b, a, A_log and dt_bias.
        own = self.chunks.own[batch.chunks]
        share = some.beta * (1 - some.beta)
        self._write(grads.b, batch, self._tokens(beta * share))
        decays = self._tokens(decays) * some.valid[..., None]
        raw = self._at_tokens(self.a, own).to(self.wide) + self.dt_bias
        slope = -self.a_log.to(self.wide).exp()
        grads.a_log += (decays * slope * softplus(raw)).sum((0, 1))
        decays = decays * slope * raw.sigmoid()
        grads.dt_bias += decays.sum((0, 1))
        self._write(grads.a, batch, decays)

    def _convolution_backward(self, conv: Tensor, mixed: Tensor, batch: Batch, grad: Tensor, grads: Gradients) -> None:
        into = self.convolution_gradient(conv, mixed, grad, grads)
        grads.tails.index_add_(0, self.chunks.tail_places[batch.chunks].flatten(), into[:, :TAIL].flatten(0, 1))
        self._write(grads.qkv, batch, into[:, TAIL:])

    def convolution_gradient(self, conv: Tensor, mixed: Tensor, grad: Tensor, grads: Gradients) -> Tensor:
        # Returns the gradient of ``conv``. ``grad`` is the gradient of silu(mixed), and is overwritten.
        size, gate = mixed.shape[1], mixed.sigmoid()
        grad.mul_(gate).mul_(gate.neg_().add_(1).mul_(mixed).add_(1))
        del gate
        into = torch.zeros_like(conv)
        for tap in range(TAIL + 1):
            into[:, tap : tap + size].addcmul_(grad, self.taps[tap])
            grads.taps[tap] += (grad * conv[:, tap : tap + size]).sum((0, 1))
        return into


@dataclass
class Gradients:
    """Gradients that all batches add to.

    Attributes:
        tails: Gradients of the rows ``tail_rows`` that come from the chunks behind them.
        border: Gradients of the states in the border behind the round that is computed.
        reading: Gradients of the states in the border before it, from its last parts.
    """

    qkv: Tensor
    b: Tensor
    a: Tensor
    taps: Tensor
    a_log: Tensor
    dt_bias: Tensor
    tails: Tensor
    border: Tensor
    reading: Tensor


def _within(part: Part, batch: Batch) -> slice:
    return slice(part.chunks.start - batch.chunks.start, part.chunks.stop - batch.chunks.start)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
