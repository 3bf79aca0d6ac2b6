import pytest

from verl_memopt.config.keys import leaf_types
from verl_memopt.config.schema import Algorithm, Critic, CriticModel, Settings
from verl_memopt.memory.critic_rules import CRITIC_PHASES, advices, as_critic, refusals, twin, twin_text, unused_keys, with_critic
from verl_memopt.memory.knob import Refusal

AR = "actor_rollout_ref"
KEYS = set(leaf_types())


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
        assert set(refusal.keys) <= KEYS
        assert AR not in refusal.because


def test_every_unused_key_of_the_critic_exists():
    twins = of_critic(unused_keys(), lambda unused: unused.key)
    assert len(twins) >= 7
    for unused in twins:
        assert unused.key in KEYS
        assert AR not in unused.because


def test_no_rule_of_the_critic_is_about_a_key_that_the_critic_lacks():
    rules = [key for refusal in refusals() if refusal.keys[0].startswith("critic.") for key in refusal.keys]
    assert not any(key.startswith(f"{AR}.ref.") for key in rules)
    assert "critic.model.logprob_chunk_tokens" not in {advice.key for advice in advices()}
    assert "critic.model.load_mode" not in rules


def test_a_rule_about_the_policy_reads_the_critics_values_where_it_is_asked_of_the_critic():
    settings = Settings(critic=Critic(ppo_epochs=7, model=CriticModel(lora_rank=3)))
    seen = as_critic(settings)
    assert seen.actor_rollout_ref.actor.ppo_epochs == 7
    assert seen.actor_rollout_ref.model.lora_rank == 3
    assert seen.actor_rollout_ref.actor.optim.lr == settings.critic.optim.lr != settings.actor_rollout_ref.actor.optim.lr
    assert seen.actor_rollout_ref.rollout.n == settings.actor_rollout_ref.rollout.n


def test_a_rule_of_the_critic_is_silent_without_one():
    def of(clip, estimator):
        return Settings(critic=Critic(cliprange_value=clip), algorithm=Algorithm(adv_estimator=estimator))

    rule = with_critic(
        Refusal(
            ("critic.cliprange_value",),
            lambda settings: settings.critic.cliprange_value > 1,
            "too far",
            lambda settings: f"Set {settings.critic.cliprange_value / 2:g}.",
        )
    )
    assert rule.when(of(2.0, "gae"))
    assert not rule.when(of(2.0, "grpo"))
    assert not rule.when(of(0.5, "gae"))
    assert rule.way_out_for(of(2.0, "gae")) == "Set 1."


def test_advice_names_the_key_of_the_model_that_computes():
    for kind in ("activations", "grads", "optimizer scratch", "gathered parameters"):
        for phase in (*CRITIC_PHASES, "update_actor"):
            keys = [advice.key for advice in advices() if advice.kind == kind and advice.helps_in(phase)]
            both = [key for key in keys if twin(key) != key]
            critics = [key for key in keys if key.startswith("critic.")]
            assert not (both and phase in CRITIC_PHASES), (kind, phase, both)
            assert not (critics and phase == "update_actor"), (kind, phase, critics)
            assert keys or (kind, phase) == ("grads", "values")


def test_optimizer_state_of_both_models_may_leave_the_device_in_any_phase():
    keys = [advice.key for advice in advices() if advice.kind == "optimizer" and advice.helps_in("gen")]
    assert keys == [f"{AR}.actor.fsdp_config.optimizer_offload", "critic.model.fsdp_config.optimizer_offload"]
