"""What a reward process may take, as the kernel holds it."""

import resource
import subprocess
import sys

import pytest

from verl_memopt.config.schema import CustomReward
from verl_memopt.rewards.score import Limits


def under(limits: Limits, program: str) -> "subprocess.CompletedProcess[str]":
    """Runs a program whose process is bound by the limits."""
    bound = f"from verl_memopt.rewards.score import Limits; {limits!r}.bind_process()\n{program}"
    return subprocess.run([sys.executable, "-c", bound], capture_output=True, text=True, check=False)


def test_a_row_may_take_32_processor_seconds_for_each_second_of_its_time_limit_unless_it_is_set() -> None:
    assert Limits.of(CustomReward(timeout_seconds=2)).cpu_seconds == 64
    assert Limits.of(CustomReward(timeout_seconds=2, cpu_seconds=5)).cpu_seconds == 5


def test_a_limit_above_the_machines_own_is_lowered_to_it() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this machine bounds no open files")
    shown = under(Limits(1, 1, hard + 1), "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))")
    assert shown.stdout.split() == [str(hard)] * 2


def test_torch_can_be_imported_and_used_under_the_default_limits() -> None:
    shown = under(Limits.of(CustomReward()), "import torch; print(float((torch.ones(512, 512) @ torch.ones(512, 512)).sum()))")
    assert shown.stdout.split() == [str(512.0**3)], shown.stderr
