"""Every setting, typed and frozen, with its one default.

A field without a default is required. A field whose default is ``None`` and which appears in
:mod:`verl_memopt.config.links` follows another key unless it is given. Nothing past the loader sees a Hydra object,
and no other file in the project holds a default for a key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

REQUIRED: Any = "???"
"""Marks a key that has no default; the loader reports every one that is still missing."""


@dataclass(frozen=True)
class CustomClass:
    path: str | None = None
    """Python file that holds the class; null = the built-in one."""
    name: str | None = None
    """Class name inside ``path``."""


@dataclass(frozen=True)
class CustomSampler:
    class_path: str | None = None
    """Python file that holds a sampler class; it is called with (num_rows, seed, epoch) and yields row indices."""
    class_name: str | None = None
    """Class name inside ``class_path``."""


@dataclass(frozen=True)
class Data:
    train_files: Any = REQUIRED
    """A path or a list of paths: .parquet, .json, .jsonl."""
    val_files: Any = REQUIRED
    """As ``train_files``; null switches validation off."""
    train_max_samples: int = -1
    """Cap on training rows: a seeded random subset with ``shuffle``, else the first rows; -1 = all."""
    val_max_samples: int = -1
    """Cap on validation rows; -1 = all."""
    max_prompt_length: int = 512
    """Hard cap of a prompt in tokens; what happens beyond it is ``truncation``."""
    max_response_length: int = 512
    """Hard cap of a response in tokens."""
    train_batch_size: int = 1024
    """Prompts per step (each is answered ``rollout.n`` times)."""
    val_batch_size: int | None = None
    """Prompts per validation call; null = the whole validation set at once."""
    shuffle: bool = True
    """Draw a new order of the training rows each epoch."""
    validation_shuffle: bool = False
    """Shuffle the validation rows once."""
    seed: int | None = None
    """Seed of the data order; null = drawn once, logged, saved in the checkpoint."""
    filter_overlong_prompts: bool = False
    """Drop prompts over ``max_prompt_length`` when the dataset is read; the number dropped is logged."""
    truncation: str = "error"
    """What happens to a prompt over the cap: error, left, right, middle. Tokens lost are counted and logged."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a list of {role, content}, or a text that is used as it is."""
    allow_special_tokens: bool = False
    """Let the tokenizer read special tokens such as ``<|im_end|>`` inside prompts as tokens. false = they are plain text, except
    those of the chat template. Set true for prompts whose text is already rendered."""
    reward_fn_key: str = "data_source"
    """Column that chooses the default reward and groups validation metrics."""
    trust_remote_code: bool = False
    """Let the tokenizer run code from its folder."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the tokenizer's chat template."""
    custom_cls: CustomClass = field(default_factory=CustomClass)
    """A dataset class of the user's own."""
    sampler: CustomSampler = field(default_factory=CustomSampler)
    """A sampler of the user's own."""


@dataclass(frozen=True)
class TiledMlp:
    enabled: bool = False
    """Compute each MLP tile by tile, again in backward, so that its wide intermediates exist for one tile at a time.
    For long micro-batches, where they are most of a block's bytes."""
    num_shards: int = 4
    """Tiles a micro-batch's tokens are cut into."""


