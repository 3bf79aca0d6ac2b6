import pytest

from verl_memopt.config.keys import leaf_types, leaf_values
from verl_memopt.config.schema import Settings
from verl_memopt.config.values import WHY_NOT, check_values, choices, ranges, with_links
from verl_memopt.memory.critic_rules import twin

AR = "actor_rollout_ref"


def complaints(**values):
    """Gives the texts of what is wrong with settings that differ from the defaults in the given keys."""
    given = {key.replace("__", "."): value for key, value in values.items()}
    problems = check_values(with_links(leaf_values(Settings()) | given))
    return [problem.text for problem in problems if set(problem.keys) <= set(given)]


def test_choices_and_ranges_are_of_keys_that_exist_and_never_of_the_same():
    assert not choices().keys() & ranges().keys()
    assert choices().keys() | ranges().keys() <= set(leaf_types())


def test_a_reason_is_of_a_word_that_is_no_choice():
    assert all(word not in choices()[key] for key, word in WHY_NOT)


def test_each_item_of_a_list_is_looked_at():
    assert complaints(trainer__logger=["console", "jsonl"]) == []
    (text,) = complaints(trainer__logger=["console", "comet"])
    assert "comet is no choice" in text


def test_null_is_left_to_the_keys_type():
    assert complaints(data__val_batch_size=None) == []


STEP = 1e-9
"""How far beyond a bound a number with a fraction is tried; a whole number is tried one beyond."""


def roles(*keys):
    return [f"{role}.fsdp_config.{key}" for role in (f"{AR}.actor", f"{AR}.ref", "reward_model.model") for key in keys]


def and_critics(keys):
    """Gives the keys and the critic's twins of those that it has too."""
    return [*keys, *sorted({twin(key) for key in keys if twin(key) != key and twin(key) in leaf_types()})]


