"""The names of TRL's trainers, and of transformers' arguments below them, that have no equal here: what passes, and why."""

from __future__ import annotations

from typing import Any

from verl_memopt.config.unused_keys import ANY, EITHER, Refusal

_AR = "actor_rollout_ref"
_ACTOR, _ROLLOUT = f"{_AR}.actor", f"{_AR}.rollout"
_LOSS_MODE = f"{_ACTOR}.policy_loss.loss_mode"
_CORRECTION = "algorithm.rollout_correction"
_REWARD_FUNCTION = "Use custom_reward_function.path: it belongs in the reward function"

_ROWS: tuple[tuple[str, tuple[Any, ...] | None, str], ...] = (
    ("missing_eos_penalty", (), f"a score has no further penalty. {_REWARD_FUNCTION}"),
    ("reward_clip_range", (), f"scores are not clipped. {_REWARD_FUNCTION}"),
    ("reward_weights", (), f"there is one reward. {_REWARD_FUNCTION}"),
    ("reward_funcs", (), "a reward function is named by its file. Use custom_reward_function.path"),
    ("whiten_rewards", (False,), "rewards are not whitened. Use algorithm.normalize_advantages"),
    ("token_level_kl", (False,), "RLOO takes the KL of a whole response off its reward. Set false, or remove the key"),
    ("min_p", (0, 0.0), f"samples are cut by {_ROLLOUT}.top_p and top_k alone. Use one of them"),
    ("vllm_mode", ("colocate",), f"the engine always lives in the worker's process. Set {_ROLLOUT}.name=vllm alone"),
    ("disable_dropout", EITHER, "models are computed in evaluation mode, whatever this key says"),
    ("local_rollout_forward_batch_size", ANY,
     f"passes without gradients are cut by tokens. Use {_ROLLOUT}.log_prob_max_token_len_per_gpu"),
    ("per_device_eval_batch_size", ANY, "a validation is one call. Use data.val_batch_size to cut it"),
    ("stop_token", ("eos",), "a response ends at the end-of-sequence tokens of the model's folder. Remove the key"),
    ("dataset_name", (), "rows come from files. Use data.train_files and data.val_files"),
    ("log_completions", EITHER, "samples are written to the run folder. Use trainer.log_val_generations for a table"),
    ("remove_unused_columns", EITHER, "a reward function gets every column. Remove the key"),
    ("model_init_kwargs", (), f"models load by other keys. Use {_AR}.model.override_config and {_ACTOR}.fsdp_config.dtype"),
    ("router_aux_loss_coef", (0, 0.0), "the loss has no term for the balance of experts. Set 0, or remove the key"),
    ("pad_to_multiple_of", ANY, "nothing is padded: sequences are packed"),
    ("generation_kwargs", (), f"responses are drawn with other names. Use {_ROLLOUT}.temperature, top_p and top_k"),
    ("cache_implementation", ANY, "the engine chooses its cache"),
    ("use_transformers_continuous_batching use_transformers_paged", (False,), f"vLLM does that. Set {_ROLLOUT}.name=vllm"),
    ("transformers_continuous_batching_config", (), f"vLLM does that. Set {_ROLLOUT}.name=vllm"),
    ("vllm_model_impl", ("vllm", "auto"), f"set an argument of vLLM by {_ROLLOUT}.engine_kwargs.vllm"),
    ("vllm_structured_outputs_regex", (), "responses are drawn freely. Reward the format in the reward function"),
    ("vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port", (),
     "the engine always lives in the worker's process, and there is no server. Remove the key"),
    ("log_multimodal", EITHER, "there are no images"),
    ("num_completions_to_print log_unique_prompts", ANY, "samples are written to the run folder, each with its prompt"),
    ("log_completions_hub_repo", (), "nothing is sent to the hub. Remove the key"),
    ("use_liger_kernel", EITHER, "head and loss are computed by code of this package"),
    ("torch_empty_cache_steps", ANY, "memory goes back between the phases that need it"),
    ("cast_lm_head_to_fp32", (False,), f"the head has the dtype of the model. Use {_ACTOR}.fsdp_config.dtype"),
    ("delta", (), f"the clip for negative advantages has another name. Use {_ACTOR}.clip_ratio_c"),
    ("sapo_temperature_neg sapo_temperature_pos", (),
     f"SAPO is a loss of its own. Use {_LOSS_MODE}=sapo with {_ACTOR}.tau_neg and tau_pos"),
    ("vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", (), f"there is no loss VESPO. Use another {_LOSS_MODE}"),
    ("importance_sampling_level", ("token",), f"a ratio of sequences is a loss of its own. Use {_LOSS_MODE}=gspo"),
    ("multi_objective_aggregation", ("sum_then_normalize",), f"rewards are added up first. {_REWARD_FUNCTION}"),
    ("top_entropy_quantile", (1, 1.0), "all tokens are learned, whatever their entropy. Set 1.0, or remove the key"),
    ("entropy_coef", (0, 0.0), f"TRL's bonus is a mean over tokens with any loss. Use {_ACTOR}.entropy_coeff"),
    ("use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target", (False,),
     f"the coefficient of the entropy stays as it is. Use {_ACTOR}.entropy_coeff"),
    ("max_tool_calling_iterations", (), "there are no tool calls in rollouts. Remove the key"),
    ("vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_cap "
     "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min", (False,),
     f"the correction has settings of its own. Use {_CORRECTION}.rollout_is and rollout_is_threshold"),
    ("off_policy_mask_threshold", (), f"the mask has settings of its own. Use {_CORRECTION}.rollout_rs"),
    ("fp16 fp16_full_eval", (False,), f"float16 needs a scaler of the loss. Use {_ACTOR}.fsdp_config.dtype=bfloat16"),
    ("bf16_full_eval tf32", EITHER, f"validation generates with {_ROLLOUT}.dtype, and matrices of fp32 are multiplied in fp32"),
    ("do_train do_eval do_predict prediction_loss_only batch_eval_metrics eval_do_concat_batches eval_use_gather_object "
     "include_for_metrics include_num_input_tokens_seen eval_accumulation_steps eval_delay label_names", ANY,
     "a validation reports rewards. Use trainer.test_freq"),
    ("eval_strategy", ("no", "steps"), "it is by steps. Use trainer.test_freq"),
    ("save_strategy", ("no", "steps"), "it is by steps. Use trainer.save_freq"),
    ("logging_strategy", ("no", "steps"), "every step is logged"),
    ("logging_first_step logging_nan_inf_filter log_level log_level_replica log_on_each_node disable_tqdm "
     "skip_memory_metrics", ANY, "every step is logged, and the console has a bar"),
    ("load_best_model_at_end", (False,), "the best checkpoint is kept. Use trainer.keep_best_checkpoint"),
    ("metric_for_best_model greater_is_better", ANY, "the best checkpoint is chosen by trainer.keep_best_checkpoint"),
    ("save_only_model", (False,), f"Use {_ACTOR}.checkpoint.save_contents"),
    ("save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint ignore_data_skip", (False,),
     "a checkpoint is one folder, which holds the whole state. Set false, or remove the key"),
    ("push_to_hub hub_always_push hub_private_repo", (False,), "nothing is sent to the hub. Remove the key"),
    ("hub_model_id hub_token hub_revision trackio_space_id trackio_bucket_id trackio_static_space_id", (),
     "nothing is sent to the hub. Remove the key"),
    ("hub_strategy project", ANY, "nothing is sent to the hub"),
    ("resume_from_checkpoint", (), "Use trainer.resume_mode=resume_path with trainer.resume_from_path"),
    ("dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
     "dataloader_prefetch_factor dataloader_in_order dataloader_multiprocessing_context length_column_name", ANY,
     "rows are read on the driver, while the devices compute"),
    ("data_seed", (), "Use data.seed"),
    ("train_sampling_strategy", ("random",), "Use data.shuffle or data.sampler.class_path"),
    ("ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout local_rank "
     "average_tokens_across_devices", ANY, "ranks are sharded by FSDP2, and sums over tokens are over all ranks"),
    ("fsdp fsdp_config deepspeed parallelism_config", ((), [], {}, ""),
     f"models are sharded by FSDP2. Use {_ACTOR}.fsdp_config.fsdp_size"),
    ("accelerator_config", ANY, "there is no accelerator of that library"),
    ("auto_find_batch_size", (False,), f"Use {_ACTOR}.adaptive_token_budget=true, which never changes the batch"),
    ("optim", ("adamw_torch", "adamw_torch_fused"), f"Use {_ACTOR}.optim.optimizer and optimizer_impl"),
    ("optim_args optim_target_modules", (), f"Use {_ACTOR}.optim.override_optimizer_config"),
    ("full_determinism", (False,), f"Use {_ACTOR}.fsdp_config.full_determinism"),
    ("gradient_checkpointing_kwargs", ANY, "checkpoints are always non-reentrant"),
    ("torch_compile", EITHER, f"Use {_ACTOR}.use_torch_compile"),
    ("torch_compile_backend torch_compile_mode", ANY, f"Use {_ACTOR}.use_torch_compile"),
    ("use_cache liger_kernel_config", ANY, "head, loss and attention are computed by code of this package"),
    ("label_smoothing_factor", (0, 0.0), "the loss is of the policy's log-probs. Set 0, or remove the key"),
    ("neftune_noise_alpha", (), "embeddings get no noise. Remove the key"),
    ("use_bias_correction_kl", (False,), "the KL is not weighted by the ratio. Set false, or remove the key"),
    ("ds3_gather_for_generation", EITHER, "weights reach the engine inside its process, piece by piece. Remove the key"),
)  # fmt: skip
"""Names (separated by spaces), the values that ask for nothing, why, and the way out."""

NO_EQUAL: dict[str, Refusal] = {name: Refusal(inert, reason) for names, inert, reason in _ROWS for name in names.split()}
"""Name of TRL without an equal here -> the values that ask for nothing, why, and the way out."""
