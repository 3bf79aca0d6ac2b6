"""The passes of an RLT step on fake tensors: real shapes, all layers, no values. A byte tracker counts what lives."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from tests.config.card_memory import ModelShape
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Settings
from verl_memopt.data.batch import Ragged, RolloutBatch, rollout_batch
from verl_memopt.distributed.device import leave_process_group, training_mesh
from verl_memopt.memory.fused import NARROW_TILE_ELEMENTS, TILE_ELEMENTS
from verl_memopt.model.assembly import ModelUse, build_policy
from verl_memopt.model.packed_model import allocate
from verl_memopt.model.packing import Pack
from verl_memopt.model.policy_model import PolicyModel
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.recipes.rlt.student import targets_at
from verl_memopt.trainer.micro_batching import Budget, budgets, cut_ranks
from verl_memopt.worker.policy import Policy, pack_log_probs
from verl_memopt.worker.trained_model import MicroBatch, micro_batch

CPU = torch.device("cpu")
ROUNDS = 2
"""Times that the update runs. The first meets sharded operations for the first time, which makes further tensors."""


@dataclass(frozen=True)
class Rows:
    """The longest rows that a run may have: tokens of the teacher's prompt, and of the explanation; of the student's likewise."""

    prompt: int
    response: int
    question: int
    solution: int

    @property
    def student(self) -> int:
        """Tokens of the student's row: question, explanation, solution."""
        return self.question + self.response + self.solution


@dataclass(frozen=True)
class PassPeaks:
    """Bytes that a pass holds at its peak beside the parameters. For the update that includes all gradients."""

    log_probs: int
    score: int
    update: int


def measure_passes(shape: ModelShape, settings: Settings, rows: Rows) -> PassPeaks:
    """Return the peaks of the passes of one model, policy and student alike.

    Args:
        shape: Sizes of the model.
        settings: Of the run. ``model.path`` is not read.
        rows: The longest rows.
    """
    roles, rlt = settings.actor_rollout_ref, settings.reward_model.rlt
    update_budget, old_budget, _ = budgets(roles)
    update_micros, old_micros = (_micros(_batch(rows, settings), budget) for budget in (update_budget, old_budget))
    student_pack = _student_pack(rows, rlt.max_tokens_per_micro_batch)
    with tempfile.TemporaryDirectory() as name, fake_process_group(), tiles_of_a_gpu():
        folder, mesh = Path(name), training_mesh("cpu", 1, -1)
        _write_config(folder, shape)
        model = replace(roles.model, path=name, enable_activation_offload=False)
        own, chunk = settings.reward_model.model.fsdp_config, rlt.logits_chunk_tokens
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            use = ModelUse(recompute=True, trained=True)
            trained = _built(build_policy(model, roles.actor.fsdp_config, folder, mesh, CPU, use))
            micros = [_faked(micro, fake) for micro in update_micros]
            update = _update(Policy(trained, roles.actor, 10, 1, CPU), micros, roles.rollout.temperature)
            packs = [micro.pack.map(fake.from_tensor) for micro in old_micros]
            log_probs = _forward(trained, packs)
            del trained
            # A frozen model whose weights rest in the dtype of compute is no FSDP module, and fake tensors are its storage.
            student = build_policy(replace(model, logprob_chunk_tokens=chunk), own, folder, mesh, CPU)
            score = _forward(student, [student_pack.map(fake.from_tensor)])
    return PassPeaks(log_probs, score, update)


@contextmanager
def tiles_of_a_gpu() -> Iterator[None]:
    """Cut elementwise statements into tiles as large as on a GPU. Those of a CPU are small, and their operations many."""
    before = [dict(elements) for elements in (TILE_ELEMENTS, NARROW_TILE_ELEMENTS)]
    for elements in (TILE_ELEMENTS, NARROW_TILE_ELEMENTS):
        elements["cpu"] = elements["cuda"]
    try:
        yield
    finally:
        for elements, kept in zip((TILE_ELEMENTS, NARROW_TILE_ELEMENTS), before, strict=True):
            elements.update(kept)