ABOVE_0 = [
    *("data.max_prompt_length", "data.max_response_length", "data.train_batch_size", "data.val_batch_size"),
    *("data.gen_batch_size", "data.shuffle_buffer_size"),
    *(f"{AR}.nccl_timeout", f"{AR}.model.gradient_checkpointing_every", f"{AR}.model.activation_offload_in_flight"),
    *(f"{AR}.model.tiled_mlp.num_shards", f"{AR}.model.block_tile_tokens", f"{AR}.model.lora_alpha"),
    *(f"{AR}.actor.{key}" for key in ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu")),
    *(f"{AR}.actor.{key}" for key in ("ppo_epochs", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "loss_scale_factor")),
    *(f"{AR}.actor.optim.{key}" for key in ("clip_grad", "num_cycles", "bucket_megabytes")),
    *(f"{AR}.{role}.log_prob_{key}_per_gpu" for role in ("ref", "rollout") for key in ("micro_batch_size", "max_token_len")),
    *(f"{AR}.rollout.{key}" for key in ("n", "repetition_penalty", "prompt_length", "response_length")),
    *(f"{AR}.rollout.{key}" for key in ("kv_cache_memory_gb", "max_model_len", "max_num_seqs", "max_num_batched_tokens")),
    *(f"{AR}.rollout.{key}" for key in ("tensor_model_parallel_size", "max_logprob_diff", "val_kwargs.n")),
    f"{AR}.rollout.checkpoint_engine.update_weights_bucket_megabytes",
    *("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
    *(f"reward_model.{key}" for key in ("num_workers", "max_concurrent", "reward_kwargs.max_resp_len", "max_length")),
    *("reward_model.sandbox_fusion.max_concurrent", "reward_model.sandbox_fusion.memory_limit_mb"),
    *(f"reward_model.{key}_per_gpu" for key in ("micro_batch_size", "forward_max_token_len")),
    *(f"custom_reward_function.{key}" for key in ("timeout_seconds", "cpu_seconds", "memory_gb")),
    *(f"reward_model.rlt.{key}" for key in ("clip_log_prob", "clip_kl", "unbias_student_log_probs_temp", "max_student_len")),
    *(f"reward_model.rlt.{key}" for key in ("max_tokens_per_micro_batch", "logits_chunk_tokens")),
    *("critic.forward_micro_batch_size_per_gpu", "critic.forward_max_token_len_per_gpu", "critic.cliprange_value"),
    *(f"trainer.{key}" for key in ("nnodes", "n_gpus_per_node", "total_epochs", "total_training_steps", "table_every_steps")),
    *("trainer.max_actor_ckpt_to_keep", "trainer.ray_wait_register_center_timeout", "trainer.max_skipped_steps"),
    *("trainer.stop_deadline_seconds", "trainer.max_critic_ckpt_to_keep"),
    *(f"{AR}.actor.tau_pos", f"{AR}.actor.tau_neg", f"{AR}.actor.entropy_ctrl.target"),
    *(f"{AR}.actor.off_policy_mask_threshold", f"{AR}.actor.policy_loss.cispo_max_ratio"),
    *(f"{AR}.ref.sync_every_steps", *roles("ulysses_sequence_parallel_size")),
    *("memory.card_gb", "memory.device_limit_gb", "memory.host_limit_gb", "memory.pinned_limit_gb"),
]
FROM_0 = [
    *("data.seed", f"{AR}.model.activation_offload_min_bytes", f"{AR}.model.lora_rank", f"{AR}.model.logprob_chunk_tokens"),
    *(f"{AR}.model.logprob_vocab_tile", f"{AR}.actor.entropy_coeff", f"{AR}.actor.kl_loss_coef"),
    *(f"{AR}.actor.policy_loss.ppo_kl_coef", "algorithm.pf_ppo.weight_pow", f"{AR}.model.activation_offload_device_gb"),
    *(f"{AR}.actor.data_loader_seed", f"{AR}.actor.optim.lr", f"{AR}.actor.optim.weight_decay", *roles("seed")),
    *(f"{AR}.rollout.seed", "algorithm.kl_ctrl.kl_coef"),
    *(f"reward_model.reward_kwargs.overlong_buffer_cfg.{key}" for key in ("len", "penalty_factor")),
    *("trainer.track_memory_every_steps", "trainer.log_val_generations", "algorithm.filter_groups.max_num_gen_batches"),
    *(f"{AR}.actor.entropy_ctrl.{key}" for key in ("delta", "min", "max")),
    *("trainer.critic_warmup", "reward_model.rlt.empty_think_kl", "algorithm.norm_adv_epsilon"),
    *(f"{AR}.actor.policy_loss.vespo_{key}" for key in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")),
    *(f"{role}.{key}" for role in ("critic", "reward_model") for key in ("nnodes", "n_gpus_per_node")),
]
ABOVE_0_OR_MINUS_1 = [
    *("data.train_max_samples", "data.val_max_samples", f"{AR}.actor.optim.total_training_steps", *roles("fsdp_size")),
    *(f"{AR}.rollout.top_k", f"{AR}.rollout.val_kwargs.top_k", "trainer.save_freq", "trainer.test_freq"),
]
UP_TO_1 = [
    *(f"{AR}.actor.optim.min_lr_ratio", f"{AR}.actor.optim.lr_warmup_steps_ratio", "algorithm.gamma", "algorithm.lam"),
    *("algorithm.top_entropy_quantile", f"{AR}.rollout.min_p", f"{AR}.rollout.val_kwargs.min_p"),
]
ABOVE_0_UP_TO_1 = [
    *(f"{AR}.rollout.{key}" for key in ("top_p", "val_kwargs.top_p", "gpu_memory_utilization")),
    *(f"{AR}.actor.policy_loss.{key}" for key in ("clip_cov_ratio", "kl_cov_ratio")),
    f"{AR}.ref.sync_mixup_alpha",
]


def least_step(key):
    return STEP if "float" in str(leaf_types()[key]) else 1


EDGES = {
    **{key: ([least_step(key)], [0, -least_step(key)]) for key in and_critics(ABOVE_0)},
    **{key: ([0, least_step(key)], [-least_step(key)]) for key in and_critics(FROM_0)},
    **{key: ([1, -1], [0, -2]) for key in and_critics(ABOVE_0_OR_MINUS_1)},
    **{key: ([0, 1], [-STEP, 1 + STEP]) for key in and_critics(UP_TO_1)},
    **{key: ([STEP, 1], [0, 1 + STEP]) for key in ABOVE_0_UP_TO_1},
    **{key: ([-1, 0], [-2]) for key in and_critics([f"{AR}.actor.optim.lr_warmup_steps"])},
    f"{AR}.actor.clip_ratio_c": ([1 + STEP], [1, 1 - STEP]),
    **dict.fromkeys(
        and_critics([f"{AR}.actor.optim.betas"]),
        ([(0, 0), (1 - STEP, 1 - STEP)], [(-STEP, 0.9), (0.9, -STEP), (1, 0.9), (0.9, 1)]),
    ),
    **dict.fromkeys(and_critics([f"{AR}.actor.optim.momentum"]), ([0, 1 - STEP], [-STEP, 1])),
    "custom_reward_function.open_files": ([64], [63]),
    "algorithm.reward_clip_range": ([[-1.0, 1.0]], [[1.0, 1.0], [2.0, 1.0]]),
    f"{AR}.rollout.stop": ([[], ["x"]], [["x", ""]]),
    "reward_model.rlt.not_matched_penalty": ([0, -STEP], [STEP]),
    f"{AR}.rollout.temperature": ([1e-4], [1e-5, 0, -1]),
    f"{AR}.rollout.val_kwargs.temperature": ([0, 1e-4], [1e-5, -1]),
    f"{AR}.rollout.sleep_level": ([1, 2], [0, 3]),
    f"{AR}.rollout.share_weights": ([False, "auto"], ["always", "true"]),
    f"{AR}.actor.use_prefix_grouper": ([False, True, "auto"], ["always", "true"]),
    **{f"{each}.fsdp_config.param_offload": ([True, False], ["streamed", "true"]) for each in (f"{AR}.actor", "critic.model")},
    **dict.fromkeys(
        (f"{each}.fsdp_config.param_offload" for each in (f"{AR}.ref", "reward_model.model")),
        ([True, False, "stream"], ["streamed", "true"]),
    ),
}
"""Key -> values at the bounds of its range, and values just beyond them."""


def test_every_range_has_its_edges_here():
    assert EDGES.keys() == ranges().keys()


@pytest.mark.parametrize("key", EDGES)
def test_a_number_at_the_edge_of_its_range_is_told_from_one_beyond(key):
    inside, beyond = EDGES[key]
    name = key.replace(".", "__")
    assert [len(complaints(**{name: value})) for value in inside] == [0] * len(inside)
    for value in beyond:
        (text,) = complaints(**{name: value})
        assert text.startswith(f"{key}=")
        assert ranges()[key].text in text


@pytest.mark.parametrize(
    "key", ["data.seed", f"{AR}.rollout.seed", f"{AR}.actor.data_loader_seed", *roles("seed"), "data.train_batch_size"]
)
def test_a_whole_number_that_needs_more_than_63_bits_is_refused(key):
    name = key.replace(".", "__")
    assert complaints(**{name: 2**63 - 1}) == []
    assert complaints(**{name: 2**63})[0].startswith(f"{key}=9223372036854775808: must be at most 9223372036854775807.")
