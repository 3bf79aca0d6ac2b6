import json
import logging
import math
import os
import signal

import pytest
from safetensors.torch import load_file

from tests.trainer.conftest import AR, learned, ready
from verl_memopt.errors import CheckpointError, TrainingError
from verl_memopt.observe.metrics import headline_score
from verl_memopt.run import checkpoints
from verl_memopt.run.manifest import find_fault, read_manifest
from verl_memopt.worker.worker import Worker


def rows(trainer):
    return {row["step"]: row for row in trainer.reporter.folder.read_metrics()}


def validated(trainer):
    return [step for step, row in rows(trainer).items() if any(name.startswith("val-core/") for name in row)]


def saved(trainer):
    return trainer.context.store.steps()


@pytest.mark.parametrize(("every", "steps"), [(-1, []), (2, [2, 4, 5]), (9, [5])])
def test_saves_and_validations_come_every_so_many_steps_and_at_the_last(settled, every, steps):
    more = {"trainer.total_training_steps": 5, "trainer.save_freq": every, "trainer.test_freq": every}
    with ready(settled(more)) as trainer:
        trainer.run()
        assert list(rows(trainer)) == [1, 2, 3, 4, 5]
        assert saved(trainer) == steps
        assert validated(trainer) == steps


def test_the_weights_a_run_starts_with_are_validated_first_when_asked(settled):
    with ready(settled({"trainer.val_before_train": True})) as trainer:
        trainer.run()
        assert validated(trainer) == [0]
        assert list(rows(trainer)) == [0, 1, 2]


def test_without_a_validation_set_nothing_is_validated_however_often_it_is_due(settled):
    with ready(settled({"data.val_files": None, "trainer.val_before_train": True, "trainer.test_freq": 1})) as trainer:
        trainer.run()
        assert list(rows(trainer)) == [1, 2]
        assert validated(trainer) == []


def test_validation_alone_takes_no_step_and_saves_nothing(settled):
    with ready(settled({"trainer.val_only": True, "trainer.save_freq": 1})) as trainer:
        trainer.run()
        assert list(rows(trainer)) == validated(trainer) == [0]
        assert saved(trainer) == []


def test_validation_alone_of_a_checkpoint_is_logged_under_its_step(settled):
    with ready(settled({"trainer.save_freq": 2})) as trainer:
        trainer.run()
    with ready(settled({"trainer.val_only": True})) as trainer:
        trainer.run()
        assert validated(trainer) == [2]


def test_a_run_asked_to_stop_takes_no_further_step_and_saves_the_one_it_took(settled):
    with ready(settled()) as trainer:
        trainer.workers.all("update_weights", Worker.update_weights)
        trainer.one_step(1)
        os.kill(os.getpid(), signal.SIGINT)
        trainer.run()
        assert trainer.step == 1
        assert saved(trainer) == [1]


def test_a_step_that_was_saved_is_not_saved_again_at_a_stop(settled):
    with ready(settled({"trainer.save_freq": 1})) as trainer:
        trainer.workers.all("update_weights", Worker.update_weights)
        trainer.one_step(1)
        before = (trainer.context.environment.run_dir / "global_step_1").stat().st_ino
        os.kill(os.getpid(), signal.SIGTERM)
        trainer.run()
        assert (trainer.context.environment.run_dir / "global_step_1").stat().st_ino == before


def test_a_run_asked_to_stop_before_its_first_step_leaves_no_checkpoint(settled):
    with ready(settled()) as trainer:
        os.kill(os.getpid(), signal.SIGINT)
        trainer.run()
        assert (trainer.step, saved(trainer)) == (0, [])


@pytest.mark.parametrize(("every", "tracked"), [(0, []), (4, [0, 1, 2, 4]), (1, [0, 1, 2, 3, 4, 5])])
def test_bytes_are_counted_in_the_first_two_steps_and_every_so_many(settled, every, tracked):
    counted = []
    with ready(settled({"trainer.track_memory_every_steps": every})) as trainer:
        for step in range(6):
            trainer.track(step)
            if trainer.workers.track:
                counted.append(step)
    assert counted == tracked


