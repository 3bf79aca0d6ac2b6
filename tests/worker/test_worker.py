import gc
import pickle
import re
import weakref

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from tests.critics import call_critic, critic_mini, critic_plan
from tests.tensors import local_of, whole_of
from tests.worker.test_policy import batch
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import Memory
from verl_memopt.errors import DeviceMemoryError, RolloutError
from verl_memopt.memory.host_buffers import GIB, host_allocator
from verl_memopt.model.packed_model import PolicyModel
from verl_memopt.model.weights import named_weights
from verl_memopt.rollout.engine import train_sampling
from verl_memopt.worker.group import Placement
from verl_memopt.worker.roles import WorkerPlan
from verl_memopt.worker.trained_model import MiniBatch

AR = "actor_rollout_ref"
ALL = ["model", "optimizer", "extra"]
PROMPTS = [[40, 41, 42], [50], [60, 61]]


def plan_of(folder, more=None, **plan):
    least = {
        "data.train_files": "none",
        "data.val_files": None,
        "data.max_prompt_length": 8,
        "data.max_response_length": 6,
        "algorithm.adv_estimator": "rloo",
        f"{AR}.model.path": str(folder),
        f"{AR}.model.enable_gradient_checkpointing": False,
        f"{AR}.actor.use_dynamic_bsz": True,
        # Batches here are of rows alone.
        f"{AR}.actor.use_prefix_grouper": False,
        f"{AR}.actor.optim.lr": 1e-3,
        f"{AR}.actor.fsdp_config.dtype": "fp32",
        f"{AR}.ref.fsdp_config.dtype": "fp32",
        f"{AR}.rollout.name": "hf",
        f"{AR}.rollout.n": 2,
        f"{AR}.rollout.dtype": "fp32",
        f"{AR}.rollout.temperature": 0.9,
        f"{AR}.actor.policy_loss.loss_mode": "vanilla",
    }
    where = str(folder)
    fixed = {"folder": where, "engine_folder": where, "reference_folder": None, "tokenizer_folder": where}
    fixed |= {"eos_token_ids": (2,), "schedule_steps": 10, "free_engine": False, "track_init": False}
    return WorkerPlan(settings=settings_from_mapping(least | (more or {})).actor_rollout_ref, **{**fixed, **plan})


def place(rank=0, world_size=1):
    return Placement(rank, world_size, rank, "127.0.0.1", 0, "cpu")


PHASES = {
    "generate": "gen",
    "old_log_probs": "old_log_prob",
    "ref_log_probs": "ref",
    "update_actor": "update_actor",
    "update_weights": "update_weights",
    "save": "save_checkpoint",
    "load": "load_checkpoint",
}


def call(worker, method, *args):
    return worker.call(PHASES[method], False, method, *args).value


def generated(worker, seed=1):
    return call(worker, "generate", PROMPTS, [seed, seed + 1, seed + 2], train_sampling(worker.settings.rollout))


def mini_batch(rows=4):
    whole = batch(rows=rows)
    return MiniBatch(whole, [list(range(rows))], GlobalCounts(float(whole.responses.lengths.sum()), float(rows)))


def weights(worker):
    return {name: whole_of(parameter).detach().clone() for name, parameter in named_weights(worker.policy.model)}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_worker_joins_a_group_of_its_own_and_leaves_it_when_closed(made):
    worker = made()
    assert dist.get_world_size() == 1
    worker.close()
    worker.close()
    assert not dist.is_initialized()


def test_an_engine_without_weights_refuses_to_answer_until_the_first_sync(made):
    worker = made()
    with pytest.raises(RolloutError, match="weights are incomplete"):
        generated(worker)
    call(worker, "update_weights")
    assert [len(row) for row in generated(worker).response_ids]


def test_engine_and_policy_give_one_distribution_after_every_sync(made):
    worker = made({f"{AR}.rollout.ignore_eos": True})
    for _ in range(2):
        call(worker, "update_weights")
        found = generated(worker)
        whole = batch(rows=3)
        prompts, responses = ([torch.tensor(row) for row in rows] for rows in (PROMPTS, found.response_ids))
        whole.prompts, whole.responses = (type(whole.prompts).from_rows(rows, torch.int64) for rows in (prompts, responses))
        scores = call(worker, "old_log_probs", whole, [[0, 1, 2]], False)
        engine = torch.tensor([value for row in found.log_probs for value in row])
        torch.testing.assert_close(scores.log_probs, engine, rtol=0, atol=1e-5)
        call(worker, "update_actor", [mini_batch()])


def test_an_update_changes_what_the_engine_says_only_at_the_next_sync(made):
    worker = made()
    call(worker, "update_weights")
    before = generated(worker).log_probs
    call(worker, "update_actor", [mini_batch(), mini_batch()])
    assert generated(worker).log_probs == before
    call(worker, "update_weights")
    assert generated(worker).log_probs != before


def test_the_reference_is_built_only_when_named_and_stays_as_it_is(made, tiny_folder):
    assert made().reference is None
    worker = made({f"{AR}.actor.use_kl_loss": True}, reference_folder=str(tiny_folder))
    whole, rows = batch(rows=4), [[0, 1, 2, 3]]
    before = call(worker, "ref_log_probs", whole, rows).log_probs
    assert torch.equal(before, call(worker, "old_log_probs", whole, rows, False).log_probs)
    call(worker, "update_actor", [mini_batch()])
    assert torch.equal(before, call(worker, "ref_log_probs", whole, rows).log_probs)
    assert not torch.equal(before, call(worker, "old_log_probs", whole, rows, False).log_probs)


