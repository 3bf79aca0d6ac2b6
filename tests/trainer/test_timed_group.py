from dataclasses import replace

import pytest

from tests.trainer.conftest import Apart, Member, Members, group_of, memory
from verl_memopt.memory.token_budget import PassFigures
from verl_memopt.observe.phase import PhaseClock, host_rss_bytes
from verl_memopt.worker.group import TimedGroup
from verl_memopt.worker.worker import Reply, Worker


class Scripted(Member):
    """Answers with its rank and its arguments; a phase's figures are those of the script, one call after another."""

    def __init__(self, rank, script=()):
        super().__init__(rank)
        self.script = list(script)

    def call(self, phase, track, method, *args):
        self.asked.append((phase, track, method, args))
        return Reply((self.rank, *args), self.script.pop(0) if self.script else memory(phase))


def test_a_call_reaches_every_worker_with_its_arguments_and_whether_to_count_and_answers_come_in_rank_order():
    workers = group_of(Scripted(0), Scripted(1))
    assert workers.world_size == 2
    assert workers.all("gen", Worker.generate, "a", "b") == [(0, "a", "b"), (1, "a", "b")]
    workers = group_of(Scripted(0), Scripted(1))
    assert workers.each("gen", Worker.generate, [("a",), ("b",)]) == [(0, "a"), (1, "b")]
    assert [member.asked for member in workers.group.members] == [
        [("gen", False, "generate", ("a",))],
        [("gen", False, "generate", ("b",))],
    ]
    workers.track = True
    workers.all("gen", Worker.generate)
    assert workers.group.members[0].asked[-1] == ("gen", True, "generate", ())


class Pressed(Member):
    """Answers with the figures of a call that went on after errors."""

    def __init__(self, rank, peak, budget, cap, retries):
        super().__init__(rank)
        self.figures = peak, budget, cap, retries

    def call(self, phase, track, method, *args):
        peak, budget, cap, retries = self.figures
        return Reply(None, replace(memory(phase), peak_allocated_bytes=peak), budget, cap, retries)


def test_the_figures_of_a_call_are_those_of_the_rank_that_is_worst_off():
    workers = group_of(Pressed(0, 500, 1000, None, 0), Pressed(1, 700, 900, 64, 1), Pressed(2, 600, 950, 32, 2))
    workers.all("ref", Worker.ref_log_probs)
    assert workers.figures == PassFigures(peak_bytes=700, budget_bytes=900, cap_after_error=32, retries=3)


@pytest.mark.parametrize(("peak", "budget"), [(None, 1000), (500, None)])
def test_a_figure_that_one_rank_lacks_is_lacking(peak, budget):
    workers = group_of(Pressed(0, 500, 1000, None, 0), Pressed(1, peak, budget, None, 0))
    workers.all("ref", Worker.ref_log_probs)
    assert workers.figures == PassFigures(500 if peak else None, 1000 if budget else None)


def test_every_call_is_timed_as_its_phase_and_the_start_is_the_first_phase_of_the_first_take():
    workers = group_of(Scripted(0))
    for phase, method in (("gen", Worker.generate), ("gen", Worker.release_engine), ("update_actor", Worker.update_actor)):
        workers.all(phase, method)
    assert [span.name for span in workers.clock.take()] == ["gen", "gen", "update_actor"]
    assert [taken.name for taken in workers.take_memories()] == ["init", "gen", "update_actor"]
    assert workers.take_memories() == []
    workers.all("gen", Worker.generate)
    assert [taken.name for taken in workers.take_memories()] == ["gen"]


def test_over_ranks_device_figures_are_the_largest_resident_memory_the_sum_and_what_nobody_has_is_absent():
    workers = group_of(
        Scripted(0, [memory("gen", host=3, peak_allocated_bytes=5, allocated_bytes=4)]),
        Scripted(1, [memory("gen", host=4, peak_allocated_bytes=7, allocated_bytes=2)]),
    )
    workers.all("gen", Worker.generate)
    figures = workers.take_memories()[1]
    assert (figures.peak_allocated_bytes, figures.allocated_bytes, figures.host_rss_bytes) == (7, 4, 7)
    workers = group_of(Scripted(0), Scripted(1))
    workers.all("gen", Worker.generate)
    workers.all("gen", Worker.generate)
    assert workers.take_memories()[1].peak_allocated_bytes is None


