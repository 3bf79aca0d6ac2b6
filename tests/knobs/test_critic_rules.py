import inspect

import pytest

from verl_memopt.config.keys import leaf_keys
from verl_memopt.knobs.critic_rules import ESTIMATOR, PHASES, advices, idles, refusals, twin, twin_text, with_critic
from verl_memopt.knobs.knob import Refusal

AR = "actor_rollout_ref"
KEYS = set(leaf_keys())


def of_critic(rules, key_of):
    return [rule for rule in rules if key_of(rule).startswith("critic.")]


@pytest.mark.parametrize(
    ("key", "critics"),
    [
        (f"{AR}.actor.fsdp_config.param_offload", "critic.model.fsdp_config.param_offload"),
        (f"{AR}.actor.optim.lr", "critic.optim.lr"),
        (f"{AR}.actor.ppo_epochs", "critic.ppo_epochs"),
        (f"{AR}.model.lora_rank", "critic.model.lora_rank"),
        (f"{AR}.rollout.n", f"{AR}.rollout.n"),
        (f"{AR}.ref.fsdp_config.dtype", f"{AR}.ref.fsdp_config.dtype"),
        ("data.max_prompt_length", "data.max_prompt_length"),
    ],
)
def test_a_key_of_the_policy_has_a_twin_and_any_other_key_stays(key, critics):
    assert twin(key) == critics


def test_sentences_name_the_critics_keys_whether_or_not_the_policys_are_written_in_full():
    assert twin_text(f"Set {AR}.actor.optim.clip_grad=null.") == "Set critic.optim.clip_grad=null."
    assert twin_text("model.tiled_mlp.enabled is false") == "critic.model.tiled_mlp.enabled is false"
    assert twin_text("actor.use_dynamic_bsz is false") == "critic.use_dynamic_bsz is false"
    assert twin_text("critic.model.path stays, as does trainer.device") == "critic.model.path stays, as does trainer.device"


def test_every_rule_of_the_critic_is_about_keys_that_exist_with_as_many_values():
    twins = of_critic(refusals(), lambda refusal: refusal.keys[0])
    assert {refusal.keys[0] for refusal in twins} >= {
        "critic.optim.in_backward", "critic.optim.stochastic_rounding", "critic.model.fsdp_config.offload_policy",
        "critic.model.fsdp_config.reshard_after_forward", "critic.ppo_max_token_len_per_gpu", "critic.model.lora_rank",
        "critic.forward_max_token_len_per_gpu", "critic.optim.state_dtype",
    }  # fmt: skip
    for refusal in twins:
        assert set(refusal.reads) <= KEYS
        assert refusal.reads[-1] == ESTIMATOR
        assert AR not in refusal.because
        for function in (refusal.when, refusal.because_here, refusal.way_out):
            if callable(function):
                inspect.signature(function).bind(*refusal.reads)


def test_every_idle_key_of_the_critic_exists():
    twins = of_critic(idles(), lambda idle: idle.key)
    assert len(twins) >= 7
    for idle in twins:
        assert {idle.key, *idle.under} <= KEYS
        assert AR not in idle.because


def test_no_rule_of_the_critic_reads_a_key_that_the_critic_lacks():
    rules = [key for refusal in refusals() if refusal.keys[0].startswith("critic.") for key in refusal.reads]
    assert not any(key.startswith(f"{AR}.ref.") for key in rules)
    assert "critic.model.logprob_chunk_tokens" not in {advice.key for advice in advices()}
    assert "critic.model.load_mode" not in rules


def test_a_rule_of_the_critic_is_silent_without_one():
    rule = with_critic(Refusal(("critic.cliprange_value",), lambda clip: clip > 1, "too far", lambda clip: f"Set {clip / 2:g}."))
    assert rule.when(2.0, "gae")
    assert not rule.when(2.0, "grpo")
    assert not rule.when(0.5, "gae")
    assert rule.way_out_for(2.0, "gae") == "Set 1."


def test_advice_names_the_key_of_the_model_that_computes():
    for kind in ("activations", "grads", "optimizer scratch", "gathered parameters"):
        for phase in (*PHASES, "update_actor"):
            keys = [advice.key for advice in advices() if advice.kind == kind and advice.helps_in(phase)]
            both = [key for key in keys if twin(key) != key]
            critics = [key for key in keys if key.startswith("critic.")]
            assert not (both and phase in PHASES), (kind, phase, both)
            assert not (critics and phase == "update_actor"), (kind, phase, critics)
            assert keys or (kind, phase) == ("grads", "values")


def test_optimizer_state_of_both_models_may_leave_the_device_in_any_phase():
    keys = [advice.key for advice in advices() if advice.kind == "optimizer" and advice.helps_in("gen")]
    assert keys == [f"{AR}.actor.fsdp_config.optimizer_offload", "critic.model.fsdp_config.optimizer_offload"]
