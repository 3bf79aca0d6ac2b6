import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedModel

from tests.models.own_code import own_code, write_own_code
from tests.ranks import run_ranks
from tests.tensors import local_of, whole_of
from tests.workers.test_policy import batch
from verl_memopt.algorithms.reductions import GlobalCounts
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import Memory
from verl_memopt.distributed.file_records import record_folder
from verl_memopt.distributed.process_group import leave_process_group
from verl_memopt.errors import CheckpointError, ConfigError, DeviceMemoryError, RolloutError
from verl_memopt.memory.host.host_buffers import GIB, host_allocator
from verl_memopt.models.build import named_weights
from verl_memopt.models.policy_model import PolicyModel
from verl_memopt.ops import fused
from verl_memopt.rollout.sampling import train_sampling
from verl_memopt.workers.group import Placement
from verl_memopt.workers.plan import WorkerPlan
from verl_memopt.workers.policy import MiniBatch
from verl_memopt.workers.worker import Worker

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
    fixed |= {"eos_token_ids": (2,), "optimizer_steps": 10, "free_engine": False, "track_init": False}
    return WorkerPlan(settings=settings_from_mapping(least | (more or {})).actor_rollout_ref, **{**fixed, **plan})


def place(rank=0, world_size=1):
    return Placement(rank, world_size, rank, "127.0.0.1", 0, "cpu")


@pytest.fixture
def made(tiny_folder):
    """Builds workers, one after another, each in a process group of its own."""
    leave_process_group()
    workers = []

    def build(more=None, **plan):
        workers.append(Worker(plan_of(tiny_folder, more, **plan), place()))
        return workers[-1]

    def close():
        while workers:
            workers.pop().close()

    build.close = close
    yield build
    close()
    leave_process_group()


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
    leave_process_group()
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
        leave_process_group()
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
    leave_process_group()
    memory = made(track_init=True).started()
    assert memory.name == "init"
    assert memory.peak_allocated_bytes >= memory.allocated_bytes > 0


def test_a_loaded_worker_goes_on_bit_for_bit(made, tmp_path):
    worker = made()
    call(worker, "update_actor", [mini_batch()])
    call(worker, "save", str(tmp_path), ALL)
    metrics = call(worker, "update_actor", [mini_batch()])
    leave_process_group()
    other = made()
    call(other, "load", str(tmp_path), ALL)
    assert call(other, "update_actor", [mini_batch()]) == metrics
    assert same(weights(worker), weights(other))


def test_a_checkpoint_holds_a_model_folder_with_weights_only_when_asked(made, tmp_path, tiny_folder):
    worker = made()
    call(worker, "save", str(tmp_path / "plain"), ALL)
    call(worker, "save", str(tmp_path / "whole"), [*ALL, "hf_model"])
    plain, whole = (tmp_path / name / "huggingface" for name in ("plain", "whole"))
    for folder in (plain, whole):
        assert (folder / "config.json").is_file()
        assert (folder / "tokenizer.json").is_file()
    assert not list(plain.glob("*.safetensors"))
    assert same(load_file(whole / "model.safetensors"), weights(worker))


@pytest.mark.parametrize("more", [{}, {f"{AR}.model.lora_rank": 2}])
def test_a_save_answers_with_the_record_of_every_file(made, tmp_path, more):
    assert call(made(more), "save", str(tmp_path), [*ALL, "hf_model"]) == record_folder(tmp_path, tmp_path)


def test_a_saved_tokenizer_renders_prompts_as_the_run_did(made, tmp_path):
    template = "{{ messages[0]['content'] }} ->"
    call(made({f"{AR}.model.custom_chat_template": template}), "save", str(tmp_path), ["model"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "huggingface")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], tokenize=False) == "1+1= ->"


def test_a_model_folder_that_cannot_be_written_is_an_error_for_the_user(made, tmp_path):
    worker = made()
    (tmp_path / "huggingface").write_text("a file where a folder must be")
    with pytest.raises(CheckpointError, match=r"the model could not be written: .*huggingface"):
        call(worker, "save", str(tmp_path), ["model"])


def test_full_determinism_and_the_seed_hold_for_the_worker(made):
    before = torch.are_deterministic_algorithms_enabled()
    try:
        made({f"{AR}.actor.fsdp_config.full_determinism": True, f"{AR}.actor.fsdp_config.seed": 5})
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.initial_seed() == 5
    finally:
        torch.use_deterministic_algorithms(before)


