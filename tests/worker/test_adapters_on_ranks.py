"""Adapters on several ranks: each rank has the whole frozen base once, its engine's own, and only the adapters train."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.rollout.tools import tiny_folder as model_folder
from tests.tensors import local_of
from tests.worker.test_policy import batch
from tests.worker.test_shared_rows import LORA, check_close, masters, step, worker_of
from tests.worker.test_shared_weights import settings_of
from tests.worker.test_worker import ALL, AR, PROMPTS, call, same
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.memory.lora_torch import ADAPTERS
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import named_weights
from verl_memopt.rollout.engine import train_sampling
from verl_memopt.worker.trained_model import MiniBatch

KIND = f"{AR}.model.quantization"
SMOOTH = {f"{AR}.actor.optim.override_optimizer_config": {"eps": 1e-3}}
"""Updates as smooth as gradients, so that a gradient that is all rounding takes no whole step."""
ROWS = 6


def settings(kind, dtype, engine="hf", share=True):
    return settings_of(share, dtype, engine) | LORA | SMOOTH | {KIND: kind}


def split(worker):
    """Gives the policy's adapters and the rest of its weights, by name."""
    weights = dict(named_weights(worker.policy.model))
    adapters = {name: weights.pop(name) for name in list(weights) if name.rsplit(".", 1)[-1] in ADAPTERS}
    return adapters, weights


def shares_the_base(worker):
    """Whether every weight of the base is the engine's own memory."""
    return {name: each.data_ptr() for name, each in split(worker)[1].items()} == {
        name: view.data_ptr() for name, view in worker.engine.share_weights().items()
    }


def update(worker, number):
    """Updates the policy with this rank's part of some rows; gives the loss of all ranks and the norm of the gradient."""
    whole, own = batch(rows=ROWS, seed=number), ROWS // dist.get_world_size()
    first = dist.get_rank() * own
    rows = whole.select(list(range(first, first + own)))
    mini = MiniBatch(rows, [[row] for row in range(own)], GlobalCounts(float(whole.responses.lengths.sum()), float(ROWS)))
    metrics = call(worker, "update_actor", [mini])
    loss = torch.tensor(metrics["actor/loss"], dtype=torch.float64)
    dist.all_reduce(loss)
    return [], float(loss), metrics["actor/grad_norm"]


SAVED = ("lora_adapter/adapter_model.safetensors", "lora_adapter/adapter_config.json", "huggingface/model.safetensors")


def updates(rank, folder, more, numbers, saves, loads=None):
    """Takes some steps; gives what was learned, the weights, and the files that were saved before the third step."""
    worker = worker_of(folder, more)
    assert worker.shares_weights
    assert shares_the_base(worker)
    if loads is not None:
        call(worker, "load", str(loads), ALL)
    learned = []
    for number in numbers:
        if number == 2:
            call(worker, "save", str(saves), [*ALL, "hf_model"])
        learned.append(update(worker, number))
    return learned, masters(worker), {name: (saves / name).read_bytes() for name in SAVED if rank == 0}


CASES = {("none", "fp32"): 3, ("nf4", "fp32"): 3, ("none", "default"): 2, ("int8", "default"): 2}
"""Kind and precision -> ranks. Backward starts from the loss times the ranks, which bfloat16 scales exactly by a power of two."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id="-".join(case), marks=[pytest.mark.slow] * (number % 3 == 0)) for number, case in enumerate(CASES)],
)
def test_ranks_learn_what_one_learns_from_the_same_rows_and_either_goes_on_as_the_other(tmp_path, case):
    folder, ranks = model_folder(tmp_path / "model", tied=case[1] == "fp32"), CASES[case]
    whole = {
        number: run_ranks(updates, number, folder, settings(*case), range(4), tmp_path / str(number)) for number in (1, ranks)
    }
    ((learned, ended, _),) = whole[1]
    assert ended["model.layers.0.mlp.up_proj.lora_B"].abs().max() > 1e-3
    for found in whole[ranks]:
        check_close(found, (learned, ended))
    for number, other in ((1, ranks), (ranks, 1)):
        again = tmp_path / f"{other} from {number}"
        for found in run_ranks(updates, other, folder, settings(*case), range(2, 4), again, tmp_path / str(number)):
            check_close(found, (learned[2:], ended))
        # What was loaded and saved again by another number of ranks is the same, byte for byte.
        assert {name: (again / name).read_bytes() for name in SAVED} == whole[number][0][2]


def steps(rank, folder, more, tolerance):
    """Takes steps with rollouts, checks what holds in each, and gives the bytes of some phases by kind."""
    worker = worker_of(folder, more)
    assert worker.shares_weights
    adapters, base = split(worker)
    before = {name: each.clone() for name, each in base.items()}
    whole, own = (
        sum(count) for count in zip(*((each.numel(), local_of(each).numel()) for each in adapters.values()), strict=True)
    )
    for number in range(5):
        assert shares_the_base(worker)
        _, difference, (copied, gathered) = step(worker, number)
        assert difference <= tolerance
        # The engine copies each adapter to its own place for it, at most twice, and what a rank gets is the others' rows of them.
        assert whole <= copied <= 6 * whole
        assert gathered in ({whole - own} if number else {0, whole - own})
    assert same(before, split(worker)[1])
    assert adapters["model.layers.0.self_attn.q_proj.lora_B"].full_tensor().abs().max() > 0
    sync = worker.call("update_weights", True, "update_weights").memory.kind_peaks
    rollout = worker.call("gen", True, "generate", PROMPTS, [1, 2, 3], train_sampling(worker.settings.rollout)).memory.kind_peaks
    at_rest = {"params": sum(each.nbytes for each in before.values()) + 4 * whole, "optimizer": 8 * own + 4 * len(adapters)}
    if worker.settings.rollout.name == "hf":  # vLLM has places for the rows of wider adapters too
        each = 4 if worker.settings.rollout.dtype == "fp32" else 2
        at_rest["rollout weights"] = each * whole + sum(one.nbytes for one in worker.engine._model.buffers())
    return at_rest, sync, rollout


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_each_rank_holds_the_bytes_of_experts_once(tmp_path, kind):
    folder = make_tiny_model(tmp_path / "model", TinyShape(kind, initializer_range=0.06))
    for at_rest, *phases in run_ranks(steps, 2, folder, settings("nf4", "fp32"), 1e-5, timeout=300):
        assert all({kind: phase[kind] for kind in at_rest} == at_rest for phase in phases)


ENGINES = ["hf", pytest.param("vllm", marks=pytest.mark.slow)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("kind", "dtype"), [("none", "fp32"), ("nf4", "fp32"), ("int8", "default")])
def test_each_rank_holds_the_base_once_and_its_engine_gets_the_adapters_alone(tmp_path, kind, dtype, engine):
    folder, more = model_folder(tmp_path / "model", tied=True), settings(kind, dtype, engine, True if engine == "hf" else "auto")
    for at_rest, *phases in run_ranks(steps, 2, folder, more, 1e-5 if dtype == "fp32" else 0.2, timeout=300):
        assert all({kind: phase[kind] for kind in at_rest} == at_rest for phase in phases)
