import pytest

from verl_memopt.config.checks import ENGINE_NAMES, RULES
from verl_memopt.config.keys import leaf_types
from verl_memopt.config.values import WHY_NOT, choices, ranges
from verl_memopt.memory.critic_rules import refusals

AR = "actor_rollout_ref"


def test_every_rule_about_one_key_is_about_a_key_that_exists():
    assert {*choices(), *ranges(), *(key for key, _ in WHY_NOT)} <= set(leaf_types())
    assert set(ENGINE_NAMES.values()) <= set(leaf_types())


@pytest.mark.parametrize("estimator", ["rloo", "gae"])
def test_every_rule_is_about_keys_that_exist_and_allows_settings_that_are_right(settled, estimator):
    settings = settled({"algorithm.adv_estimator": estimator})
    for rule in (*RULES, *refusals()):
        assert set(rule.keys) <= set(leaf_types())
        assert not rule.when(settings), rule.because


def test_a_rule_does_not_read_a_key_that_is_wrong_by_itself(complaint):
    parts = f"{AR}.rollout.tensor_model_parallel_size"
    line = complaint({"trainer.n_gpus_per_node": 0, parts: 3, "data.train_batch_size": 3})
    assert "the prompts of a step do not divide into mini-batches" in line
    assert "does not divide the" not in line


def test_a_rule_of_the_critic_does_not_read_a_key_of_the_critic_that_is_wrong_by_itself(complaint):
    keys = {"critic.optim.in_backward": True, "algorithm.adv_estimator": "gae", "critic.use_dynamic_bsz": False}
    rows = "critic.ppo_micro_batch_size_per_gpu"
    assert "would have to accumulate" in complaint(keys | {rows: 1})
    assert "would have to accumulate" not in complaint(keys | {rows: -1})
    assert "would have to accumulate" in complaint(keys | {rows: 1, f"{AR}.actor.ppo_micro_batch_size_per_gpu": -1})


def test_every_number_has_a_range():
    numbers = {key for key, kind in leaf_types().items() if kind in (int, float, int | None, float | None)}
    bounds = {f"{AR}.actor.policy_loss.{key}" for key in ("clip_cov_lb", "clip_cov_ub")}  # a covariance may be any number
    assert numbers - set(ranges()) == {"custom_reward_function.fallback_score", f"{AR}.rollout.agent.failed_reward"} | bounds


@pytest.mark.parametrize("key", choices())
def test_a_word_that_is_no_choice_is_refused_with_the_choices(complaint, key):
    listed = "list" in str(leaf_types()[key])
    message = complaint({key: ["nothing"] if listed else "nothing"})
    line = next(line for line in message.splitlines() if line.startswith(f"{key}="))
    assert line.endswith(f"nothing is no choice. Set {' or '.join(choices()[key])}.")


def test_a_number_out_of_range_is_refused_alone(complaint):
    line = complaint({"data.train_batch_size": -7, "trainer.worker_group": "ray"})
    assert line.startswith("data.train_batch_size=-7: ")
    assert "\n" not in line


