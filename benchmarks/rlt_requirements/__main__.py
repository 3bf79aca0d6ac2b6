"""Measure the passes of RLT for each model, and write the table of what a card needs.

``python -m benchmarks.rlt_requirements --measure qwen2_5_0_5b ...`` counts the passes of these models into results.json.
``python -m benchmarks.rlt_requirements`` writes results.txt from it. That is arithmetic and takes a moment.

Passes run on fake tensors: real shapes, all layers, no values. A byte tracker counts what lives.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from benchmarks.common import CPU, text_table
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.loader import load_settings
from verl_memopt.config.schema import Settings
from verl_memopt.data.batch import Ragged, RolloutBatch, rollout_batch
from verl_memopt.distributed.device import leave_process_group, training_mesh
from verl_memopt.memory.fit import CARDS, CONTEXT, RESERVED
from verl_memopt.memory.formulas import NARROW_TILE_ELEMENTS, PUBLISHED, TILE_ELEMENTS, ModelSize, width
from verl_memopt.memory.rollout_memory import kv_bytes_per_token
from verl_memopt.model.assembly import ModelUse, allocate, build_policy
from verl_memopt.model.packed_model import PolicyModel
from verl_memopt.model.packing import Pack
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.observe.phase import GIB, MIB
from verl_memopt.trainer.micro_batching import Budget, budgets, cut_ranks
from verl_memopt.worker.policy import Policy, pack_log_probs
from verl_memopt.worker.trained_model import MicroBatch, micro_batch

MODELS = {
    name.rpartition("/")[2].replace("-Instruct", "").replace("-", "_").replace(".", "_").lower().replace("llama_", "llama"): size
    for name, size in PUBLISHED.items()
}
"""Preset -> sizes of its model."""

FOLDER = Path(__file__).parent
RESULTS, TABLE = FOLDER / "results.json", FOLDER / "results.txt"
RECIPE = "recipe/rlt/config"
SOLUTION = 1024
"""Tokens of the longest solution. The teacher's prompt of 2,048 tokens holds it beside the question."""
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


def measure_passes(shape: ModelSize, settings: Settings, rows: Rows) -> PassPeaks:
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
        write_config(folder, shape)
        model = replace(roles.model, path=name, enable_activation_offload=False)
        own, chunk = settings.reward_model.model.fsdp_config, rlt.logits_chunk_tokens
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            trained = _built(
                build_policy(model, roles.actor.fsdp_config, folder, mesh, CPU, ModelUse(recompute=True, trained=True))
            )
            micros = [faked(micro, fake) for micro in update_micros]
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


def write_config(folder: Path, shape: ModelSize) -> None:
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


def faked(micro: MicroBatch, fake: FakeTensorMode) -> MicroBatch:
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
    return micro_batch(batch, range(count)).pack.with_targets(read)


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


HEAD = ("model", "policy", "update", "log-probs", "score", "engine", "KV", "largest phase", "GiB", "card", "host", "LoRA", "card")
NO_CARD = "-"


