import pytest

from verl_memopt.config.keys import leaf_types
from verl_memopt.run.resume import ADAPTERS, HARMLESS, HARMLESS_KEYS, REFUSED, RULES, TRAJECTORY, changes, kept_settings

AR = "actor_rollout_ref"
OPTIM = f"{AR}.actor.optim"


@pytest.fixture
def compared(settled):
    """Gives {key: (kind, reason)} of what ``now`` changes of ``before``, both given by the keys that differ from the defaults."""

    def compare(before, now):
        found = changes(kept_settings(settled(before)), settled(now))
        return {change.key: (change.kind, change.reason) for change in found}

    return compare


def test_every_classified_key_exists_and_is_classified_once():
    groups = [set(HARMLESS_KEYS), set(ADAPTERS), set(RULES)]
    assert set().union(*groups) <= set(leaf_types())
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert all(reason for reason in HARMLESS_KEYS.values())


def test_settings_that_went_through_a_checkpoint_are_equal_to_themselves(settled, tmp_path):
    import torch

    settings = settled({"data.train_files": ["a", "b"], f"{AR}.model.override_config": {"rope_theta": 10}})
    torch.save(kept_settings(settings), tmp_path / "f")
    assert changes(torch.load(tmp_path / "f", weights_only=True), settings) == []


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        (f"{AR}.rollout.n", 2, 4),
        (f"{OPTIM}.lr", 1e-6, 1e-3),
        (f"{AR}.actor.fsdp_config.dtype", "bfloat16", "fp32"),
        (f"{AR}.actor.fsdp_config.optimizer_offload", False, True),
        ("data.train_files", "a", "b"),
        ("algorithm.adv_estimator", "rloo", "grpo"),
        ("custom_reward_function.path", "a.py", "b.py"),
        (f"{AR}.model.path", "one", "other"),
    ],
)
def test_what_a_number_can_depend_on_changes_the_trajectory(compared, key, old, new):
    assert compared({key: old}, {key: new})[key] == (TRAJECTORY, "")


def test_a_key_that_follows_another_is_named_with_it(compared):
    found = compared({"data.max_response_length": 512}, {"data.max_response_length": 256})
    assert {"data.max_response_length", f"{AR}.rollout.response_length"} <= found.keys()


@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("trainer.save_freq", 7),
        ("trainer.logger", ["console"]),
        ("data.val_files", "other"),
        ("reward_model.num_workers", 4),
        (f"{AR}.actor.fsdp_config.param_offload", True),
        (f"{AR}.model.enable_gradient_checkpointing", False),
        (f"{AR}.rollout.val_kwargs.n", 3),
    ],
)
def test_what_no_number_can_depend_on_is_harmless_and_says_why(compared, key, new):
    kind, reason = compared({}, {key: new})[key]
    assert kind == HARMLESS
    assert reason


@pytest.mark.parametrize(
    ("key", "new"),
    [
        (f"{AR}.model.lora_rank", 8),
        (f"{AR}.model.exclude_modules", ["q_proj"]),
        (f"{AR}.model.target_parameters", ["mlp.experts.down_proj"]),
    ],
)
def test_other_adapters_are_refused(compared, key, new):
    lora = {f"{AR}.model.lora_rank": 4}
    assert compared(lora, lora | {key: new})[key][0] == REFUSED


