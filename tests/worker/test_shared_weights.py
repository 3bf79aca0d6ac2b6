"""One copy of the weights: the policy computes with the engine's own parameters, and learns what it learns with a sync."""

import logging

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from tests.config.conftest import LEAST
from tests.rollout.tools import tiny_folder as model_folder
from tests.tensors import whole_of
from tests.worker.test_policy import batch
from tests.worker.test_worker import ALL, AR, PROMPTS, call, generated, same
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.data.batch import Ragged
from verl_memopt.errors import ConfigError, RolloutError
from verl_memopt.memory.lora_torch import ADAPTERS
from verl_memopt.memory.shared_weights import KEY, why_not
from verl_memopt.model.weights import named_weights
from verl_memopt.worker.policy import Policy
from verl_memopt.worker.roles import RoleBuilder
from verl_memopt.worker.trained_model import MiniBatch

ENGINE_SIZES = {"kv_cache_memory_gb": 0.02, "enforce_eager": True, "max_num_seqs": 16, "max_num_batched_tokens": 512}


def settings_of(share, dtype="fp32", engine="hf"):
    sizes = ENGINE_SIZES if engine == "vllm" else {}
    compute = "fp32" if dtype == "fp32" else "bfloat16"
    return {
        **{f"{AR}.rollout.{name}": value for name, value in sizes.items()},
        f"{AR}.rollout.name": engine,
        f"{AR}.rollout.dtype": compute,
        f"{AR}.actor.fsdp_config.dtype": compute,
        f"{AR}.actor.fsdp_config.model_dtype": "bfloat16" if dtype == "bfloat16" else "fp32",
        f"{AR}.actor.fsdp_config.split_master_weights": dtype == "split",
        KEY: share,
    }


class Copies(TorchDispatchMode):
    """Counts the elements that are copied."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def masters(worker):
    """The policy's masters, whole: they are its parameters, or joined from them and their remainders."""
    trained = worker.policy.trained
    return {name: whole_of(trained.master(each)).detach().clone() for name, each in named_weights(trained.model)}


def places(worker):
    return {name: parameter.data_ptr() for name, parameter in named_weights(worker.policy.model)}


def engine_places(worker):
    """Where each tensor of the policy lies in the engine, by the engine's own comparison of its names."""
    return {name: view.data_ptr() for name, view in worker.engine.share_weights().items()}


def rollout(worker, seed):
    """Generates and scores rows. Gives them with their advantages, their rewards, and the engine's log-probs of their tokens."""
    found = generated(worker, seed=seed)
    rows = batch(rows=3)
    rows.prompts, rows.responses = (
        Ragged.from_rows([torch.tensor(row) for row in each], torch.int64) for each in (PROMPTS, found.response_ids)
    )
    rows.advantages = rows.old_log_probs = rows.ref_log_probs = None
    rows.old_log_probs = call(worker, "old_log_probs", rows, [[0], [1, 2]], False).log_probs
    engine = torch.tensor([value for row in found.log_probs for value in row])
    rewards = torch.tensor([float(sum(row) % 7) for row in found.response_ids])
    rows.advantages = (rewards - rewards.mean()).repeat_interleave(rows.responses.lengths)
    return rows, rewards, engine


def step(worker, number):
    """Syncs, generates, scores and updates as a training step does; gives what is the same in every run that is."""
    with Copies() as copies:
        call(worker, "update_weights")
    rows, rewards, engine = rollout(worker, number)
    mini = MiniBatch(rows, [[0, 1], [2]], GlobalCounts(float(len(engine)), 3.0))
    metrics = call(worker, "update_actor", [mini])
    learned = rewards.tolist(), metrics["actor/loss"], metrics["actor/grad_norm"]
    return learned, float((engine - rows.old_log_probs).abs().max()), copies.elements


HALF = 4
"""Steps before a run is ended, and after it goes on."""


