"""One worker's whole life on the virtual GPU: load, roll out, score, update, save, load, sleep and wake."""

import dataclasses
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.end_to_end.covering import REF, settings_of
from tests.virtual_gpu.device import VirtualGpu
from tests.worker.test_conversations import batch_of, conversations
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Critic, CriticModel
from verl_memopt.data.batch import Ragged, rollout_batch
from verl_memopt.distributed.device import leave_process_group
from verl_memopt.memory.residency import CRITIC, NEEDS, POLICY, REFERENCE
from verl_memopt.memory.shared_prompt import prompt_groups
from verl_memopt.model.packing_check import GROUPS, row_differences
from verl_memopt.observe.byte_tracker import storages_of
from verl_memopt.observe.device_ledger import state_tensors
from verl_memopt.rollout.engine import train_sampling
from verl_memopt.trainer.micro_batching import budgets, cut_ranks, rows_per_rank
from verl_memopt.worker.group import Placement
from verl_memopt.worker.roles import WorkerPlan
from verl_memopt.worker.trained_model import MiniBatch
from verl_memopt.worker.worker import Worker

STREAMS = {f"{REF}.fsdp_config.param_offload": "stream"}
"""Settings with which the reference streams."""
PROMPTS = [[40, 41, 42], [50], [60, 61]]
SLACK_BYTES = 16 * 2**10
"""What may lie on the device beside the parts that are known: tables of rotary embeddings, a scalar here and there."""


@dataclass
class Life:
    """What was recorded. ``rests``: phase -> kind -> bytes on the device after it. ``strangers``: phase -> unknown bytes.

    ``waits`` lists what made the host wait in the update, ``ops`` the names of device operations.
    """

    rests: dict = field(default_factory=dict)
    strangers: dict = field(default_factory=dict)
    peaks: dict = field(default_factory=dict)
    waits: list = field(default_factory=list)
    ops: set = field(default_factory=set)


@contextmanager
def first_worker(plan, world_size):
    """Return the first worker of a group on a virtual GPU, and the GPU. The other ranks do not exist."""
    leave_process_group()
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    with VirtualGpu() as gpu:
        worker = Worker(plan, Placement(0, world_size, 0, "127.0.0.1", 0, "cuda"))
        try:
            yield worker, gpu
        finally:
            worker.close()


def live(row, folder, world_size=1, attention=None, whole=True, critic=False, more=None, talks=False):
    """Run a worker's life under a row of knobs, and return what was recorded. Errors of the worker are raised.

    Args:
        world_size: Ranks of the group. The other ranks do not exist, and send nothing.
        attention: ``model.attn_implementation``.
        whole: Include generation, an update with its own log-probs, and a checkpoint.
        critic: Add a critic with the policy's knobs.
        more: Settings on top of the row's.
        talks: Rows are conversations of several turns.
    """
    plan, settings = _plan(row, folder, world_size, attention, more)
    if critic:
        ours = settings.actor_rollout_ref
        plan = dataclasses.replace(
            plan, critic=twin_of(ours.actor, ours.model), critic_folder=str(folder), critic_schedule_steps=2
        )
    with first_worker(plan, world_size) as (worker, gpu):
        seen = _Witness(worker, gpu, settings, world_size, _talks if talks else _batch)
        seen.whole_life() if whole else seen.step(seed=0)
    seen.life.ops = set(gpu.ops)
    return seen.life


def compare_packed_rows(row, folder, world_size=1):
    """Return by how much packing changes a row of each model, as if the models had values. Errors as in :func:`live`."""
    plan, settings = _plan(row, folder, world_size, None)
    ours = settings.actor_rollout_ref
    plan = dataclasses.replace(plan, critic=twin_of(ours.actor, ours.model), critic_folder=str(folder), critic_schedule_steps=2)
    with first_worker(plan, world_size) as (worker, _):
        groups = prompt_groups(GROUPS, plan.settings.actor)
        models = (worker.policy.model, worker.reference, worker.critic.model)
        return [row_differences(model, worker.device, groups) for model in models]


def _plan(row, folder, world_size, attention, more=None):
    settings = settings_of(row, folder, world_size, more)
    ours = settings.actor_rollout_ref
    model = ours.model if attention is None else dataclasses.replace(ours.model, attn_implementation=attention)
    # What is compiled is not dispatched: the operations behind it would not be seen.
    ours = dataclasses.replace(
        ours,
        model=model,
        actor=dataclasses.replace(ours.actor, use_torch_compile=False),
        ref=dataclasses.replace(ours.ref, use_torch_compile=False),
    )
    text = str(folder)
    plan = WorkerPlan(
        settings=ours,
        folder=text,
        engine_folder=text,
        reference_folder=None if ours.model.lora_rank else text,
        tokenizer_folder=text,
        eos_token_ids=(2,),
        schedule_steps=2,
        free_engine=bool(ours.rollout.free_cache_engine),
        track_init=False,
        memory=settings.memory,
    )
    return plan, dataclasses.replace(settings, actor_rollout_ref=ours)


