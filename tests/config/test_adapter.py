import json
import logging

import pytest

MODEL = "actor_rollout_ref.model"


def folder_of(tmp_path, **config):
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return {f"{MODEL}.lora_adapter_path": str(tmp_path)}


def test_what_is_not_given_is_read_from_the_folder(settled, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = {"r": 6, "lora_alpha": 24, "target_modules": ["q_proj", "v_proj"], "exclude_modules": None, "bias": "none"}
    model = settled(folder_of(tmp_path, **config)).actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (6, 24.0, ["q_proj", "v_proj"])
    assert model.exclude_modules is None
    (notice,) = [text for text in caplog.messages if "lora_adapter_path" in text]
    assert notice.endswith(f"sets {MODEL}.lora_rank=6, {MODEL}.lora_alpha=24, {MODEL}.target_modules=[q_proj,v_proj]")


def test_a_key_that_is_given_keeps_its_value(settled, tmp_path):
    given = folder_of(tmp_path, r=6, lora_alpha=24)
    assert settled(given | {f"{MODEL}.lora_alpha": 8}).actor_rollout_ref.model.lora_alpha == 8
    own = settled(given | {f"{MODEL}.lora.rank": 4}).actor_rollout_ref.model
    assert (own.lora_rank, own.lora_alpha) == (4, 16)


def test_a_folder_that_says_nothing_leaves_the_rank_to_the_user(complaint, tmp_path):
    said = f"{MODEL}.lora_rank=0, {MODEL}.lora_adapter_path={tmp_path}: adapters are given and none are asked for. "
    assert complaint({f"{MODEL}.lora_adapter_path": str(tmp_path)}).startswith(said)
    assert complaint(folder_of(tmp_path, lora_alpha=8)).startswith(said)


@pytest.mark.parametrize("text", ["{", "[]", "\ufeff{}"])
def test_a_file_that_is_no_json_object_is_refused(complaint, tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    assert f"={tmp_path}: its adapter_config.json is no JSON object." in complaint({f"{MODEL}.lora_adapter_path": str(tmp_path)})


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_rslora", True), ("use_dora", True), ("rank_pattern", {"q_proj": 2}), ("modules_to_save", ["lm_head"])],
)
def test_adapters_of_another_kind_are_refused(complaint, settled, tmp_path, name, value):
    assert f"its adapter_config.json asks for {name}; " in complaint(folder_of(tmp_path, r=4, **{name: value}))
    assert settled(folder_of(tmp_path, r=4, **{name: None})).actor_rollout_ref.model.lora_rank == 4


def test_dropout_of_the_adapters_is_named(settled, tmp_path, caplog):
    settled(folder_of(tmp_path, r=4, lora_dropout=0.05))
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.getMessage().endswith("the adapters were trained with dropout, and are trained on without it")
