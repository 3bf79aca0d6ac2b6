from functools import partial

import pytest
import torch

from tests.recipe.rlt.test_student_pass import CPU, HEAT, encode, plain_lm, random_samples
from verl_memopt.recipes.rlt.score_command import ScoringPlan, ScoringWorker
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student import Student, student_batch, student_micro_batches, teacher_batch
from verl_memopt.recipes.rlt.student_rows import SOLUTION, THINK
from verl_memopt.worker.group import LocalGroup


@pytest.fixture
def workers(tiny_folder, untied_folder):
    plan = ScoringPlan(str(tiny_folder), str(untied_folder), RltReward(), "fp32", HEAT, False)
    group = LocalGroup(partial(ScoringWorker, plan), "cpu")
    yield group
    group.shutdown()


def ask(group, phase, method, *args):
    return group.all("call", phase, True, method, *args)[0]


def bins_of(rows):
    return student_micro_batches(student_batch(rows).row_tokens(), 512)


@torch.no_grad()
def naive(folder, ids, start, stop, temperature):
    """Return the log-probs of ``ids[start:stop]`` from one forward of the whole row."""
    logits = plain_lm(folder)(torch.tensor([ids], device=CPU)).logits[0].float() / temperature
    return logits.log_softmax(-1)[range(start - 1, stop - 1), ids[start:stop]]


def test_student_and_teacher_are_the_models_of_their_folders(workers, tiny_folder, untied_folder):
    rows, prompts = encode(random_samples(4, seed=3))
    reply = ask(workers, "reward", "of_role", Student.log_probs, rows, bins_of(rows), HEAT)
    own = ask(workers, "old_log_prob", "policy_log_probs", teacher_batch(prompts, rows), [[0, 1], [2, 3]], 1.0).value.log_probs
    thoughts, solutions, teachers = [], [], []
    for ids, parts, prompt in zip(rows.ids.rows(), rows.parts.tolist(), prompts.rows(), strict=True):
        prefix, think, bridge, solution, _ = parts
        row, behind = ids.tolist(), prefix + think + bridge
        thoughts.append(naive(tiny_folder, row, prefix, prefix + think, HEAT))
        solutions.append(naive(tiny_folder, row, behind, behind + solution, HEAT))
        whole = prompt.tolist() + row[prefix : prefix + think]
        teachers.append(naive(untied_folder, whole, len(prompt), len(whole), 1.0))
    assert (rows.part(THINK).flat.numel(), rows.part(SOLUTION).flat.numel()) == (
        len(torch.cat(thoughts)),
        len(torch.cat(solutions)),
    )
    for found, expected in (
        (reply.value.log_probs.think, thoughts),
        (reply.value.log_probs.solution, solutions),
        (own, teachers),
    ):
        torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-5)


def test_a_call_is_measured_and_needs_no_gradient(workers):
    rows, _ = encode(random_samples(4, seed=3))
    reply = ask(workers, "reward", "of_role", Student.log_probs, rows, bins_of(rows), HEAT)
    assert reply.memory.name == "reward"
    assert reply.memory.kinds["params"] > 0
    assert not reply.value.log_probs.think.requires_grad
    assert workers.all("started")[0].name == "init"


def test_without_a_teacher_there_is_one_model(tiny_folder):
    plan = ScoringPlan(str(tiny_folder), None, RltReward(), "bfloat16", HEAT, False)
    group = LocalGroup(partial(ScoringWorker, plan), "cpu")
    try:
        (worker,) = (group._worker,)
        assert worker.teacher is None
        assert {tensor.dtype for _, tensor in worker._resident()} == {torch.bfloat16}
    finally:
        group.shutdown()
