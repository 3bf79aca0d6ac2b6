import pytest

from tests.memory.rollout.test_rollout_memory import VLLM_ONLY
from verl_memopt.config.algorithm_rules import WITHOUT_CRITIC
from verl_memopt.config.keys import leaf_types
from verl_memopt.config.reward_rules import WITHOUT_REWARD_MODEL
from verl_memopt.config.unused_keys import UNUSED_KEYS
from verl_memopt.memory.critic_rules import twin

AR = "actor_rollout_ref"
CORRECTION = "algorithm.rollout_correction"


ESTIMATOR, FILTERS, KL_IN_REWARD = (f"algorithm.{key}" for key in ("adv_estimator", "filter_groups.enable", "use_kl_in_reward"))
LOSS, DYNAMIC, ROWS, KL_LOSS = (
    f"{AR}.actor.{key}" for key in ("policy_loss.loss_mode", "use_dynamic_bsz", "ppo_micro_batch_size_per_gpu", "use_kl_loss")
)
OFFLOADS, BYPASS, REWARD_FILE = (
    f"{AR}.model.enable_activation_offload",
    f"{CORRECTION}.bypass_mode",
    "custom_reward_function.path",
)


def _twins(keys):
    return {twin(key): value for key, value in keys.items()}


TAUGHT = {"teacher.model.path": "big", "distill.coef": 1.0}
OF_A_TEACHER = {
    "model.trust_remote_code": True, "model.external_lib": "os", "model.override_config": {"a": 1}, "quantization": "int8",
    "log_prob_micro_batch_size_per_gpu": 2, "log_prob_max_token_len_per_gpu": 50_000,
    "log_prob_adaptive_token_budget": True, "fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": ["Block"],
    "fsdp_config.forward_prefetch": True, "fsdp_config.seed": 7, "fsdp_config.full_determinism": True,
    "fsdp_config.param_offload": True, "fsdp_config.offload_policy": True, "fsdp_config.reshard_after_forward": False,
    "fsdp_config.fsdp_size": 1, "fsdp_config.ulysses_sequence_parallel_size": 1, "fsdp_config.own_units": False,
    "fsdp_config.model_dtype": "bfloat16", "fsdp_config.dtype": "fp32",
    "fsdp_config.mixed_precision.reduce_dtype": "bfloat16",
}  # fmt: skip
"""Keys of the section ``teacher`` -> a value that is not the default."""
OF_A_SERVER = {
    "model": "big", "api": "openai", "api_key_env": "KEY", "timeout_seconds": 5.0, "requests_at_once": 2,
}  # fmt: skip
ASKED = {"teacher.endpoint.url": "http://host/v1", "distill.coef": 1.0, "distill.divergence": "sampled"}
SAID = {
    "teacher.log_probs_key": "said", "distill.coef": 1.0, "distill.top_k": 8, ESTIMATOR: "sft", LOSS: "gpg", f"{AR}.rollout.n": 1,
}  # fmt: skip