@dataclass(frozen=True)
class Model:
    path: str = REQUIRED
    """Folder in Hugging Face format, or a hub id; ``verl-memopt toy`` makes a tiny one."""
    hf_config_path: str | None = None
    """Read config.json from this folder in place of ``path``."""
    tokenizer_path: str | None = None
    """Read the tokenizer from this folder in place of ``path``."""
    trust_remote_code: bool = False
    """Let transformers run code from the model's folder."""
    external_lib: str | None = None
    """Module imported before the model is built (it may register architectures)."""
    custom_chat_template: str | None = None
    """Jinja text that replaces the tokenizer's chat template."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Merged into the model's config.json; a name the config does not have is an error."""
    enable_gradient_checkpointing: bool = True
    """Recompute decoder blocks in backward (non-reentrant): saves activations, costs one more forward."""
    gradient_checkpointing_mode: str = "full"
    """full = every block keeps its input only; every_n = one block in ``gradient_checkpointing_every`` does, the others keep
    everything; selective = every block also keeps the outputs of products and attention, and computes the rest again."""
    gradient_checkpointing_every: int = 2
    """With every_n: one block in n is computed again, counted back from the last but one. Raise it while memory lasts: a block
    that keeps everything is faster."""
    enable_activation_offload: bool = False
    """What a forward saves for its backward rests in host buffers in between, with or without gradient checkpointing."""
    activation_offload_min_bytes: int = 1048576
    """Smaller tensors stay on the device: a copy of its own would cost more than they take."""
    activation_offload_in_flight: int = 2
    """Tensors whose copies may be under way at once, either way; more hides copies better and holds as many on the device."""
    tiled_mlp: TiledMlp = field(default_factory=TiledMlp)
    """The MLP of each block over tiles of tokens."""
    recompute_elementwise: bool = True
    """Outputs of norms, rotations and the MLP's activation are made again in backward from what they were made of, which no
    product needs; set it to false only to compare."""
    prune_last_block: bool = True
    """The last block computes what is read of it, not the prompt; set it to false only to compare."""
    attn_implementation: str = "auto"
    """auto, flash_attention_2, sdpa, eager. auto = flash kernels where device and dtype support them, else sdpa."""
    load_mode: str = "stream"
    """stream = each rank reads its own shards, tensor by tensor; mmap = the reference that rests on the host rests in its
    safetensors file, mapped, and takes no host memory of its own."""
    logprob_chunk_tokens: int = 512
    """Response tokens per chunk of LM head, log-prob and entropy; 0 = whole logits."""
    logprob_vocab_tile: int = 0
    """Vocabulary entries per tile of a chunk's logits; 0 = 16,384 where a tile costs nothing, and whole rows where it would cost
    a product with the head: in an update whose loss is one of tokens, or strictly on-policy. Set it when logits are the peak."""
    lora_rank: int = 0
    """Rank of the adapters of a frozen base; 0 = train every weight. Use it when gradients and optimizer do not fit."""
    lora_alpha: float = 16
    """Adapters are scaled by lora_alpha / lora_rank."""
    target_modules: Any = "all-linear"
    """Layers with an adapter: all-linear (all but the head), a list of name endings, or a regular expression."""
    exclude_modules: Any = None
    """Layers left out: a list of name endings or a regular expression."""
    lora_adapter_path: str | None = None
    """Folder in the peft format to start the adapters from."""


@dataclass(frozen=True)
class PolicyLoss:
    loss_mode: str = "vanilla"
    """vanilla = clipped ratio per token; sequence = per sequence, exp of the summed log-ratio (RLOO);
    gspo = per sequence, length-normalised."""


