"""The command line as a person meets it: what it lists, what it prints, how it ends."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.config.conftest import OVERRIDES
from tests.docs.pages import DOCS, blocks
from verl_memopt import __version__
from verl_memopt.cli import COMMANDS, main
from verl_memopt.config.loader import settings_from_mapping, to_plain

SHAPE = ["knobs", "--measure", "--shape", "qwen3-0.6b"]


def ended(arguments):
    """Gives the code with which argparse ends the program."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code


def test_help_lists_every_command(capsys):
    assert ended(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (_, text) in COMMANDS.items():
        assert f"{name:10} {text}" in shown


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_the_page_of_commands_has_the_help_of_each_as_it_is(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert ended([*command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: verl-memopt {command}".rstrip())
    assert shown in blocks(DOCS / "cli.md", "")


def test_the_version_is_the_packages(capsys):
    assert ended(["--version"]) == 0
    assert capsys.readouterr().out == f"verl-memopt {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["trian"]])
def test_without_a_command_or_with_an_unknown_one_the_usage_is_shown_on_standard_error(arguments, capsys):
    assert ended(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("usage: verl-memopt")
    assert not arguments or arguments[0] in shown.err


def python(*arguments):
    """Gives the finished process of an interpreter that finds what this one finds."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.parametrize("entry", ["verl_memopt", "verl_memopt.cli"])
def test_it_is_a_module_to_run_too(entry):
    process = python("-m", entry, "--version")
    assert (process.returncode, process.stdout) == (0, f"verl-memopt {__version__}\n")


def test_help_imports_neither_torch_nor_ray_nor_vllm():
    code = "import sys\nfrom verl_memopt.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    print(*sys.modules)"
    process = python("-c", code)
    assert "verl_memopt" in process.stdout
    assert not {"torch", "ray", "vllm", "transformers"} & set(process.stdout.split())


def test_cfg_prints_yaml_that_loads_back_as_the_same_settings(capsys):
    assert main(["train", "--cfg", "job", *OVERRIDES, "actor_rollout_ref.rollout.n=6"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["actor_rollout_ref"]["rollout"]["n"] == 6
    assert to_plain(settings_from_mapping(shown)) == shown


def test_the_printed_yaml_is_a_config_to_start_from(capsys, tmp_path):
    assert main(["train", "--cfg", "job", *OVERRIDES]) == 0
    first = capsys.readouterr().out
    (tmp_path / "mine.yaml").write_text(first)
    assert main(["train", "--config-dir", str(tmp_path), "--config-name", "mine", "--cfg", "job"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(first)


def test_a_users_mistake_is_one_line_on_standard_error(capsys):
    assert main(["train", *OVERRIDES, "trainer.total_epoch=1"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "ConfigError: trainer.total_epoch: no such key. Did you mean trainer.total_epochs?\n"


def test_a_setting_after_only_is_a_setting_and_no_knob(tiny_folder, capsys):
    """The rows of --only are measured with it, so a key that does not exist is refused as a key."""
    assert main(["knobs", "--measure", "--model", str(tiny_folder), "--only", "chunked_logprob", "lora", "trainer.no_key=1"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("ConfigError: trainer.no_key: no such key.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report"], "RUN_DIR"),
        (["knobs", "--measure", "--model", "folder", "--json"], "--measure writes the ladder to a file: --json FILE"),
        ([*SHAPE, "--layers", "1", "--vocabulary", "64"], "--vocabulary 64: too small. The tokenizer needs at least 259."),
        *(
            ([*SHAPE, option, "0"], f"argument {option}: 0 is not a whole number of at least 1")
            for option in ("--layers", "--rows", "--prompt", "--response")
        ),
        (["toy", "folder", "--seed", "lucky"], "argument --seed: invalid int value: 'lucky'"),
        *(
            (["fit", "model=qwen3_0_6b", option, size], f"argument {option}: {size} is no number of GB above 0")
            for option in ("--memory", "--host-memory")
            for size in ("0", "-1", "nan", "inf", "24x")
        ),
    ],
)
def test_an_argument_that_is_missing_or_cannot_be_is_named(arguments, said, capsys):
    assert ended(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["export", "run", "out", "--step", "1" * 5000], "neither a step nor best"),
        (["export", "x" * 300, "out"], "no file can have this name"),
        (["check", "a\0b"], "no file can have this name"),
        (["report", "run", "--out", "ü" * 128], "no file can have this name"),
        (["chat", "run", "--max-tokens", "1" * 5000], "not a whole number"),
        (["chat", "run", "--temperature", "1e-300"], "0, or at least"),
        (["chat", "run", "--temperature", "nan"], "0, or at least"),
    ],
    ids=lambda value: "_".join(each[:12] for each in value).replace("\0", "") if isinstance(value, list) else "",
)
def test_an_argument_that_no_call_could_use_is_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    line = capsys.readouterr().err.splitlines()[-1]
    assert (caught.value.code, said in line, len(line) < 300) == (2, True, True), line


def test_a_working_directory_that_was_deleted_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["check", "run"]) == 2
    assert capsys.readouterr().err == "UserError: the working directory was deleted. Change to one that exists.\n"


@pytest.fixture
def run_dir(tmp_path):
    """What a run of two steps leaves at the least."""
    folder = tmp_path / "first"
    folder.mkdir()
    rows = [{"step": step, "critic/score/mean": step / 2, "val-core/toy/reward/mean@1": step / 4} for step in (0, 1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_report_makes_summary_and_charts_of_a_run_again(run_dir, capsys):
    assert main(["report", str(run_dir)]) == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["validation_before"], summary["validation_after"]) == (2, 0.0, 0.5)
    assert (run_dir / "reward_and_validation.png").stat().st_size > 0
    assert capsys.readouterr().out.rstrip().splitlines()[-1] == str(run_dir / "summary.json")


def test_report_compares_runs_and_leaves_their_folders_alone(run_dir, tmp_path, capsys):
    other = shutil.copytree(run_dir, tmp_path / "second")
    assert main(["report", str(run_dir), str(other), "--out", str(tmp_path / "both")]) == 0
    shown = capsys.readouterr().out
    assert "first" in shown
    assert "second" in shown
    assert list((tmp_path / "both").glob("*.png"))
    assert [path.name for path in run_dir.iterdir()] == [path.name for path in other.iterdir()] == ["metrics.jsonl"]


def test_report_writes_nothing_over_a_users_files_or_another_runs(run_dir, tmp_path, capsys):
    mine, other = tmp_path / "mine", shutil.copytree(run_dir, tmp_path / "second")
    for name in ("summary.json", "compare_reward_and_validation.png"):
        mine.mkdir(exist_ok=True)
        (mine / name).write_text("mine")
        for runs in ([run_dir], [run_dir, other]):
            assert main(["report", *map(str, runs), "--out", str(mine)]) == 2
            assert f"{mine / name} is there" in capsys.readouterr().err
        (mine / name).unlink()
    for place, said in ((other, "folder of a run"), (other / "metrics.jsonl", "this is a file")):
        assert main(["report", str(run_dir), "--out", str(place)]) == 2
        assert said in capsys.readouterr().err
    assert [path.name for path in other.iterdir()] == ["metrics.jsonl"]


def test_report_draws_its_charts_again_where_it_drew_them_before(run_dir, tmp_path):
    for _ in range(2):
        assert main(["report", str(run_dir), "--out", str(tmp_path / "charts")]) == 0


@pytest.mark.parametrize(
    "command",
    [
        ["knobs", "--measure", "--model", "none", "--json"],
        ["knobs", "--measure", "--model", "none", "--text"],
        ["knobs", "--measure", "--model", "none", "--png"],
        ["score", "rows.jsonl", "--student", "none", "--out"],
        ["score", "rows.jsonl", "--student", "none", "--out", "new.jsonl", "--best"],
    ],
    ids=lambda command: " ".join((command[0], command[-1])),
)
def test_a_command_is_told_of_a_file_that_is_there_before_it_begins(command, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    for name, said in (("mine", "is there already; give another name, or remove it"), ("", "is a folder; give a file")):
        with pytest.raises(SystemExit):
            main([*command, str(tmp_path / name)])
        assert said in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shutil.rmtree, "no such run folder"),
        (lambda run: (run / "metrics.jsonl").unlink(), "contains neither metrics.jsonl nor memory_timeline.csv"),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 0}\n "critic": 1}\n'), "metrics.jsonl:2: not JSON"),
        (lambda run: (run / "summary.json").write_text("{"), "summary.json: not JSON"),
    ],
)
def test_report_names_a_folder_that_holds_no_run_or_a_damaged_one(run_dir, capsys, damage, said):
    damage(run_dir)
    assert main(["report", str(run_dir)]) == 2
    shown = capsys.readouterr().err
    assert str(run_dir) in shown
    assert said in shown
    assert len(shown.splitlines()) == 1


def test_toy_makes_model_and_data_and_leaves_them_when_asked_again(toy, capsys):
    made = {path: path.stat().st_mtime_ns for path in toy.rglob("*")}
    assert {"model", "train.parquet", "val.parquet", "toy.json"} <= {path.name for path in made}
    assert json.loads((toy / "toy.json").read_text())["seed"] == 0
    assert main(["toy", str(toy), "--seed", "0"]) == 0
    assert {path: path.stat().st_mtime_ns for path in toy.rglob("*")} == made
    assert f"{toy} is ready" in capsys.readouterr().err


def test_toy_does_not_replace_what_is_no_toy_task(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["toy", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"DataError: {tmp_path}: it exists and is not a toy task")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.fixture(scope="module")
def bash_script():
    with contextlib.redirect_stdout(io.StringIO()) as script:
        assert main(["completion", "bash"]) == 0
    return script.getvalue()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ex"], {"export"}),
        (["train", "--until"], {"--until-it-fits"}),
        (["train", "trainer.resume"], {"trainer.resume_mode=", "trainer.resume_from_path="}),
        (["fit", "memory=24"], {"memory=24g"}),
        (["sft", "--cfg", "job", "num_train"], {"num_train_epochs="}),
        (["chat", "trainer.resume"], set()),
    ],
)
def test_a_shell_completes_commands_options_and_settings(words, expected, bash_script):
    line = " ".join(f"'{word}'" for word in ("verl-memopt", *words))
    ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words)}; _verl_memopt; printf "%s\\n" "${{COMPREPLY[@]}}"'
    found = subprocess.run(["bash", "-c", f"{bash_script}\n{ask}"], capture_output=True, text=True, check=True)
    assert set(found.stdout.split()) == expected
