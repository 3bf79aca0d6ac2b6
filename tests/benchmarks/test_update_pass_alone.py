"""One contestant after another, as on a GPU: what befalls one is a row, and nothing of it is left for the next."""

import dataclasses
import json
import weakref

import pytest
import torch

from benchmarks.update_pass import contest
from benchmarks.update_pass.__main__ import main
from benchmarks.update_pass.contest import Contestant, TimeBudget, make_job, run_alone
from benchmarks.update_pass.report import render
from benchmarks.update_pass.sides import Side
from benchmarks.update_pass.work import Workload
from verl_memopt.model.tiny import TinyShape
from verl_memopt.observe.phase import GIB

CPU = torch.device("cpu")
TINY = TinyShape(hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, max_positions=256)
WORK = Workload("a small one", TINY, groups=1, k=3, prompt=9, answer=4, chunk_tokens=5)
SMALL = ["--workload", "c", "--layers", "1", "--shrink", "64", "--threads", "1", "--repeats", "1", "--checkpointing", "off"]
ALONE = [*SMALL, "--order", "alone"]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    return make_job(WORK, tmp_path_factory.mktemp("alone") / "model", False, CPU)


def measured(given, names, seconds=None, repeats=1, most_bytes=GIB):
    return list(run_alone(names, *given, repeats, most_bytes, TimeBudget(seconds, len(names))))


class Broken(Contestant):
    """A contestant whose update does a part of its work and then raises what the device would."""

    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 33.60 GiB.")

    def build(self, job):
        side = super().build(job)
        alive.append(weakref.ref(side.model))

        def update():
            side.update()
            raise type(self.error)(*self.error.args)  # a new one each time, as an error keeps the frames it came through

        return Side(side.model, update, side.gradients)


class Illegal(Broken):
    error = RuntimeError("CUDA error: an illegal memory access was encountered")


class NoWorkspace(Broken):
    error = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)")


class Stopped(Broken):
    error = KeyboardInterrupt()


class Twice(Contestant):
    def build(self, job):
        side = super().build(job)
        return Side(side.model, lambda: [side.update() for _ in range(2)], side.gradients)


alive = []


@pytest.fixture
def contestants(monkeypatch):
    alive.clear()
    for name, kind in {"full": Broken, "illegal": Illegal, "workspace": NoWorkspace, "stopped": Stopped, "twice": Twice}.items():
        monkeypatch.setitem(contest.CONTESTANTS, name, kind("naive", "build_response_logits"))
    monkeypatch.setitem(contest.CONTESTANTS, "absent", Contestant("no_such_side", "build"))


def test_rows_are_the_same_as_those_in_turns_and_ours_come_before_a_peer_can_break_the_device(given):
    names = ["response_logits", "ours"]
    rows = measured(given, names)
    assert [row.contestant for row in rows] == ["ours", "response_logits"]
    alone_rows = {row.contestant: row for row in rows}
    for row in contest.run(names, *given, repeats=1):
        other = dataclasses.replace(alone_rows[row.contestant], seconds=row.seconds, runs=row.runs)
        assert dataclasses.replace(other, grad_rel_err=row.grad_rel_err) == row
        assert other.grad_rel_err == pytest.approx(row.grad_rel_err, abs=1e-9)


def test_memory_that_runs_out_is_a_row_and_the_next_is_measured(given, contestants):
    rows = measured(given, ["full", "workspace", "response_logits"])
    assert [row.status for row in rows] == ["out of memory", "out of memory", "measured"]
    assert alive[0]() is None, "nothing of the first is left"
    assert rows[0].note == "out of memory while computing the gradient: CUDA out of memory. Tried to allocate 33.60 GiB."
    assert rows[0].seconds is None
    assert "out of memory" in render(rows).splitlines()[4]


@pytest.mark.parametrize(("name", "status", "code"), [("twice", "wrong gradient", 4), ("illegal", "failed", 5)])
def test_a_wrong_gradient_or_an_error_is_a_row_without_figures_and_the_exit_code(contestants, tmp_path, name, status, code):
    file = tmp_path / "rows.json"
    assert main([*ALONE, "--contestants", name, "response_logits", "--json", str(file)]) == code
    rows = {row["contestant"]: row for row in json.loads(file.read_text())["rows"]}
    assert {each: row["status"] for each, row in rows.items()} == {name: status, "response_logits": "measured"}
    assert (rows[name]["seconds"], rows[name]["peak_bytes"], rows[name]["flops"]) == (None, None, None)
    assert name == "twice" or rows[name]["note"].startswith("failed while computing the gradient: CUDA error: an illegal memory")


@pytest.mark.parametrize("order", ["alone", "turns"])
def test_a_contestant_that_is_not_installed_is_a_row(contestants, monkeypatch, tmp_path, order):
    keep = {name: contest.CONTESTANTS[name] for name in ("absent", "response_logits")}
    monkeypatch.setattr(contest, "CONTESTANTS", keep)
    monkeypatch.setattr("benchmarks.update_pass.__main__.CONTESTANTS", keep)
    file = tmp_path / "rows.json"
    assert main([*SMALL, "--order", order, "--json", str(file)]) == 0
    rows = {row["contestant"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["absent"]["status"] == "not installed"
    assert "no_such_side" in rows["absent"]["note"]
    assert rows["response_logits"]["seconds"] > 0


def test_an_interrupted_run_leaves_the_rows_before_it(contestants, tmp_path):
    file = tmp_path / "rows.json"
    with pytest.raises(KeyboardInterrupt):
        main([*ALONE, "--contestants", "ours", "stopped", "--json", str(file)])
    record = json.loads(file.read_text())
    assert [row["contestant"] for row in record["rows"]] == ["ours"]
    assert record["complete"] is False