def live_models():
    gc.collect()
    return {id(found) for found in gc.get_objects() if isinstance(found, PreTrainedModel | PolicyModel)}


def test_a_start_that_runs_out_of_memory_leaves_no_engine_model_limit_or_group(made):
    """The engine is built when the policy does not fit; the error is held while one looks."""
    before = live_models()
    engine_bytes = made(track_init=True).started().allocated_bytes // 2
    leave_process_group()
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


def two_ranks(rank, folder, out):
    """Loads what one rank wrote, takes a step, saves and gives what this rank computed."""
    worker = Worker(plan_of(folder), place(rank, 2))
    worker.load(str(out / "one"), ALL)
    whole = batch(rows=4)
    counts = GlobalCounts(float(whole.responses.lengths.sum()), 4.0)
    metrics = worker.update_actor([MiniBatch(whole.select([2 * rank, 2 * rank + 1]), [[0, 1]], counts)])
    worker.save(str(out / "two"), ALL)
    return metrics


def test_another_number_of_ranks_goes_on_from_a_checkpoint_and_back(made, tiny_folder, tmp_path):
    worker = made()
    call(worker, "update_actor", [mini_batch()])
    call(worker, "save", str(tmp_path / "one"), ALL)
    expected = call(worker, "update_actor", [mini_batch()])
    answers = run_ranks(two_ranks, 2, tiny_folder, tmp_path)
    assert sum(answer["actor/loss"] for answer in answers) == pytest.approx(expected["actor/loss"], rel=1e-5)
    for answer in answers:
        assert answer["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
        assert answer["actor/lr"] == expected["actor/lr"]
    assert sorted(path.name for path in (tmp_path / "two").glob("extra*")) == ["extra_rank_0.pt", "extra_rank_1.pt"]
    leave_process_group()
    back = made()
    call(back, "load", str(tmp_path / "two"), ALL)
    for name, tensor in weights(back).items():
        torch.testing.assert_close(tensor, weights(worker)[name], rtol=0, atol=2e-5)


def test_a_phase_past_the_device_limit_is_an_error_that_names_it_and_the_worker_goes_on(made):
    worker = made(memory=Memory(device_limit_gb=0.0011), free_engine=True)
    counts = GlobalCounts(tokens=1.0, sequences=16.0)
    mini = [MiniBatch(batch(), [list(range(16))], counts)]
    with pytest.raises(DeviceMemoryError, match=r"update_actor: out of device memory at 0\.0011.* of 0\.0011 GiB .*Most of it"):
        worker.call("update_actor", True, "update_actor", mini)
    # Bytes are only counted in tracked phases of a CPU, so only those are refused.
    assert worker.call("update_actor", False, "update_actor", mini).value["actor/loss"]


def test_a_workers_host_limits_end_with_it(made):
    worker = made(memory=Memory(host_limit_gb=2, pinned_limit_gb=1))
    assert (host_allocator().limit_bytes, host_allocator().pinned_limit_bytes) == (2 * GIB, GIB)
    worker.close()
    assert (host_allocator().limit_bytes, host_allocator().pinned_limit_bytes) == (None, None)


@pytest.mark.parametrize("role", ["policy", "reference"])
def test_a_model_that_mixes_rows_is_refused_when_it_is_loaded(tiny_folder, untied_folder, tmp_path, monkeypatch, role):
    own_code(monkeypatch, tmp_path)
    own = str(write_own_code(untied_folder, tmp_path / "own", mixes=True))
    policy, reference = (own, None) if role == "policy" else (tiny_folder, own)
    plan = plan_of(policy, {f"{AR}.model.trust_remote_code": True}, reference_folder=reference)
    with pytest.raises(ConfigError, match=rf"model\.path={own}: models of type own mix the tokens of different rows in"):
        Worker(plan, place())
    leave_process_group()


def test_a_mapped_reference_has_its_values_when_its_rows_are_compared(made, tiny_folder):
    mapped = {f"{AR}.actor.use_kl_loss": True, f"{AR}.model.load_mode": "mmap", f"{AR}.ref.fsdp_config.param_offload": True}
    worker = made(mapped, reference_folder=str(tiny_folder))
    found = call(worker, "ref_log_probs", batch(rows=2), [[0, 1]])
    assert torch.isfinite(found.log_probs).all()


def test_a_worker_on_a_cpu_compiles_nothing(made):
    worker = made({f"{AR}.actor.use_torch_compile": True})
    assert not fused._on
    call(worker, "update_actor", [mini_batch()])
    assert not worker.policy.model.lm.get_output_embeddings().compiled
