import os
import re

import pytest

from tests.trainer.conftest import rewards_of
from verl_memopt.errors import RewardError
from verl_memopt.observe.phase import PhaseClock
from verl_memopt.trainer.build import build_run
from verl_memopt.trainer.loop import start_workers


def test_workers_are_ready_inside_and_gone_after_an_error(settled):
    clock, inside = PhaseClock(), []

    def fail():
        with start_workers(build_run(settled()), clock) as workers:
            inside.append((workers, workers.world_size, os.environ["WORLD_SIZE"]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    ((workers, *sizes),) = inside
    assert sizes == [1, "1"]
    assert [span.name for span in clock.take()] == ["init"]
    assert "WORLD_SIZE" not in os.environ
    with pytest.raises(AssertionError, match="shut down"):
        workers.group.all("started")


def test_reward_processes_have_their_function_before_the_run_goes_on(settled, tmp_path):
    broken = tmp_path / "reward.py"
    broken.write_text("def compute_score(:")
    context = build_run(settled({"custom_reward_function.path": str(broken)}))
    with pytest.raises(RewardError, match=re.escape(str(broken))), rewards_of(context):
        pytest.fail("the body ran")


def test_a_service_for_programs_is_not_asked_where_a_function_decides(settled):
    context = build_run(settled({"reward_model.sandbox_fusion.url": "http://127.0.0.1:9/run_code"}))
    with rewards_of(context) as runner:
        assert runner.pids()
