"""The teacher of a run that distills: its states of the sampled tokens, on the host, and its head in the update.

An exact divergence needs both models' distributions over the vocabulary, which the policy's head computes tile by tile. So the
teacher's own pass leaves its head out. It keeps the states that its head would read: [R, h] in the compute dtype, for the R
response tokens of this rank. The update copies those of one micro-batch to the device. With ``distill.top_k`` the pass reads the
head, and keeps the ids and log-probs of the k most probable tokens instead, 8 k bytes a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_memopt.config.role_settings import SAMPLED
from verl_memopt.config.schema import Distill
from verl_memopt.data.batch import RolloutBatch, token_index
from verl_memopt.distributed.device import sent_together
from verl_memopt.memory.host_buffers import host_buffer
from verl_memopt.memory.logit_tiles import Head
from verl_memopt.memory.teaching import AnyTeaching, Divergence, MixedTeaching, Teaching, TopTeaching, top_log_probs
from verl_memopt.model.packed_model import PolicyModel
from verl_memopt.model.packing import Pack
from verl_memopt.model.prefix_kv import PrefixKV
from verl_memopt.observe.byte_tracker import scope
from verl_memopt.worker.policy import forward_pass
from verl_memopt.worker.trained_model import MicroBatch

KIND = "teacher states"
KIND_OF_HEAD = "params"
LEAST_REST = 1e-6
"""Smallest mass of all tokens but the most probable ones, if it follows from rounded log-probs of these."""


class TokenStore:
    """Tensors with one entry per response token, in host buffers: ``tensors``, [N, width] each, in the order of ``places``.

    Args:
        places: int64 [N], the number of each token.
        entries: Width and dtype of each tensor, [N, width].
        device: Device to which the entries go.
    """

    def __init__(self, places: Tensor, entries: Sequence[tuple[int, torch.dtype]], device: torch.device) -> None:
        self._device = device
        self._places, self._order = places.sort()
        self.tensors = [
            host_buffer(places.shape[0] * width * dtype.itemsize, device, KIND).view(dtype).view(-1, width)
            for width, dtype in entries
        ]

    def put(self, positions: Tensor, values: Sequence[Tensor]) -> None:
        """Store the entries, [n, width] each, of the tokens at some positions, int64 [n], of ``places``."""
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor.index_copy_(0, positions, value.detach().cpu())

    def holds(self, places: Tensor) -> Tensor:
        """Return which of the tokens with these numbers, int64 [n], have entries, bool [n]."""
        if not len(self._places):
            return torch.zeros_like(places, dtype=torch.bool)
        return self._places[torch.searchsorted(self._places, places).clamp(max=len(self._places) - 1)] == places

    def at(self, places: Tensor) -> list[Tensor]:
        """Return the entries of the tokens with these numbers, int64 [n], on the device, [n, width] each."""
        order = self._order[torch.searchsorted(self._places, places)]
        return sent_together([tensor.index_select(0, order) for tensor in self.tensors], self._device)


@dataclass(eq=False)
class Teacher:
    """The teacher in one worker.

    Attributes:
        model: The teacher's model, which is frozen.
        distill: What the policy learns from it.
        temperature: Divides the logits of both models.
        vocabulary: Number of ids of the policy.
        as_teacher: Makes ``model`` compute as the teacher, if it is the policy.
        kept: What the update reads: the states, or the most probable tokens with their log-probs.
    """

    model: PolicyModel
    distill: Distill
    temperature: float
    device: torch.device
    vocabulary: int
    as_teacher: Callable[[], AbstractContextManager[None]] = nullcontext
    kept: TokenStore | None = None
    _head: Head | None = None

    @property
    def is_exact(self) -> bool:
        return self.distill.divergence != SAMPLED

    def compute(self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]]) -> None:
        """Compute what the update reads of all response tokens of a batch, and keep it until the next call.

        ``batch.places`` has the number of each token. ``micro_batches`` are as in :func:`forward_pass`. A batch with the most
        probable tokens of a teacher elsewhere needs no forward.
        """
        assert batch.places is not None, "the driver numbers the tokens"
        self.kept = None  # the buffers of the step before are free for this one
        if batch.teacher_ids is not None:
            self._keep_told(batch.places, batch.teacher_ids, batch.teacher_top, batch.teacher_rest)
            return
        sizes, top = batch.responses.sizes(), self.distill.top_k
        entries = [(self.model.head.weight.shape[1], self.model.compute)]
        if top is not None:
            entries = [(top, torch.int32), (top, torch.float32), (1, torch.float32)]
        kept = TokenStore(batch.places, entries, self.device)
        # Gathered once if it is sharded, because whether a pass has gathered the head already may differ among ranks. Otherwise
        # only after the blocks of each pass, so that it is not there beside them.
        gathers = top is not None and isinstance(self.model.head.weight, DTensor)

        def forward(pack: Pack, prefix_kv: PrefixKV | None, rows: Sequence[int] | Tensor) -> None:
            positions = rows if isinstance(rows, Tensor) else token_index(sizes, rows)
            states = self.model(pack, prefix_kv=prefix_kv, states_only=True)
            if top is None:
                kept.put(positions, [states])
                return
            with nullcontext() if gathers else self.whole_head(1):
                assert self._head is not None
                ids, log_probs, log_rest = top_log_probs(self._head, states, top, self.vocabulary)
            kept.put(positions, [ids, log_probs, log_rest[:, None]])

        with self.as_teacher(), self.whole_head(1) if gathers else nullcontext():
            forward_pass(self.model, batch, micro_batches, self.device, forward)
        self.kept = kept

    def top(self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the most probable tokens of all response tokens of a batch, on the host, and keep nothing.

        Returns:
            int32 [R, k], their ids; fp32 [R, k], their log-probs; and fp32 [R], the log of the mass of all other tokens.
        """
        assert self.distill.top_k is not None
        numbered = batch.clone(recurse=False)
        numbered.places = torch.arange(batch.responses.flat.shape[0])
        self.compute(numbered, micro_batches)
        assert self.kept is not None
        (ids, log_probs, rest), self.kept = self.kept.tensors, None
        return ids.clone(), log_probs.clone(), rest[:, 0].clone()

    def _keep_told(self, places: Tensor, ids: Tensor, log_probs: Tensor | None, log_rest: Tensor | None) -> None:
        # The teacher is elsewhere, and its most probable tokens came with the batch.
        assert log_probs is not None, "ids come with their log-probs"
        if log_rest is None:
            log_rest = (1 - log_probs.double().exp().sum(1)).clamp(min=LEAST_REST).log().float()
        kept = TokenStore(places, [(ids.shape[1], torch.int32), (ids.shape[1], torch.float32), (1, torch.float32)], self.device)
        kept.put(torch.arange(len(places)), [ids, log_probs, log_rest[:, None]])
        self.kept = kept

    def in_update(self, steps: int) -> AbstractContextManager[None]:
        """Hold what updates of the policy inside the body read, besides what is kept. ``steps``: as in :meth:`whole_head`."""
        return self.whole_head(steps) if self.is_exact and self.distill.top_k is None else nullcontext()

    @contextmanager
    def whole_head(self, steps: int) -> Iterator[None]:
        """Hold the whole head on the device in the compute dtype.

        If the policy is its own teacher and takes several optimizer ``steps`` inside the body, the head is a copy. For the states
        were computed before the first of them.
        """
        own = self.model.head
        with torch.no_grad(), self.model.computing(), scope(kind=KIND_OF_HEAD):
            copied = steps > 1 and bool(own.weight.requires_grad)
            weight, bias = (None if part is None else self._whole(part, copied) for part in (own.weight, own.bias))
        assert weight is not None
        cap = None if own.cap is None else own.cap / own.scale
        head = Head(weight, bias, self.temperature / own.scale, own.chunk_tokens, own.vocab_tile, compiled=own.compiled, cap=cap)
        self._head = head
        try:
            yield
        finally:
            self._head = None

    def of(self, places: Tensor) -> Teaching | TopTeaching:
        """Return what the policy's head needs to compute the divergences of the tokens with these numbers, int64 [n]."""
        assert self.kept is not None, "the teacher's pass comes before the update"
        kind = self.distill.divergence
        assert kind != "sampled"
        found = self.kept.at(places)
        if self.distill.top_k is not None:
            assert kind != "jsd", "the rules refuse it"
            ids, log_probs, log_rest = found
            return TopTeaching(kind, ids, log_probs, log_rest[:, 0], min(self.model.head.weight.shape[0], self.vocabulary))
        assert self._head is not None, "the update runs inside in_update"
        return Teaching(Divergence(kind, self.distill.beta), self._head, found[0])

    def _whole(self, parameter: Tensor, copied: bool) -> Tensor:
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        return whole.to(self.device, self.model.compute, copy=copied)


