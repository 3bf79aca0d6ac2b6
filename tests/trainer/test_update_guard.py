import logging
import math

import pytest

from tests.trainer.conftest import AR
from tests.trainer.test_checkpoints import save
from verl_memopt.errors import TrainingError
from verl_memopt.run.checkpoints import CheckpointStore
from verl_memopt.trainer.update_guard import BAD_LOG_PROBS, UpdateGuard, Updates
from verl_memopt.worker.trained_model import ACTOR, CRITIC

LR = f"{AR}.actor.optim.lr"


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "run", None)


def guard_of(store, most=3):
    return UpdateGuard(most, store, Updates(ACTOR, 0.5, 2))


def applied(norm=1.0):
    return {"actor/skipped_updates": 0.0, "actor/grad_norm": norm}


def skipped(count=2, advantage=1.0, bad=3.0):
    return {
        "actor/skipped_updates": float(count), "actor/grad_norm": math.nan, BAD_LOG_PROBS: bad,
        "critic/advantages/min": -advantage, "critic/advantages/max": advantage,
    }  # fmt: skip


def test_so_many_steps_in_a_row_without_an_update_end_the_run_with_the_way_back(store):
    guard = guard_of(store)
    for step, metrics in enumerate([applied(), applied(), applied(), skipped(), skipped()], start=1):
        guard.watch(step, metrics, True)
        save(store, step)
    with pytest.raises(TrainingError) as error:
        guard.watch(6, skipped(), True)
    assert str(error.value) == (
        "trainer.max_skipped_steps=3: steps 4 to 6 applied no update, because the gradient norm was not finite (nan). The "
        "weights are those of the update of step 3. They give log-probs that are not finite: that update has damaged them. The "
        "checkpoint of step 2 is good: its weights gave finite gradients. Continue from it with a lower rate: "
        f"trainer.resume_mode=resume_path trainer.resume_from_path={store.root}/global_step_2 {LR}=<less than 0.5>"
    )


def test_a_step_with_any_update_begins_the_count_again(store):
    guard = guard_of(store)
    for step in range(1, 9, 2):
        guard.watch(step, skipped(2), True)
        guard.watch(step + 1, skipped(1), True)
    guard.watch(9, skipped(2), True)
    guard.watch(10, skipped(2), True)
    with pytest.raises(TrainingError, match="steps 9 to 11 applied no update"):
        guard.watch(11, skipped(2), True)


@pytest.mark.parametrize(("most", "steps"), [(1, "step 1"), (2, "steps 1 to 2")])
def test_the_limit_is_the_users_and_without_a_proven_checkpoint_the_way_back_is_a_new_start(tmp_path, most, steps):
    guard = guard_of(CheckpointStore(tmp_path / "empty", None), most)
    for step in range(1, most):
        guard.watch(step, skipped(), True)
    with pytest.raises(TrainingError) as error:
        guard.watch(most, skipped(), True)
    assert f"{steps} applied no update" in str(error.value)
    began = f"the model that the run began with. They give log-probs that are not finite: check {AR}.model.path"
    assert began in str(error.value)
    assert str(error.value).endswith(f"Start again with a lower rate: trainer.resume_mode=disable {LR}=<less than 0.5>")


@pytest.mark.parametrize(
    ("metrics", "cause"),
    [
        (skipped(advantage=1e30, bad=0.0), r"The advantages reach from -1e\+30 to 1e\+30: look at the rewards first\."),
        (skipped(bad=0.0), r"Their log-probs are finite, but their gradients overflow: that update has damaged them\."),
    ],
)
def test_the_cause_is_told_as_far_as_it_is_known(store, metrics, cause):
    guard = guard_of(store, 1)
    guard.watch(1, applied(), True)
    with pytest.raises(TrainingError, match=cause):
        guard.watch(2, metrics, True)


