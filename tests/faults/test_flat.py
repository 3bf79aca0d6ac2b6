"""Three hundred steps under the profile for one small card: nothing that a run holds grows, as seen from outside."""

import pytest

from tests.end_to_end.runs import metrics, wait_for_step
from tests.faults.conftest import QUIET
from tests.faults.machine import held
from verl_memopt.observe.run_folder import read_timeline

STEPS = 300
SETTLED = 50
LOOKED = (SETTLED, 100, 150, 200, 250, 290)
SETTINGS = [
    "memory=constrained", *QUIET, f"trainer.total_training_steps={STEPS}", "trainer.save_freq=20",
    "trainer.max_actor_ckpt_to_keep=2", "trainer.track_memory_every_steps=10",
]  # fmt: skip
IN_ONE_PROCESS = ["trainer.worker_group=local", "actor_rollout_ref.rollout.name=hf"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", [IN_ONE_PROCESS, []], ids=["in one process", "Ray and vLLM"])
def test_three_hundred_steps_hold_no_more_than_fifty(healthy, toy, run_dir, where, request):
    run = healthy.start(toy, run_dir, *SETTINGS, *where)
    seen = []
    for step in LOOKED:
        wait_for_step(run, run_dir, step - 1, timeout=600)
        seen.append(held(run))
    assert run.wait(600).returncode == 0, run.stdout[-3000:]
    assert max(metrics(run_dir)) == STEPS
    last = {row.step: row for row in read_timeline(run_dir / "memory_timeline.csv") if row.allocated_bytes}
    tracked = [step for step in last if step >= SETTLED and step % 20 == 10]  # between two saves
    device = [last[step].allocated_bytes for step in tracked]
    host = [last[step].host_rss_bytes for step in tracked]
    request.config.get_terminal_writer().line(f"{where}: {seen}; device {device}; host {host}")
    assert len(device) >= 10
    assert len(set(device)) == 1
    for what in ("processes", "threads", "files"):
        # A thread or a process that is just being replaced may be there twice.
        assert max(found[what] for found in seen[1:]) <= seen[0][what] + 2, (what, seen)