@dataclass(frozen=True)
class Optim:
    optimizer: str = "AdamW"
    """Class name inside ``optimizer_impl``."""
    optimizer_impl: str = "torch.optim"
    """Module that holds the optimizer class."""
    override_optimizer_config: dict[str, Any] | None = None
    """Further arguments of the optimizer; the optimizer itself rejects names it does not know."""
    lr: float = 1e-6
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's moment decays."""
    clip_grad: float | None = 1.0
    """Global gradient-norm clip; null = no clipping, the norm is still reported."""
    state_dtype: str | None = None
    """dtype in which AdamW's two moments rest: fp32, bfloat16, int8, int4 (8, 4, 2.03, 1.06 bytes a parameter). Go down when
    optimizer state does not fit and ``optimizer_offload`` costs too much time; the last two are block-wise quantised."""
    stochastic_rounding: bool = False
    """Round updated bfloat16 weights up or down by chance, right on average; for ``fsdp_config.model_dtype=bfloat16``, where
    rounding to nearest loses updates below 2^-9 of a weight."""
    bucket_megabytes: float = 64
    """MiB of a bucket in which AdamW walks its state where that is offloaded, quantised or rounded; its step holds three at
    most. Lower it when the step sets the peak; a few MiB are enough to keep a bus busy."""
    in_backward: bool = False
    """Update each FSDP unit as soon as its gradient is reduced and free the gradient at once. Needs ``clip_grad=null`` and
    one micro-batch per optimizer step. A gradient that is not finite stops the run, unless it is the first of its step."""
    lr_scheduler_type: str = "constant"
    """Shape of the learning rate after the warm-up, by transformers' names. constant keeps ``lr``; the others lower it."""
    lr_scheduler_kwargs: dict[str, Any] | None = None
    """Further arguments of transformers' schedule, such as ``power`` of polynomial or ``num_decay_steps`` of
    warmup_stable_decay."""
    min_lr_ratio: float = 0.0
    """Floor of the schedule as a share of ``lr``."""
    num_cycles: float = 0.5
    """Waves of cosine over the run: 0.5 falls once from ``lr`` to the floor. cosine_with_restarts takes a whole number."""
    lr_warmup_steps: int = -1
    """Optimizer steps of linear warm-up; -1 = use ``lr_warmup_steps_ratio``."""
    lr_warmup_steps_ratio: float = 0.0
    """Warm-up as a share of the run's optimizer steps."""
    total_training_steps: int = -1
    """Length of the schedule in optimizer steps; -1 = the run's own number."""


@dataclass(frozen=True)
class MixedPrecision:
    reduce_dtype: str = "fp32"
    """dtype of the gradient reduction."""


@dataclass(frozen=True)
class WrapPolicy:
    transformer_layer_cls_to_wrap: list[str] | None = None
    """Block classes that become shards; null = the model's own decoder blocks."""


@dataclass(frozen=True)
class Fsdp:
    wrap_policy: WrapPolicy = field(default_factory=WrapPolicy)
    """Which modules become FSDP units."""
    param_offload: bool = False
    """Parameters rest in one host buffer outside the phases that need them: 4 bytes a parameter (fp32) leave the device.
    Turn it on for a reference first: it is needed in one phase only."""
    offload_policy: bool = False
    """FSDP2's own offload: parameters, gradients and optimizer state live on the host, and a CPU optimizer steps there.
    The last resort; not together with ``param_offload`` or ``optimizer_offload``."""
    own_units: bool = True
    """Embedding and LM head are FSDP units of their own, gathered when they compute only; false leaves them to the root.
    Tied ones are one tensor and stay with the root."""
    reshard_after_forward: bool | int = True
    """Free gathered parameters between forward and backward. false keeps them, which saves a gather; a number keeps them
    sharded over that many ranks, such as those of one machine."""
    forward_prefetch: bool = False
    """Gather the next block while the present one computes."""
    fsdp_size: int = -1
    """Ranks per shard group; -1 = all (one flat mesh); smaller = replicate x shard (HSDP)."""
    model_dtype: str = "fp32"
    """dtype in which parameters rest (masters)."""
    dtype: str = "bfloat16"
    """dtype of compute."""
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    """Gradient reduction."""
    seed: int = 42
    """Seed of every worker's torch generator."""
    full_determinism: bool = False
    """Deterministic kernels on every worker."""


@dataclass(frozen=True)
class TrainedFsdp(Fsdp):
    optimizer_offload: bool = False
    """Optimizer state rests in one host buffer and streams through the device inside the optimizer step only: 8 bytes a
    parameter (fp32 moments) leave the device."""
    gradient_sync: str = "every"
    """every = reduce gradients at each micro-batch; last = keep them whole and reduce once, at the last micro-batch: fewer
    collectives for 4 bytes a parameter (fp32 reduction) less this rank's share."""


@dataclass(frozen=True)
class CheckpointContents:
    save_contents: list[str] = field(default_factory=lambda: ["model", "optimizer", "extra"])
    """Parts to save: model, optimizer, extra (scheduler and RNG), hf_model (a Hugging Face folder)."""
    load_contents: list[str] | None = None
    """Parts to load on resume; follows ``save_contents``."""