def twin_of(actor, model):
    """Return the settings of a critic with the policy's knobs."""
    knobs = {field.name: getattr(model, field.name) for field in dataclasses.fields(CriticModel) if hasattr(model, field.name)}
    return Critic(
        model=CriticModel(**knobs, fsdp_config=actor.fsdp_config),
        optim=actor.optim,
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor,
    )


def _batch(seed, actor):
    """Return two groups of four answers, one empty, with few different lengths, because each length needs kernels of its own."""
    generator = torch.Generator().manual_seed(seed)

    def ids(lengths):
        return Ragged.from_rows([torch.randint(256, (n,), generator=generator) for n in lengths], torch.int64)

    responses = ids([5, 5, 5, 5, 5, 5, 3, 0])
    firsts = ids([6, 6]).select([0] * 4 + [1] * 4)
    tokens = int(responses.lengths.sum())
    fields = {
        name: torch.randn(tokens, generator=generator)
        for name in ("old_log_probs", "ref_log_probs", "advantages", "old_values", "returns")
    }
    batch = rollout_batch(firsts, responses, torch.arange(8) // 4, actor)
    return dataclasses.replace(batch, **fields)


def _talks(seed, actor):
    """Return conversations, some of which went back and sampled again."""
    rows, group = conversations(groups=2, seed=seed)
    batch = batch_of(rows, group, seed)
    made = rollout_batch(batch.prompts, batch.responses, group, actor, forest=batch.forest)
    names = ("old_log_probs", "ref_log_probs", "advantages", "old_values", "returns")
    return dataclasses.replace(made, **{name: getattr(batch, name) for name in names})


class _Witness:
    """Calls the worker phase by phase, and looks at the device after each."""

    def __init__(self, worker, gpu, settings, world_size, make_batch):
        self.worker, self.gpu, self.settings, self.world_size = worker, gpu, settings, world_size
        self.make_batch = make_batch
        self.life = Life()
        self._look("init")
        for trained in worker._trained():
            trained.accumulate = self._never_waiting(trained.accumulate)
        for model in (worker.policy.model, worker.reference, None if worker.critic is None else worker.critic.model):
            if model is not None:
                model.forward = self._never_waiting(model.forward)

    def _never_waiting(self, function):
        # FSDP2's own offload adds gradients up on the host: it waits for those of each further micro-batch, and for the backward.
        own_offload = self.worker.settings.actor.fsdp_config.offload_policy
        # The last is the optimizer step in backward, which waits for the copies of gradients to the host.
        but_for = ("Event.synchronize", "aten._to_copy.default to the host", "Stream.synchronize") if own_offload else ()
        but_for += ("torch.cuda.graph",)  # a capture, once for each size
        actor = self.worker.settings.actor
        if actor.fsdp_config.grad_offload and actor.optim.bucket_megabytes < 1:
            # Where the rows of each tile of the vocabulary end: a copy that began in the forward, and is there in backward.
            but_for += ("Event.synchronize",)

        def watched(*args, **kwargs):
            with self.gpu.never_waits("between micro-batches", but_for):
                return function(*args, **kwargs)

        return watched

    def whole_life(self):
        sampling = train_sampling(self.worker.settings.rollout)
        self.call("update_weights", "update_weights")
        self.call("gen", "generate", PROMPTS, [1, 2, 3], sampling)
        self.step(seed=0)
        self.on_policy(seed=1)
        if self.world_size > 1:
            return  # the other ranks, without which no checkpoint is whole, are not there
        with tempfile.TemporaryDirectory() as folder:
            contents = ["model", "optimizer", "extra", "hf_model"]
            self.call("save_checkpoint", "save", folder, contents)
            if self.worker.critic is not None:
                self.call("save_checkpoint", "save_critic", f"{folder}/critic", contents)

    def step(self, seed):
        whole, (update, old, ref) = self._batch(seed)
        self.call("gen", "release_engine")
        whole.old_log_probs = self.call("old_log_prob", "old_log_probs", whole, old, True).log_probs
        whole.ref_log_probs = self.call("ref", "ref_log_probs", whole, ref).log_probs
        counts = GlobalCounts(float(sum(whole.responses.sizes())), float(whole.num_rows))
        if self.worker.critic is not None:
            values = self.call("values", "values", whole, old)
            assert (values.shape, values.device.type) == (whole.returns.shape, "cpu")
            self.call("update_critic", "update_critic", [MiniBatch(whole, update, counts)])
        self.call("update_actor", "update_actor", [MiniBatch(whole, update, counts)])
        self.call("update_weights", "update_weights")

    def on_policy(self, seed):
        whole, (update, _, ref) = self._batch(seed)
        self.call("gen", "release_engine")
        whole.ref_log_probs = self.call("ref", "ref_log_probs", whole, ref).log_probs
        whole.old_log_probs = None
        counts = GlobalCounts(float(sum(whole.responses.sizes())), float(whole.num_rows))
        found = self.call("update_actor", "update_on_policy", MiniBatch(whole, update, counts))
        assert found.log_probs.device.type == "cpu"
        self.call("update_weights", "update_weights")

    def call(self, phase, method, *args):
        before = len(self.gpu.waits)
        # Generation goes on until the device says that all rows are done.
        self.gpu.truth = phase == "gen"
        reply = self.worker.call(phase, False, method, *args)
        if phase == "update_actor":
            self.life.waits += self.gpu.waits[before:]
        self.life.peaks[phase] = max(self.life.peaks.get(phase, 0), self.gpu.peak)
        self._look("released" if method == "release_engine" else phase)
        return reply.value

    def _batch(self, seed):
        whole = self.make_batch(seed, self.settings.actor_rollout_ref.actor)
        shares = rows_per_rank(whole.row_tokens(), range(whole.num_rows), self.world_size, even_out=False)

        def cut(budget):
            tokens = whole.row_tokens()
            names = [[f"row {row}" for row in rows] for rows in shares]
            return cut_ranks([tokens.select(rows) for rows in shares], names, budget)[0]

        return whole.select(shares[0]), [cut(budget) for budget in budgets(self.settings.actor_rollout_ref)]

    def _look(self, phase):
        held = self.gpu.held()
        known = {kind: _keys(tensors) for kind, tensors in self._parts()}
        self.life.rests[phase] = {kind: sum(held.get(key, 0) for key in keys) for kind, keys in known.items()}
        claimed = set().union(*known.values())
        self.life.strangers[phase] = sum(size for key, size in held.items() if key not in claimed)

    def _parts(self):
        worker = self.worker
        yield "policy", [*worker.policy.model.parameters(), *worker.policy.model.buffers()]
        yield "optimizer", list(state_tensors(worker.policy.trained.optimizer))
        if worker.reference is not None:
            yield "reference", [*worker.reference.parameters(), *worker.reference.buffers()]
        if worker.critic is not None:
            yield "critic", [*worker.critic.model.parameters(), *worker.critic.model.buffers()]
            yield "critic's optimizer", list(state_tensors(worker.critic.trained.optimizer))
        yield "engine", [tensor for _, tensor in worker.engine.resident_tensors()]


def _keys(tensors):
    return {storage._cdata for tensor in tensors for storage in storages_of(tensor)}


def misplaced(row, life):
    """Describe what lies on the device after a phase although a knob says that it rests on the host."""
    found = []

    def rests_on_host(kind, factor, names):
        if row[factor] != "on":
            return
        for phase, kinds in life.rests.items():
            away = phase == "released" or (phase in NEEDS and not names & NEEDS[phase])
            if away and kinds.get(kind, 0) > SLACK_BYTES:
                found.append(f"{kind} after {phase}: {kinds[kind]} bytes")

    # With LoRA the reference is the policy without its adapters.
    rests_on_host("policy", "actor param_offload", {POLICY} if row["lora"] == "off" else {POLICY, REFERENCE})
    rests_on_host("reference", "ref param_offload", {REFERENCE})
    rests_on_host("critic", "actor param_offload", {CRITIC})
    for phase, kinds in life.rests.items():
        moments, models = (kinds.keys() & names for names in ({"optimizer", "critic's optimizer"}, {"policy", "critic"}))
        offloaded = moments if "on" in (row["actor optimizer_offload"], row["actor offload_policy"]) else set()
        offloaded |= models if row["actor offload_policy"] == "on" else set()
        found += [f"{kind} after {phase}: {kinds[kind]} bytes" for kind in sorted(offloaded) if kinds[kind] > SLACK_BYTES]
        if row["engine"] != "awake" and phase == "released" and kinds["engine"]:
            found.append(f"engine after {phase}: {kinds['engine']} bytes")
        if life.strangers[phase] > SLACK_BYTES:
            found.append(f"no part of anything after {phase}: {life.strangers[phase]} bytes")
    return found
