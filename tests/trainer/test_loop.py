import json
import math
import os
import re
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from tests.trainer.conftest import AR, LEAST, learned, ready, rewards_of
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.errors import CheckpointError, RewardError, TrainingError
from verl_memopt.observe.metrics import headline_score
from verl_memopt.observe.phase import PhaseClock
from verl_memopt.run import checkpoints
from verl_memopt.run.checkpoints import find_fault, read_manifest
from verl_memopt.trainer.build import build_run
from verl_memopt.trainer.loop import start_workers
from verl_memopt.worker.worker import Worker

ADAPTIVE_KL = {
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.kl_ctrl.horizon": 100,
}
KEPT = ADAPTIVE_KL | {
    f"{AR}.actor.adaptive_token_budget": True,
    f"{AR}.actor.optim.lr_warmup_steps": 50,
    "trainer.save_freq": 1,
    "trainer.test_freq": 2,
    "trainer.val_before_train": True,
    "trainer.max_actor_ckpt_to_keep": 3,
}


@pytest.fixture(scope="module")
def trained(run_files, tmp_path_factory):
    """A run of two steps with a checkpoint at each: its folder, what its driver kept, and which files it read again to hash."""
    folder, read_back = tmp_path_factory.mktemp("trained") / "run", []
    settings = settings_from_mapping(LEAST | run_files | KEPT | {"trainer.default_local_dir": str(folder)})
    hash_again = checkpoints.record_file
    with pytest.MonkeyPatch.context() as patch, ready(settings) as trainer:
        patch.setattr(checkpoints, "record_file", lambda path: read_back.append(path.name) or hash_again(path))
        trainer.learner.learned_budgets()["update_actor"].cap = 33
        trainer.run()
        manifests = trainer.context.store.history().manifests
        return SimpleNamespace(folder=folder, state=kept_by_driver(trainer), read_back=read_back, manifests=manifests)


@pytest.fixture
def goes_on(trained, settled, tmp_path):
    """Makes a trainer ready that goes on in a copy of the folder of that run."""
    shutil.copytree(trained.folder, tmp_path / "run")
    return lambda more=None: ready(settled(KEPT | (more or {})))


@pytest.fixture
def run_in(settled, tmp_path):
    """Trains into a folder by name and gives the folder."""

    def run(name, more=None):
        folder = tmp_path / name
        with ready(settled({"trainer.default_local_dir": str(folder)} | (more or {}))) as trainer:
            trainer.run()
        return folder

    return run


def from_step_1(folder):
    return {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(folder / "global_step_1")}


def kept_by_driver(trainer):
    return {name: value for name, value in trainer.state.driver_state(trainer.step).items() if name != "settings"}


def rows(trainer):
    return {row["step"]: row for row in trainer.reporter.folder.read_metrics()}


def validated(trainer):
    return [step for step, row in rows(trainer).items() if any(name.startswith("val-core/") for name in row)]


def saved(trainer):
    return trainer.context.store.steps()


@pytest.mark.parametrize(("every", "steps", "first"), [(-1, [], [0]), (2, [2, 3], [])])
def test_saves_and_validations_come_every_so_many_steps_and_at_the_last_and_a_validation_first_when_asked(
    settled, every, steps, first
):
    more = {"trainer.total_training_steps": 3, "trainer.save_freq": every, "trainer.test_freq": every}
    with ready(settled(more | {"trainer.val_before_train": bool(first)})) as trainer:
        trainer.run()
        assert list(rows(trainer)) == [*first, 1, 2, 3]
        assert saved(trainer) == steps
        assert validated(trainer) == [*first, *steps]


def test_without_a_validation_set_nothing_is_validated_however_often_it_is_due(settled):
    often = {"data.val_files": None, "trainer.val_before_train": True, "trainer.test_freq": 1, "trainer.total_training_steps": 1}
    with ready(settled(often)) as trainer:
        trainer.run()
        assert (list(rows(trainer)), validated(trainer)) == ([1], [])


def test_validation_alone_takes_no_step_and_saves_nothing(settled):
    with ready(settled({"trainer.val_only": True, "trainer.save_freq": 1})) as trainer:
        trainer.run()
        assert list(rows(trainer)) == validated(trainer) == [0]
        assert saved(trainer) == []


def test_validation_alone_of_a_checkpoint_is_logged_under_its_step(goes_on, tmp_path):
    with goes_on(from_step_1(tmp_path / "run") | {"trainer.val_only": True}) as trainer:
        trainer.run()
        assert validated(trainer) == [1]


