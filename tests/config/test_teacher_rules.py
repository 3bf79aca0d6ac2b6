"""What a run that distills refuses, and which keys of a teacher have no effect."""

import logging

import pytest
import yaml

from verl_memopt import api
from verl_memopt.config.keys import value_at
from verl_memopt.config.loader import load_settings, log_objective
from verl_memopt.errors import ConfigError

AR = "actor_rollout_ref"
TAUGHT = {"algorithm.adv_estimator": "distill", "teacher.model.path": "big"}
ASKED = {"teacher.model.path": None, "teacher.endpoint.url": "http://host/v1"}
LIMITS = {
    "a policy learns nothing from itself at its own prompt": (
        {"algorithm.adv_estimator": "distill", "teacher.model.path": None}, "distill.teacher_prompt",
        ["{prompt} The sum is {answer}."], [None],
    ),
    "a template tells something of the row": (
        TAUGHT, "distill.teacher_prompt", ["{prompt} {hint}", "{question}"], ["{prompt", "Think."],
    ),
    "distillation has a weight": (TAUGHT, "distill.coef", [0.5], [0.0]),
    "rewards that are not learned from have no KL": (TAUGHT, "algorithm.use_kl_in_reward", [False], [True]),
    "groups without different rewards teach too": (TAUGHT, "algorithm.filter_groups.enable", [False], [True]),
    "an estimate needs samples of the whole distribution": (
        TAUGHT | {"distill.divergence": "sampled"}, f"{AR}.rollout.top_p", [1.0], [0.9],
    ),
    "an exact divergence does not": (TAUGHT, f"{AR}.rollout.top_p", [1.0, 0.9], []),
    "an estimate needs samples of the policy": (
        {"algorithm.adv_estimator": "sft", "teacher.model.path": "big", "distill.coef": 1.0, f"{AR}.rollout.n": 1,
         f"{AR}.actor.policy_loss.loss_mode": "gpg"},
        "distill.divergence", ["reverse_kl"], ["sampled"],
    ),
    "a server has the log-probs of one temperature": (
        TAUGHT | ASKED | {"distill.divergence": "sampled"}, f"{AR}.rollout.temperature", [1.0], [0.7],
    ),
    "a server has no states": (TAUGHT | ASKED, "distill.top_k", [20], [None]),
    "ids of the most probable tokens come from vLLM": (
        TAUGHT | ASKED | {"distill.top_k": 20}, "teacher.endpoint.api", ["vllm"], ["openai"],
    ),
    "there is one teacher": (TAUGHT | {"distill.divergence": "sampled"}, "teacher.endpoint.url", [None], ["http://host/v1"]),
    "further teachers come after a first one": (
        {"algorithm.adv_estimator": "distill", "distill.teacher_prompt": "{prompt}"}, "teacher.further_models", [{}],
        [{"own": "small"}],
    ),
    "other devices have no states of the teacher": (
        TAUGHT | {"teacher.enable_resource_pool": True}, "distill.top_k", [8], [None],
    ),
    "other devices need workers": (
        TAUGHT | {"teacher.enable_resource_pool": True, "distill.top_k": 8}, "trainer.worker_group", ["ray"], ["local"],
    ),
    "each further teacher has a folder": (TAUGHT, "teacher.further_models", [{"own": "small"}], [{"own": 1}]),
    "a text has no divergence": (TAUGHT | {"distill.align": "text"}, "distill.divergence", ["sampled"], ["reverse_kl"]),
    "a server of another tokenizer needs its tokenizer": (
        TAUGHT | ASKED | {"distill.align": "text", "distill.divergence": "sampled"}, "teacher.model.tokenizer_path", ["big"],
        [None],
    ),
    "adapters need a base": (
        TAUGHT | {"teacher.model.path": None, "teacher.model.lora_adapter_path": "a"}, f"{AR}.model.lora_rank", [2], [0],
    ),
    "mapped files have no adapters": (
        TAUGHT | {"teacher.model.lora_adapter_path": "a", "teacher.fsdp_config.param_offload": True}, f"{AR}.model.load_mode",
        ["stream"], ["mmap"],
    ),
    "a reference teaches at the same prompt too": (
        {"algorithm.adv_estimator": "distill"}, "teacher.weights", ["reference"], ["policy"],
    ),
    "only datasets have columns for tokens": (
        {"teacher.log_probs_key": "said", "distill.coef": 1.0, "distill.top_k": 8, f"{AR}.rollout.n": 1,
         f"{AR}.actor.policy_loss.loss_mode": "gpg"},
        "algorithm.adv_estimator", ["sft"], ["distill"],
    ),
    "beta mixes": (TAUGHT | {"distill.divergence": "jsd"}, "distill.beta", [0.1, 0.9], [0.0, 1.0]),
}  # fmt: skip


@pytest.mark.parametrize("what", LIMITS)
def test_a_value_passes_or_is_refused_by_name(assert_limit, what):
    assert_limit(*LIMITS[what])


def test_the_weight_follows_the_estimator(settled):
    assert settled(TAUGHT).distill.coef == 1.0
    assert settled({"algorithm.adv_estimator": "rloo"}).distill.coef == 0.0


def test_keys_of_a_teacher_that_is_not_there_have_no_effect(settled, caplog):
    with caplog.at_level(logging.WARNING):
        settled({"algorithm.adv_estimator": "rloo", "teacher.model.path": "big", "distill.beta": 0.3})
    said = caplog.text
    assert "teacher.model.path=big has no effect here: distill.coef is 0" in said
    assert "distill.beta=0.3 has no effect here" in said


def test_a_teacher_that_streams_has_one_device(settled):
    with pytest.raises(ConfigError, match=r"teacher\.fsdp_config\.param_offload=stream, .*n_gpus_per_node=2"):
        settled(TAUGHT | {"teacher.fsdp_config.param_offload": "stream", "trainer.n_gpus_per_node": 2})


