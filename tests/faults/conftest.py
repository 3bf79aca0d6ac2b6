import pytest

from tests.end_to_end.runs import LOCAL
from tests.faults.machine import Machine

QUIET = ["trainer.test_freq=-1", "trainer.val_before_train=false"]
SHORT = [
    *LOCAL,
    *QUIET,
    "trainer.total_training_steps=4",
    "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=3",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
]


@pytest.fixture(scope="session")
def machine(tmp_path_factory):
    with Machine(tmp_path_factory.mktemp("machine")) as made:
        yield made


@pytest.fixture
def healthy(machine):
    """The machine, with a disk that has room and can be read before and after the test."""
    machine.fill_after(0)
    yield machine
    machine.fill_after(0)


@pytest.fixture
def run_dir(machine, request, tmp_path):
    """A new run folder on the disk that can fail."""
    return machine.disk / tmp_path.name / "run"


@pytest.fixture(scope="session")
def uninterrupted(machine, toy):
    """A run of four steps without faults, each saved."""
    machine.fill_after(0)
    return machine.trained(toy, machine.disk / "uninterrupted" / "run", *SHORT)