@dataclass(frozen=True)
class Teachers:
    """The teachers in one worker: the first one, then the further ones. Each has some of the rows of a step."""

    all: Sequence[Teacher]

    @property
    def are_exact(self) -> bool:
        return self.all[0].is_exact

    @contextmanager
    def in_update(self, steps: int) -> Iterator[None]:
        """Hold what updates of the policy inside the body read. Afterwards the teachers keep nothing of the step.

        ``steps``: as in :meth:`Teacher.whole_head`.
        """
        with ExitStack() as stack:
            for teacher in self.all:
                stack.enter_context(teacher.in_update(steps))
            yield
        for teacher in self.all:
            teacher.kept = None

    def of(self, micro: MicroBatch) -> AnyTeaching:
        """Return what the policy's head needs to compute the divergences of a micro-batch."""
        places, teachers = micro.places, [teacher for teacher in self.all if teacher.kept is not None]
        assert places is not None
        assert teachers, "the teacher's pass comes before the update"
        if len(teachers) == 1:
            return teachers[0].of(places)
        number, parts = torch.zeros_like(places), list[Teaching | TopTeaching]()
        for teacher in teachers:
            assert teacher.kept is not None
            own = teacher.kept.holds(places)
            if own.any():
                number[own] = len(parts)
                parts.append(teacher.of(places[own]))
        if len(parts) < 2:
            return parts[0] if parts else teachers[0].of(places)
        return MixedTeaching(parts, number)