OPTIM, FSDP, REF = f"{AR}.actor.optim", f"{AR}.actor.fsdp_config", f"{AR}.ref.fsdp_config"
KL = {f"{AR}.actor.use_kl_loss": True}
WRONG = {
    "another optimizer that should rest on the host": (
        {f"{FSDP}.optimizer_offload": True, f"{OPTIM}.optimizer": "RMSprop"},
        f"{FSDP}.optimizer_offload=true, {OPTIM}.optimizer=RMSprop, "
        f"{OPTIM}.optimizer_impl=torch.optim: only AdamW and SGD of torch.optim support it. Remove "
        f"{FSDP}.optimizer_offload, or {OPTIM}.optimizer and optimizer_impl.",
    ),
    "an argument that our AdamW does not take": (
        {f"{OPTIM}.state_dtype": "int8", f"{OPTIM}.override_optimizer_config": {"foreach": True}},
        f"{OPTIM}.state_dtype=int8, {OPTIM}.override_optimizer_config={{'foreach': True}}: with "
        f"{OPTIM}.state_dtype, AdamW takes only lr, betas, eps and weight_decay, and SGD only lr, momentum, nesterov and "
        f"weight_decay. "
        f"Remove foreach from {OPTIM}.override_optimizer_config.",
    ),
    "a quantised momentum": (
        {f"{OPTIM}.state_dtype": "int8", f"{OPTIM}.optimizer": "SGD", f"{OPTIM}.momentum": 0.9},
        f"{OPTIM}.state_dtype=int8, {OPTIM}.optimizer=SGD: SGD's momentum cannot be quantised. Set "
        f"{OPTIM}.state_dtype=bfloat16, or {OPTIM}.optimizer=AdamW.",
    ),
    "rounding of weights that are not rounded": (
        {f"{OPTIM}.stochastic_rounding": True},
        f"{OPTIM}.stochastic_rounding=true, {FSDP}.model_dtype=fp32: fp32 weights are not rounded. "
        f"Set {FSDP}.model_dtype=bfloat16, or remove stochastic_rounding.",
    ),
    "torchao's 4-bit optimizer": (
        {f"{OPTIM}.optimizer_impl": "torchao.optim", f"{OPTIM}.optimizer": "AdamW4bit", "trainer.device": "cuda"},
        f"{OPTIM}.optimizer_impl=torchao.optim, {OPTIM}.optimizer=AdamW4bit: this optimizer cannot update sharded "
        f"parameters. Remove both and set {OPTIM}.state_dtype=int4 (or int8), or set {OPTIM}.optimizer="
        "AdamW8bit.",
    ),
    "no micro-batch size": (
        {f"{AR}.actor.use_dynamic_bsz": False},
        f"{AR}.actor.ppo_micro_batch_size_per_gpu=null, {AR}.actor.use_dynamic_bsz=false: a micro-batch has no size. "
        f"Set {AR}.actor.ppo_micro_batch_size_per_gpu, or {AR}.actor.use_dynamic_bsz=true.",
    ),
    "a shard group of the reference that does not divide": (
        {f"{REF}.fsdp_size": 3, "trainer.n_gpus_per_node": 4, **KL},
        f"{REF}.fsdp_size=3, ",
    ),
    "resharding to all the ranks there are": (
        {f"{REF}.reshard_after_forward": 2, "trainer.n_gpus_per_node": 2, **KL},
        f"{REF}.reshard_after_forward=2, {REF}.fsdp_size=-1: does not divide the 2 ranks",
    ),
    "two ways of resting on the host": (
        {f"{FSDP}.offload_policy": True, f"{FSDP}.param_offload": True},
        f"{FSDP}.offload_policy=true, {FSDP}.param_offload=true: offload_policy already keeps",
    ),
    "a policy that streams": (
        {f"{FSDP}.param_offload": "stream"},
        f"{FSDP}.param_offload=stream: backward and optimizer need the whole model on the device; only a frozen "
        f"model streams. Set {FSDP}.param_offload=true.",
    ),
    "a reference that streams to several devices": (
        {f"{REF}.param_offload": "stream", **KL, "trainer.n_gpus_per_node": 2},
        f"{REF}.param_offload=stream, trainer.nnodes=1, trainer.n_gpus_per_node=2: on several devices "
        f"FSDP2 shards each block, and gathers it when it computes. Set {REF}.offload_policy=true",
    ),
    "a reference that streams from a mapped file": (
        {f"{REF}.param_offload": "stream", **KL, f"{AR}.model.load_mode": "mmap"},
        f"{REF}.param_offload=stream, {AR}.model.load_mode=mmap: a copy from a mapped file",
    ),
    "a reference that streams and never leaves the host": (
        {f"{REF}.{key}": value for key, value in (("param_offload", "stream"), ("offload_policy", True))} | {**KL},
        f"{REF}.offload_policy=true, {REF}.param_offload=stream: offload_policy already keeps",
    ),
    "adapters and a reference that streams": (
        {f"{REF}.param_offload": "stream", f"{AR}.model.lora_rank": 4},
        f"{REF}.param_offload=stream, {AR}.model.lora_rank=4: with LoRA the reference is the policy's own base",
    ),
    "a reference that follows the policy and has lost its masters": (
        {f"{REF}.param_offload": "stream", **KL, f"{AR}.ref.sync_every_steps": 1},
        f"{REF}.param_offload=stream, {AR}.ref.sync_every_steps=1, {REF}.model_dtype=fp32, "
        f"{REF}.dtype=bfloat16: a reference that streams rests in the compute dtype",
    ),
    "two ways of offloading optimizer state": (
        {f"{FSDP}.offload_policy": True, f"{FSDP}.optimizer_offload": True},
        f"{FSDP}.offload_policy=true, {FSDP}.optimizer_offload=true: offload_policy already keeps",
    ),
    "a mapped file without a reference on the host": (
        {f"{AR}.model.load_mode": "mmap", **KL},
        f"{AR}.model.load_mode=mmap, {REF}.param_offload=false: a mapped file holds a reference",
    ),
    "a mapped file and adapters": (
        {f"{AR}.model.load_mode": "mmap", f"{AR}.model.lora_rank": 4, **KL},
        f"{AR}.model.load_mode=mmap, {AR}.model.lora_rank=4: with LoRA the reference is the policy's own base",
    ),
    "a mapped file and a reference that never leaves the host": (
        {f"{AR}.model.load_mode": "mmap", f"{REF}.offload_policy": True, **KL},
        f"{AR}.model.load_mode=mmap, {REF}.offload_policy=true: with offload_policy the reference stays in a host buffer",
    ),
    "Ray's arguments without Ray": (
        {"trainer.worker_group": "local", "ray_kwargs.ray_init": {"num_cpus": 2}},
        "ray_kwargs.ray_init={'num_cpus': 2}, trainer.worker_group=local: Ray is not started",
    ),
    "an engine apart from the trainer": (
        {f"{AR}.hybrid_engine": False},
        f"{AR}.hybrid_engine=false: trainer and engine always share their devices",
    ),
    "validation alone without rows": (
        {"trainer.val_only": True},
        "trainer.val_only=true, data.val_files=null: there is nothing to validate on",
    ),
    "a mode without its path": (
        {"trainer.resume_mode": "resume_path"},
        "trainer.resume_mode=resume_path, trainer.resume_from_path=null: no path is given",
    ),
    "a dataset class without a name": (
        {"data.custom_cls.path": "rows.py"},
        "data.custom_cls.path=rows.py, data.custom_cls.name=null: a class needs its file and its name",
    ),
    "a sampler class without a file": (
        {"data.sampler.class_name": "Mine"},
        "data.sampler.class_path=null, data.sampler.class_name=Mine: a class needs its file and its name",
    ),
    "gdpo without rewards": (
        {"algorithm.adv_estimator": "gdpo"},
        "algorithm.adv_estimator=gdpo, algorithm.gdpo_reward_keys=null: there is no reward to normalize",
    ),
    "gdpo with a weight too few": (
        {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["a", "b"], "algorithm.gdpo_reward_weights": [1.0]},
        "algorithm.gdpo_reward_keys=[a,b], algorithm.gdpo_reward_weights=[1.0]: each reward needs one weight",
    ),
    "gdpo with clipped rewards": (
        {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["a"], "algorithm.reward_clip_range": [-1.0, 1.0]},
        "algorithm.adv_estimator=gdpo, algorithm.reward_clip_range=[-1.0,1.0]: the advantages come from the rewards in",
    ),
    "a smallest weight of the bonus above the largest": (
        {f"{AR}.actor.entropy_ctrl.target": 1.0, f"{AR}.actor.entropy_ctrl.min": 2.0},
        f"{AR}.actor.entropy_ctrl.min=2.0, {AR}.actor.entropy_ctrl.max=1.0: the smallest weight is above the largest",
    ),
    "training files of null": ({"data.train_files": None}, "data.train_files=null: expected a path or a list of paths"),
    "training files of numbers": ({"data.train_files": [1]}, "data.train_files=[1]: expected a path or a list of paths"),
    "no training file": ({"data.train_files": []}, "data.train_files=[]: expected a path or a list of paths"),
    "an empty name of a file": ({"data.val_files": ""}, "data.val_files='': expected a path or a list of paths"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_impossible_combination_is_refused_in_one_line_that_names_it(complaint, case):
    more, message = WRONG[case]
    told = complaint(more)
    assert told.startswith(message)
    assert "\n" not in told


@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_an_engine_argument_that_a_key_sets_is_refused(complaint, name):
    message = complaint({f"{AR}.rollout.engine_kwargs.vllm": {name: 1}})
    assert f"engine_kwargs.vllm.{name}=1: {ENGINE_NAMES[name]} sets this argument already" in message


@pytest.mark.parametrize(
    "more",
    [
        {"data.train_files": {"size": 9}, "data.custom_cls.path": "a.py", "data.custom_cls.name": "A"},
        {**KL, "algorithm.use_kl_in_reward": True},
        {f"{AR}.ref.log_prob_max_token_len_per_gpu": 10},
        {f"{REF}.fsdp_size": 3, "trainer.n_gpus_per_node": 4},
        {f"{AR}.actor.ppo_max_token_len_per_gpu": 1024},
        {f"{AR}.actor.ppo_max_token_len_per_gpu": 10, f"{AR}.actor.use_dynamic_bsz": False}
        | {f"{AR}.actor.ppo_micro_batch_size_per_gpu": 1},
        {f"{AR}.rollout.engine_kwargs.vllm": {"swap_space": 4}},
        {f"{AR}.rollout.val_kwargs.do_sample": True, f"{AR}.rollout.val_kwargs.temperature": 0.6},
        {"trainer.n_gpus_per_node": 2, "data.train_batch_size": 3, f"{AR}.actor.ppo_mini_batch_size": 3, f"{AR}.rollout.n": 5},
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": 0.2},
        {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 2, f"{FSDP}.fsdp_size": 2},
        {f"{FSDP}.reshard_after_forward": 2, "trainer.n_gpus_per_node": 4},
        {f"{FSDP}.offload_policy": True, f"{REF}.param_offload": True},
        {f"{AR}.model.load_mode": "mmap", **KL, f"{REF}.param_offload": True},
    ],
)
def test_a_possible_combination_passes(settled, more):
    assert settled(more)


FOUR = {"trainer.n_gpus_per_node": 4}
ONE_STEP = {f"{OPTIM}.in_backward": True, f"{OPTIM}.clip_grad": None, f"{AR}.actor.use_dynamic_bsz": False}
LIMITS = {
    "a step is whole mini-batches": ({f"{AR}.actor.ppo_mini_batch_size": 64}, "data.train_batch_size", [64, 128], [63, 65, 127]),
    "a mini-batch divides a step": ({"data.train_batch_size": 64}, f"{AR}.actor.ppo_mini_batch_size", [32, 64], [33, 63, 65]),
    "a sample fits the actor's budget": ({}, f"{AR}.actor.ppo_max_token_len_per_gpu", [1024], [1023]),
    "a sample fits the reference's budget": (
        {**KL}, f"{AR}.ref.log_prob_max_token_len_per_gpu", [1024], [1023],
    ),
    "prompt and response fit the engine": ({}, f"{AR}.rollout.max_model_len", [1024], [1023]),
    "prompts of the data fit the engine": ({}, f"{AR}.rollout.prompt_length", [512], [511]),
    "responses of the engine fit the data": ({}, f"{AR}.rollout.response_length", [512], [513]),
    "engines divide the devices": (
        FOUR | {f"{AR}.rollout.name": "vllm"}, f"{AR}.rollout.tensor_model_parallel_size", [1, 2, 4], [3, 5, 8],
    ),
    "transformers runs on one device": ({"trainer.n_gpus_per_node": 2}, f"{AR}.rollout.tensor_model_parallel_size", [1], [2]),
    "shard groups divide the devices": (FOUR, f"{FSDP}.fsdp_size", [1, 2, 4, -1], [3]),
    "groups that share tokens divide the devices": (
        FOUR, f"{FSDP}.ulysses_sequence_parallel_size", [None, 1, 2, 4], [3, 5, 8],
    ),
    "a reference over tiles has all tokens of a pack": (
        FOUR | {f"{AR}.model.block_tile_tokens": 64, **KL},
        f"{REF}.ulysses_sequence_parallel_size", [1], [2],
    ),
    "the caps of devices that share tokens add up": (
        FOUR | {f"{FSDP}.ulysses_sequence_parallel_size": 2},
        f"{AR}.actor.ppo_max_token_len_per_gpu", [512], [511],
    ),
    "parts of a shard group are smaller than it": (
        {"trainer.n_gpus_per_node": 8}, f"{FSDP}.reshard_after_forward", [2, 4], [3, 8],
    ),
    "a local group has one device": ({"trainer.worker_group": "local"}, "trainer.n_gpus_per_node", [1], [2]),
    "a local group has one node": ({"trainer.worker_group": "local"}, "trainer.nnodes", [1], [2]),
    "an update in backward has one micro-batch": (
        ONE_STEP | {"data.train_batch_size": 2, f"{AR}.actor.ppo_mini_batch_size": 2},
        f"{AR}.actor.ppo_micro_batch_size_per_gpu", [8, 9], [7],
    ),
    "greedy validation has no temperature": (
        {f"{AR}.rollout.val_kwargs.do_sample": False}, f"{AR}.rollout.val_kwargs.temperature", [0.0], [1e-9],
    ),
    "vLLM samples at some temperatures": (
        {f"{AR}.rollout.name": "vllm"}, f"{AR}.rollout.temperature", [0.01, 1.0, 2.0], [20.0, 2.1, 0.009],
    ),
    "transformers sample at any": ({f"{AR}.rollout.name": "hf"}, f"{AR}.rollout.temperature", [20.0, 0.001], []),
    "sampled validation has a temperature": (
        {f"{AR}.rollout.val_kwargs.do_sample": True}, f"{AR}.rollout.val_kwargs.temperature", [1e-4], [0.0, 1e-5],
    ),
    "adapters have a rank": ({f"{AR}.model.lora_adapter_path": "adapter"}, f"{AR}.model.lora_rank", [1], [0]),
    "a quantised reference has no adapters": (
        {f"{AR}.ref.quantization": "int8", **KL}, f"{AR}.model.lora_rank", [0], [1],
    ),
    "torchao's step is not counted": (
        {f"{OPTIM}.optimizer_impl": "torchao.optim", f"{OPTIM}.optimizer": "AdamW8bit"},
        "trainer.track_memory_every_steps", [0], [1],
    ),
}  # fmt: skip
"""What must hold -> the other keys, the key that is tried, its values at the limit and its values just beyond."""


@pytest.mark.parametrize("what", LIMITS)
def test_a_value_at_a_limit_passes_and_one_beyond_is_refused_by_name(assert_limit, what):
    assert_limit(*LIMITS[what])


@pytest.mark.parametrize("key", ["trainer.project_name", "trainer.experiment_name"])
def test_a_name_that_leads_out_of_its_folder_is_refused_and_a_plain_one_taken(complaint, settled, key):
    for name in ("..", ".", "", " ", "../..", "/etc", "a/b", "a\\b", "a/"):
        said = complaint({key: name})
        assert said.startswith(f"{key}=")
        assert "one part of the run folder's path" in said
    for name in ("gsm8k", "..a", "a..b", "ä b", "2026-01-01 12:00"):
        assert name in settled({key: name}).trainer.default_local_dir.split("/")


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b"], ids=ascii)
@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("trainer.default_local_dir", "this is no path of a file: "),
        ("data.train_files", "this is no path of a file: "),
        ("trainer.experiment_name", "it holds a character that no file can hold. Remove it."),
    ],
)
def test_a_text_that_no_file_can_hold_is_refused(complaint, key, why, text):
    shown = ascii([text] if key == "data.train_files" else text)
    message = complaint({key: [text] if key == "data.train_files" else text})
    assert message.startswith(f"{key}={shown}: {why}")


@pytest.mark.parametrize("score", [2e12, -2e12])
def test_a_fallback_score_beyond_the_largest_is_refused(complaint, score):
    given = {"custom_reward_function.fallback_score": score, "custom_reward_function.on_error": "score"}
    assert complaint(given).startswith(f"custom_reward_function.fallback_score={score}: scores beyond 1e+12 would train nothing")
