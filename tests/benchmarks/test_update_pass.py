import dataclasses
import json

import pytest
import torch

from benchmarks.update_pass import contest
from benchmarks.update_pass.__main__ import main
from benchmarks.update_pass.contest import WrongGradientError, difference, in_turns, make_job, run
from benchmarks.update_pass.report import render
from benchmarks.update_pass.sides import plain_model
from benchmarks.update_pass.work import Workload
from tests.benchmarks.conftest import TINY

CPU = torch.device("cpu")
WORK = Workload("a small one", TINY, groups=2, k=3, prompt=9, answer=4, spread=0.5, chunk_tokens=5)
HERE = ("naive", "response_logits", "ours_no_sharing", "ours")
"""Contestants that need no peer's package."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("update_pass") / "model"


@pytest.mark.parametrize(("rows", "budget", "checkpointing"), [(None, None, False), (1, 31, True)])
def test_all_compute_one_gradient_at_any_micro_batch_size(folder, rows, budget, checkpointing):
    job, expected = make_job(dataclasses.replace(WORK, rows=rows, token_budget=budget), folder, checkpointing, CPU)
    for name in HERE:
        side = contest.CONTESTANTS[name].build(job)
        assert contest.checked(name, job, side, expected)[1] <= 2e-6, name


def test_the_reference_is_the_gradient_of_advantage_times_log_prob(folder):
    job, expected = make_job(dataclasses.replace(WORK, groups=1, k=2, spread=0.0), folder, False, CPU)
    model, batch = plain_model(job).double(), job.batch
    sums = []
    for answer in batch.answers:
        ids = batch.prompts[0] + answer
        log_p = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        sums.append(sum(log_p[position - 1, ids[position]] for position in range(len(batch.prompts[0]), len(ids))))
    loss = -sum(advantage * total for advantage, total in zip(batch.advantages, sums, strict=True)) / 2
    loss.backward()
    sums = [float(total.detach()) for total in sums]
    assert difference({name: parameter.grad for name, parameter in model.named_parameters()}, expected.gradients) <= 1e-6
    assert [float(log_probs.sum()) for log_probs in expected.log_probs] == pytest.approx(sums, 1e-6)


def test_a_wrong_gradient_is_an_error_and_no_row(folder):
    job, expected = make_job(WORK, folder, False, CPU)
    advantages = [advantage * 1.001 for advantage in job.batch.advantages]
    other = dataclasses.replace(job, batch=dataclasses.replace(job.batch, advantages=advantages))
    with pytest.raises(WrongGradientError, match=r"naive: its gradient differs by 0\.001 "):
        run(["naive"], other, expected, repeats=1)


def test_what_does_not_fit_is_not_run_and_says_so(folder):
    job, expected = make_job(dataclasses.replace(WORK, groups=1, spread=0.0), folder, False, CPU)
    logits = 16 * 3 * (9 + 4) * 320
    assert contest.CONTESTANTS["naive"].least_bytes(job) == logits
    rows = run(["naive", "ours"], job, expected, repeats=1, most_bytes=logits - 1)
    assert rows[0].seconds is None
    assert rows[0].peak_bytes == contest.simulated_peak("naive", job)
    assert rows[0].note.startswith("not run: ")
    assert rows[1].seconds > 0
    assert rows[0].param_grad_bytes == rows[1].param_grad_bytes
    assert "naive, k = 3: not run" in render(rows)


@pytest.mark.parametrize("name", ["naive", "response_logits"])
def test_a_simulated_peak_is_the_peak_and_that_of_a_gpu_is_rounded_up(folder, name):
    work = dataclasses.replace(WORK, groups=1, k=4, prompt=60, answer=20, spread=0.0)
    job, _ = make_job(work, folder, False, CPU)
    here = contest.simulated_peak(name, job)
    assert here == pytest.approx(contest.peak(contest.CONTESTANTS[name].build(job), CPU), rel=0.01)
    # The same tensors, each rounded up to the allocator's blocks.
    there = contest.simulated_peak(name, dataclasses.replace(job, device=torch.device("cuda")))
    assert here < there < here + 512 * 1000
    assert there % 512 == 0


def test_half_precision_is_reported_and_not_judged(folder):
    job, expected = make_job(dataclasses.replace(WORK, dtype="bfloat16"), folder, False, CPU)
    rows = run(["response_logits", "ours_no_sharing"], job, expected, repeats=1)
    assert all(contest.BOUND < row.grad_rel_err < 0.1 for row in rows)
    assert rows[0].param_grad_bytes == sum(2 * 2 * tensor.numel() for tensor in expected.gradients.values())


def test_every_contestant_is_first_as_often_as_the_others():
    turns = []
    found = in_turns({name: lambda name=name: turns.append(name) or float(len(turns)) for name in "abc"}, repeats=3)
    assert turns == list("abcbcacababc")
    assert found["a"] == [6.0, 8.0, 10.0]


SMALL = ["--layers", "1", "--shrink", "64", "--threads", "1", "--repeats", "1"]


def test_the_command_prints_a_table_and_writes_its_record(tmp_path, capsys):
    files = ["--json", str(tmp_path / "rows.json")]
    names = ["response_logits", "ours"]
    code = main(["--workload", "a", "--contestants", *names, "--k", "2", "3", "--checkpointing", "off", *SMALL, *files])
    printed = capsys.readouterr().out
    assert code == 0
    record = json.loads((tmp_path / "rows.json").read_text())
    assert [(found["contestant"], found["k"]) for found in record["rows"]] == [(name, k) for k in (2, 3) for name in names]
    assert all(row["peak_bytes"] > row["param_grad_bytes"] and len(row["runs"]) == 1 for row in record["rows"])
    assert all(name in printed for name in names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
def test_a_missing_gpu_and_unknown_and_missing_contestants_are_named(capsys, monkeypatch):
    assert main(["--workload", "e"]) == 2
    assert "--workload e: the shape of Qwen3-0.6B needs a CUDA device" in capsys.readouterr().err
    assert main(["--contestants", "nobody"]) == 2
    assert "--contestants nobody: unknown. Use some of naive, " in capsys.readouterr().err
    monkeypatch.setitem(contest.CONTESTANTS, "absent", contest.Contestant("no_such_side", "build"))
    assert main(["--contestants", "absent"]) == 2
    assert "setup.sh" in capsys.readouterr().err