@pytest.mark.parametrize("every", [-1, 1])
def test_a_run_asked_to_stop_takes_no_further_step_and_saves_the_one_it_took_once(settled, every):
    with ready(settled({"trainer.save_freq": every})) as trainer:
        trainer.workers.all("update_weights", Worker.update_weights)
        trainer.one_step(1)
        folder = trainer.context.environment.run_dir / "global_step_1"
        before = folder.stat().st_ino if folder.exists() else None
        os.kill(os.getpid(), signal.SIGINT if before is None else signal.SIGTERM)
        trainer.run()
        assert trainer.step == 1
        assert saved(trainer) == [1]
        assert before in (None, folder.stat().st_ino)
        assert (before is None) == (every == -1)


def test_a_run_asked_to_stop_before_its_first_step_leaves_no_checkpoint(settled):
    with ready(settled()) as trainer:
        os.kill(os.getpid(), signal.SIGINT)
        trainer.run()
        assert (trainer.step, saved(trainer)) == (0, [])


def tracked(trainer, every, steps):
    """Returns those of the steps whose bytes are counted."""
    trainer.settings, counted = replace(trainer.settings, track_memory_every_steps=every), []
    for step in steps:
        trainer.track(step)
        counted += [step] if trainer.workers.track else []
    return counted


def test_bytes_are_counted_in_the_first_two_steps_and_every_so_many(settled):
    with ready(settled()) as trainer:
        assert tracked(trainer, 0, range(6)) == []
        assert tracked(trainer, 4, range(6)) == [0, 1, 2, 4]
        assert tracked(trainer, 1, range(6)) == [0, 1, 2, 3, 4, 5]


def test_a_resumed_run_remembers_what_its_driver_knew_and_counts_bytes_in_two_steps_again(goes_on, trained):
    state = trained.state
    assert state["kl_control"]["coefficient"] != 0.001
    assert state["loader"] == {"seed": 7, "epoch": 0, "position": 8, "num_rows": 10}
    assert (state["step"], state["seed"]) == (2, 7)
    assert (state["health"]["validation"]["prompts"], state["health"]["first"]["prompts"]) == (3, 8)
    with goes_on() as trainer:
        trainer.resume()
        assert trainer.step == trainer.saved_step == 2
        assert kept_by_driver(trainer) == state
        caps = {phase: budget.cap for phase, budget in trainer.learner.learned_budgets().items()}
        assert (caps["update_actor"], caps["old_log_prob"]) == (33, 40)
        assert [span.name for span in trainer.workers.clock.take()] == ["init", "load_checkpoint"]
        assert tracked(trainer, 100, (3, 4, 5)) == [3, 4]


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


def test_a_last_save_that_fails_loses_no_trained_model(settled, tmp_path):
    with ready(settled({"trainer.save_freq": 9})) as trainer:
        trainer.context.store.begin = lambda step: (_ for _ in ()).throw(trainer.context.store.failed(step, "no space"))
        with pytest.raises(CheckpointError, match=r"step 2 could not be saved: .*trained model is saved: .*/run/model\."):
            trainer.run()
    assert json.loads((tmp_path / "run" / "model" / "training.json").read_text())["step"] == 2
    assert not list((tmp_path / "run").glob("global_step_*"))


def test_only_what_load_contents_names_is_loaded(goes_on, tmp_path):
    rates, more = {}, {"trainer.total_training_steps": 3, "trainer.save_freq": -1, "trainer.test_freq": -1}
    for parts in (["model"], ["model", "optimizer", "extra"]):
        with goes_on(more | {f"{AR}.actor.checkpoint.load_contents": parts}) as trainer:
            trainer.run()
            rates[len(parts)] = rows(trainer)[3]["actor/lr"]
        shutil.rmtree(tmp_path / "run")
    # Both mini-batches of a rollout have one rate: a schedule that goes on stands at rollout 2, one that begins anew at 0.
    assert rates[3] == pytest.approx(1e-3 * 2 / 50, rel=1e-6)
    assert rates[1] == 0


FOLLOWS = {f"{AR}.actor.use_kl_loss": True, f"{AR}.ref.sync_every_steps": 2, "trainer.total_training_steps": 4}
EVERYTHING = (
    ADAPTIVE_KL
    | FOLLOWS
    | {
        "data.truncation": "right",
        "data.max_prompt_length": 3,
        f"{AR}.actor.ppo_epochs": 2,
        f"{AR}.actor.shuffle": True,
        f"{AR}.actor.entropy_coeff": 0.01,
        f"{AR}.actor.optim.lr_scheduler_type": "cosine",
        f"{AR}.actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        "trainer.val_before_train": True,
        "trainer.test_freq": 3,
        "trainer.save_freq": 3,
    }
)