@dataclass(frozen=True)
class Actor:
    strategy: str = "fsdp2"
    """Sharding backend; fsdp2 is the only one."""
    ppo_mini_batch_size: int = 256
    """Prompts per optimizer step."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Sequences per forward and backward; this or ``use_dynamic_bsz``."""
    use_dynamic_bsz: bool = False
    """Pack micro-batches by tokens instead of by sequences."""
    ppo_max_token_len_per_gpu: int = 16384
    """Hard cap of tokens per micro-batch with ``use_dynamic_bsz``."""
    old_log_prob_pass: str = "auto"
    """always, or auto: left out where the update's own forward gives the same log-probs, which is with one optimizer step a
    rollout and neither ``algorithm.use_kl_in_reward`` nor ``calculate_entropy``."""
    use_prefix_grouper: bool = True
    """Compute the prompt of a group once for all its answers, in every pass; false = once for each answer."""
    clip_ratio: float = 0.2
    """Clip of the ratio on both sides."""
    clip_ratio_low: float | None = None
    """Lower clip; follows ``clip_ratio``."""
    clip_ratio_high: float | None = None
    """Upper clip; follows ``clip_ratio``."""
    clip_ratio_c: float = 3.0
    """Dual clip: bound of the loss for negative advantages; above 1."""
    loss_agg_mode: str = "token-mean"
    """token-mean, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm; always over the global mini-batch."""
    loss_scale_factor: int | None = None
    """Divisor of seq-mean-token-sum-norm; follows ``data.max_response_length``."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    calculate_entropy: bool = False
    """Report the entropy even when its weight is 0."""
    use_kl_loss: bool = False
    """Add a KL term against the reference to the loss."""
    kl_loss_coef: float = 0.001
    """Weight of that term."""
    kl_loss_type: str = "low_var_kl"
    """kl (k1), abs, mse (k2), low_var_kl (k3); a trailing + takes k2's gradient."""
    use_torch_compile: bool = True
    """Compile the log-prob head, and norms, rotations and activations of all models. GPU only; off under full_determinism, and
    with one warning where there is no C compiler."""
    ppo_epochs: int = 1
    """Passes over the rollout batch."""
    shuffle: bool = False
    """Shuffle groups before they are cut into mini-batches."""
    data_loader_seed: int = 42
    """Seed of that shuffle."""
    policy_loss: PolicyLoss = field(default_factory=PolicyLoss)
    """The clipped objective."""
    optim: Optim = field(default_factory=Optim)
    """Optimizer and schedule."""
    fsdp_config: TrainedFsdp = field(default_factory=TrainedFsdp)
    """Sharding and precision of the policy."""
    checkpoint: CheckpointContents = field(default_factory=CheckpointContents)
    """What a checkpoint holds."""


@dataclass(frozen=True)
class RefModel:
    path: str | None = None
    """Another reference model with the same tokenizer; follows ``actor_rollout_ref.model.path``."""


@dataclass(frozen=True)
class Ref:
    model: RefModel = field(default_factory=RefModel)
    """Where the reference comes from."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Sequences per forward of the reference; follows the actor's micro-batch size."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Follows ``actor.use_dynamic_bsz``."""
    log_prob_max_token_len_per_gpu: int | None = None
    """Follows ``actor.ppo_max_token_len_per_gpu``."""
    use_torch_compile: bool | None = None
    """Compile the reference's log-prob head; follows ``actor.use_torch_compile``."""
    quantization: str = "none"
    """none, int8 or nf4: width at which the reference's linear layers rest. Lossy; the error is measured at load and logged."""
    fsdp_config: Fsdp = field(default_factory=Fsdp)
    """Sharding and precision of the reference."""