def test_after_a_resume_the_first_two_steps_are_counted_again(settled):
    with ready(settled({"trainer.save_freq": 2})) as trainer:
        trainer.run()
    counted = []
    with ready(settled({"trainer.track_memory_every_steps": 100})) as trainer:
        for step in (3, 4, 5):
            trainer.track(step)
            counted.append(trainer.workers.track)
    assert counted == [True, True, False]


def test_the_driver_remembers_what_a_resumed_run_needs(settled):
    adaptive = {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.horizon": 100,
        "trainer.save_freq": 1,
    }
    with ready(settled(adaptive)) as trainer:
        trainer.run()
        coefficient, state = trainer.learner.kl_control.coefficient, trainer.driver_state()
    assert coefficient != 0.001
    assert state["loader"] == {"seed": 7, "epoch": 0, "position": 8, "num_rows": 10}
    assert (state["step"], state["seed"]) == (2, 7)
    with ready(settled(adaptive)) as trainer:
        trainer.resume()
        assert trainer.step == trainer.saved_step == 2
        assert trainer.learner.kl_control.coefficient == coefficient
        assert [span.name for span in trainer.workers.clock.take()] == ["init", "load_checkpoint"]


def test_a_save_that_fails_keeps_the_checkpoint_before_it(settled):
    with ready(settled({"trainer.save_freq": 1})) as trainer:
        trainer.workers.all("update_weights", Worker.update_weights)
        trainer.one_step(1)
        trainer.step = 2
        begin = trainer.context.store.begin

        def in_the_way(step):
            folder = begin(step)
            (folder / "actor").write_text("a file where a folder must be")
            return folder

        trainer.context.store.begin = in_the_way
        with pytest.raises(CheckpointError, match=r"step 2 could not be saved: .*the checkpoint of step 1 is untouched"):
            trainer.save()
        assert saved(trainer) == [1]


def test_only_what_load_contents_names_is_loaded(settled):
    lr = {f"{AR}.actor.optim.lr_warmup_steps": 50, "trainer.save_freq": 2}
    with ready(settled(lr)) as trainer:
        trainer.run()
    rates = {}
    for parts in (["model"], ["model", "optimizer", "extra"]):
        more = {f"{AR}.actor.checkpoint.load_contents": parts, "trainer.total_training_steps": 3, "trainer.save_freq": -1}
        with ready(settled(lr | more)) as trainer:
            trainer.run()
            rates[len(parts)] = rows(trainer)[3]["actor/lr"]
    # Two mini-batches a step: a schedule that goes on stands at optimizer steps 4 and 5, one that begins anew at 0 and 1.
    assert rates[3] == pytest.approx(1e-3 * (5 + 6) / 2 / 51, rel=1e-6)
    assert rates[1] == pytest.approx(1e-3 * (1 + 2) / 2 / 51, rel=1e-6)


EVERYTHING = {
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.kl_ctrl.horizon": 100,
    "data.truncation": "right",
    "data.max_prompt_length": 3,
    f"{AR}.actor.ppo_epochs": 2,
    f"{AR}.actor.shuffle": True,
    f"{AR}.actor.use_kl_loss": True,
    f"{AR}.actor.entropy_coeff": 0.01,
    f"{AR}.actor.optim.lr_scheduler_type": "cosine",
    f"{AR}.actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
    "trainer.total_training_steps": 4,
    "trainer.val_before_train": True,
    "trainer.test_freq": 2,
}


@pytest.fixture
def run_in(settled, tmp_path):
    """Trains into a folder by name and gives the folder."""

    def run(name, more=None):
        folder = tmp_path / name
        with ready(settled({"trainer.default_local_dir": str(folder)} | (more or {}))) as trainer:
            trainer.run()
        return folder

    return run