@dataclass(frozen=True)
class Needs:
    """Bytes of a run on one card, phase by phase: those of torch's allocator, with what it reserves besides."""

    shape: ModelSize
    peaks: PassPeaks
    settings: Settings
    rows: Rows

    @property
    def masters(self) -> int:
        """Bytes of the policy's parameters, and once more of their gradients."""
        return self.shape.params * width(self.settings.actor_rollout_ref.actor.fsdp_config.model_dtype)

    @property
    def student(self) -> int:
        """Bytes of a student of the policy's size."""
        return self.shape.params * width(self.settings.reward_model.model.fsdp_config.model_dtype)

    @property
    def engine(self) -> int:
        """Bytes of the engine's weights."""
        return self.shape.params * width(self.settings.actor_rollout_ref.rollout.dtype)

    @property
    def kv(self) -> int:
        """Bytes of the KV cache for all rows of a step at their longest."""
        shape, rollout = self.shape, self.settings.actor_rollout_ref.rollout
        count = self.settings.data.train_batch_size * rollout.n
        each = kv_bytes_per_token(shape.layers, shape.kv_heads, shape.head_dim, width(rollout.dtype), 1)
        return count * (self.rows.prompt + self.rows.response) * each

    def phases(self) -> dict[str, float]:
        """Return the bytes of each phase on the card. Everything that is not in it rests on the host."""
        peaks, ref = self.peaks, self.settings.actor_rollout_ref.ref.fsdp_config
        reference = self.shape.params * width(ref.model_dtype)
        in_torch = {
            "old_log_prob": self.masters + peaks.log_probs,
            "reward": self.student + peaks.score,
            "ref": reference + peaks.log_probs,
            "update_actor": self.masters + peaks.update,
            "update_weights": self.masters,
        }
        phases = {name: size * (1 + RESERVED) + CONTEXT for name, size in in_torch.items()}
        phases["update_weights"] += self.engine
        # A step needs the cache of one group at least; more rows at a time are faster.
        phases["gen"] = self.engine + self.kv / self.settings.data.train_batch_size + CONTEXT
        return phases

    @property
    def lora(self) -> float:
        """Bytes of the largest phase with LoRA on bfloat16 weights. Its update is at most the full one without the gradients."""
        frozen = self.shape.params * 2
        update = (frozen + self.peaks.update - self.masters) * (1 + RESERVED)
        return max(update, frozen * (1 + RESERVED) + self.engine) + CONTEXT

    @property
    def host(self) -> int:
        """Bytes on the host: masters, two moments in fp32, reference and student."""
        reference = self.shape.params * width(self.settings.actor_rollout_ref.ref.fsdp_config.model_dtype)
        return self.masters + 8 * self.shape.params + reference + self.student


def card_of(size: float) -> str:
    """Return the smallest card of a memory profile that holds so many bytes."""
    return next((name for name, mib in CARDS.items() if size <= mib * MIB), NO_CARD)


def table(peaks: Mapping[str, PassPeaks], settings: Settings, rows: Rows) -> str:
    """Return the table as text, a line for each model preset."""
    lines = []
    for model, measured in peaks.items():
        needs = Needs(MODELS[model], measured, settings, rows)
        phases = needs.phases()
        largest = max(phases, key=phases.__getitem__)
        sizes = (needs.masters, measured.update, measured.log_probs, measured.score, needs.engine, needs.kv)
        lines.append(
            (
                model, *map(_gib, sizes), largest, _gib(phases[largest]), card_of(phases[largest]), _gib(needs.host),
                _gib(needs.lora), card_of(needs.lora),
            )
        )  # fmt: skip
    budget = settings.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    lengths = f"{rows.prompt} + {rows.response} tokens, {budget} in a micro-batch"
    return f"""GiB of an RLT step on one card, with a student of the policy's size: {lengths}.
Measured on fake tensors at full depth: update (gradients included), log-probs and score, each beside the parameters.
Computed: policy (fp32 masters), engine (bfloat16 weights), KV (cache of all rows at their longest), host, LoRA, and the
phases with {1 + RESERVED} reserved bytes for a live one and {CONTEXT / GIB:.1f} GiB outside of torch's allocator. No card has
measured them.

{text_table(HEAD, lines)}
"""


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="*", default=[], choices=list(MODELS), metavar="MODEL", help=f"of {', '.join(MODELS)}")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    settings = load_settings("teacher_rlt_mono", [], RECIPE)
    data = settings.data
    rows = Rows(data.max_prompt_length, data.max_response_length, data.max_prompt_length - SOLUTION, SOLUTION)
    for model in arguments.measure:
        began = time.monotonic()
        peaks = measure_passes(MODELS[model], settings, rows)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[model] = vars(peaks)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
        sys.stdout.write(f"{model}: {vars(peaks)} ({time.monotonic() - began:.0f} s)\n")
        sys.stdout.flush()
    results = json.loads(RESULTS.read_text())
    text = table({model: PassPeaks(**results[model]) for model in MODELS if model in results}, settings, rows)
    TABLE.write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
