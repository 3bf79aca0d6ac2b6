import json
import os

import pytest
from blake3 import blake3

from verl_memopt.errors import ConfigError
from verl_memopt.model.export import RECORD, whole_folder, write_record
from verl_memopt.observe.own_files import differs_from_name, mark, others_in_model, private_files, with_umask
from verl_memopt.observe.run_folder import BESIDE, IN_PASSING, RUN_FILES, RunFolder, refuse_what_is_not_ours
from verl_memopt.observe.samples import dump_samples, refuse_other_files

NAMES = [name.replace("*[0-9]", "7").replace("*", "7") for name in (*RUN_FILES, *BESIDE, *IN_PASSING)]


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def saved(folder, text="weights"):
    import torch

    with whole_folder(folder) as aside:
        (aside / "model.safetensors").write_text(text)
        write_record(aside, 1, "actor", "base", torch.float32)


@pytest.mark.parametrize("inside", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("name", NAMES)
def test_a_users_own_file_under_a_name_of_ours_refuses_a_run(name, inside, tmp_path):
    path = tmp_path / name / "mine" if inside else tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    before = files(tmp_path)
    with pytest.raises(ConfigError, match=r"no run wrote it.*Move it away, or give another folder"):
        refuse_what_is_not_ours(tmp_path)
    assert files(tmp_path) == before


def test_what_a_run_wrote_and_what_has_another_name_is_no_obstacle(tmp_path):
    (tmp_path / "notes.md").write_text("mine")
    (tmp_path / "model").mkdir()
    refuse_what_is_not_ours(tmp_path)
    RunFolder(tmp_path).begin("new: true\n", None)
    saved(tmp_path / "model")
    refuse_what_is_not_ours(tmp_path)
    (tmp_path / "model" / "notes.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes.md is there"):
        refuse_what_is_not_ours(tmp_path)


def test_a_checkpoint_that_was_copied_into_a_new_folder_is_one(tmp_path):
    (tmp_path / "global_step_3").mkdir()
    (tmp_path / "global_step_3" / "notes.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"global_step_3"):
        refuse_what_is_not_ours(tmp_path)
    (tmp_path / "global_step_3" / "meta.json").write_text("{}")
    refuse_what_is_not_ours(tmp_path)


def test_a_saved_model_replaces_its_own_files_and_keeps_those_of_the_user(tmp_path):
    saved(tmp_path / "model", "old")
    (tmp_path / "model" / "notes.md").write_text("mine")
    saved(tmp_path / "model", "new")
    assert {path.name: path.read_text() for path in (tmp_path / "model").iterdir() if path.name != RECORD} == {
        "model.safetensors": "new",
        "notes.md": "mine",
    }
    assert json.loads((tmp_path / "model" / RECORD).read_text())["files"] == ["model.safetensors", RECORD]
    assert others_in_model(tmp_path / "model") == ["notes.md"]


@pytest.mark.parametrize("name", ["model", "model.partial", "model.old.partial"])
def test_a_model_is_not_written_over_a_folder_that_no_run_wrote(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "model.safetensors").write_text("mine")
    (tmp_path / "model").mkdir(exist_ok=True)
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="Move it away"):
        saved(tmp_path / "model")
    assert files(tmp_path) == before


def test_a_dump_is_not_written_over_rows_of_the_user(tmp_path):
    dump_samples(tmp_path, 1, [])
    dump_samples(tmp_path, 1, [])
    refuse_other_files(tmp_path, "trainer.rollout_data_dir")
    (tmp_path / "2.jsonl").write_text('{"question": "1+1="}\n')
    for refused in (lambda: dump_samples(tmp_path, 2, []), lambda: refuse_other_files(tmp_path, "trainer.rollout_data_dir")):
        with pytest.raises(ConfigError, match=r"2.jsonl is there"):
            refused()


@pytest.mark.parametrize(("private", "modes"), [(True, (0o700, 0o600)), (False, (0o750, 0o640))])
def test_what_a_run_writes_is_private_unless_the_umask_decides(private, modes, tmp_path):
    before = os.umask(0o027)
    try:
        with private_files(private):
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "metrics.jsonl").write_text("")
            (tmp_path / "moved").write_text("")
            (tmp_path / "moved").chmod(0o666)
            with_umask(tmp_path / "moved")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    paths = (tmp_path / "run", tmp_path / "run" / "metrics.jsonl", tmp_path / "moved")
    assert [path.stat().st_mode & 0o777 for path in paths] == [*modes, modes[1]]


def test_the_mark_stays_with_a_record_and_goes_with_a_refused_start(tmp_path):
    folder = RunFolder(tmp_path)
    folder.take_back(folder.begin("new: true\n", None))
    assert list(tmp_path.iterdir()) == []
    folder.begin("new: true\n", None)
    assert not mark(tmp_path)
    refuse_what_is_not_ours(tmp_path)


def test_an_input_of_a_run_that_was_changed_since_is_told_by_its_name(tmp_path):
    contents = b"rows"
    path = tmp_path / "inputs" / f"train-{blake3(contents).hexdigest()[:12]}.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"others")
    assert not differs_from_name(path), "a file of the user's with such a name"
    mark(tmp_path)
    assert differs_from_name(path)
    path.write_bytes(contents)
    assert not differs_from_name(path)