@dataclass(frozen=True)
class ValKwargs:
    n: int = 1
    """Samples per validation prompt."""
    do_sample: bool = False
    """false = greedy."""
    temperature: float = 0.0
    """Temperature when sampling."""
    top_p: float = 1.0
    """Nucleus when sampling."""
    top_k: int = -1
    """Top-k when sampling; -1 = off."""


@dataclass(frozen=True)
class BucketEngine:
    update_weights_bucket_megabytes: int = 2048
    """Upper bound in MiB of the buffer that carries weights from the trainer to the engine."""


@dataclass(frozen=True)
class EngineKwargs:
    vllm: dict[str, Any] = field(default_factory=dict)
    """Passed to vLLM last; a name that a rollout key already sets is an error."""


@dataclass(frozen=True)
class Rollout:
    name: str = REQUIRED
    """vllm, or hf (transformers generate)."""
    mode: str = "async"
    """Accepted for compatibility; the engine lives in the worker's process."""
    n: int = 1
    """Samples per prompt (the group size)."""
    temperature: float = 1.0
    """Sampling temperature; the trainer's log-probs use the same."""
    top_k: int = -1
    """-1 = off."""
    top_p: float = 1.0
    """1 = off."""
    repetition_penalty: float = 1.0
    """1 = off."""
    do_sample: bool = True
    """false = greedy."""
    prompt_length: int | None = None
    """Follows ``data.max_prompt_length``."""
    response_length: int | None = None
    """Exact cap of generated tokens; follows ``data.max_response_length``."""
    ignore_eos: bool = False
    """Generate exactly ``response_length`` tokens, for measurements."""
    seed: int | None = None
    """Seed of sampling, mixed with step, prompt and sample; follows ``data.seed``."""
    dtype: str = "bfloat16"
    """dtype of the engine's weights and KV cache."""
    load_format: str = "dummy"
    """dummy = weights come from the trainer at the first sync; auto = read from the model folder as well."""
    gpu_memory_utilization: float = 0.5
    """vLLM's share of total device memory (GPU)."""
    kv_cache_memory_gb: float | None = None
    """Size of the KV cache in GiB; null = from ``gpu_memory_utilization`` on a GPU, 1 GiB on a CPU."""
    kv_cache_dtype: str = "auto"
    """Elements of the KV cache: auto = ``dtype``; bfloat16; fp8 (e4m3), fp8_e4m3, fp8_e5m2 take one byte. Touch it when the
    cache bounds how many sequences run at once, and watch rollout/logprob_diff_mean."""
    max_model_len: int | None = None
    """Longest sequence; null = prompt_length + response_length."""
    max_num_seqs: int = 256
    """Sequences decoded at once."""
    max_num_batched_tokens: int = 8192
    """Prefill budget of one engine step."""
    tensor_model_parallel_size: int = 1
    """Ranks that share one engine."""
    enforce_eager: bool = False
    """No CUDA graphs."""
    enable_chunked_prefill: bool = True
    """Split long prefills."""
    enable_prefix_caching: bool = True
    """Share equal prompt blocks; reset after every weight sync."""
    free_cache_engine: bool | None = None
    """The engine sleeps outside rollout and validation; null = true on a GPU, false on a CPU (where vllm cannot; hf can)."""
    sleep_level: int | None = None
    """What a sleeping engine keeps: 1 = its weights, in host memory; 2 = nothing. null = 2: a sync brings all weights."""
    cudagraph_capture_sizes: list[int] | None = None
    """Passed to vLLM."""
    checkpoint_engine: BucketEngine = field(default_factory=BucketEngine)
    """Weight sync."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Sequences per forward of the old-log-prob pass; follows the actor's micro-batch size."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Follows ``actor.use_dynamic_bsz``."""
    log_prob_max_token_len_per_gpu: int | None = None
    """Follows ``actor.ppo_max_token_len_per_gpu``."""
    calculate_log_probs: bool = True
    """Return the engine's log-probs and log how far they are from the trainer's."""
    logprobs_mode: str = "processed_logprobs"
    """processed_logprobs (after temperature and filters) or raw_logprobs."""
    max_logprob_diff: float | str | None = "auto"
    """Stop the run when ``rollout/logprob_diff_mean`` passes this (nats). auto = by the dtypes of engine and trainer: 0.001 where
    both compute in fp32, 0.2 where one of them rounds to 16 bits, 1 with an fp8 KV cache. null = never."""
    disable_log_stats: bool = True
    """Passed to vLLM."""
    scheduling_policy: str = "fcfs"
    """Passed to vLLM: fcfs or priority."""
    engine_kwargs: EngineKwargs = field(default_factory=EngineKwargs)
    """Further engine arguments."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    """Sampling in validation."""


@dataclass(frozen=True)
class ActorRolloutRef:
    hybrid_engine: bool = True
    """Trainer and engine share devices; only true exists."""
    nccl_timeout: int = 600
    """Timeout of process groups in seconds."""
    model: Model = field(default_factory=Model)
    """The policy's model."""
    actor: Actor = field(default_factory=Actor)
    """The update."""
    ref: Ref = field(default_factory=Ref)
    """The reference; built only when a KL is asked for."""
    rollout: Rollout = field(default_factory=Rollout)
    """Generation."""