@pytest.mark.parametrize(("metrics", "sound"), [(applied(0.0), True), (applied(), False), (skipped(2), True)])
def test_only_a_gradient_that_is_finite_and_not_zero_under_a_sound_reward_proves_weights(store, metrics, sound):
    guard = guard_of(store)
    for step in (1, 2, 3):
        guard.watch(step, applied(), True)
        save(store, step)
    guard.watch(4, metrics, sound)
    assert store.proven() == 2


def test_each_skipped_update_is_logged_once_a_step(store, caplog):
    guard = guard_of(store)
    with caplog.at_level(logging.WARNING):
        guard.watch(1, applied(), True)
        guard.watch(2, skipped(1), True)
    assert [record.getMessage() for record in caplog.records] == [
        "step 2: the gradient norm is nan. 1 of 2 updates skipped: they changed neither weights nor optimizer state nor schedule"
    ]


CRITIC_LR = "critic.optim.lr"


def both(store, most=3):
    """Gives the guard of a run with a critic, whose rate is 0.25."""
    return UpdateGuard(most, store, Updates(ACTOR, 0.5, 2), Updates(CRITIC, 0.25, 4))


def of_critic(count=0.0, norm=1.0, **more):
    return {"critic/skipped_updates": float(count), "critic/grad_norm": norm, **more}


def test_a_critic_without_an_update_for_so_many_steps_ends_the_run_and_names_its_rate(store):
    guard = both(store, most=2)
    save(store, 1)
    guard.watch(2, applied() | of_critic(), True)
    guard.watch(3, applied() | of_critic(4, math.nan), True)
    with pytest.raises(TrainingError) as error:
        guard.watch(4, applied() | of_critic(4, math.nan, **{"critic/values/mean": math.nan}), True)
    assert str(error.value) == (
        "trainer.max_skipped_steps=2: steps 3 to 4 applied no update of the critic, because the gradient norm was not finite "
        "(nan). The weights are those of the update of step 2. They give values that are not finite: that update has damaged "
        "them. The checkpoint of step 1 is good: its weights gave finite gradients. Continue from it with a lower rate: "
        f"trainer.resume_mode=resume_path trainer.resume_from_path={store.root}/global_step_1 {CRITIC_LR}=<less than 0.25>"
    )


def test_a_checkpoint_is_proven_by_both_models(store):
    guard = both(store)
    save(store, 1)
    guard.watch(2, applied() | of_critic(4, math.nan), True)
    assert store.proven() is None
    save(store, 2)
    guard.watch(3, skipped(2) | of_critic(), True)
    assert store.proven() is None
    save(store, 3)
    guard.watch(4, applied() | of_critic(3, math.nan), True)
    assert store.proven() == 3


def test_in_a_warm_up_the_critic_alone_is_judged(store):
    guard = both(store, most=1)
    save(store, 1)
    guard.watch(2, of_critic(), True)
    assert store.proven() == 1
    with pytest.raises(TrainingError, match=r"step 3 applied no update of the critic.*returns reach from -1e\+09 to 2"):
        guard.watch(3, of_critic(4, math.inf, **{"critic/returns/min": -1e9, "critic/returns/max": 2.0}), True)


def test_a_restart_does_not_begin_the_counts_again(store):
    guard, resumed = guard_of(store), guard_of(store)
    guard.watch(4, applied(), True)
    guard.watch(5, skipped(), True)
    resumed.load_state_dict(guard.state_dict())
    resumed.watch(6, skipped(), True)
    with pytest.raises(TrainingError, match=r"steps 5 to 7 applied no update.*the update of step 4"):
        resumed.watch(7, skipped(), True)
    guard, resumed = both(store), both(store)
    guard.watch(5, skipped(2) | of_critic(4, math.nan), True)
    resumed.load_state_dict(guard.state_dict())
    resumed.watch(6, applied() | of_critic(4, math.nan), True)
    with pytest.raises(TrainingError, match="steps 5 to 7 applied no update of the critic"):
        resumed.watch(7, applied() | of_critic(4, math.nan), True)
