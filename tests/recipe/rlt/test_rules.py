"""What the settings of RLT must hold together."""

import pytest

from verl_memopt.recipes.rlt.rules import RLT_RULES

AR, MODEL, RLT = "actor_rollout_ref", "reward_model.model", "reward_model.rlt"
STUDENT = {"reward_model.enable": True, "reward_model.reward_manager": "rlt", f"{MODEL}.path": "student"}
KL = {f"{AR}.actor.use_kl_loss": True}
ALIAS = {**STUDENT, **KL, f"{MODEL}.path": None}
SWAP = {**STUDENT, **KL, "reward_model.residency": "swap", f"{AR}.ref.fsdp_config.param_offload": True}


@pytest.mark.parametrize("more", [STUDENT, ALIAS, SWAP, ALIAS | {"reward_model.residency": "alias_ref"}])
def test_a_student_of_its_own_and_the_reference_as_student_are_settings_without_a_warning(settled, caplog, more):
    assert settled(more).reward_model.recipe
    assert caplog.messages == []


def test_the_values_of_the_recipe_are_the_defaults(settled):
    rlt = settled(STUDENT).reward_model.rlt
    assert (rlt.answer_log_prob_coeff, rlt.kl_penalty_reward_coeff) == ([1.0, 0.01], [3.0, 0.03])
    assert (rlt.not_matched_penalty, rlt.max_tokens_per_micro_batch, rlt.logits_chunk_tokens) == (-1.0, 8192, 512)


def test_a_reward_function_or_a_classifier_is_no_student(settled):
    assert not settled({}).reward_model.recipe
    classifier = {"reward_model.enable": True, f"{MODEL}.path": "judge", "critic.ppo_max_token_len_per_gpu": 4096}
    assert not settled({**classifier, "critic.use_dynamic_bsz": True}).reward_model.recipe


def test_the_student_reads_at_the_temperature_of_the_rollouts(settled, complaint):
    heat, own = f"{AR}.rollout.temperature", f"{RLT}.unbias_student_log_probs_temp"
    for more in ({heat: 0.7, own: 0.7}, {heat: 0.7}, {heat: 0.7, f"{AR}.rollout.do_sample": False, own: 1.0}):
        settled(STUDENT | more | {"algorithm.adv_estimator": "reinforce_plus_plus"})
    assert complaint(STUDENT | {heat: 0.7, own: 0.5}).startswith(f"{own}=0.5, {heat}=0.7: both sides of the KL would")


CASES = [
    (STUDENT | {f"{RLT}.answer_log_prob_coeff": [1.0]}, f"{RLT}.answer_log_prob_coeff=[1.0]", "1 weights for 2 reductions"),
    (STUDENT | {f"{RLT}.kl_penalty_reward_coeff": [1.0] * 3}, f"{RLT}.kl_penalty_reward_coeff", "3 weights for 2 reductions"),
    (STUDENT | {f"{RLT}.reduction_kl_fn": ["mean", "mean"]}, f"{RLT}.reduction_kl_fn", "a reduction appears twice"),
    (STUDENT | {f"{RLT}.reduction_log_prob_fn": ["min", "min"]}, f"{RLT}.reduction_log_prob_fn", "Name it once"),
    (STUDENT | {"reward_model.enable": False}, "reward_model.reward_manager=rlt, reward_model.enable=false", "enable=true"),
    (ALIAS | {"reward_model.residency": "separate"}, f"{MODEL}.path=null, reward_model.residency=separate", "auto"),
    (STUDENT | KL | {"reward_model.residency": "alias_ref"}, f"{MODEL}.path=student, reward_model.residency=alias_ref", "Remove"),
    (ALIAS | {f"{AR}.actor.use_kl_loss": False}, f"{MODEL}.path=null", "without a KL there is no reference"),
    (STUDENT | {f"{RLT}.kl_teacher": "reference"}, f"{RLT}.kl_teacher=reference", "kl_teacher=policy"),
    (ALIAS | {f"{MODEL}.quantization": "int8"}, f"{MODEL}.quantization=int8", f"{AR}.ref.quantization={{int8,nf4}}"),
    (SWAP | {f"{AR}.actor.use_kl_loss": False}, "reward_model.residency=swap", "no reference to take turns with"),
    (SWAP | {f"{AR}.model.lora_rank": 2}, f"reward_model.residency=swap, {AR}.model.lora_rank=2", "residency=separate"),
    (SWAP | {f"{AR}.ref.fsdp_config.param_offload": False}, "reward_model.residency=swap", "param_offload=true"),
    (SWAP | {f"{AR}.ref.fsdp_config.param_offload": "stream"}, "reward_model.residency=swap", "streams has no place"),
    (SWAP | {f"{MODEL}.quantization": "nf4"}, f"reward_model.residency=swap, {MODEL}.quantization=nf4", "residency=separate"),
    (SWAP | {f"{AR}.ref.quantization": "int8"}, f"reward_model.residency=swap, {AR}.ref.quantization=int8", "=none"),
    (STUDENT | {"algorithm.filter_groups.enable": True}, "algorithm.filter_groups.enable=true", "Set algorithm.filter_groups"),
    (STUDENT | {"algorithm.adv_estimator": "remax"}, "algorithm.adv_estimator=remax", "Use grpo or rloo."),
    (STUDENT | {"custom_reward_function.path": "f.py"}, "custom_reward_function.path=f.py", "path=null"),
    (STUDENT | {"data.custom_cls.path": "f.py", "data.custom_cls.name": "A"}, "data.custom_cls.path=f.py", "path=null"),
    (STUDENT | {"data.truncation": "left"}, "data.truncation=left", "filter_overlong_prompts=true"),
]