def test_a_resumed_run_equals_one_that_was_never_stopped(run_in):
    # The reference moves before the stop. A resumed run that forgot the count would move it in step 5, not in step 4.
    shorter = {"trainer.total_training_steps": 3, f"{AR}.actor.optim.total_training_steps": 4}
    whole = run_in("whole", EVERYTHING)
    run_in("cut", EVERYTHING | shorter)
    cut = run_in("cut", EVERYTHING)
    assert [row["step"] for row in learned(cut)] == [0, 1, 2, 3, 4]
    assert [row.get("ref/sync") for row in learned(cut)[1:]] == [0, 1, 0, 1]
    assert learned(cut)[3]["actor/kl_loss"] < learned(cut)[2]["actor/kl_loss"]
    assert len(list((cut / "global_step_3" / "ref" / "dcp").glob("*.distcp"))) == 1
    assert learned(cut) == learned(whole)
    weights = [load_file(run / "global_step_4" / "actor" / "huggingface" / "model.safetensors") for run in (whole, cut)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


def test_a_checkpoint_without_a_reference_starts_it_from_its_folder(goes_on, tmp_path, capsys):
    assert not (tmp_path / "run" / "global_step_2" / "ref").exists()
    with goes_on(FOLLOWS) as trainer:
        trainer.run()
    assert "global_step_2 has no reference, so the reference starts from its model's folder" in capsys.readouterr().out
    assert [row.get("ref/sync") for row in learned(tmp_path / "run")] == [None, None, None, 0, 1]


def test_a_run_goes_on_from_a_checkpoint_by_name_in_a_folder_of_its_own(run_in, trained):
    second = run_in("second", KEPT | from_step_1(trained.folder))
    assert learned(second) == learned(trained.folder)[2:]
    assert sorted(path.name for path in trained.folder.glob("global_step_*")) == ["global_step_1", "global_step_2"]


def test_going_back_by_name_inside_a_folder_replaces_what_followed(goes_on, trained, tmp_path):
    folder = tmp_path / "run"
    again = {"trainer.max_actor_ckpt_to_keep": 1, f"{AR}.actor.optim.lr": 1e-2, f"{AR}.actor.optim.lr_warmup_steps": 0}
    with goes_on(from_step_1(folder) | again) as trainer:
        trainer.run()
    assert learned(folder)[:2] == learned(trained.folder)[:2]
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    with goes_on(again | {"trainer.total_training_steps": 3}) as trainer:
        trainer.run()
    assert [row["step"] for row in learned(folder)] == [0, 1, 2, 3]
    assert learned(folder)[2]["actor/lr"] == pytest.approx(1e-2)


def test_epochs_count_whole_batches_and_more_of_them_prolong_a_finished_run(goes_on, tmp_path):
    with goes_on({"trainer.total_training_steps": None, "trainer.total_epochs": 2}) as trainer:
        trainer.run()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["training/epoch"] for row in rows[1:]] == [0, 0, 1, 1]  # 10 prompts, 4 a step
    first, second = rows[0]["run_id"], rows[-1]["run_id"]  # the start that wrote them
    assert [row["run_id"] for row in rows] == [first] * 3 + [second] * 2
    assert first != second


def lost(trainer):
    """Lets the policy's weights become what an update that is far too large makes of them."""
    for parameter in trainer.workers.group._worker.policy.model.parameters():
        parameter.data.fill_(math.nan)


def test_a_run_whose_weights_are_lost_stops_and_keeps_the_last_good_checkpoint_also_when_it_is_started_again(settled):
    every_step = {"trainer.save_freq": 1, "trainer.max_actor_ckpt_to_keep": 1, "trainer.total_training_steps": 9}
    with ready(settled(every_step)) as trainer:
        trainer.workers.all("update_weights", Worker.update_weights)
        for step in (1, 2):
            trainer.one_step(step)
        lost(trainer)
        for step in (3, 4):
            trainer.one_step(step)
        assert saved(trainer) == [1, 4]
    with ready(settled(every_step)) as trainer:
        with pytest.raises(TrainingError, match=r"steps 3 to 5 applied no update.*of step 1 is good"):
            trainer.run()
        assert saved(trainer) == [1, 4]
        assert [row["actor/skipped_updates"] for row in rows(trainer).values()] == [0, 0, 2, 2, 2]


def test_a_checkpoint_holds_the_score_of_its_own_step_and_none_where_it_was_not_validated(trained):
    logged = {row["step"]: headline_score(row) for row in learned(trained.folder)[1:]}
    assert {step: manifest.score for step, manifest in trained.manifests.items()} == logged
    assert [step for step, score in logged.items() if score is None] == [1]


def test_every_file_of_a_checkpoint_was_hashed_by_who_wrote_it(trained):
    folder = trained.folder / "global_step_2"
    assert find_fault(folder) is None
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {*read_manifest(folder).files, "meta.json"}
    assert trained.read_back == ["meta.json"] * 2


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
    steps = {"trainer.total_training_steps": 2}
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
        assert trainer.step == 2
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
