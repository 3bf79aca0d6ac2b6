import dataclasses

import pytest
import torch

from benchmarks.update_pass import contest
from benchmarks.update_pass.__main__ import main
from benchmarks.update_pass.contest import difference, make_job, run
from benchmarks.update_pass.sides import CLIP_VALUE, critic_model
from benchmarks.update_pass.work import Workload, make_batch
from tests.benchmarks.conftest import TINY

CPU = torch.device("cpu")
WORK = Workload("a small one", TINY, groups=2, k=3, prompt=9, answer=4, spread=0.5, chunk_tokens=5, token_budget=31, critic=True)
HERE = ("naive_ppo", "response_logits_ppo", "ours_ppo_no_sharing", "ours_ppo")
"""Contestants that need no peer's package."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("update_pass_ppo") / "model"


def test_all_compute_the_gradients_of_both_models(folder):
    job, expected = make_job(WORK, folder, True, CPU)
    assert {name.split(".")[0] for name in expected.gradients} == {"actor", "critic"}
    for name in HERE[:-1]:
        assert contest.checked(name, job, contest.CONTESTANTS[name].build(job), expected)[1] <= 2e-6, name
    (row,) = run(HERE[-1:], job, expected, repeats=1)
    assert row.grad_rel_err <= 2e-6
    assert row.peak_bytes > row.param_grad_bytes


def test_the_reference_is_the_gradient_of_the_clipped_value_loss_where_the_clip_binds_on_some_tokens(folder):
    job, expected = make_job(WORK, folder, False, CPU)
    model, batch, losses, clipped = critic_model(job).double(), job.batch, [], 0
    for row, answer in enumerate(batch.answers):
        prompt = batch.prompt_of(row)
        found = model(input_ids=torch.tensor([prompt + answer])).logits[0, :, 0]
        for index in range(len(answer)):
            value, old, target = found[len(prompt) - 1 + index], float(job.values[row][index]), float(job.returns[row][index])
            near = min(max(float(value.detach()), old - CLIP_VALUE), old + CLIP_VALUE)
            plain = 0.5 * (value - target) ** 2
            if 0.5 * (near - target) ** 2 > float(plain.detach()):
                clipped += 1  # the clipped prediction does not depend on the weights
            else:
                losses.append(plain)
    (sum(losses) / len(batch.answers)).backward()
    gradients = {f"critic.{name}": parameter.grad for name, parameter in model.named_parameters()}
    assert clipped > 0
    assert difference(gradients, {name: expected.gradients[name] for name in gradients}) <= 1e-6


def test_the_floor_counts_the_critics_blocks_and_not_its_head():
    work = dataclasses.replace(WORK, spread=0.0)
    batch = make_batch(work)
    floor = contest.flops.floor
    # A vocabulary of one entry has a head of 2 x 32 x 24 FLOPs a forward; the critic's own is left out.
    alone = dataclasses.replace(TINY, vocab_size=1)
    head = 3 * 2 * 32 * sum(map(len, batch.answers))
    for checkpointing in (False, True):
        critic = floor(TINY, batch, checkpointing, critic=True) - floor(TINY, batch, checkpointing)
        assert critic == floor(alone, batch, checkpointing) - head


def test_contestants_without_a_critic_are_no_contestants_of_ppo(capsys):
    assert main(["--workload", "p", "--contestants", "ours"]) == 2
    assert "--contestants ours: workload p has a critic" in capsys.readouterr().err
    assert main(["--workload", "b", "--contestants", "ours_ppo"]) == 2
    assert "--contestants ours_ppo: workload b has no critic" in capsys.readouterr().err