@pytest.mark.parametrize(("more", "address", "text"), CASES)
def test_what_a_run_of_rlt_cannot_have_is_refused(complaint, more, address, text):
    message = complaint(more)
    assert message.startswith(address)
    assert text in message
    assert "\n" not in message


def test_bypass_mode_is_refused(complaint):
    bypass = "algorithm.rollout_correction.bypass_mode"
    assert f"{bypass}=true, reward_model.reward_manager=rlt: the KL of the reward" in complaint(STUDENT | {bypass: True})


MMAP = {f"{AR}.model.load_mode": "mmap"}
RESTS = STUDENT | {f"{MODEL}.fsdp_config.param_offload": True}


@pytest.mark.parametrize("more", [{}, KL, {f"{AR}.model.lora_rank": 2}, KL | {f"{AR}.ref.fsdp_config.offload_policy": True}])
def test_a_student_that_rests_on_the_host_may_rest_in_its_file(settled, complaint, more):
    assert settled(RESTS | MMAP | more).actor_rollout_ref.model.load_mode == "mmap"
    assert complaint(STUDENT | MMAP | more).startswith(f"{AR}.model.load_mode=mmap")


def test_a_quantised_student_rests_in_no_file(settled, complaint):
    quantised = MMAP | KL | {f"{MODEL}.quantization": "int8", f"{AR}.ref.fsdp_config.param_offload": True}
    message = complaint(RESTS | quantised)
    assert message.startswith(f"{AR}.model.load_mode=mmap, {MODEL}.quantization=int8: the student rests on the host")
    settled(STUDENT | quantised)


def test_rules_of_a_student_say_nothing_of_other_runs(settled):
    more = {"reward_model.residency": "swap", f"{RLT}.kl_teacher": "reference", "data.truncation": "left"}
    settings = settled({**more, "algorithm.filter_groups.enable": True})
    assert (settings.reward_model.residency, settings.algorithm.filter_groups.enable) == ("swap", True)


@pytest.mark.parametrize(
    ("key", "value", "more", "because"),
    [
        (f"{RLT}.max_student_len", 9, {}, "reward_model.reward_manager is not rlt"),
        ("reward_model.residency", "swap", {}, "reward_model.reward_manager is not rlt"),
        ("reward_model.max_length", 9, STUDENT, "reward_model.reward_manager is rlt"),
        (f"{MODEL}.fsdp_config.param_offload", True, ALIAS, "the student uses the reference's own module"),
        (f"{MODEL}.fsdp_config.model_dtype", "bfloat16", SWAP, "reference's own module (reward_model.residency=swap)"),
        (f"{MODEL}.input_tokenizer", None, STUDENT, "reward_model.reward_manager is rlt"),
        ("reward_model.micro_batch_size_per_gpu", 9, STUDENT, "reward_model.reward_manager is rlt"),
        ("reward_model.forward_max_token_len_per_gpu", 9, STUDENT, "reward_model.reward_manager is rlt"),
    ],
)
def test_keys_of_the_other_kind_of_model_are_warned_of(settled, caplog, key, value, more, because):
    settled(more | {key: value})
    (text,) = [text for text in caplog.messages if text.startswith(f"{key}=")]
    assert because in text


def test_every_rule_has_a_case():
    assert len(RLT_RULES) == len(CASES) + 2
