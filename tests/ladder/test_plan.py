from itertools import pairwise

from verl_memopt.ladder.measure import ABLATION, ALTERNATIVES, Work, choose_rows, plan_rows, row_settings
from verl_memopt.memory.knob import knob_named, knobs

WORK = Work(rows=4, prompt=24, response=8, group=4)


def test_the_ladder_goes_from_all_off_to_all_on_one_knob_at_a_time():
    ablation = [plan for plan in plan_rows(WORK) if plan.knob not in ALTERNATIVES]
    assert [plan.knob for plan in ablation] == ["all off", *ABLATION]
    assert [plan.base for plan in ablation] == ["", "all off", *ABLATION[:-1]]
    for before, plan in pairwise(ablation):
        changed = {override.split("=")[0] for override in set(plan.overrides) - set(before.overrides)}
        assert changed <= {override.split("=")[0] for override in knob_named(plan.knob).row.on}


def test_an_alternative_adds_its_knob_to_the_row_it_names():
    plans = {plan.knob: plan for plan in plan_rows(WORK)}
    for name, base in ALTERNATIVES.items():
        assert set(plans[name].overrides) - set(plans[base].overrides) <= set(knob_named(name).row.on)


def test_every_knob_that_an_update_can_show_has_a_row():
    shown = {*ABLATION, *ALTERNATIVES}
    # The ladder runs on one device, where no tokens are shared.
    assert {knob.name for knob in knobs()} - shown == {"limits", "profiles", "sequence_parallel", "tiled_block"}
    assert all(knob.row.on and knob.row.off for knob in knobs() if knob.name in shown)


def test_a_knob_that_is_on_is_not_off_as_well():
    for plan in plan_rows(WORK):
        keys = [override.split("=")[0] for override in plan.overrides]
        assert len(keys) == len(set(keys))


def test_every_row_is_a_valid_configuration(tiny_folder):
    for plan in plan_rows(WORK):
        assert row_settings(str(tiny_folder), WORK, plan.overrides).trainer.worker_group == "local"


def test_chosen_rows_are_those_asked_for_and_the_ones_they_are_compared_with():
    assert [plan.knob for plan in choose_rows(WORK, ["lora", "token_budget"])] == [
        *("bucketed_adamw", "token_budget", "rollout_memory", "lora")
    ]


def test_the_ladder_keeps_its_order():
    """Committed ladders are compared row by row."""
    assert ABLATION[:3] == ("chunked_logprob", "shared_prompt", "bucketed_adamw")
    assert ABLATION[-3:] == ("precision", "stochastic_rounding", "optimizer_state_dtype")
    assert ALTERNATIVES["load_mode"] == "param_offload"


def test_with_a_critic_its_own_knobs_stand_as_the_policys_do(tiny_folder):
    *_, plan = [plan for plan in plan_rows(WORK) if plan.knob in ABLATION]
    settings = row_settings(str(tiny_folder), WORK, [*plan.overrides, "algorithm.adv_estimator=gae"])
    actor, critic = settings.actor_rollout_ref.actor, settings.critic
    assert critic.model.fsdp_config == actor.fsdp_config
    assert critic.model.enable_activation_offload is settings.actor_rollout_ref.model.enable_activation_offload is True
    assert critic.ppo_max_token_len_per_gpu == actor.ppo_max_token_len_per_gpu
    assert critic.optim.state_dtype == actor.optim.state_dtype
    own = "critic.model.fsdp_config.param_offload=false"
    settings = row_settings(str(tiny_folder), WORK, [*plan.overrides, "algorithm.adv_estimator=gae", own])
    assert settings.actor_rollout_ref.actor.fsdp_config.param_offload is True
    assert settings.critic.model.fsdp_config.param_offload is False