def test_the_log_says_what_is_learned(caplog):
    least = ["data.train_files=a", "data.val_files=null", f"{AR}.model.path=small", f"{AR}.actor.use_dynamic_bsz=true"]
    with caplog.at_level(logging.INFO):
        log_objective(load_settings("distill_trainer", [*least, "teacher.model.path=big"]))
        log_objective(load_settings("grpo_trainer", [*least, "teacher.model.path=big", "distill.coef=0.5"]))
    alone, beside = (record.message for record in caplog.records if record.message.startswith("objective"))
    assert alone == "objective: distillation: 1 x KL from the policy to the teacher, exact (teacher: big)"
    assert "advantages grpo" in beside
    assert "0.5 x KL from the policy to the teacher" in beside


# verl's section of distillation.

LOSS, ONE = "distillation.distillation_loss", "distillation.teacher_models.teacher_model"
OF_VERL = {
    "distillation.enabled": True, f"{ONE}.model_path": "big", f"{LOSS}.loss_mode": "k1", f"{LOSS}.use_policy_gradient": True,
}  # fmt: skip
READ = {
    "beside rewards": ({f"{LOSS}.distillation_loss_coef": 0.3}, {"distill.coef": 0.3, "algorithm.adv_estimator": "rloo"}),
    "weight 1": ({}, {"distill.coef": 1.0, "algorithm.adv_estimator": "rloo"}),
    "alone": ({f"{LOSS}.use_task_rewards": False}, {"distill.coef": 1.0, "algorithm.adv_estimator": "distill"}),
    "alone, whatever the weight": (
        {f"{LOSS}.use_task_rewards": False, f"{LOSS}.distillation_loss_coef": 0.3}, {"distill.coef": 1.0},
    ),
    "another name of the estimate": ({f"{LOSS}.loss_mode": "kl", f"{LOSS}.loss_max_clamp": None}, {"distill.coef": 1.0}),
}  # fmt: skip


@pytest.mark.parametrize("what", READ)
def test_verls_estimate_in_the_policy_gradient_is_ours(settled, what):
    further, expected = READ[what]
    settings = settled({"algorithm.adv_estimator": "rloo"} | OF_VERL | further)
    expected = expected | {"distill.divergence": "sampled", "teacher.model.path": "big"}
    assert {key: value_at(settings, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("further", "name", "way_out"),
    [
        ({f"{LOSS}.use_policy_gradient": False}, f"{LOSS}.use_policy_gradient=false", f"Set {LOSS}.use_policy_gradient=true"),
        ({f"{LOSS}.loss_mode": "forward_kl_topk"}, f"{LOSS}.loss_mode=forward_kl_topk", "distill.top_k"),
        ({f"{LOSS}.loss_mode": "k3"}, f"{LOSS}.loss_mode=k3", "distill.divergence=reverse_kl"),
        ({f"{LOSS}.loss_max_clamp": 10.0}, f"{LOSS}.loss_max_clamp=10.0", "Set it to null"),
        ({f"{LOSS}.policy_loss_mode": "gspo"}, f"{LOSS}.policy_loss_mode=gspo", "Set it to vanilla"),
        ({"distillation.teacher_models.other.model_path": "x"}, "teacher_models.other.model_path=x", "teacher.further_models"),
        ({"distillation.self_distillation": True}, "distillation.self_distillation=true", "docs/distill.md"),
        ({"distill.divergence": "jsd"}, "distill.divergence=jsd", "Keep distill.divergence"),
        ({"distillation.enabled": "maybe"}, "distillation.enabled=maybe", "Correct it"),
    ],
)
def test_what_verl_computes_otherwise_is_refused_by_name(complaint, further, name, way_out):
    lines = complaint({"algorithm.adv_estimator": "rloo"} | OF_VERL | further).splitlines()
    assert any(name in line and way_out in line for line in lines), lines


def test_verls_pool_of_the_teacher_and_a_section_that_is_off_do_nothing(settled, caplog):
    plain = settled({"algorithm.adv_estimator": "rloo"} | OF_VERL)
    with caplog.at_level(logging.WARNING):
        idle = {"distillation.n_gpus_per_node": 4, f"{ONE}.inference.name": "vllm", f"{LOSS}.topk": 32}
        assert settled({"algorithm.adv_estimator": "rloo"} | OF_VERL | idle) == plain
    for key, value in idle.items():
        assert f"{key}={value} does nothing here" in caplog.text
    off = settled({"algorithm.adv_estimator": "rloo"} | OF_VERL | {"distillation.enabled": False})
    assert off == settled({"algorithm.adv_estimator": "rloo"})


def test_verls_section_reads_the_same_from_the_command_line_a_file_and_python(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"defaults": ["grpo_trainer", "_self_"], **nested(OF_VERL)}))
    least = [f"data.train_files={rows}", "data.val_files=null", f"{AR}.model.path=small", f"{AR}.actor.use_dynamic_bsz=true"]
    words = [f"{key}={str(value).lower()}" for key, value in OF_VERL.items()]
    found = [load_settings("grpo_trainer", [*least, *words]), load_settings("mine", least, str(tmp_path))]
    given = {"distillation": nested(OF_VERL)["distillation"]}, OF_VERL
    found += [api.Call("small", [{"prompt": "1+1="}], each, run_dir=tmp_path / "run").load()[1] for each in given]
    for settings in found:
        assert (settings.distill.divergence, settings.distill.coef, settings.teacher.model.path) == ("sampled", 1.0, "big")
        assert settings.algorithm.adv_estimator == "grpo"


def nested(flat):
    tree = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return tree
