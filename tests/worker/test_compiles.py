"""Compilations of whole steps with changing lengths: those of the first steps, and no more."""

import functools
import shutil
from dataclasses import replace

import pytest
import torch

from tests.critics import call_critic, critic_batch, critic_plan
from tests.recipe.rlt.test_student_pass import rows_of
from tests.worker.test_policy import batch
from tests.worker.test_worker import AR
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Fsdp, ScoringModel
from verl_memopt.memory import fused
from verl_memopt.model import attention_dense
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student import Student, StudentPlan
from verl_memopt.worker import roles
from verl_memopt.worker.trained_model import MiniBatch

OTHER = TinyShape(hidden_size=48, intermediate_size=80, num_layers=2, num_heads=3, num_kv_heads=1)


@pytest.fixture
def compiling(monkeypatch):
    """Has workers on a CPU compile as on a GPU, with the backend that it is called with."""

    def start(backend):
        monkeypatch.setattr(roles, "is_gpu", lambda _: True)
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        monkeypatch.setattr(fused, "_compiled", functools.cache(fused._compiled.__wrapped__))
        monkeypatch.setattr(fused, "_given_up", set())
        # A GPU has no calls with a mask, which merge nothing.
        monkeypatch.setattr(attention_dense, "PACKED_CPU_FLASH", replace(attention_dense.PACKED_CPU_FLASH, masked_products=0))

    yield start
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def models(tiny_folder, tmp_path_factory):
    """The folders of the tiny model and of one of another width."""
    return tiny_folder, make_tiny_model(tmp_path_factory.mktemp("other") / "model", OTHER, seed=5)


def phases_of(worker, step):
    """Gives what a step asks of the policy, the reference and the critic or the student: the replies, in order."""
    rows = 3 + step % 5
    whole, cut = batch(rows, step), [list(range(rows))]
    counts = GlobalCounts(float(whole.responses.lengths.sum()), float(rows))
    yield worker.call("old_log_prob", False, "old_log_probs", whole, cut, True)
    if worker.reference is not None or worker.settings.model.lora_rank:
        yield worker.call("ref", False, "ref_log_probs", whole, cut)
    if worker.critic is not None:
        valued = critic_batch(rows, step)
        yield call_critic(worker, "values", valued, cut)
        yield call_critic(worker, "update_critic", [MiniBatch(valued, cut, counts)])
    if worker.role is not None:
        lengths = [5 + (step * multiple) % 11 for multiple in (3, 7, 5)]
        yield worker.call("reward", False, "call_role", Student.log_probs, rows_of(*lengths, rows), cut, 0.9)
    yield worker.call("update_actor", False, "update_actor", [MiniBatch(whole, cut, counts)])


def lives(tiny, other):
    kl = {f"{AR}.actor.use_kl_loss": True}
    student = StudentPlan(
        ScoringModel(path=str(other), fsdp_config=Fsdp(dtype="fp32")), RltReward(logits_chunk_tokens=8), "separate", str(other)
    )
    return {
        "ppo": ({}, critic_plan(other)),
        "rlt": (kl, {"reference_folder": str(tiny), "role": student}),
        "grpo": ({f"{AR}.actor.calculate_entropy": True, **kl}, {"reference_folder": str(tiny)}),
        "lora": ({f"{AR}.model.lora_rank": 2, **kl}, {}),
    }


SLOW = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")]
LIVES = [("ppo", 32), ("rlt", 24), ("grpo", 19), ("lora", 16)]
"""With the pairs of function and width that a life's models have: 14 of a block's, 2 to 5 of the head."""


CASES = [("ppo", 32, "eager", 5), *(pytest.param(*life, "inductor", 20, marks=SLOW) for life in LIVES)]


@pytest.mark.parametrize(("life", "most", "backend", "steps"), CASES)
def test_steps_of_changing_lengths_compile_each_function_once_for_each_width(
    made, compiling, models, life, most, backend, steps
):  # fmt: skip
    compiling(backend)
    more, plan = lives(*models)[life]
    worker = made(more, **plan)
    memories = [[reply.memory for reply in phases_of(worker, step)] for step in range(steps)]
    compiles = [worker.init_memory.compiles, *(sum(memory.compiles for memory in step) for step in memories)]
    assert sum(compiles) == most
    assert not any(compiles[2:])
    assert not any(memory.compile_fallbacks for step in memories for memory in step)