def test_greedy_rollouts_are_scored_at_a_temperature_of_one(made):
    whole, rows = batch(rows=2), [[0, 1]]
    found = {}
    for name, more in {"greedy": {"do_sample": False}, "one": {"temperature": 1.0}, "cool": {}}.items():
        found[name] = call(
            made({f"{AR}.rollout.{key}": value for key, value in more.items()}), "old_log_probs", whole, rows, False
        )
    assert torch.equal(found["greedy"].log_probs, found["one"].log_probs)
    assert not torch.equal(found["greedy"].log_probs, found["cool"].log_probs)


def test_a_call_is_a_phase_and_its_answer_can_travel(made):
    worker = made()
    reply = worker.call("old_log_prob", False, "old_log_probs", batch(rows=2), [[0, 1]], True)
    assert reply.memory.name == "old_log_prob"
    assert reply.memory.host_rss_bytes > 0
    assert reply.memory.peak_allocated_bytes is None
    assert torch.equal(pickle.loads(pickle.dumps(reply)).value.entropy, reply.value.entropy)


def test_tracked_bytes_of_an_update_hold_masters_and_the_optimizers_two_moments(made):
    worker = made()
    call(worker, "update_actor", [mini_batch()])
    kinds = worker.call("update_actor", True, "update_actor", [mini_batch()]).memory.kinds
    sizes = sum(local_of(parameter).nbytes for parameter in worker.policy.model.parameters())
    assert kinds["params"] == sizes
    assert 2 * sizes <= kinds["optimizer"] <= 2 * sizes + 8 * len(list(worker.policy.model.parameters()))
    assert kinds["rollout weights"] >= sizes


def test_the_start_is_counted_when_asked_for(made):
    assert made().started().peak_allocated_bytes is None
    memory = made(track_init=True).started()
    assert memory.name == "init"
    assert memory.peak_allocated_bytes >= memory.allocated_bytes > 0


def live_models():
    gc.collect()
    return {id(found) for found in gc.get_objects() if isinstance(found, PreTrainedModel | PolicyModel)}


def test_a_start_that_runs_out_of_memory_leaves_no_engine_model_limit_or_group(made):
    """The engine is built when the policy does not fit; the error is held while one looks."""
    before = live_models()
    engine_bytes = made(track_init=True).started().allocated_bytes // 2
    made.close()
    memory = Memory(device_limit_gb=engine_bytes * 1.5 / GIB, host_limit_gb=1)
    with pytest.raises(DeviceMemoryError, match="init: out of device memory") as caught:
        made(track_init=True, memory=memory)
    assert host_allocator().limit_bytes is None
    assert not dist.is_initialized()
    made.close()
    assert live_models() <= before
    assert caught.value is not None


class LastEngine:
    """An engine that notes which models are left when it is shut down: a sleeping one needs their room to wake."""

    def __init__(self, models):
        self.models, self.left = models, None

    def shutdown(self):
        gc.collect()
        self.left = [model for model in self.models if model() is not None]


def test_a_closing_worker_lets_its_models_go_before_its_engine(made, tiny_folder):
    more = {f"{AR}.actor.fsdp_config.param_offload": True, f"{AR}.actor.use_kl_loss": True}
    worker = made(more, reference_folder=str(tiny_folder))
    call(worker, "update_actor", [mini_batch()])
    worker.engine.shutdown()
    engine = worker.engine = LastEngine([weakref.ref(worker.policy.model), weakref.ref(worker.reference)])
    worker.close()
    assert engine.left == []


def test_gradients_that_are_there_at_an_out_of_memory_error_are_told_as_gradients(made):
    worker = made()
    for parameter in worker.policy.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    kinds = [kind for kind, _ in worker._resident()]
    assert kinds.count("grads") == kinds.count("params") == len(list(worker.policy.model.parameters()))


def test_a_phase_past_the_device_limit_is_an_error_that_names_it_and_the_worker_goes_on(made):
    worker = made(memory=Memory(device_limit_gb=0.0011), free_engine=True)
    counts = GlobalCounts(tokens=1.0, sequences=16.0)
    mini = [MiniBatch(batch(), [list(range(16))], counts)]
    with pytest.raises(DeviceMemoryError, match=r"(?s)update_actor: out of device memory at 1\.1.* of 1\.13 MiB .*Most of it"):
        worker.call("update_actor", True, "update_actor", mini)
    # Bytes are only counted in tracked phases of a CPU, so only those are refused.
    assert worker.call("update_actor", False, "update_actor", mini).value["actor/loss"]


def test_memory_that_runs_out_in_the_critics_update_is_told_with_the_critics_keys(made, tiny_folder):
    """Its parameters are counted beside the policy's, and what to set is a key of the critic's."""
    plan = critic_plan(tiny_folder)
    params = sum(parameter.numel() for parameter in made(**plan).critic.model.parameters()) * 4
    worker = made(memory=Memory(device_limit_gb=0.0015), **plan)
    with pytest.raises(DeviceMemoryError, match=r"update_critic: out of device memory") as caught:
        call_critic(worker, "update_critic", [critic_mini(rows=16)], track=True)
    assert "critic." in str(caught.value)
    assert "actor_rollout_ref.model" not in str(caught.value)
    held = float(re.search(r"params ([\d.e-]+)", str(caught.value))[1]) * 2**20
    assert held == pytest.approx(2 * params, rel=0.01), "the head and its bias in place of a tied LM head"
    assert [kind for kind, _ in worker._resident()].count("params") == len(
        [*worker.policy.model.parameters(), *worker.critic.model.parameters()]
    )


def test_a_workers_host_limits_end_with_it(made):
    worker = made(memory=Memory(host_limit_gb=2, pinned_limit_gb=1))
    assert (host_allocator().limit_bytes, host_allocator().pinned_limit_bytes) == (2 * GIB, GIB)
    worker.close()
    assert (host_allocator().limit_bytes, host_allocator().pinned_limit_bytes) == (None, None)