@dataclass(frozen=True)
class KlControl:
    type: str = "fixed"
    """fixed or adaptive."""
    kl_coef: float = 0.001
    """Coefficient, or its first value."""
    horizon: int = 10000
    """Adaptive only: samples over which the coefficient moves."""
    target_kl: float = 0.1
    """Adaptive only."""


@dataclass(frozen=True)
class Algorithm:
    adv_estimator: str = "gae"
    """rloo or grpo. The default is verl's: gae needs a critic, which is not available, so that one of the two must be given."""
    norm_adv_by_std_in_grpo: bool = True
    """GRPO: divide by the group's standard deviation."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from the reward."""
    kl_penalty: str = "kl"
    """Estimator of that KL: kl, abs, mse, low_var_kl."""
    kl_ctrl: KlControl = field(default_factory=KlControl)
    """Its coefficient."""
    expansion: str = "string"
    """How a prompt becomes ``rollout.n`` rows: string (as text, before one tokenization) or token (as ids)."""


@dataclass(frozen=True)
class RewardModel:
    reward_manager: str = "naive"
    """How scores become rewards; naive = one score on the last response token."""
    num_workers: int = 1
    """Processes that run the reward function."""


@dataclass(frozen=True)
class CustomReward:
    path: str | None = None
    """Python file with the reward function; null = the rule that belongs to ``data_source``."""
    name: str = "compute_score"
    """Function name: (data_source, solution_str, ground_truth, extra_info=None, **reward_kwargs)."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Fixed arguments of the function."""
    timeout_seconds: float = 60.0
    """Longest time one row may take."""
    cpu_seconds: float | None = None
    """Most processor time of one row, summed over all threads and processes that work on it; null = 32 x ``timeout_seconds``."""
    memory_gb: float = 16
    """Most GiB of memory that one reward process, with all that it starts, may hold. Each of ``reward_model.num_workers`` has
    this limit for itself."""
    open_files: int = 4096
    """Most files that one reward process may have open."""
    on_error: str = "raise"
    """raise = a row that fails stops the run; score = it takes ``fallback_score``, is counted and logged."""
    fallback_score: float = 0.0
    """Score of a failed row with on_error=score."""


@dataclass(frozen=True)
class RayKwargs:
    ray_init: dict[str, Any] = field(default_factory=dict)
    """Arguments of ray.init (num_cpus, address, ...)."""
    timeline_json_file: str | None = None
    """Write Ray's timeline here at the end."""