@pytest.mark.parametrize(
    ("key", "old", "new", "kind"),
    [
        (f"{OPTIM}.optimizer", "AdamW", "SGD", REFUSED),
        (f"{OPTIM}.optimizer_impl", "torch.optim", "torch.optim.adamw", REFUSED),
        (f"{OPTIM}.momentum", 0.0, 0.9, REFUSED),
        (f"{OPTIM}.momentum", 0.9, 0.5, TRAJECTORY),
        (f"{OPTIM}.state_dtype", "fp32", "bfloat16", TRAJECTORY),
        (f"{OPTIM}.state_dtype", "fp32", "int8", REFUSED),
        (f"{OPTIM}.state_dtype", "int4", "int8", REFUSED),
        (f"{OPTIM}.override_optimizer_config", None, {"eps": 1e-6}, TRAJECTORY),
        (f"{OPTIM}.override_optimizer_config", {"eps": 1e-6}, {"eps": 1e-6, "amsgrad": True}, REFUSED),
    ],
)
def test_an_optimizer_whose_state_does_not_fit_is_refused_only_where_it_is_loaded(compared, key, old, new, kind):
    assert compared({key: old}, {key: new})[key][0] == kind
    without = {f"{AR}.actor.checkpoint.load_contents": ["model"]}
    assert compared({key: old} | without, {key: new} | without)[key][0] == TRAJECTORY


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        ({}, HARMLESS),
        ({"lr_warmup_steps_ratio": 0.1}, TRAJECTORY),
        ({"lr_scheduler_type": "cosine"}, TRAJECTORY),
        ({"lr_scheduler_type": "constant_with_warmup", "lr_warmup_steps": 5}, HARMLESS),
        ({"lr_scheduler_type": "inverse_sqrt", "lr_warmup_steps": 5}, HARMLESS),
        ({"lr_scheduler_type": "cosine", "total_training_steps": 50}, HARMLESS),
    ],
)
def test_a_longer_run_changes_the_trajectory_where_the_learning_rate_depends_on_its_length(compared, schedule, kind):
    same = {f"{OPTIM}.{name}": value for name, value in schedule.items()}
    key = "trainer.total_training_steps"
    assert compared(same | {key: 10}, same | {key: 20})[key][0] == kind


def test_a_key_that_the_checkpoint_did_not_know_counts_as_its_default(settled):
    kept = kept_settings(settled({}))
    del kept["trainer.keep_best"], kept[f"{AR}.rollout.temperature"]
    assert changes(kept | {"trainer.gone": 1}, settled({})) == []
    (change,) = changes(kept, settled({f"{AR}.rollout.temperature": 0.5}))
    assert str(change) == f"{AR}.rollout.temperature: 1.0 -> 0.5 (changes the trajectory)"


GAE = {"algorithm.adv_estimator": "gae"}


@pytest.mark.parametrize(
    ("key", "old", "new", "kind"),
    [
        ("critic.optim.lr", 1e-5, 1e-4, TRAJECTORY),
        ("critic.optim.state_dtype", "fp32", "int8", REFUSED),
        ("critic.optim.optimizer", "AdamW", "SGD", REFUSED),
        ("critic.model.lora_rank", 4, 8, REFUSED),
        ("critic.model.fsdp_config.param_offload", False, True, HARMLESS),
        ("critic.model.enable_gradient_checkpointing", True, False, HARMLESS),
        ("critic.checkpoint.save_contents", ["model"], ["model", "optimizer"], HARMLESS),
    ],
)
def test_a_change_of_the_critic_is_judged_as_one_of_the_policy(compared, key, old, new, kind):
    around = GAE | {"critic.checkpoint.load_contents": ["model", "optimizer"]}
    assert compared(around | {key: old}, around | {key: new})[key][0] == kind
    assert not any(key.startswith("critic.") for key in compared({key: old}, {key: new}))


def test_what_the_critic_does_not_load_may_be_another_optimizer(compared):
    without = GAE | {"critic.checkpoint.load_contents": ["model"]}
    key = "critic.optim.state_dtype"
    assert compared(without | {key: "fp32"}, without | {key: "int8"})[key][0] == TRAJECTORY


def test_the_length_of_a_run_matters_where_the_critics_schedule_needs_it(compared):
    key, linear = "trainer.total_training_steps", {"critic.optim.lr_scheduler_type": "linear"}
    assert compared(GAE | {key: 5}, GAE | {key: 6})[key][0] == HARMLESS
    assert compared(GAE | linear | {key: 5}, GAE | linear | {key: 6})[key][0] == TRAJECTORY