@pytest.mark.parametrize(("dtype", "tied"), [("fp32", True), ("bfloat16", False), ("split", True)])
def test_steps_with_shared_weights_are_those_with_a_sync_and_either_kind_goes_on_as_the_other(made, tmp_path, dtype, tied):
    folder, runs, copied = model_folder(tmp_path / "model", tied=tied), [], {True: set(), False: set()}
    for number, kinds in enumerate(([True, False], [False, True])):
        learned = []
        for half, share in enumerate(kinds):
            worker = made(settings_of(share, dtype, "hf"), folder)
            assert worker.shares_weights == share
            if half:
                call(worker, "load", str(tmp_path / str(number)), ALL)
            for at in range(HALF * half, HALF * (half + 1)):
                assert (places(worker) == engine_places(worker)) or not share
                found, difference, elements = step(worker, at)
                assert difference <= (1e-4 if dtype == "fp32" else 0.2)
                learned.append(found)
                copied[share].add(elements)
            if not half:
                call(worker, "save", str(tmp_path / str(number)), ALL)
        runs.append((learned, masters(worker)))
    assert copied[True] == {0}
    assert min(copied[False]) > 0
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


@pytest.mark.parametrize("dtype", ["fp32", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bfloat16", "split"))])
def test_every_weight_lies_in_vllms_own_parameters_and_no_number_differs_from_a_run_with_a_sync(made, tmp_path, dtype):
    worker = made(settings_of("auto", dtype, "vllm"), model_folder(tmp_path / "model", tied=True))
    assert worker.shares_weights
    fused = worker.engine._model.get_parameter("model.layers.0.self_attn.qkv_proj.weight")
    key = dict(named_weights(worker.policy.model))["model.layers.0.self_attn.k_proj.weight"]
    assert key.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    assert key.storage_offset() > 0
    runs = []
    for share in (True, False):
        if not share:  # the same engine, and a policy with weights of its own
            worker.policy = Policy.built(RoleBuilder(worker.plan, worker.placement, worker.device, worker.residency))
            worker.shares_weights = False
        steps = [(step(worker, at), places(worker) == engine_places(worker)) for at in range(2 * HALF)]
        assert all(shared == share and (elements == 0) == share for (_, _, elements), shared in steps)
        assert max(difference for (_, difference, _), _ in steps) <= (1e-4 if dtype == "fp32" else 0.2)
        runs.append(([learned for (learned, _, _), _ in steps], masters(worker)))
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("default", marks=pytest.mark.slow)])
def test_with_lora_vllm_shares_the_frozen_base_and_gets_the_adapters_alone(made, tmp_path, dtype):
    lora = {f"{AR}.model.lora_rank": 4, f"{AR}.model.lora_alpha": 8, f"{AR}.actor.optim.lr": 1e-2}
    worker = made(settings_of("auto", dtype, "vllm") | lora, model_folder(tmp_path / "model", tied=True))
    assert worker.shares_weights
    weights = dict(named_weights(worker.policy.model))
    adapters = {name for name in weights if name.rsplit(".", 1)[-1] in ADAPTERS}
    compute = torch.float32 if dtype == "fp32" else torch.bfloat16
    assert {weights[name].dtype for name in adapters} == {torch.float32}
    assert {weight.dtype for name, weight in weights.items() if name not in adapters} == {compute}
    base = {name: weight.clone() for name, weight in weights.items() if name not in adapters}
    in_adapters = sum(weights[name].numel() for name in adapters)
    losses = []
    for at in range(6):
        assert {name: places(worker)[name] for name in base} == engine_places(worker)
        learned, difference, elements = step(worker, at)
        # Each adapter is copied to vLLM's place for it, at most twice, and a step writes nothing of the base.
        assert 0 < elements <= 3 * in_adapters * 2
        assert difference <= (1e-5 if dtype == "fp32" else 0.2)
        losses.append(learned[1])
    assert same(base, {name: weights[name] for name in base})
    assert weights["model.layers.0.mlp.up_proj.lora_B"].abs().max() > 0
    # The same adapters merged into an engine's weights answer with the same log-probs.
    call(worker, "update_weights")
    shared = generated(worker, seed=9)
    call(worker, "save", str(tmp_path / "saved"), ALL)
    worker = made(settings_of(False, dtype, "vllm") | lora, tmp_path / "model")
    assert not worker.shares_weights
    call(worker, "load", str(tmp_path / "saved"), ALL)
    call(worker, "update_weights")
    merged = generated(worker, seed=9)
    if dtype == "fp32":
        assert merged.response_ids == shared.response_ids
        for one, other in zip(merged.log_probs, shared.log_probs, strict=True):
            assert one == pytest.approx(other, abs=1e-5)