IDLE_CASES = {
    "teacher.model.path": ({}, "big", {"distill.coef": 1.0}),
    **{f"teacher.{key}": ({}, value, TAUGHT) for key, value in OF_A_TEACHER.items()},
    "teacher.log_prob_use_dynamic_bsz": ({}, False, {**TAUGHT, "teacher.log_prob_micro_batch_size_per_gpu": 2}),
    "teacher.further_models": ({}, {"own": "small"}, TAUGHT),
    "teacher.enable_resource_pool": ({}, True, {**TAUGHT, "distill.top_k": 8}),
    **{
        f"teacher.{key}": ({}, 2, {**TAUGHT, "distill.top_k": 8, "teacher.enable_resource_pool": True})
        for key in ("nnodes", "n_gpus_per_node")
    },
    "teacher.key": ({}, "who", {**TAUGHT, "teacher.further_models": {"own": "small"}}),
    "teacher.model.lora_adapter_path": ({}, "adapter", TAUGHT),
    "teacher.model.tokenizer_path": (
        {},
        "words",
        {**TAUGHT, "distill.align": "text", "distill.divergence": "sampled"},
    ),
    "distill.align": ({}, "text", {**TAUGHT, "distill.divergence": "sampled"}),
    "teacher.weights": ({}, "reference", {"distill.coef": 1.0}),
    "teacher.log_probs_key": ({}, "said", SAID),
    "teacher.endpoint.url": ({}, "http://host/v1", ASKED),
    **{f"teacher.endpoint.{key}": ({}, value, ASKED) for key, value in OF_A_SERVER.items()},
    "distill.divergence": ({}, "jsd", TAUGHT),
    "distill.teacher_prompt": ({}, "{prompt}", TAUGHT),
    "distill.weight_key": ({}, "weight", TAUGHT),
    "distill.top_k": ({}, 64, TAUGHT),
    "distill.beta": ({}, 0.3, {**TAUGHT, "distill.divergence": "jsd"}),
    "distill.discount": ({}, 0.3, {**TAUGHT, "distill.divergence": "sampled"}),
    "algorithm.norm_adv_by_std_in_grpo": ({}, True, {ESTIMATOR: "grpo"}),
    "algorithm.normalize_advantages": ({ESTIMATOR: "opo"}, True, {ESTIMATOR: "rloo"}),
    "algorithm.lam": ({}, 0.5, {ESTIMATOR: "gae"}),
    "algorithm.custom_estimator.name": ({}, "mine", {"algorithm.custom_estimator.path": "mine.py", ESTIMATOR: "custom"}),
    f"{AR}.actor.policy_loss.custom.name": ({}, "mine", {f"{AR}.actor.policy_loss.custom.path": "mine.py", LOSS: "custom"}),
    "algorithm.gdpo_reward_keys": ({}, ["score"], {ESTIMATOR: "gdpo"}),
    "algorithm.gdpo_reward_weights": ({}, [2.0], {ESTIMATOR: "gdpo", "algorithm.gdpo_reward_keys": ["score"]}),
    "algorithm.gdpo_whiten_over": ({}, "rows", {ESTIMATOR: "gdpo", "algorithm.gdpo_reward_keys": ["score"]}),
    "algorithm.norm_adv_epsilon": ({}, 0.5, {ESTIMATOR: "grpo"}),
    "algorithm.norm_adv_std_of": ({}, "batch", {ESTIMATOR: "grpo"}),
    "algorithm.gpg_counts": ({}, "informative", {ESTIMATOR: "gpg"}),
    "algorithm.gamma": ({}, 0.5, {ESTIMATOR: "reinforce_plus_plus"}),
    FILTERS: ({ESTIMATOR: "reinforce_plus_plus", f"{AR}.rollout.n": 1}, True, {f"{AR}.rollout.n": 2}),
    **{f"critic.{key}": ({ESTIMATOR: "gae"}, 2, {"critic.enable_resource_pool": True}) for key in ("nnodes", "n_gpus_per_node")},
    "algorithm.filter_groups.metric": ({}, "acc", {FILTERS: True}),
    "algorithm.filter_groups.max_num_gen_batches": ({}, 5, {FILTERS: True}),
    **{f"{AR}.actor.entropy_ctrl.{key}": ({}, 0.5, {f"{AR}.actor.entropy_ctrl.target": 1.0}) for key in ("delta", "min", "max")},
    "algorithm.kl_penalty": ({}, "abs", {KL_IN_REWARD: True}),
    "algorithm.kl_ctrl.type": ({}, "adaptive", {KL_IN_REWARD: True}),
    "algorithm.kl_ctrl.kl_coef": ({}, 0.5, {KL_IN_REWARD: True}),
    "algorithm.kl_ctrl.horizon": ({}, 5, {"algorithm.kl_ctrl.type": "adaptive", KL_IN_REWARD: True}),
    "algorithm.kl_ctrl.target_kl": ({}, 5, {"algorithm.kl_ctrl.type": "adaptive", KL_IN_REWARD: True}),
    f"{AR}.actor.optim.momentum": ({}, 0.9, {f"{AR}.actor.optim.optimizer": "SGD"}),
    f"{AR}.actor.optim.bucket_megabytes": ({}, 8.0, {f"{AR}.actor.optim.state_dtype": "bfloat16"}),
    f"{AR}.actor.kl_loss_coef": ({}, 0.5, {KL_LOSS: True}),
    f"{AR}.actor.kl_loss_type": ({}, "abs", {KL_LOSS: True}),
    f"{AR}.actor.kl_loss_by_ratio": ({}, True, {KL_LOSS: True}),
    f"{AR}.actor.entropy_agg_mode": ({}, "token-sum", {f"{AR}.actor.entropy_coeff": 0.1}),
    f"{AR}.actor.policy_loss.cispo_max_ratio": ({}, 5.0, {LOSS: "cispo"}),
    **{
        f"{AR}.actor.policy_loss.vespo_{key}": ({}, 5.0, {LOSS: "vespo"})
        for key in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
    },
    f"{AR}.actor.loss_scale_factor": ({}, 5, {f"{AR}.actor.loss_agg_mode": "seq-mean-token-sum-norm"}),
    f"{AR}.actor.clip_ratio_c": ({LOSS: "sequence"}, 5.0, {LOSS: "vanilla"}),
    LOSS: ({"data.train_batch_size": 8, f"{AR}.actor.ppo_mini_batch_size": 8}, "kl_cov", {f"{AR}.actor.ppo_epochs": 2}),
    f"{AR}.actor.loss_agg_mode": ({LOSS: "geo_mean"}, "seq-mean-token-sum", {f"{AR}.actor.entropy_coeff": 0.1}),
    **{f"{AR}.actor.{key}": ({LOSS: "gpg"}, 0.1, {LOSS: "cispo"}) for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")},
    **{
        f"{AR}.actor.policy_loss.{key}": ({}, 0.5, {LOSS: loss})
        for key, loss in {
            "clip_cov_ratio": "clip_cov",
            "clip_cov_lb": "clip_cov",
            "kl_cov_ratio": "kl_cov",
            "ppo_kl_coef": "kl_cov",
        }.items()
    },
    f"{AR}.actor.policy_loss.clip_cov_ub": ({}, 2.0, {LOSS: "clip_cov"}),
    **{
        f"{CORRECTION}.{key}": ({}, value, {f"{CORRECTION}.rollout_is": "token"})
        for key, value in {"rollout_is_threshold": 3.0, "rollout_is_batch_normalize": True}.items()
    },
    f"{CORRECTION}.rollout_rs_threshold": ({}, 3.0, {f"{CORRECTION}.rollout_rs": "token_k1"}),
    f"{CORRECTION}.loss_type": ({}, "reinforce", {BYPASS: True}),
    f"{CORRECTION}.rollout_is": ({BYPASS: True}, "token", {f"{CORRECTION}.loss_type": "reinforce"}),
    f"{AR}.actor.calculate_entropy": ({BYPASS: True}, True, {BYPASS: False}),
    f"{AR}.actor.old_log_prob_pass": ({BYPASS: True}, "always", {BYPASS: False}),
    f"{AR}.actor.calculate_sum_pi_squared": ({}, True, {ESTIMATOR: "optimal_token_baseline"}),
    "algorithm.pf_ppo.reweight_method": ({}, "max_min", {"algorithm.use_pf_ppo": True}),
    "algorithm.pf_ppo.weight_pow": ({}, 1.0, {"algorithm.use_pf_ppo": True}),
    **{f"{AR}.actor.{key}": ({}, 3.0, {LOSS: "sapo"}) for key in ("tau_pos", "tau_neg")},
    ROWS: ({}, 5, {DYNAMIC: False}),
    f"{AR}.actor.ppo_max_token_len_per_gpu": (
        {DYNAMIC: False, f"{AR}.rollout.log_prob_use_dynamic_bsz": False}
        | {f"{AR}.rollout.log_prob_micro_batch_size_per_gpu": 1, ROWS: 1},
        5000,
        {DYNAMIC: True, ROWS: None},
    ),
    f"{AR}.rollout.do_sample": ({}, False, {ESTIMATOR: "reinforce_plus_plus"}),
    "custom_reward_function.name": ({}, "mine", {REWARD_FILE: "mine.py"}),
    "custom_reward_function.fallback_score": ({}, 1.0, {"custom_reward_function.on_error": "score"}),
    **{
        f"reward_model.reward_kwargs.{key}": (
            {},
            value,
            {
                "reward_model.reward_manager": "dapo",
                "reward_model.reward_kwargs.overlong_buffer_cfg.enable": True,
                "reward_model.reward_kwargs.overlong_buffer_cfg.len": 64,
            },
        )
        for key, value in {
            "overlong_buffer_cfg.len": 64,
            "overlong_buffer_cfg.penalty_factor": 0.5,
            "overlong_buffer_cfg.log": True,
            "max_resp_len": 256,
        }.items()
    },
    "reward_model.tolerant_rules": ({REWARD_FILE: "mine.py"}, True, {REWARD_FILE: None}),
    "reward_model.sandbox_fusion.url": ({REWARD_FILE: "mine.py"}, "http://h", {REWARD_FILE: None}),
    **{
        f"reward_model.sandbox_fusion.{key}": ({}, 100, {"reward_model.sandbox_fusion.url": "http://h"})
        for key in ("max_concurrent", "memory_limit_mb")
    },
    "trainer.test_freq": ({}, 5, {"data.val_files": "val.jsonl"}),
    "data.shuffle_buffer_size": ({}, 5, {"data.streaming": True, "trainer.total_training_steps": 5}),
    "trainer.resume_from_path": ({}, "global_step_3", {"trainer.resume_mode": "resume_path"}),
    "trainer.keep_best": ({}, True, {"data.val_files": "val.jsonl", "trainer.test_freq": 5, "trainer.max_actor_ckpt_to_keep": 2}),
    f"{AR}.rollout.sleep_level": ({f"{AR}.rollout.free_cache_engine": False}, 1, {f"{AR}.rollout.free_cache_engine": True}),
    **{f"{AR}.rollout.{key}": ({}, value, {f"{AR}.rollout.name": "vllm"}) for key, value in VLLM_ONLY.items()},
    f"{AR}.model.gradient_checkpointing_mode": (
        {f"{AR}.model.enable_gradient_checkpointing": False},
        "selective",
        {f"{AR}.model.enable_gradient_checkpointing": True},
    ),
    f"{AR}.model.gradient_checkpointing_every": ({}, 3, {f"{AR}.model.gradient_checkpointing_mode": "every_n"}),
    f"{AR}.model.activation_offload_min_bytes": ({}, 0, {OFFLOADS: True}),
    f"{AR}.model.activation_offload_in_flight": ({}, 5, {OFFLOADS: True}),
    f"{AR}.model.activation_offload_device_gb": ({}, 0.5, {OFFLOADS: True}),
    f"{AR}.actor.adaptive_token_budget": ({DYNAMIC: False, ROWS: 2}, True, {DYNAMIC: True, ROWS: None}),
    f"{AR}.ref.adapter": ({KL_LOSS: True, f"{AR}.model.lora_rank": 4}, "base", {f"{AR}.model.lora_adapter_path": "adapters"}),
    f"{AR}.ref.sync_every_steps": ({}, 8, {KL_LOSS: True}),
    f"{AR}.ref.sync_mixup_alpha": ({}, 0.5, {f"{AR}.ref.sync_every_steps": 8, KL_LOSS: True}),
    f"{AR}.model.tiled_mlp.num_shards": ({}, 8, {f"{AR}.model.tiled_mlp.enabled": True}),
}
"""Key -> (keys that make it idle, a value to give, keys that make it count; None = nothing does)."""

GAE = {ESTIMATOR: "gae"}
OF_CRITIC = {key: twins for key, twins in ((twin(key), case) for key, case in IDLE_CASES.items()) if key in UNUSED_KEYS}
IDLE_CASES = {
    **IDLE_CASES,
    **{
        key: (GAE | _twins(around), value, _twins(cure))
        for key, (around, value, cure) in OF_CRITIC.items()
        if key.startswith("critic.")
    },
}


def test_every_rule_is_about_a_key_that_exists():
    rules = [*UNUSED_KEYS.values(), *WITHOUT_CRITIC.values(), *WITHOUT_REWARD_MODEL.values()]
    assert {unused.key for unused in rules} <= set(leaf_types())


@pytest.mark.parametrize("key", UNUSED_KEYS)
def test_a_key_that_has_no_effect_is_warned_of_and_only_then(settled, caplog, key):
    around, value, cure = IDLE_CASES[key]
    settled(around | {key: value})
    assert [text.split("=")[0] for text in caplog.messages] == [key]
    caplog.clear()
    if cure is not None:
        settled(around | {key: value} | cure)
        assert caplog.messages == []


def test_a_default_given_on_purpose_is_not_warned_of(settled, caplog):
    settled({f"{AR}.actor.kl_loss_coef": 0.001, f"{AR}.actor.loss_scale_factor": 512, "data.max_response_length": 512})
    assert caplog.messages == []
