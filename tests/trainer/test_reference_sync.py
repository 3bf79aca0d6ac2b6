import dataclasses

from tests.trainer.conftest import AR
from tests.trainer.test_step import running

FOLLOWS = {f"{AR}.actor.use_kl_loss": True, f"{AR}.ref.sync_every_steps": 2}


def test_the_reference_moves_every_so_many_steps_that_update_the_policy_and_the_count_is_restored(settled):
    with running(settled(FOLLOWS)) as learner:
        sync = learner.reference_sync
        assert (sync.every, sync.optimizer_steps) == (2, 2)
        skipped = [0, 1, 2, 2, 0, 0, 0]  # of two optimizer steps each
        moves = [sync.after_update({"actor/skipped_updates": count})["ref/sync"] for count in skipped]
        assert moves == [0, 1, 0, 0, 0, 1, 0]
        other = dataclasses.replace(sync, steps=0)
        other.load_state_dict(sync.state_dict())
        assert other.after_update({"actor/skipped_updates": 0}) == {"ref/sync": 1.0}


def test_a_run_without_a_kl_has_no_reference_to_move(settled):
    with running(settled({f"{AR}.ref.sync_every_steps": 2})) as learner:
        assert learner.reference_sync is None