def test_the_weights_take_no_more_room_than_the_policys_own(made):
    """The engine stays awake while the policy is updated."""
    peaks, kinds = {}, {}
    for share in (False, True):
        worker = made(settings_of(share))
        call(worker, "update_weights")
        step(worker, 0)
        memory = worker.call("update_weights", True, "update_weights").memory
        peaks[share], kinds[share] = memory.peak_allocated_bytes, memory.kind_peaks
    num_bytes = sum(parameter.numel() * 4 for parameter in worker.policy.model.parameters())
    assert peaks[False] - peaks[True] == num_bytes
    assert kinds[True]["params"] == kinds[False]["params"] == num_bytes
    assert kinds[False]["rollout weights"] - kinds[True]["rollout weights"] == num_bytes


def test_a_weight_that_moves_on_either_side_is_noticed_and_named(made):
    worker = made(settings_of(True))
    call(worker, "update_weights")
    for whose, model in (("trainer", worker.policy.model), ("engine", worker.engine._model)):
        parameter = next(
            parameter for name, parameter in model.named_parameters() if name.endswith("layers.0.mlp.up_proj.weight")
        )
        shared, parameter.data = parameter.data, parameter.data.clone()
        with pytest.raises(
            RolloutError, match=rf"1 weights of the {whose} have moved, such as \S*layers\.0\.mlp\.up_proj\.weight.*"
        ):
            call(worker, "update_weights")
        with pytest.raises(RolloutError, match="weights are incomplete"):
            generated(worker)
        parameter.data = shared
        call(worker, "update_weights")
        generated(worker)


ACTOR = f"{AR}.actor.fsdp_config"
IN_FP32 = LEAST | {f"{AR}.rollout.name": "vllm", f"{AR}.rollout.dtype": "fp32", f"{ACTOR}.dtype": "fp32"}
OBSTACLES = {
    "an engine over several devices": (
        {"trainer.n_gpus_per_node": 2, f"{AR}.rollout.tensor_model_parallel_size": 2},
        f"{AR}.rollout.tensor_model_parallel_size=2",
    ),
    "adapters too wide for vLLM": ({f"{AR}.model.lora_rank": 600}, f"{AR}.model.lora_rank=600"),
    "an engine in bfloat16": ({f"{AR}.rollout.dtype": "bfloat16"}, f"{AR}.rollout.dtype=bfloat16"),
    "masters in fp32": (
        {f"{AR}.rollout.dtype": "bfloat16", f"{ACTOR}.dtype": "bfloat16"}, f"{ACTOR}.model_dtype=fp32, {ACTOR}.dtype=bfloat16"
    ),
    "weights that live on the host": ({f"{ACTOR}.offload_policy": True}, f"{ACTOR}.offload_policy=true"),
    "weights that rest on the host": ({f"{ACTOR}.param_offload": True}, f"{ACTOR}.param_offload=true"),
}  # fmt: skip