def test_over_calls_each_peak_is_the_largest_and_what_is_live_is_the_last_calls():
    names = ("peak_allocated_bytes", "allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "host_buffer_bytes")
    first, second, both = (
        dict(zip(names, sizes, strict=True)) for sizes in ((5, 5, 6, 30, 2), (7, 1, 2, 10, 3), (7, 1, 6, 30, 3))
    )
    workers = group_of(Scripted(0, [memory("gen", host=9, **first), memory("gen", host=8, **second)]))
    workers.all("gen", Worker.generate)
    workers.all("gen", Worker.release_engine)
    assert workers.take_memories()[1] == memory("gen", host=9, seconds=2.0, **both)


def test_compilations_are_the_most_of_a_rank_and_the_sum_over_calls():
    first, second = ([memory("gen", compiles=n, compile_fallbacks=0) for n in counts] for counts in ((4, 1), (3, 2)))
    workers = group_of(Scripted(0, first), Scripted(1, second))
    workers.all("gen", Worker.generate)
    workers.all("gen", Worker.generate)
    figures = workers.take_memories()[1]
    assert (figures.compiles, figures.compile_fallbacks) == (4 + 2, 0)


@pytest.mark.parametrize("in_process", [True, False])
def test_the_driver_counts_unless_the_workers_live_in_it(in_process):
    workers = TimedGroup(Members([Scripted(0, [memory("gen", host=5)])]), PhaseClock(), in_process)
    workers.all("gen", Worker.generate)
    host = workers.take_memories()[1].host_rss_bytes
    assert host == 5 if in_process else host > host_rss_bytes() / 2


def test_a_role_with_devices_of_its_own_computes_until_its_result_is_asked_for_and_its_time_lies_beside_the_others():
    peak = {"peak_allocated_bytes": 5}
    own = Apart([Scripted(0, [memory("values", seconds=3.0, **peak), memory("save_checkpoint", seconds=1.0)])])
    workers = TimedGroup(Members([Scripted(0)]), PhaseClock(), True, {"critic": own})
    critic = workers.of("critic")
    assert workers.of("reward_model") is workers
    values = critic.begin("values", Worker.values, [("rows",)])
    assert (own.begun, own.members[0].asked) == (["values"], [])
    workers.all("old_log_prob", Worker.old_log_probs)
    assert values.result() == [(0, "rows")]
    assert values.result() == [(0, "rows")]
    assert len(own.members[0].asked) == 1
    critic.all("save_checkpoint", Worker.save_critic)
    workers.note_idle(10.0)
    taken = {each.name: each.peak_allocated_bytes for each in workers.take_memories()}
    assert taken == {"init": None, "old_log_prob": None, "init_critic": None, "values": 5, "save_checkpoint_critic": None}
    timings = workers.clock.timings()
    assert (timings["timing_s/values"], timings["timing_s/save_checkpoint_critic"]) == (3.0, 1.0)
    assert timings["timing_s/idle_critic"] == 6.0
    assert 0 <= timings["timing_s/waiting_for_critic"] < 3.0
    workers.note_idle(2.0)  # of a step without a call
    assert workers.clock.timings()["timing_s/idle_critic"] == 8.0


def test_on_shared_devices_what_follows_a_call_is_done_before_the_next_one():
    workers = group_of(Pressed(0, 500, 1000, None, 1))
    seen = workers.begin("ref", Worker.ref_log_probs, [()]).then(lambda _: workers.figures)
    workers.group.members[0].figures = 600, 900, None, 0
    workers.all("ref", Worker.ref_log_probs)
    assert seen.result() == PassFigures(peak_bytes=500, budget_bytes=1000, cap_after_error=None, retries=1)
