"""One contestant after another, as on a GPU: what befalls one is a row, and nothing of it is left for the next."""

import dataclasses
import gc
import json
import time
import weakref

import pytest
import torch
from torch._guards import active_fake_mode

from benchmarks.update_pass import contest
from benchmarks.update_pass.__main__ import main
from benchmarks.update_pass.contest import Contestant, Row, TimeBudget, in_turns, make_job, run_alone, simulated_peak
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


class Full(Contestant):
    """A contestant that does not fit; tensors without values always do."""

    def build(self, job):
        side = super().build(job)

        def update():
            side.update()
            if active_fake_mode() is None:
                raise torch.OutOfMemoryError(*Broken.error.args)

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


def test_rows_are_the_same_as_those_in_turns(given):
    names = ["response_logits", "ours"]
    alone_rows = {row.contestant: row for row in measured(given, names)}
    for row in contest.run(names, *given, repeats=1):
        other = dataclasses.replace(alone_rows[row.contestant], seconds=row.seconds, runs=row.runs)
        assert dataclasses.replace(other, grad_rel_err=row.grad_rel_err) == row
        assert other.grad_rel_err == pytest.approx(row.grad_rel_err, abs=1e-9)


def test_ours_are_measured_before_a_peer_can_break_the_device(given):
    assert [row.contestant for row in measured(given, ["response_logits", "ours"])] == ["ours", "response_logits"]


def test_memory_that_runs_out_is_a_row_and_the_next_is_measured(given, contestants):
    rows = measured(given, ["full", "workspace", "response_logits"])
    assert [row.status for row in rows] == ["out of memory", "out of memory", "measured"]
    assert rows[0].note == "out of memory while computing the gradient: CUDA out of memory. Tried to allocate 33.60 GiB."
    assert rows[0].seconds is None
    assert "out of memory" in render(rows).splitlines()[4]


def test_what_runs_out_of_memory_has_a_simulated_peak_where_it_can(given, monkeypatch):
    monkeypatch.setitem(contest.CONTESTANTS, "full", Full("naive", "build_response_logits", simulates=True))
    (row,) = measured(given, ["full"])
    assert row.status == "out of memory"
    assert row.peak_bytes == simulated_peak("response_logits", given[0])
    assert row.note.endswith("Tried to allocate 33.60 GiB.; the peak is simulated")


def test_nothing_of_a_contestant_that_ran_out_of_memory_is_left(given, contestants):
    rows = run_alone(["full", "response_logits"], *given, 1, GIB, TimeBudget(None, 2))
    next(rows)
    assert [model() for model in alive] == [None]


def test_nothing_of_a_measured_contestant_is_left_for_the_next(given, monkeypatch):
    models = []

    class Watched(Contestant):
        def build(self, job):
            side = super().build(job)
            models.append(weakref.ref(side.model))
            return side

    for name in ("naive", "ours"):
        found = contest.CONTESTANTS[name]
        monkeypatch.setitem(contest.CONTESTANTS, name, Watched(found.module, found.function))
    rows = run_alone(["naive", "ours"], *given, 1, GIB, TimeBudget(None, 2))
    for number, _ in enumerate(rows, start=1):
        gc.collect()
        assert [model() for model in models] == [None] * number


def test_a_wrong_gradient_is_a_row_without_figures_and_the_exit_code(contestants, tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert main([*ALONE, "--contestants", "twice", "response_logits", "--json", str(file)]) == 4
    rows = json.loads(file.read_text())["rows"]
    assert {row["contestant"]: row["status"] for row in rows} == {"twice": "wrong gradient", "response_logits": "measured"}
    wrong = next(row for row in rows if row["contestant"] == "twice")
    assert (wrong["seconds"], wrong["peak_bytes"], wrong["flops"]) == (None, None, None)
    assert "twice: its gradient differs by 1 of" in capsys.readouterr().out


def test_a_gradient_twice_as_long_is_wrong_in_half_precision_too(given, contestants):
    job, expected = given
    half = dataclasses.replace(job, work=dataclasses.replace(job.work, dtype="bfloat16"))
    rows = measured((half, expected), ["twice", "response_logits"])
    assert [row.status for row in rows] == ["wrong gradient", "measured"]


def test_a_peers_error_is_a_row_and_the_exit_code(contestants, tmp_path):
    file = tmp_path / "rows.json"
    assert main([*ALONE, "--contestants", "illegal", "response_logits", "--json", str(file)]) == 5
    rows = {row["contestant"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["illegal"]["note"].startswith("failed while computing the gradient: CUDA error: an illegal memory access")
    assert rows["response_logits"]["status"] == "measured"


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


def test_a_spent_budget_keeps_one_round_and_starts_no_further_contestant(given):
    (row,) = run_alone(["response_logits"], *given, 3, GIB, TimeBudget(0.0, 2))
    assert (row.status, row.seconds, row.peak_bytes) == ("not run", None, None)
    side = contest.CONTESTANTS["response_logits"].build(given[0])
    assert len(in_turns({"one": lambda: contest.timed(side, CPU)}, repeats=5, until=time.monotonic() - 1)["one"]) == 1


def test_the_time_budget_is_shared_evenly_among_those_still_to_run():
    budget = TimeBudget(100.0, 4, started=time.monotonic())
    shares = [budget.take() - time.monotonic() for _ in range(4)]
    assert shares == pytest.approx([25.0, 100 / 3, 50.0, 100.0], abs=0.5)


@pytest.mark.parametrize("name", ["naive", "response_logits"])
def test_a_simulated_peak_for_a_gpu_is_counted_by_the_tracker(given, name):
    job, _ = given
    on_gpu = dataclasses.replace(job, device=torch.device("cuda"))
    here, there = simulated_peak(name, job), simulated_peak(name, on_gpu)
    # The same tensors, each rounded up to the allocator's blocks.
    assert here < there < here + 512 * 1000
    assert there % 512 == 0


def test_what_a_former_contestant_left_on_the_device_is_said():
    row = Row("naive", False, 3, seconds=1.0, peak_bytes=9, param_grad_bytes=2, flops=1, grad_rel_err=0.0, floor_flops=1)
    assert contest.with_start(row, start=10, left_over=contest.LEFT_OVER).note == ""
    told = contest.with_start(row, start=10, left_over=contest.LEFT_OVER + 2**20)
    assert (told.note, told.start_bytes) == ("65 MiB of former contestants were on the device", 10)