def test_a_resumed_run_equals_one_that_was_never_stopped(run_in):
    more = EVERYTHING | {"trainer.save_freq": 2}
    shorter = {"trainer.total_training_steps": 2, f"{AR}.actor.optim.total_training_steps": 4 * 2 * 2}
    whole = run_in("whole", more)
    run_in("cut", more | shorter)
    cut = run_in("cut", more)
    assert [row["step"] for row in learned(cut)] == [0, 1, 2, 3, 4]
    assert learned(cut) == learned(whole)
    weights = [load_file(run / "global_step_4" / "actor" / "huggingface" / "model.safetensors") for run in (whole, cut)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


FOLLOWS = {f"{AR}.actor.use_kl_loss": True, f"{AR}.ref.sync_every_steps": 2, "trainer.total_training_steps": 4}


def test_a_resumed_run_goes_on_with_the_reference_that_followed_the_policy(run_in):
    # It moves before the stop. A resumed run that forgot the count would move in step 5, not in step 4.
    more = FOLLOWS | {"trainer.save_freq": 3}
    whole = run_in("whole", more)
    run_in("cut", more | {"trainer.total_training_steps": 3})
    cut = run_in("cut", more)
    assert [row.get("ref/sync") for row in learned(cut)] == [0, 1, 0, 1]
    assert learned(cut) == learned(whole)
    assert learned(cut)[2]["actor/kl_loss"] < learned(cut)[1]["actor/kl_loss"]
    assert len(list((cut / "global_step_3" / "ref" / "dcp").glob("*.distcp"))) == 1


def test_learned_token_budgets_are_restored(settled):
    adaptive = {f"{AR}.actor.adaptive_token_budget": True, "trainer.save_freq": 1, "trainer.total_training_steps": 1}
    with ready(settled(adaptive)) as trainer:
        trainer.learner.learned_budgets()["update_actor"].cap = 33
        trainer.run()
    with ready(settled(adaptive)) as trainer:
        trainer.resume()
        caps = {phase: budget.cap for phase, budget in trainer.learner.learned_budgets().items()}
    assert caps == {"update_actor": 33, "old_log_prob": 40}


def test_a_checkpoint_without_a_reference_starts_it_from_its_folder(run_in, capsys):
    keeps = FOLLOWS | {f"{AR}.ref.sync_every_steps": None, "trainer.save_freq": 2}
    folder = run_in("run", keeps | {"trainer.total_training_steps": 2})
    assert not (folder / "global_step_2" / "ref").exists()
    again = run_in("run", FOLLOWS | {"trainer.save_freq": 2})
    assert "global_step_2 has no reference of its own; it starts from its model's folder" in capsys.readouterr().out
    assert [row.get("ref/sync") for row in learned(again)] == [None, None, 0, 1]


def test_a_run_goes_on_from_a_checkpoint_by_name_in_a_folder_of_its_own(run_in):
    first = run_in("first", {"trainer.save_freq": 1})
    named = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": f"{first}/global_step_1/"}
    second = run_in("second", named)
    assert learned(second) == learned(first)[1:]
    assert sorted(path.name for path in first.glob("global_step_*")) == ["global_step_1", "global_step_2"]


def test_going_back_by_name_inside_a_folder_replaces_what_followed(run_in):
    folder = run_in("run", {"trainer.save_freq": 1, "trainer.max_actor_ckpt_to_keep": 3})
    before = learned(folder)
    named = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(folder / "global_step_1")}
    again = {"trainer.save_freq": 1, "trainer.max_actor_ckpt_to_keep": 1, f"{AR}.actor.optim.lr": 1e-2}
    assert learned(run_in("run", named | again))[0] == before[0]
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    goes_on = learned(run_in("run", again | {"trainer.total_training_steps": 3}))
    assert [row["step"] for row in goes_on] == [1, 2, 3]
    assert goes_on[1]["actor/lr"] == pytest.approx(1e-2)


def test_the_number_of_steps_wins_over_epochs_and_epochs_count_whole_batches(run_in):
    epochs = {"trainer.total_training_steps": None, "trainer.total_epochs": 2}
    rows = learned(run_in("epochs", epochs))
    assert [row["training/epoch"] for row in rows] == [0, 0, 1, 1]  # 10 prompts, 4 a step
    longer = learned(run_in("epochs", epochs | {"trainer.resume_mode": "disable", "trainer.total_training_steps": 3}))
    assert longer == rows[:3]


