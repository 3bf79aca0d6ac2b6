import os

import pytest

from verl_memopt.errors import RolloutError
from verl_memopt.worker.group import LocalGroup


class Recorder:
    """Answers with what it was given, and remembers whether it was closed."""

    def __init__(self, placement):
        self.placement = placement
        self.closed = False

    def place(self):
        return self.placement

    def sum(self, *values):
        return sum(values)

    def fail(self):
        raise RolloutError("the engine is asleep")

    def close(self):
        self.closed = True


@pytest.fixture
def group():
    group = LocalGroup(Recorder, "cpu")
    yield group
    group.shutdown()


def test_the_only_member_answers_alone_and_knows_its_place(group):
    assert group.world_size == 1
    assert group.all("sum", 1, 2) == [3]
    assert group.each("sum", [(4, 5)]) == [9]
    (placement,) = group.all("place")
    assert (placement.rank, placement.world_size, placement.local_rank, placement.device) == (0, 1, 0, "cpu")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[name] for name in names] == ["0", "1", "0", "1", placement.master_addr, str(placement.master_port)]


def test_an_error_comes_through_as_it_was_raised(group):
    with pytest.raises(RolloutError, match="the engine is asleep"):
        group.all("fail")
    with pytest.raises(AttributeError):
        group.all("no_such_method")


def test_arguments_for_another_number_of_members_are_refused(group):
    with pytest.raises(ValueError):
        group.each("sum", [(1,), (2,)])


def test_shutdown_closes_the_worker_once_and_restores_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    made = []
    group = LocalGroup(lambda placement: made.append(Recorder(placement)) or made[0], "cpu")
    group.shutdown()
    group.shutdown()
    assert made[0].closed
    assert os.environ["RANK"] == "7"
    assert "MASTER_PORT" not in os.environ


def test_a_factory_that_raises_leaves_the_environment_as_it_was(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ZeroDivisionError):
        LocalGroup(lambda placement: 1 // placement.rank, "cpu")
    assert "RANK" not in os.environ