@pytest.mark.parametrize("case", OBSTACLES)
def test_where_the_numbers_would_differ_asking_for_it_is_refused_and_auto_says_why_it_is_off(case):
    settings, named = OBSTACLES[case]
    for model in ({}, {f"{AR}.model.lora_rank": 4}, {f"{AR}.model.lora_rank": 4, f"{AR}.model.quantization": "nf4"}):
        assert all(
            why_not(settings_from_mapping(IN_FP32 | model).actor_rollout_ref, devices, False) is None for devices in (1, 2)
        )
    with pytest.raises(ConfigError) as error:
        settings_from_mapping(IN_FP32 | settings | {KEY: True})
    assert f"{KEY}=true" in str(error.value)
    assert named in str(error.value)
    assert f"or {KEY} to auto." in str(error.value)
    composed = settings_from_mapping(IN_FP32 | settings)
    reason = why_not(composed.actor_rollout_ref, composed.trainer.n_gpus_per_node, False)
    assert named.partition("=")[0] in reason


QUANTIZED = {f"{AR}.model.lora_rank": 4, f"{AR}.model.quantization": "int8"}
"""A base that FSDP2 cannot shard for an engine."""


@pytest.mark.parametrize(
    ("devices", "share", "model", "shares"),
    [
        (1, "auto", {}, True), (2, "auto", {}, False), (2, True, {}, True), (2, "auto", {f"{AR}.model.lora_rank": 4}, False),
        (2, "auto", QUANTIZED, True),
    ],
)  # fmt: skip
def test_where_an_engine_that_sleeps_would_leave_more_room_to_shards_auto_does_not_share(devices, share, model, shares):
    roles = settings_from_mapping(IN_FP32 | model | {"trainer.n_gpus_per_node": devices, KEY: share}).actor_rollout_ref
    assert why_not(roles, devices, False) is None
    reason = why_not(roles, devices, True)
    assert (reason is None) == shares
    assert shares or f"{KEY}=true" in reason


def test_transformers_shares_only_when_asked_and_the_log_says_what_was_chosen(made, caplog):
    caplog.set_level(logging.INFO)
    assert not made(settings_of("auto")).shares_weights
    assert "a copy of the weights each: auto shares weights only with actor_rollout_ref.rollout.name=vllm" in caplog.text
    worker = made(settings_of(True))
    assert worker.shares_weights
    assert "share one copy of the weights" in caplog.text


SPLIT, WHOLE = "split", "whole"
MORE = {
    f"{AR}.actor.optim.override_optimizer_config": {"eps": 1e-3},
    f"{ACTOR}.optimizer_offload": True,
    f"{AR}.ref.fsdp_config.dtype": "bfloat16",
}
"""Updates as smooth as gradients, so that a gradient that is all rounding takes no whole step."""


def test_split_masters_train_as_whole_ones_and_either_checkpoint_goes_on_as_the_other(made, tmp_path, tiny_folder):
    found, saved = {}, {}
    for kind in (WHOLE, SPLIT):
        worker = made(settings_of(False, kind) | MORE)
        started = masters(worker)
        assert all(weight.dtype == torch.float32 for weight in started.values())
        steps = [step(worker, at)[0] for at in range(8)]
        found[kind] = torch.tensor([each[1:] for each in steps]), masters(worker), started
        call(worker, "save", str(tmp_path / kind), [*ALL, "hf_model"])
        saved[kind] = load_file(tmp_path / kind / "huggingface" / "model.safetensors")
        assert same(saved[kind], masters(worker))
        parameters = dict(named_weights(worker.policy.model))
        assert {weight.dtype for weight in parameters.values()} == {torch.bfloat16 if kind == SPLIT else torch.float32}
    assert same(found[SPLIT][2], found[WHOLE][2])
    torch.testing.assert_close(found[SPLIT][0], found[WHOLE][0], rtol=2e-2, atol=1e-3)
    for name, master in found[WHOLE][1].items():
        moved = (master - found[WHOLE][2][name]).norm()
        assert (found[SPLIT][1][name] - master).norm() <= 0.05 * moved, name
    for kind, other in ((WHOLE, SPLIT), (SPLIT, WHOLE)):
        worker = made(settings_of(False, other) | MORE)
        call(worker, "load", str(tmp_path / kind), ALL)
        assert same(masters(worker), found[kind][1])
        step(worker, 8)
        assert not same(masters(worker), found[kind][1])