def test_more_epochs_prolong_a_finished_run(run_in):
    epochs = {"trainer.total_training_steps": None, "trainer.total_epochs": 1, "trainer.save_freq": 2}
    assert len(learned(run_in("run", epochs))) == 2
    assert [row["step"] for row in learned(run_in("run", epochs | {"trainer.total_epochs": 2}))] == [1, 2, 3, 4]


def test_a_seed_that_was_drawn_is_kept_over_a_resume(run_in, caplog):
    drawn = {"data.seed": None, "trainer.save_freq": 2}
    with caplog.at_level(logging.INFO):
        run_in("run", drawn)
        run_in("run", drawn | {"trainer.total_training_steps": 3})
    said = [record.getMessage().split("uses ")[1] for record in caplog.records if "this run uses" in record.getMessage()]
    seed = said[0].split()[0]
    assert said == [f"{seed} (drawn)", f"{seed} (from the checkpoint)"]


def lost(trainer):
    """Lets the policy's weights become what an update that is far too large makes of them."""
    for parameter in trainer.workers.group._worker.policy.model.parameters():
        parameter.data.fill_(math.nan)


EVERY_STEP = {"trainer.save_freq": 1, "trainer.max_actor_ckpt_to_keep": 1, "trainer.total_training_steps": 9}


def test_a_run_whose_weights_are_lost_stops_and_keeps_the_last_good_checkpoint(settled):
    with ready(settled(EVERY_STEP)) as trainer:
        trainer.workers.all("update_weights", Worker.update_weights)
        for step in (1, 2):
            trainer.one_step(step)
        lost(trainer)
        for step in (3, 4):
            trainer.one_step(step)
        assert saved(trainer) == [1, 4]
        with pytest.raises(TrainingError, match=r"steps 3 to 5 applied no update.*of step 1 is good"):
            trainer.one_step(5)
        assert saved(trainer) == [1, 4]
        assert [row["actor/skipped_updates"] for row in rows(trainer).values()] == [0, 0, 2, 2, 2]


def test_a_run_started_again_goes_on_counting_the_steps_without_an_update(settled):
    with ready(settled(EVERY_STEP)) as trainer:
        trainer.workers.all("update_weights", Worker.update_weights)
        trainer.one_step(1)
        lost(trainer)
        for step in (2, 3):
            trainer.one_step(step)
    with ready(settled(EVERY_STEP)) as trainer, pytest.raises(TrainingError, match="steps 2 to 4 applied no update"):
        trainer.run()


def test_what_a_run_was_warned_of_is_remembered_by_the_one_that_goes_on(settled):
    first = {"trainer.val_before_train": True, "trainer.save_freq": 2}
    with ready(settled(first)) as trainer:
        trainer.run()
        before = trainer.health.state_dict()
    assert before["validation"]["prompts"] == 3
    assert before["first"]["prompts"] == 8
    with ready(settled(first)) as trainer:
        trainer.resume()
        assert trainer.health.state_dict() == before


def test_the_best_validated_checkpoint_outlives_those_that_came_after_it(settled, monkeypatch):
    scores = iter((0.25, 0.75, 0.5, 0.0))
    monkeypatch.setattr("verl_memopt.trainer.loop.checkpoint_score", lambda metrics: next(scores))
    more = {"trainer.total_training_steps": 4, "trainer.save_freq": 1, "trainer.test_freq": 1}
    with ready(settled(more | {"trainer.max_actor_ckpt_to_keep": 1})) as trainer:
        trainer.run()
        assert trainer.context.store.best() == 2
        assert saved(trainer) == [2, 3, 4]  # 3 is the newest that is proven: no step has begun with the weights of 4


