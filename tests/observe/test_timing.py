"""The clock's bookkeeping; no test looks at how long anything took."""

import pytest

from verl_memopt.observe.phase import PhaseClock, Span


def test_a_phase_that_runs_twice_is_summed():
    clock = PhaseClock()
    clock.spans = [Span("gen", 0.0, 1.5), Span("gen", 5.0, 2.0), Span("ref", 7.0, 1.0)]
    assert clock.timings() == {"timing_s/gen": 3.5, "timing_s/ref": 1.0}


def test_nested_phases_are_both_recorded_and_the_outer_contains_the_inner():
    clock = PhaseClock()
    with clock.phase("step"), clock.phase("gen"):
        pass
    inner, outer = clock.take()
    assert (inner.name, outer.name) == ("gen", "step")
    assert outer.started <= inner.started
    assert outer.seconds >= inner.seconds


def test_taking_the_spans_begins_a_new_step():
    clock = PhaseClock()
    with clock.phase("gen"):
        pass
    assert [span.name for span in clock.take()] == ["gen"]
    assert clock.timings() == {}


def test_a_phase_that_raises_is_not_recorded():
    clock = PhaseClock()
    with pytest.raises(ZeroDivisionError), clock.phase("gen"):
        raise ZeroDivisionError
    assert clock.take() == []
