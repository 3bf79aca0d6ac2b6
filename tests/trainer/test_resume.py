import dataclasses
import json
import logging
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from tests.trainer.conftest import AR, LEAST, learned, ready
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.distributed.file_records import FileRecord
from verl_memopt.errors import CheckpointError, ConfigError, UnreadableCheckpointError
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.observe.run_folder import RunFolder
from verl_memopt.run.checkpoints import CheckpointStore, read_manifest, write_manifest
from verl_memopt.run.resume import checkpoint_store, find_checkpoint, loaded_parts, plain_shapes, with_seeds
from verl_memopt.trainer.build import build_run
from verl_memopt.trainer.main_ppo import train

SAVES = {"trainer.save_freq": 1}
MOVED = "trainer.default_local_dir"
"""Differs in every run here, which goes on in a copy of one run's folder."""


@pytest.fixture(scope="module")
def trained(run_files, tmp_path_factory):
    """A run of two steps with a checkpoint at each; tests copy its folder."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    more = {"trainer.default_local_dir": str(folder), "trainer.save_freq": 1}
    with ready(settings_from_mapping(LEAST | run_files | more)) as trainer:
        trainer.run()
    return folder


@pytest.fixture
def run_dir(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def resumed_context(settled, more=None):
    context = build_run(settled(SAVES | (more or {})))
    context.lock.release()
    return context


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({}, False),
        ({"trainer.test_freq": 1}, True),
        ({"trainer.test_freq": 1, "data.val_files": None}, False),
        ({"trainer.test_freq": 1, "trainer.keep_best": False}, False),
        ({"trainer.keep_best": True}, True),
    ],
)
def test_the_best_is_kept_where_the_run_validates_unless_it_is_said_otherwise(settled, tmp_path, more, kept):
    settings = settled(more)
    assert checkpoint_store(settings.trainer, settings.data.val_files is not None, tmp_path).keep_best is kept


def test_a_flipped_bit_in_a_shard_makes_the_run_resume_before_it_and_say_so(settled, run_dir, capsys):
    shard = next((run_dir / "global_step_2").rglob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    whole = learned(run_dir)
    with ready(settled(SAVES)) as trainer:
        trainer.run()
    shown = capsys.readouterr().out
    assert "passed over" in shown
    assert f"{shard.name} has other contents than were written" in shown
    assert "resumed from" in shown
    assert "global_step_1 (step 1 of 2)" in shown
    assert learned(run_dir) == whole


def test_a_shard_that_only_torch_finds_unreadable_makes_the_run_fall_back(settled, run_dir, capsys):
    shard = next((run_dir / "global_step_2").rglob("*.distcp"))
    shard.write_bytes(b"\0" * shard.stat().st_size)
    seal(run_dir / "global_step_2")
    whole = learned(run_dir)
    assert train(settled(SAVES)) == 0
    shown = capsys.readouterr().out
    assert "global_step_2: not whole" in shown
    assert "could not be read" in shown
    assert learned(run_dir) == whole


def seal(folder):
    """Write the manifest anew, so that it agrees with what the files hold by now."""
    manifest = read_manifest(folder)
    data = {name: (folder / name).read_bytes() for name in manifest.files}
    records = {name: FileRecord(len(each), blake3(each).hexdigest()) for name, each in data.items()}
    write_manifest(folder, dataclasses.replace(manifest, files=records))


def test_a_named_checkpoint_never_falls_back(settled, run_dir):
    shard = next((run_dir / "global_step_2").rglob("*.distcp"))
    shard.write_bytes(b"\0" * shard.stat().st_size)
    named = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(run_dir / "global_step_2")}
    with pytest.raises(CheckpointError, match=r"resume_from_path=.*not whole \(actor/dcp/.* has other contents"):
        train(settled(SAVES | named))
    seal(run_dir / "global_step_2")
    with pytest.raises(UnreadableCheckpointError, match="looks whole and cannot be loaded"):
        train(settled(SAVES | named))


def test_a_run_refuses_to_start_over_while_none_of_its_checkpoints_is_whole(settled, run_dir):
    for shard in run_dir.glob("global_step_*/actor/dcp/*.distcp"):
        shard.write_bytes(shard.read_bytes()[:-1])
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"there are checkpoints, and none can be resumed.*resume_mode=disable"):
        train(settled(SAVES))
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_starting_over_loses_neither_the_checkpoints_nor_the_record(settled, run_dir, capsys):
    with ready(settled(SAVES | {"trainer.resume_mode": "disable", "trainer.total_training_steps": 1})) as trainer:
        trainer.run()
    aside = run_dir / "previous" / "1"
    assert str(aside) in capsys.readouterr().out
    assert CheckpointStore(aside, None).newest().step == 2
    assert CheckpointStore(run_dir, None).newest().step == 1
    assert (aside / "config.yaml").exists()
    assert [model_step(folder) for folder in (aside, run_dir)] == [2, 1]
    assert RunFolder(aside).read_metrics()[-1]["step"] == 2


def model_step(folder):
    return json.loads((folder / "model" / "training.json").read_text())["step"]


def test_a_finished_run_without_a_checkpoint_keeps_its_model_when_its_command_is_started_again(settled, run_dir):
    for path in (*run_dir.glob("global_step_*"), run_dir / "latest_checkpointed_iteration.txt"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    weights = (run_dir / "model" / "model.safetensors").read_bytes()
    with ready(settled({"trainer.total_training_steps": 1})) as trainer:
        trainer.run()
    assert (run_dir / "previous" / "1" / "model" / "model.safetensors").read_bytes() == weights
    assert model_step(run_dir) == 1


def test_going_back_before_the_step_of_a_model_keeps_it_with_its_record(settled, run_dir):
    back = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(run_dir / "global_step_1")}
    record = (run_dir / "metrics.jsonl").read_text()
    with ready(settled(SAVES | back)):
        aside = run_dir / "previous" / "1"
        assert (model_step(aside), (aside / "metrics.jsonl").read_text()) == (2, record)
        assert not (run_dir / "model").exists()
    with ready(settled(SAVES | {"trainer.total_training_steps": 3})) as trainer:
        trainer.run()
    assert (model_step(run_dir), len(list(run_dir.glob("previous/*")))) == (3, 1), "a model that is continued stays"


def test_the_folder_of_a_run_stands_for_its_newest_checkpoint(settled, run_dir, tmp_path):
    other = shutil.copytree(run_dir, tmp_path / "other")
    trainer = settled(SAVES | {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(other)}).trainer
    store = CheckpointStore(run_dir, None)
    assert find_checkpoint(trainer, {}, store, {}).folder == other / "global_step_2"
    empty = dataclasses.replace(trainer, resume_from_path=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"not a checkpoint\. Give a global_step_N folder .*, or the folder of a run"):
        find_checkpoint(empty, {}, store, {})


def test_a_checkpoint_of_another_folder_does_not_continue_the_run_that_is_here(settled, run_dir, tmp_path):
    other = shutil.copytree(run_dir, tmp_path / "other")
    from_other = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(other / "global_step_1")}
    with ready(settled(SAVES | from_other)) as trainer:
        trainer.run()
    assert [row["step"] for row in learned(run_dir)] == [2]
    assert RunFolder(run_dir / "previous" / "1").read_metrics()[-1]["step"] == 2


def test_a_run_that_had_done_all_its_steps_says_that_nothing_was_trained(settled, run_dir, capsys):
    assert train(settled(SAVES)) == 0
    shown = capsys.readouterr().out
    assert re.search(r"NOTHING WAS TRAINED: .* all its 2 steps.*total_training_steps.*resume_mode=disable", shown)
    assert train(settled(SAVES | {"trainer.total_training_steps": 3})) == 0
    assert "NOTHING" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "name", "more"),
    [
        (f"{AR}.model.path", "model", {}),
        (f"{AR}.model.path", "model", {"trainer.resume_mode": "disable"}),
        (f"{AR}.model.path", "global_step_2/actor/huggingface", {"trainer.resume_mode": "disable"}),
    ],
)
def test_what_an_earlier_run_left_is_no_model_of_a_run_in_its_place(settled, run_dir, key, name, more):
    if not (run_dir / name / "model.safetensors").exists():
        shutil.copytree(run_dir / "model", run_dir / name, dirs_exist_ok=True)
    before = sorted(run_dir.rglob("*"))
    with pytest.raises(ConfigError, match=rf"^{key}=.*/run/{name}: an earlier run left it.*default_local_dir"):
        resumed_context(settled, more | {key: str(run_dir / name)})
    assert sorted(run_dir.rglob("*")) == before


def test_a_logger_that_cannot_start_leaves_no_folder_and_an_earlier_run_where_it_was(settled, run_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    wanted = {"trainer.logger": ["console", "wandb"], "trainer.resume_mode": "disable"}
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file()}
    for more in ({}, {"trainer.default_local_dir": str(tmp_path / "runs" / "new")}):
        with pytest.raises(ConfigError, match="pip install wandb"):
            train(settled(wanted | more))
    assert not (tmp_path / "runs").exists()
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file()} == before


def test_a_change_of_settings_is_logged_with_what_it_means_and_the_same_ones_are_not(settled, run_dir, caplog):
    with caplog.at_level(logging.INFO):
        resumed_context(settled)
        assert [each.message for each in caplog.records if "since global" in each.message and MOVED not in each.message] == []
        resumed_context(settled, {f"{AR}.rollout.n": 4, "trainer.save_freq": 5})
    assert f"since global_step_2: {AR}.rollout.n: 2 -> 4 (changes the trajectory)" in caplog.text
    assert "since global_step_2: trainer.save_freq: 1 -> 5 (harmless: " in caplog.text
    levels = {record.message.split(": ")[1]: record.levelname for record in caplog.records if "since global" in record.message}
    assert levels == {f"{AR}.rollout.n": "WARNING"} | dict.fromkeys(("trainer.save_freq", MOVED), "INFO")


REWARD = "def compute_score(*args, **kwargs): return 1.0"


def test_other_contents_under_the_same_names_are_told_like_other_settings(settled, tmp_path, caplog):
    settings = settled({})
    data, model = tmp_path / "rows.jsonl", shutil.copytree(settings.actor_rollout_ref.model.path, tmp_path / "model")
    source = Path(settings.data.train_files).read_text().splitlines(keepends=True)
    data.write_text("".join(source))
    (tmp_path / "reward.py").write_text(REWARD)
    names = {"data.train_files": str(data), "custom_reward_function.path": str(tmp_path / "reward.py")}
    names |= {f"{AR}.ref.model.path": str(model), f"{AR}.actor.use_kl_loss": True, **SAVES, "trainer.total_training_steps": 1}
    with ready(settled(names)) as trainer:
        trainer.run()
    resumed_context(settled, names)
    assert "other contents" not in caplog.text
    data.write_text("".join(reversed(source)))
    (tmp_path / "reward.py").write_text(REWARD.replace("1", "2"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
    resumed_context(settled, names)
    for key in ("data.train_files", "custom_reward_function.path", f"{AR}.ref.model.path"):
        assert f"since global_step_1: {key}={names[key]}: other contents (changes the trajectory)" in caplog.text


def test_a_secret_is_kept_as_a_checksum_and_the_run_goes_on_with_it(settled, tmp_path, caplog, monkeypatch):
    (tmp_path / "reward.py").write_text(REWARD)
    names = {"custom_reward_function.path": str(tmp_path / "reward.py"), **SAVES, "trainer.total_training_steps": 1}
    names |= {"custom_reward_function.reward_kwargs": {"api_key": "sk-42", "judge": {"hf_token": "hf-42"}, "tokens": 7}}
    argument = "custom_reward_function.reward_kwargs.api_key=sk-42"
    monkeypatch.setattr(sys, "argv", ["verl-memopt", argument, "+custom_reward_function.reward_kwargs={hf_token: hf-42,a: 1}"])
    settings = settled(names)
    assert train(settings) == 0
    written = [path for path in Path(settings.trainer.default_local_dir).rglob("*") if path.is_file()]
    assert {path.name for path in written} >= {"config.yaml", "data.pt", "summary.json"}
    assert [path for path in written if b"sk-42" in path.read_bytes() or b"hf-42" in path.read_bytes()] == []
    resumed_context(settled, names)
    assert "reward_kwargs" not in caplog.text
    names["custom_reward_function.reward_kwargs"] = {"api_key": "sk-43", "tokens": 7}
    resumed_context(settled, names)
    assert "custom_reward_function.reward_kwargs: " in caplog.text
    assert "sk-4" not in caplog.text


def test_changes_with_which_a_run_cannot_go_on_are_refused_by_name(settled, run_dir):
    more = {f"{AR}.actor.optim.optimizer": "SGD", f"{AR}.actor.optim.lr": 1e-2}
    with pytest.raises(ConfigError, match=r"optim.optimizer=SGD: .*AdamW -> SGD \(refused: .*Set it back"):
        resumed_context(settled, more)


def test_a_model_whose_weights_do_not_fit_is_refused_before_a_worker_starts(settled, run_dir, tmp_path):
    other = make_tiny_model(tmp_path / "other", TinyShape(hidden_size=32), seed=1)
    with pytest.raises(ConfigError, match=r"model.path=.*other: its weights are not those of .* \(.* there, .* here"):
        resumed_context(settled, {f"{AR}.model.path": str(other)})


def test_a_critic_cannot_go_on_from_a_checkpoint_without_one_or_without_its_model(settled, run_dir):
    with pytest.raises(ConfigError, match=r"algorithm\.adv_estimator=gae: there is no critic in .*global_step_2"):
        resumed_context(settled, {"algorithm.adv_estimator": "gae"})
    parts = {"algorithm.adv_estimator": "gae", "critic.checkpoint.load_contents": ["extra"]}
    with pytest.raises(ConfigError, match=r"critic\.checkpoint\.load_contents=\['extra'\]: a run cannot go on from"):
        resumed_context(settled, parts)


def test_the_parts_of_every_trained_role_are_listed(settled):
    settings = settled({"algorithm.adv_estimator": "gae", "critic.checkpoint.load_contents": ["model"]})
    actor = settings.actor_rollout_ref.actor
    assert loaded_parts(actor, None) == {f"{AR}.actor.checkpoint.load_contents": ["model", "optimizer", "extra"]}
    assert loaded_parts(actor, settings.critic)["critic.checkpoint.load_contents"] == ["model"]


def test_shapes_are_kept_as_torch_reads_them_back_without_trust(tmp_path):
    torch.save(plain_shapes({"a": (2, 3), "b": ()}), tmp_path / "f")
    assert torch.load(tmp_path / "f", weights_only=True) == {"a": [2, 3], "b": []}


def seeded(settings, resumed):
    return with_seeds(settings.data, settings.actor_rollout_ref.rollout, resumed)


@pytest.mark.parametrize(
    ("more", "resumed", "expected"),
    [
        ({"data.seed": 3}, None, (3, 3)),
        ({"data.seed": 3}, 8, (3, 3)),
        ({"data.seed": 3, f"{AR}.rollout.seed": 4}, None, (3, 4)),
        ({"data.seed": None}, 8, (8, 8)),
        ({"data.seed": None, f"{AR}.rollout.seed": 4}, 8, (8, 4)),
    ],
)
def test_seeds_are_those_of_the_settings_else_the_resumed_runs_and_nothing_else_changes(settled, caplog, more, resumed, expected):
    caplog.set_level(logging.INFO)
    settings = settled(more)
    data, rollout = seeded(settings, resumed)
    assert (data.seed, rollout.seed) == expected
    assert dataclasses.replace(data, seed=settings.data.seed) == settings.data
    given = settings.actor_rollout_ref.rollout
    assert dataclasses.replace(rollout, seed=given.seed) == given
    assert (f"this run uses {resumed} (from the checkpoint)" in caplog.text) == (settings.data.seed is None)


def test_a_seed_that_nobody_gave_is_drawn_and_logged(settled, caplog):
    settings = settled({"data.seed": None})
    with caplog.at_level(logging.INFO):
        drawn = [seeded(settings, None) for _ in range(4)]
    assert len({data.seed for data, _ in drawn}) > 1
    for data, rollout in drawn:
        assert data.seed == rollout.seed
        assert f"this run uses {data.seed} (drawn)" in caplog.text