def test_a_checkpoint_holds_the_score_of_its_own_step_and_none_where_it_was_not_validated(settled):
    more = {"trainer.total_training_steps": 3, "trainer.save_freq": 1, "trainer.test_freq": 2}
    with ready(settled(more)) as trainer:
        trainer.run()
        manifests = trainer.context.store.history().manifests
        logged = {step: headline_score(row) for step, row in rows(trainer).items()}
    assert {step: manifest.score for step, manifest in manifests.items()} == logged
    assert [step for step, score in logged.items() if score is None] == [1]


def test_every_file_of_a_checkpoint_was_hashed_by_who_wrote_it(settled, monkeypatch):
    read_back = []
    hash_again = checkpoints.record_file
    monkeypatch.setattr(checkpoints, "record_file", lambda path: read_back.append(path.name) or hash_again(path))
    with ready(settled({"trainer.save_freq": 2})) as trainer:
        trainer.run()
        folder = trainer.context.store.folder(2)
        assert find_fault(folder) is None
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert files == {*read_manifest(folder).files, "meta.json"}
    assert read_back == ["meta.json"]


def test_rows_of_a_run_carry_the_id_of_the_start_that_wrote_them(run_in):
    folder = run_in("run", {"trainer.save_freq": 1, "trainer.total_training_steps": 1})
    run_in("run", {"trainer.save_freq": 1})
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert len({row["run_id"] for row in rows}) == 2


def stop_in(trainer, monkeypatch, owner, name, deadline):
    """Makes the call of ``owner.name`` in step 2 begin with a stop that must be finished within ``deadline`` seconds."""
    real = getattr(owner, name)

    def stopping(*args, **options):
        if trainer.step == 1 and not trainer.interrupts.requested:
            trainer.interrupts.deadline_seconds = deadline
            trainer.interrupts.request(signal.SIGTERM)
        return real(*args, **options)

    monkeypatch.setattr(owner, name, stopping)


OWNERS = {
    "generate": lambda trainer: (trainer.learner.rollouts, "generate"),
    "score": lambda trainer: (trainer.runner, "score"),
    "log_probs": lambda trainer: (trainer.learner.policy, "old_log_probs"),
}


@pytest.mark.parametrize("phase", ["generate", *(pytest.param(name, marks=pytest.mark.slow) for name in ("score", "log_probs"))])
def test_a_step_without_time_left_is_given_up_and_the_resumed_run_equals_an_uninterrupted_one(
    settled, tmp_path, monkeypatch, phase
):
    steps = {"trainer.total_training_steps": 3}
    with ready(settled(steps | {"trainer.default_local_dir": str(tmp_path / "whole")})) as trainer:
        trainer.run()
    with ready(settled(steps)) as trainer:
        stop_in(trainer, monkeypatch, *OWNERS[phase](trainer), deadline=0.0)
        trainer.run()
        assert (trainer.step, saved(trainer)) == (1, [1])
        assert not list((tmp_path / "run").glob(".stop*"))
    monkeypatch.undo()
    with ready(settled(steps)) as trainer:
        trainer.run()
        assert trainer.step == 3
    assert learned(tmp_path / "run") == learned(tmp_path / "whole")


def test_an_update_that_has_begun_is_finished_validated_and_saved(settled, tmp_path, monkeypatch):
    with ready(settled({"trainer.total_training_steps": 3, "trainer.test_freq": 1})) as trainer:
        stop_in(trainer, monkeypatch, trainer.learner.policy, "update", deadline=0.0)
        trainer.run()
        assert (trainer.step, saved(trainer)) == (2, [2])
    assert [row["step"] for row in learned(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize(("seconds", "last"), [(900.0, 1), (0.0, 2)])
def test_an_update_that_would_leave_no_time_to_save_is_not_begun(settled, monkeypatch, seconds, last):
    with ready(settled({"trainer.total_training_steps": 3})) as trainer:
        stop_in(trainer, monkeypatch, trainer.learner.rollouts, "generate", deadline=1000.0)
        real = trainer.begin_update

        def begin_update():
            trainer.update_seconds = seconds
            real()

        trainer.learner.before_update = begin_update
        trainer.run()
        assert (trainer.step, saved(trainer)) == (last, [last])
