import dataclasses

from tests.trainer.conftest import AR
from tests.trainer.test_step import running

FOLLOWS = {f"{AR}.actor.use_kl_loss": True, f"{AR}.ref.sync_every_steps": 2}


def test_the_reference_moves_every_so_many_steps_that_update_the_policy(settled):
    with running(settled(FOLLOWS)) as learner:
        sync = learner.reference_sync
        assert (sync.every, sync.optimizer_steps) == (2, 2)
        skipped = [0, 1, 2, 2, 0, 0]  # of two optimizer steps each
        moves = [sync.after_update({"actor/skipped_updates": count})["ref/sync"] for count in skipped]
    assert moves == [0, 1, 0, 0, 0, 1]


def test_the_count_is_restored(settled):
    with running(settled(FOLLOWS)) as learner:
        sync = learner.reference_sync
        sync.after_update({"actor/skipped_updates": 0})
        other = dataclasses.replace(sync, steps=0)
        other.load_state_dict(sync.state_dict())
        assert other.after_update({"actor/skipped_updates": 0}) == {"ref/sync": 1.0}


def test_a_step_moves_the_reference_after_its_update(settled):
    with running(settled(FOLLOWS)) as learner:
        rows = [learner.train_step(step).metrics for step in (1, 2, 3)]
    assert [row["ref/sync"] for row in rows] == [0, 1, 0]
    # The KL is measured in the update. In step 3 it is that to the reference after its move, close to the policy.
    assert rows[2]["actor/kl_loss"] < rows[1]["actor/kl_loss"]


def test_a_run_without_a_kl_has_no_reference_to_move(settled):
    with running(settled({f"{AR}.ref.sync_every_steps": 2})) as learner:
        assert learner.reference_sync is None
