"""Log-probs, entropies and gradients of a chunk of tokens, from one tile of the vocabulary after another.

One fp32 buffer [chunk, tile] holds logits, log-probs, probabilities and the gradient, one after another. There is no other fp32
tensor of that size. In half precision there is one more buffer in the compute dtype. If functions are compiled, the
half-precision buffer is enough: one kernel reads the logits from it, another overwrites them with their gradient, and neither
writes fp32 values to memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl_memopt.memory import kernels
from verl_memopt.memory.chunked_logprob import TAUGHT_COLUMNS
from verl_memopt.memory.fused import fused_statements, over_rows, run_compiled
from verl_memopt.memory.kernels import has_kernel

if TYPE_CHECKING:
    from verl_memopt.memory.teaching import AnyTeaching, Lesson, Terms

BEFORE_ANY = -1e30
"""Initial value of the running statistics of :func:`product_statistics`: so low that it changes no bit, and finite, so that 0
times it is 0."""

SCRATCH_COLUMNS = 4096
"""Columns of the scratch tensor beside the logits where functions are not compiled. It is used for entropy, and for exponentials
on a GPU."""


@dataclass(frozen=True)
class Statistic:
    """A number that describes a token's distribution. A pass without gradients computes it while the logits exist."""

    compute: Callable[[Tensor, Tensor | None], Tensor]
    """Compute the number, fp32 [c], from log-probs fp32 [c, v], which must not change, and a scratch tensor [c, any number of
    columns] or None."""
    rescaled: Callable[[Tensor, Tensor], Tensor] | None = None
    """For a number that is a sum over the vocabulary: given its value [c], return the value if all probabilities are multiplied
    by a share [c]. With it the values of several tiles can be added. None = the whole vocabulary must be in one tile."""


class TokenStatistics:
    """Further statistics per token, by name. ``asked`` says how to compute each; after the pass ``values`` holds fp32 [R].

    Not a dataclass, because FSDP2 copies dataclasses among the inputs of a forward, and the caller would not see the values.
    """

    def __init__(self, asked: Mapping[str, Statistic]) -> None:
        self.asked = asked
        self.values: dict[str, Tensor] = {}


