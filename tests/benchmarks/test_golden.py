import json
import shutil

from benchmarks import golden

AR = "actor_rollout_ref"


def test_a_case_is_answered_with_its_error_or_with_what_it_changes_and_what_is_logged():
    base = golden.flat(golden.to_plain(golden.settings_from_mapping(golden.LEAST)))
    wrong = golden.answer({"mapping": golden.LEAST | {"trainer.save_freq": "often"}}, base)
    assert wrong["error"].startswith("ConfigError: trainer.save_freq=often: expected a whole number")
    assert "settings" not in wrong
    right = golden.answer({"mapping": golden.LEAST | {"trainer.save_freq": 7, f"{AR}.model.use_liger": True}}, base)
    assert right["settings"] == {"trainer.save_freq": 7}
    assert len(right["log"]) == 1
    assert right["log"][0].startswith(f"WARNING {AR}.model.use_liger=true does nothing here")


def test_every_recipe_and_packaged_config_is_among_the_configs():
    names = {name for name, _ in golden.configs()}
    assert {"ppo_trainer", "rloo_trainer memory=24g", "recipe/rloo/toy.yaml", "recipe/rloo/toy.yaml +device=gpu"} <= names
    assert {"recipe/ppo/toy.yaml", "recipe/rlt/config/teacher_rlt_toy.yaml"} <= names


def test_equal_outputs_pass_and_a_difference_is_told_once_with_where_it_shows(tmp_path, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    golden.write(old / "configs.json", {"a": {"lr": 1, "n": 2}, "b": {"lr": 1, "n": 3}})
    (old / "cases.jsonl").write_text(json.dumps({"case": {"mapping": {}}, "answer": {"error": "no"}}) + "\n")
    shutil.copytree(old, new)
    assert golden.main(["--compare", str(old), str(new)]) == 0
    golden.write(new / "configs.json", {"a": {"lr": 5, "n": 2}, "b": {"lr": 5, "n": 3}})
    (new / "cases.jsonl").write_text("")
    capsys.readouterr()
    assert golden.main(["--compare", str(old), str(new)]) == 1
    said = capsys.readouterr().out
    assert said.count('+ "lr": 5') == 1
    assert "2 differences, in 3 of 3 outputs" in said