@contextmanager
def fake_process_group() -> Iterator[None]:
    """Join a process group of one rank in which collectives do nothing."""
    leave_process_group()
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        yield
    finally:
        leave_process_group()


def _write_config(folder: Path, shape: ModelShape) -> None:
    """Write the config.json of a model with these sizes."""
    kind = "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama"
    AutoConfig.for_model(
        kind, vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.mlp, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied, max_position_embeddings=40_960, bos_token_id=None, eos_token_id=0, pad_token_id=1,
    ).save_pretrained(folder)  # fmt: skip


def _built(model: PolicyModel) -> PolicyModel:
    """Return the model with storage for its parameters."""
    allocate(model, CPU)
    return model


def _batch(rows: Rows, settings: Settings) -> RolloutBatch:
    """Return one group of rows that fills the token budget."""
    count = settings.actor_rollout_ref.rollout.n

    def ragged(length: int) -> Ragged:
        return Ragged(flat=torch.zeros(count * length, dtype=torch.int64), lengths=torch.full((count,), length), batch_size=[])

    group = torch.zeros(count, dtype=torch.int64)
    batch = rollout_batch(ragged(rows.prompt), ragged(rows.response), group, settings.actor_rollout_ref.actor)
    tokens = count * rows.response
    batch.advantages, batch.old_log_probs, batch.ref_log_probs = (torch.zeros(tokens) for _ in range(3))
    return batch


def _micros(batch: RolloutBatch, budget: Budget) -> list[MicroBatch]:
    """Return the largest micro-batches of a batch, two at most."""
    names = [f"row {row}" for row in range(batch.num_rows)]
    (bins,) = cut_ranks([batch.row_tokens()], [names], budget)
    largest = sorted(bins, key=batch.row_tokens().cost, reverse=True)[:2]
    return [micro_batch(batch, members) for members in largest]


def _faked(micro: MicroBatch, fake: FakeTensorMode) -> MicroBatch:
    flat = (micro.old_log_probs, micro.ref_log_probs, micro.advantages)
    return MicroBatch(micro.pack.map(fake.from_tensor), *(fake.from_tensor(tensor) for tensor in flat if tensor is not None))


def _student_pack(rows: Rows, max_tokens: int) -> Pack:
    """Return the pack of as many student rows as fit into a micro-batch, one at least."""
    count = max(max_tokens // rows.student, 1)
    length = rows.response + 4 + rows.solution
    group = torch.arange(count)
    batch = RolloutBatch(
        prompts=Ragged(
            flat=torch.zeros(count * rows.question, dtype=torch.int64), lengths=torch.full((count,), rows.question), batch_size=[]
        ),
        responses=Ragged(
            flat=torch.zeros(count * length, dtype=torch.int64), lengths=torch.full((count,), length), batch_size=[]
        ),
        group=group, prompt_group=group, batch_size=[],
    )  # fmt: skip
    place = torch.arange(length).repeat(count)
    read = ((place < rows.response) | (place >= rows.response + 4)).nonzero()[:, 0]
    return targets_at(micro_batch(batch, range(count)).pack, read)


def _forward(model: PolicyModel, packs: Sequence[Pack]) -> int:
    """Return the peak of a pass without gradients."""
    with ByteTracker() as tracker:
        tracker.mark("params", model.parameters())
        tracker.enter("pass")
        held = tracker.total()
        for pack in packs:
            pack_log_probs(model, pack, 0.7, False)
        return tracker.peaks[DEVICE].bytes - held


def _update(policy: Policy, micros: list[MicroBatch], temperature: float) -> int:
    """Return the peak of forward and backward over some micro-batches, gradients included."""
    tokens = float(sum(micro.pack.targets.shape[0] for micro in micros))
    with ByteTracker() as tracker:
        tracker.mark("params", policy.model.parameters())
        for _ in range(ROUNDS):
            policy.trained.optimizer.zero_grad(set_to_none=True)
            tracker.enter("update")
            held = tracker.total()
            policy.accumulate(micros, GlobalCounts(tokens, 1.0), temperature)
        return tracker.peaks[DEVICE].bytes - held