@dataclass(frozen=True)
class Trainer:
    nnodes: int = 1
    """Machines."""
    n_gpus_per_node: int = 1
    """Devices per machine; on a CPU, worker processes."""
    device: str = "auto"
    """auto, cuda, cpu."""
    worker_group: str = "ray"
    """ray = one process per device; local = the worker lives in this process (one device)."""
    total_epochs: int = 30
    """Passes over the training rows."""
    total_training_steps: int | None = None
    """Steps; wins over ``total_epochs``."""
    logger: Any = field(default_factory=lambda: ["console", "jsonl"])
    """console, jsonl, tensorboard, wandb."""
    table_every_steps: int = 10
    """Print the table of recent steps every so many steps."""
    track_memory_every_steps: int = 10
    """CPU only: count live tensor bytes in steps 1, 2 and every so many (a GPU reads its allocator every step);
    0 = never."""
    log_val_generations: int = 0
    """Validation samples logged as a table."""
    rollout_data_dir: str | None = None
    """Write every training sample to {dir}/{step}.jsonl."""
    validation_data_dir: str | None = None
    """Write every validation sample to {dir}/{step}.jsonl."""
    save_freq: int = -1
    """Steps between checkpoints; > 0 also saves the last step."""
    test_freq: int = -1
    """Steps between validations; > 0 also validates the last step."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate and exit."""
    resume_mode: str = "auto"
    """auto = newest whole checkpoint in ``default_local_dir``; disable; resume_path."""
    resume_from_path: str | None = None
    """A global_step_N folder, with resume_mode=resume_path."""
    project_name: str = "verl_examples"
    """Names the run in loggers and in ``default_local_dir``."""
    experiment_name: str = "gsm8k"
    """As ``project_name``."""
    default_local_dir: str | None = None
    """The run folder; null = checkpoints/{project_name}/{experiment_name}."""
    max_actor_ckpt_to_keep: int | None = None
    """Checkpoints kept; null = all. The newest whose weights are known to be good (they gave finite gradients) stays besides."""
    keep_best: bool | None = None
    """Keep the checkpoint with the best validation score besides; null = true where the run validates (``test_freq`` > 0)."""
    max_skipped_steps: int = 3
    """Steps in a row without any update, because no gradient norm was finite, after which the run stops and names the last good
    checkpoint. One such step may be a bad batch; three in a row mean that the weights or the settings are at fault."""
    balance_batch: bool = True
    """Even out tokens over ranks."""
    ray_wait_register_center_timeout: int = 300
    """Seconds for placement and worker start."""
    stop_deadline_seconds: float = 25.0
    """Seconds from a stop signal to the end of the run: it finishes or gives up the step, saves and exits. Slurm and Kubernetes
    kill 30 seconds after SIGTERM unless told otherwise."""


@dataclass(frozen=True)
class Memory:
    device_limit_gb: float | None = None
    """Most GiB of device memory a worker may take, engine included, so that a smaller card can be rehearsed; null = all of it.
    On a CPU it is held in the phases whose bytes are counted (``trainer.track_memory_every_steps``)."""
    host_limit_gb: float | None = None
    """Most GiB of host memory a worker's offloads may take together; null = no limit. Set it below the machine's memory
    divided by its workers: an error that names it is better than a killed process."""
    pinned_limit_gb: float | None = None
    """Most GiB of those that may be page-locked; what goes beyond is ordinary memory, whose copies wait; null = no limit."""


@dataclass(frozen=True)
class Debug:
    mode: str = "off"
    """off, or dry (resolve the settings, print them, exit)."""


@dataclass(frozen=True)
class Settings:
    data: Data = field(default_factory=Data)
    actor_rollout_ref: ActorRolloutRef = field(default_factory=ActorRolloutRef)
    algorithm: Algorithm = field(default_factory=Algorithm)
    reward_model: RewardModel = field(default_factory=RewardModel)
    custom_reward_function: CustomReward = field(default_factory=CustomReward)
    trainer: Trainer = field(default_factory=Trainer)
    ray_kwargs: RayKwargs = field(default_factory=RayKwargs)
    memory: Memory = field(default_factory=Memory)
    """Limits of each worker process. As a group, ``memory=constrained`` names a profile."""
    debug: Debug = field(default_factory=Debug)