@dataclass(frozen=True)
class Head:
    """The LM head, and for how many tokens and vocabulary entries logits exist at once (0 = all).

    Logits are divided by ``temperature`` in fp32. If there is a ``cap``, ``cap * tanh(product / cap)`` is computed before that.
    ``compiled``: compile what runs between the matrix products. ``teaching``: what a teacher says of the tokens of this pass.
    """

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    temperature: float
    chunk_tokens: int
    vocab_tile: int
    with_entropy: bool = False
    compiled: bool = False
    statistics: Mapping[str, Statistic] = field(default_factory=dict)
    cap: float | None = None
    teaching: AnyTeaching | None = None

    @property
    def vocabulary(self) -> int:
        return int(self.weight.shape[0])

    @property
    def tile(self) -> int:
        return min(self.vocab_tile, self.vocabulary) or self.vocabulary

    @property
    def whole_rows(self) -> bool:
        return self.tile == self.vocabulary

    @property
    def one_buffer(self) -> bool:
        # Statistics, the slope of a cap and a teacher need fp32 log-probs in memory.
        return self.compiled and not self.statistics and self.cap is None and self.teaching is None

    @property
    def rows_at_once(self) -> int:
        """Number of tokens whose logits exist at once; 0 = all.

        Without the fp32 buffer more tokens fit in the bytes of ``chunk_tokens``: three times as many in half precision, or
        slightly fewer where the gradients of tiles are summed in fp32. Beside the logits of a teacher fewer fit.
        """
        entry, summed = self.weight.itemsize, 0 if self.whole_rows else self.weight.shape[1] * (4 + self.weight.itemsize)
        both = (entry if entry == 4 else 4 + entry) * self.tile + summed
        if self.teaching is not None and self.chunk_tokens:
            beside = self.teaching.taught(self).row_bytes(self.tile, self.compiled and self.cap is None)
            return max(self.chunk_tokens * both // (both + beside), 1)
        return self.chunk_tokens * both // (entry * self.tile + summed) if self.one_buffer else self.chunk_tokens

    def chunks(self, tokens: int) -> list[slice]:
        return list(slices(tokens, self.rows_at_once or max(tokens, 1)))

    def tiles(self) -> list[slice]:
        return list(slices(self.vocabulary, self.tile))


@dataclass(frozen=True)
class Tokens:
    """Statistics of some tokens, fp32 [c] each. None = not requested."""

    log_probs: Tensor  # of the targets
    log_normalizer: Tensor  # log of the sum of exponentials of the logits
    entropy: Tensor | None
    further: dict[str, Tensor] = field(default_factory=dict)
    normalizer_parts: Tensor | None = None  # [c, 2]: the largest logit, and log_normalizer minus it; more exact than their sum
    taught: Tensor | None = None  # [c, 4 or 5]: the record of a :class:`~verl_memopt.memory.teaching.Lesson`


LogitGrads = tuple[Tensor, Tensor | None, *tuple[Tensor | None, ...]]
"""Gradients of the loss with respect to log-probs, entropies and divergences from a teacher, fp32 [c] each; None = not requested.
The third may be left out."""


@dataclass(frozen=True)
class Gradients:
    hidden: Tensor | None  # written
    weight: Tensor | None  # added to
    bias: Tensor | None  # added to


class LogitTiles:
    """Buffers for the chunks of one head and one hidden dtype. They are kept for one pass over hidden states [R, H]."""

    def __init__(self, head: Head, hidden: Tensor, narrow: Tensor | None = None) -> None:
        """``narrow``: a buffer in the dtype of ``hidden`` to use, if it has that dtype; None = make one if it is needed."""
        self.head = head
        size = min(head.rows_at_once or hidden.shape[0], hidden.shape[0]) * head.tile
        self._wide = None if head.one_buffer and hidden.dtype != torch.float32 else hidden.new_empty(size, dtype=torch.float32)
        if hidden.dtype == torch.float32:
            self._narrow = None
        else:
            self._narrow = narrow if narrow is not None and narrow.dtype == hidden.dtype else hidden.new_empty(size)
        in_parts = head.with_entropy or bool(head.statistics)
        scratch = in_parts and not head.compiled
        columns = min(SCRATCH_COLUMNS, head.tile) if scratch else 0
        self._scratch = hidden.new_empty(size // head.tile * columns, dtype=torch.float32)
        self._columns = columns
        # The first column of each tile, kept on the device, so that no tile needs a copy from the host.
        self._starts = None if head.whole_rows else torch.arange(0, head.vocabulary, head.tile, device=hidden.device)[:, None]
        self._normalizer = hidden.new_empty(0)
        self.normalizer_parts: tuple[Tensor, ...] = ()  # of the last statistics, fp32 [c] each
        self._soft = head.whole_rows and not in_parts and head.cap is None and head.teaching is None
        self._run: Callable[..., Any] = _compiled if head.compiled else _plain
        self._lessons = None if head.teaching is None else head.teaching.lessons(head, self._narrow, self._run)

    def lesson(self, rows: slice) -> Lesson | None:
        """Return what the teacher says of a chunk, if there is one. It serves the other methods for this chunk."""
        return None if self._lessons is None else self._lessons(rows)

    def statistics(self, hidden: Tensor, targets: Tensor, lesson: Lesson | None = None) -> Tokens:
        """Return the statistics of a chunk of tokens: hidden states [c, H], targets int64 [c].

        If a tile is the whole vocabulary, the buffer then holds log-probs (if entropies are requested, logits are capped
        or there is a teacher) or probabilities. The next :meth:`differentiate` may use them.
        """
        tiles = zip(self.head.tiles(), self._within_tiles(targets), strict=True)
        if self.head.one_buffer:
            top, log_sum, picked, entropy, further, known = self._from_products(hidden, tiles)
        else:
            parts = (self._tile_statistics(hidden, local, columns, lesson) for columns, local in tiles)
            merged = partial(_merged, statistics=self.head.statistics, lesson=lesson)
            top, log_sum, picked, entropy, further, known = reduce(merged, parts)
        self.normalizer_parts = top, log_sum
        # picked - top is computed first, because both are close and the difference loses no digits. top + log_sum is as large as
        # the logits, so its rounding would cost the log-prob digits.
        tokens = Tokens((picked - top) - log_sum, top + log_sum, entropy, further)
        if lesson is None:
            return tokens
        record = lesson.record(known)
        for columns in self.head.tiles() if lesson.reads_again else ():
            lesson.read_again(self.logits(hidden, columns).sub_(top[:, None]).sub_(log_sum[:, None]), columns, record)
        return replace(tokens, normalizer_parts=torch.stack(self.normalizer_parts, 1), taught=record)

    def differentiate(
        self,
        hidden: Tensor,
        targets: Tensor,
        tokens: Tokens,
        grads: LogitGrads,
        into: Gradients,
        in_buffer: bool,
        lesson: Lesson | None = None,
    ) -> None:
        """Add a chunk's gradients ``into`` their tensors, given its hidden states [c, H], targets int64 [c] and statistics.

        ``grads`` are the gradients of the outputs. ``in_buffer``: the last call was :meth:`statistics` of this chunk,
        so the buffer still holds its values if a tile is the whole vocabulary. Afterwards it holds the gradient of the logits.
        """
        still = in_buffer and self.head.whole_rows
        # For products in the buffer both parts of the normalizer are known. They are more exact than their sum.
        normalizer = self._normalizer if still else tokens.log_normalizer[:, None]
        if lesson is not None and tokens.normalizer_parts is not None:
            normalizer = tokens.normalizer_parts
        tiles = self.head.tiles()
        # The gradients of several tiles are summed in fp32, whatever the compute dtype.
        total = hidden.new_zeros(hidden.shape, dtype=torch.float32) if into.hidden is not None and len(tiles) > 1 else None
        for columns, local in zip(tiles, self._within_tiles(targets), strict=True):
            matrix = self._logit_gradient(hidden, columns, local, tokens, grads, normalizer, still, lesson)
            weight = self.head.weight[columns]
            if total is not None:
                total += hidden_gradient(matrix, weight, local, hidden.new_empty(hidden.shape))
            elif into.hidden is not None:
                hidden_gradient(matrix, weight, local, into.hidden)
            if into.weight is not None:
                part = into.weight[columns]
                # Added in place, because a separate product would be a second matrix as large as this part of the weight.
                add_product_(part, matrix, hidden)
            if into.bias is not None:
                into.bias[columns].add_(matrix.sum(0))
        if into.hidden is not None and total is not None:
            into.hidden.copy_(total)

    def add_weight_gradient(
        self,
        hidden: Tensor,
        targets: Tensor,
        tokens: Tokens,
        grads: LogitGrads,
        columns: slice,
        into: Tensor,
        in_buffer: bool,
        lesson: Lesson | None = None,
    ) -> None:
        """Add the contribution of a chunk to some rows of the head's gradient, ``into`` [v, H]. The rows are at most one tile.

        Other arguments are as in :meth:`differentiate`. ``in_buffer``: the buffer still holds the gradient of the chunk's logits.
        """
        if in_buffer:
            matrix = self._products_in(hidden, slice(0, self.head.vocabulary))[:, columns]
        else:
            normalizer = tokens.normalizer_parts
            assert normalizer is not None
            matrix = self._logit_gradient(hidden, columns, targets - columns.start, tokens, grads, normalizer, False, lesson)
        add_product_(into, matrix, hidden)

    def _logit_gradient(
        self,
        hidden: Tensor,
        columns: slice,
        local: Tensor,
        tokens: Tokens,
        grads: LogitGrads,
        normalizer: Tensor,
        still: bool,
        lesson: Lesson | None,
    ) -> Tensor:
        """Return the gradient of the logits before the temperature, [c, tile] in the compute dtype.

        ``still``: the buffer still holds the values of :meth:`statistics`. The columns of ``normalizer``, fp32 [c, 1 or 2], sum
        to the log of the sum of exponentials of the logits.
        """
        inverse, (grad_log_probs, grad_entropy, *taught) = 1.0 / self.head.temperature, grads
        if self.head.one_buffer:
            products = self._products_in(hidden, columns) if still else self._products(hidden, columns)
            entropy_terms = (None, None) if grad_entropy is None else (tokens.entropy, grad_entropy)
            _over_rows(product_gradient_, (products, local, normalizer, grad_log_probs, *entropy_terms), inverse)
            return products
        log_p = self._shaped(self._wide, hidden, columns) if still else self.logits(hidden, columns)
        assert log_p is not None
        for part in () if still else normalizer.unbind(1):
            log_p.sub_(part[:, None])
        narrow = self._shaped(self._narrow, hidden, columns)
        divided = grad_log_probs * inverse, None if grad_entropy is None else grad_entropy * inverse
        if self.head.cap is not None or lesson is not None:
            bound = None if self.head.cap is None else self.head.cap * inverse
            terms, run, width = None, _plain, SCRATCH_COLUMNS
            if lesson is not None:
                (grad,), width = taught, TAUGHT_COLUMNS
                assert tokens.taught is not None
                assert grad is not None
                terms = lesson.terms(columns, tokens.taught, grad * inverse, still)
                if self.head.compiled and lesson.compiles and bound is None:
                    run, width = self._run, log_p.shape[1]
            gradient_in_parts_(log_p, local, tokens, divided, bound, terms, run, width)
            return log_p if narrow is None else narrow.copy_(log_p)
        if grad_entropy is None:
            self._run(probability_gradient_ if still else log_prob_gradient_, log_p, divided[0])
        else:
            assert tokens.entropy is not None
            self._run(both_gradients_, log_p, tokens.entropy, *divided, self._scratch_for(log_p))
        add_target_terms_(log_p, local, divided[0])
        return log_p if narrow is None else narrow.copy_(log_p)

    def _within_tiles(self, targets: Tensor) -> Iterable[Tensor]:
        # For each tile of the vocabulary, return the targets, int64 [c], relative to its first column. They may be outside the
        # tile.
        return (targets,) if self._starts is None else (targets - self._starts).unbind()

    def _from_products(self, hidden: Tensor, tiles: Iterable[tuple[slice, Tensor]]) -> tuple[Any, ...]:
        # Like :meth:`_tile_statistics`, but for all tiles, with running statistics.
        running = hidden.new_full((hidden.shape[0], 4 if self.head.with_entropy else 3), BEFORE_ANY, dtype=torch.float32)
        for columns, local in tiles:
            # Reads one tensor and writes another, because code compiled by torch 2.11 may read values that it has already
            # overwritten.
            before, running = running, torch.empty_like(running)
            _over_rows(product_statistics, (self._products(hidden, columns), local, before, running), 1.0 / self.head.temperature)
        self._normalizer = running[:, :2]
        return *running[:, :3].unbind(1), running[:, 3] if self.head.with_entropy else None, {}, None

    def _tile_statistics(self, hidden: Tensor, local: Tensor, columns: slice, lesson: Lesson | None) -> tuple[Any, ...]:
        # Return [c] each: the largest logit, the log of the sum of exponentials relative to it, the logit of the target, the
        # entropy or None, the further statistics by name, and what the lesson says.
        logits = self.logits(hidden, columns)
        scratch, picked = self._scratch_for(logits), target_logits(logits, local)
        if self._soft:
            return *self._run(softmax_, logits), picked, None, {}, None
        top, log_sum, entropy = self._run(log_softmax_, logits, scratch, self.head.with_entropy)
        further = {
            # A statistic that needs the whole vocabulary may be code of a user, which is never compiled.
            name: (_plain if statistic.rescaled is None else self._run)(statistic.compute, logits, scratch)
            for name, statistic in self.head.statistics.items()
        }
        return top, log_sum, picked, entropy, further, None if lesson is None else lesson.read(logits, columns)

    def _products_in(self, hidden: Tensor, columns: slice) -> Tensor:
        return self._shaped(self._wide if self._narrow is None else self._narrow, hidden, columns)

    def _products(self, hidden: Tensor, columns: slice) -> Tensor:
        # Compute the products [c, tile] of hidden states and head in the compute dtype, into the buffer. In fp32 they are the
        # logits after the temperature, or with a cap the products divided by the cap.
        head, product = self.head, self._products_in(hidden, columns)
        divisor = head.temperature if head.cap is None else head.cap
        weight, bias = head.weight[columns].t(), None if head.bias is None else head.bias[columns]
        # In fp32 the matrix product also divides. In half precision the product is rounded before the division, as in the model
        # itself.
        factor = 1.0 / divisor if product.dtype == torch.float32 else 1.0
        if bias is None:
            # beta=0 ignores the old values in the buffer, even a NaN.
            torch.addmm(product, hidden, weight, beta=0, alpha=factor, out=product)
        else:
            # The bias is a part of the logits, so it is divided too.
            torch.addmm(bias, hidden, weight, beta=factor, alpha=factor, out=product)
        return product

    def logits(self, hidden: Tensor, columns: slice) -> Tensor:
        """Return fp32 logits [c, tile], divided by the temperature, in the fp32 buffer."""
        product, wide = self._products(hidden, columns), self._shaped(self._wide, hidden, columns)
        assert wide is not None
        cap, temperature = self.head.cap, self.head.temperature
        divisor = temperature if cap is None else cap
        if product is not wide and self._narrow is not None:
            wide.copy_(product)
            if divisor != 1.0:
                wide.mul_(1.0 / divisor)
        return wide if cap is None else wide.tanh_().mul_(cap / temperature)

    def _shaped(self, buffer: Tensor | None, hidden: Tensor, columns: slice) -> Any:
        rows, width = hidden.shape[0], columns.stop - columns.start
        return None if buffer is None else buffer[: rows * width].view(rows, width)

    def _scratch_for(self, logits: Tensor) -> Tensor | None:
        if not self._columns:
            return None
        return self._scratch[: logits.shape[0] * self._columns].view(logits.shape[0], self._columns)


# Compiled functions that overwrite logits do not read or write at the targets. Compiled by torch 2.11, such a function would read
# the logits of the targets after they were overwritten, or would copy all logits before it adds at the targets.


def target_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return each target's logit from fp32 [c, v]; 0 if the target, int64 [c], is not among columns 0 to v - 1."""
    # gather needs a valid column for each token. The value that it reads for a target outside is replaced by 0 in the next line.
    picked = logits.gather(-1, clamped(targets, logits)).squeeze(-1)
    return torch.where(is_inside(targets, logits), picked, 0.0)


def add_target_terms_(gradient: Tensor, targets: Tensor, grad: Tensor) -> None:
    """Add ``grad * onehot`` to the gradient of the logits, fp32 [c, v], in place.

    ``targets`` int64 [c] are columns; targets outside 0 to v - 1 add nothing. ``grad`` fp32 [c] is the gradient of the log-probs.
    """
    gradient.scatter_add_(-1, clamped(targets, gradient), (grad * is_inside(targets, gradient))[:, None])


@has_kernel(kernels.logit_statistics, "rrrw")
def product_statistics(products: Tensor, targets: Tensor, before: Tensor, known: Tensor, inverse: float) -> None:
    """Write the statistics of all tiles up to this one into ``known``. ``before`` has the statistics of earlier tiles.

    Args:
        products: [c, v], unchanged. In fp32 they are the logits; in half precision the logits are ``inverse`` times as large.
        targets: int64 [c]; may lie outside columns 0 to v - 1.
        before: fp32 [c, 3 or 4]: the largest logit, the log of the sum of exponentials relative to it, the logit of the target,
            and the entropy if requested. It is filled with :data:`BEFORE_ANY` before the first tile.
        known: The same, written here.
        inverse: 1 / temperature.
    """
    logits = _logits_of(products, inverse)
    tile_top = logits.amax(-1)
    above = logits - tile_top[:, None]
    total = above.exp().sum(-1)
    top = torch.maximum(before[:, 0], tile_top)
    # The logs of both sums of exponentials, relative to the largest logit of both.
    first, second = before[:, 0] - top + before[:, 1], tile_top - top + total.log()
    log_sum = torch.logaddexp(first, second)
    picked = _logits_of(target_logits(products, targets), inverse)
    known[:, 0].copy_(top)
    known[:, 1].copy_(log_sum)
    known[:, 2].copy_(torch.where(is_inside(targets, products), picked, before[:, 2]))
    if known.shape[1] == 4:
        entropy = total.log() - (above.exp() * above).sum(-1) / total
        known[:, 3].copy_(_mixed_entropy((before[:, 3], first), (entropy, second), log_sum))


@has_kernel(kernels.logit_gradient, "brrrrr", strided=(2,))
def product_gradient_(
    products: Tensor, targets: Tensor, normalizer: Tensor, grad: Tensor, entropy: Tensor | None, grad_entropy: Tensor | None,
    inverse: float,
) -> None:  # fmt: skip
    """Overwrite products [c, v] with their gradient (before the temperature). ``grad`` and ``grad_entropy`` are fp32 [c].

    They are the gradients of log-probs and entropies. A log-prob is the logit minus all columns of ``normalizer``, fp32 [c, 1 or
    2]. The formulas are in :func:`both_gradients_`.
    """
    log_p = _logits_of(products, inverse)
    for part in normalizer.unbind(1):
        log_p = log_p - part[:, None]
    factor = grad[:, None]
    if entropy is not None and grad_entropy is not None:
        factor = factor + grad_entropy[:, None] * (log_p + entropy[:, None])
    is_target = torch.arange(products.shape[1], device=products.device) == targets[:, None]
    # A comparison for all columns, because a scatter would be another pass over the tile.
    gradient = torch.where(is_target, grad[:, None], 0.0) - log_p.exp() * factor
    products.copy_(gradient * inverse)


def _logits_of(products: Tensor, inverse: float) -> Tensor:
    # Return fp32 logits. An fp32 product is already divided by the temperature.
    return products if products.dtype == torch.float32 else products.float() * inverse


def softmax_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits [c, v] into probabilities, in place. Return the first two results of :func:`log_softmax_`."""
    top = logits.amax(-1)
    if torch.compiler.is_compiling():
        # All sums first and one write last. On a CPU, exponentials that are read twice would become a separate tensor.
        above = logits - top[:, None]
        log_sum = above.exp().sum(-1).log()
        logits.copy_((above - log_sum[:, None]).exp())
        return top, log_sum
    if logits.device.type == "cpu":
        # One kernel, which reads a row before it writes it. The exponential of the largest logit, relative to itself, is 1.
        torch.softmax(logits, -1, out=logits)
        return top, -logits.amax(-1).log()
    logits.sub_(top[:, None]).exp_()
    total = logits.sum(-1)
    logits.div_(total[:, None])
    return top, total.log()


def log_softmax_(logits: Tensor, scratch: Tensor | None, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Turn logits [c, v] into log-probs over these columns, in place. ``scratch`` [c, any number of columns]; None = allocate.

    Returns:
        The largest logit, the log of the sum of exponentials relative to it, and the entropy or None, [c] each.
    """
    top = logits.amax(-1)
    if torch.compiler.is_compiling():
        # All sums first and one write last, because a write between two sums would copy all logits.
        above = logits - top[:, None]
        total = above.exp().sum(-1)
        mean = (above.exp() * above).sum(-1) / total
        log_sum = total.log()
        logits.copy_(above - log_sum[:, None])
        return top, log_sum, log_sum - mean if with_entropy else None
    if logits.device.type == "cpu":
        # One kernel, which reads a row before it writes it.
        torch.log_softmax(logits, -1, out=logits)
        log_sum = -logits.amax(-1)
    else:
        logits.sub_(top[:, None])
        log_sum = sum_of_exponentials(logits).log()
        logits.sub_(log_sum[:, None])
    if not with_entropy:
        return top, log_sum, None
    entropy = torch.zeros_like(top)
    for part, room in column_parts(logits, scratch):
        entropy -= torch.exp(part, out=room).mul_(part).sum(-1) if room is not None else (part.exp() * part).sum(-1)
    return top, log_sum, entropy


def sum_of_exponentials(logits: Tensor) -> Tensor:
    """Sum exponentials of logits [c, v] over columns, a few columns at a time; the logits stay unchanged."""
    if torch.compiler.is_compiling():
        return logits.exp().sum(-1)
    total = torch.zeros_like(logits[:, 0])
    for part in logits.split(SCRATCH_COLUMNS, -1):
        total += part.exp().sum(-1)
    return total


def log_prob_gradient_(log_p: Tensor, grad: Tensor) -> None:
    """Turn fp32 log-probs [c, v] into ``-grad * p``, the gradient of the logits without the targets' terms, in place.

    ``grad`` fp32 [c] is the gradient of the log-probs.
    """
    probability_gradient_(log_p.exp_(), grad)


def probability_gradient_(p: Tensor, grad: Tensor) -> None:
    p.mul_(-grad[:, None])


def both_gradients_(log_p: Tensor, entropy: Tensor, grad_log_probs: Tensor, grad_entropy: Tensor, scratch: Tensor | None) -> None:
    """Turn log-probs [c, v] into the gradient of the logits in place, given the gradients of log-probs and entropies.

    For the target y and the logits z:

    ``d log p(y) / d z = onehot(y) - p`` and ``d entropy / d z = -p (log p + entropy)``

    :func:`add_target_terms_` adds the term with ``onehot``.
    """
    constant = grad_log_probs + grad_entropy * entropy
    for part, room in column_parts(log_p, scratch):
        # -p (grad_entropy * log p + constant)
        factor = torch.mul(part, -grad_entropy[:, None], out=room) if room is not None else part * -grad_entropy[:, None]
        part.exp_().mul_(factor.sub_(constant[:, None]))


def gradient_in_parts_(
    log_p: Tensor,
    targets: Tensor,
    tokens: Tokens,
    grads: LogitGrads,
    bound: float | None,
    terms: Terms | None,
    run: Callable[..., Any],
    width: int,
) -> None:
    """Turn log-probs [c, v] into the gradient of the product with the head, including the targets' terms, in place.

    Args:
        log_p: fp32 [c, v].
        targets: int64 [c], may be outside the columns.
        tokens: Statistics of the tokens.
        grads: The gradients of log-probs and of entropies (or None), divided by the temperature, fp32 [c] each.
        bound: The cap of the logits divided by the temperature. None = there is no cap.
        terms: Computes the gradient of the divergences from a teacher. None = there is no teacher.
        run: Calls a statement, compiled or not.
        width: Columns at a time. Each part needs temporary tensors of its size, unless the statements are compiled.
    """
    for columns in slices(log_p.shape[1], width):
        part, slope = log_p[:, columns], None
        # Both are computed from the log-probs before these are overwritten.
        more = None if terms is None else terms(part, columns)
        if bound is not None:
            # d cap tanh(u / cap) / d u = 1 - tanh^2, where the logits give the tanh.
            slope = (part + tokens.log_normalizer[:, None]).div_(bound).square_().neg_().add_(1.0)
        if grads[1] is None:
            run(log_prob_gradient_, part, grads[0])
        else:
            assert tokens.entropy is not None
            run(both_gradients_, part, tokens.entropy, grads[0], grads[1], None)
        add_target_terms_(part, targets - columns.start, grads[0])
        if more is not None:
            part[:, : more.shape[1]].add_(more)
        if slope is not None:
            part.mul_(slope)


def _merged(
    one: tuple[Any, ...], other: tuple[Any, ...], statistics: Mapping[str, Statistic], lesson: Lesson | None
) -> tuple[Any, ...]:
    # Combine the statistics of two sets of columns.
    top = torch.maximum(one[0], other[0])
    first, second = one[0] - top + one[1], other[0] - top + other[1]
    log_sum = torch.logaddexp(first, second)
    shares = (first - log_sum).exp(), (second - log_sum).exp()
    entropy, further = None, {}
    if one[3] is not None:
        entropy = _mixed_entropy((one[3], first), (other[3], second), log_sum)
    for name, statistic in statistics.items():
        assert statistic.rescaled is not None, f"{name} needs the whole vocabulary in one tile"
        # The value of each part is relative to its own normalizer, so its probabilities are multiplied by its share.
        further[name] = statistic.rescaled(one[4][name], shares[0]) + statistic.rescaled(other[4][name], shares[1])
    known = None if lesson is None else lesson.merged(one[5], other[5], (first - log_sum, second - log_sum))
    return top, log_sum, one[2] + other[2], entropy, further, known


def _mixed_entropy(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], log_sum: Tensor) -> Tensor:
    # Entropy of two sets of columns together. `one` and `other` are (entropy, log of the sum of exponentials) of each set. The
    # result is the weighted mean of entropy - log(share) of both sets.
    first, second = ((log_of_part - log_sum).exp() * (entropy + log_sum - log_of_part) for entropy, log_of_part in (one, other))
    return first + second


def column_parts(wide: Tensor, scratch: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    if scratch is None:
        yield wide, None
        return
    for columns in slices(wide.shape[1], scratch.shape[1]):
        yield wide[:, columns], scratch[:, : columns.stop - columns.start]


def slices(total: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


def _compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    tensors = [None if value is None else value.detach() for value in arguments if value is None or isinstance(value, Tensor)]
    if not tensors or len(tensors[0] if tensors[0] is not None else ()) < 2:
        return function(*arguments)  # one row would need a variant of its own
    return run_compiled(function, tensors, arguments[len(tensors) :], lambda: function(*arguments))


def _over_rows(statement: Callable[..., None], tensors: Sequence[Tensor | None], inverse: float) -> None:
    # Run a statement compiled, whatever the setting of the process: the head has its own setting.
    with fused_statements(True):
        over_rows(statement, tensors, inverse)


def _plain(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


# The product of the logits' gradient with the LM head. The term of each token's target is added last.
#
# A row of the gradient has one large number, at its target, and many small numbers, one for each other vocabulary entry. A sum
# that adds small terms to the large one loses their last digits. In fp32 with 151,669 entries, gradients of plain autograd differ
# from float64 by 5e-6. With the large term last they differ by 4e-7 (docs/rloo_memory_study.md).

PRODUCT_ROWS = 8192
"""Rows of the head's gradient that are computed at a time, where they are added to a sum of another dtype."""
ROWS_AT_ONCE = 32
"""Tokens for which the head's row of the target is copied at a time."""


def hidden_gradient(matrix: Tensor, weight: Tensor, targets: Tensor, out: Tensor) -> Tensor:
    """Compute the gradient of the hidden states, ``matrix @ weight``, into ``out`` [c, H].

    In half precision the term of the target is summed with the others, because rounding the result loses more digits anyway.
    ``matrix`` [c, v], the gradient of the logits, is overwritten and restored. ``weight`` [v, H] has the head's rows for these
    columns. Targets, int64 [c], may be outside the columns.
    """
    if matrix.dtype != torch.float32:
        return torch.mm(matrix, weight, out=out)
    places = clamped(targets, matrix)
    terms = matrix.gather(-1, places)
    others = torch.where(is_inside(targets, matrix)[:, None], 0.0, terms)
    matrix.scatter_(-1, places, others)
    torch.mm(matrix, weight, out=out)
    # Restored, because the gradient of the head's weight is computed from this matrix afterwards.
    matrix.scatter_(-1, places, terms)
    # This gives 0 for targets outside of these columns: for them the product above is already complete.
    terms -= others
    for start in range(0, out.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        out[rows].addcmul_(terms[rows], weight[places[rows, 0]])
    return out


def add_product_(into: Tensor, matrix: Tensor, hidden: Tensor) -> None:
    """Add the gradient of the head's weight, ``matrix.t() @ hidden``, to ``into`` [v, H].

    If ``into`` has a wider dtype, rows are added in slices, so that the whole product never exists.
    """
    if into.dtype == matrix.dtype:
        torch.addmm(into, matrix.t(), hidden, out=into)
        return
    for start in range(0, into.shape[0], PRODUCT_ROWS):
        rows = slice(start, start + PRODUCT_ROWS)
        # add_, not +=, which would copy the slice onto itself.
        into[rows].add_(matrix[:, rows].t() @ hidden)


def is_inside(targets: Tensor, logits: Tensor) -> Tensor:
    return (targets >= 0) & (targets < logits.shape[1])


def clamped(targets: Tensor, logits: Tensor) -> Tensor:
    # Return the targets, [c, 1], for gather and scatter. Targets outside the columns become the first or the last column.
    return targets.clamp(0, logits.shape[1] - 1)[:, None]
