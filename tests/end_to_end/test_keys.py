"""No setting is without effect: every accepted key is read by the program in a short real run."""

import pytest

from tests import rlt
from tests.trainer.conftest import ready
from tests.worker.test_reward_scores import classifier
from tools.reads import leaf_types, record_reads
from verl_memopt.config.loader import load_settings

READ_ELSEWHERE = {
    # read only by vLLM's settings (tests/rollout/test_vllm_settings.py holds that each reaches the engine)
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.max_num_batched_tokens",
    "actor_rollout_ref.rollout.enable_chunked_prefill",
    "actor_rollout_ref.rollout.enable_prefix_caching",
    "actor_rollout_ref.rollout.cudagraph_capture_sizes",
    "actor_rollout_ref.rollout.disable_log_stats",
    "actor_rollout_ref.rollout.scheduling_policy",
    "actor_rollout_ref.rollout.enforce_eager",
    # read only by the function of its knob (tests/memory/batching/test_shared_prompt.py)
    "actor_rollout_ref.actor.use_prefix_grouper",
    # read only where Ray starts the workers (tests/worker/test_ray_group.py)
    "ray_kwargs.ray_init",
    "trainer.ray_wait_register_center_timeout",
    # read only where Ray starts workers for a role alone (tests/trainer/test_pools.py)
    *(
        f"{role}.{key}"
        for role in ("critic", "reward_model", "teacher")
        for key in ("enable_resource_pool", "nnodes", "n_gpus_per_node")
    ),
    # read only where a server is the teacher (tests/end_to_end/test_teacher_elsewhere.py)
    *(f"teacher.endpoint.{key}" for key in ("url", "model", "api", "api_key_env", "timeout_seconds", "requests_at_once")),
    # read through reference_teaches, which names the role of the teacher (tests/end_to_end/test_distill.py)
    "teacher.weights",
    # read only where the teacher has another tokenizer (tests/end_to_end/test_teacher_elsewhere.py)
    "teacher.model.tokenizer_path",
    # read through sequence_ranks, which groups of ranks are made of (tests/memory/batching/test_sequence_parallel.py)
    *(
        f"{role}.fsdp_config.ulysses_sequence_parallel_size"
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic.model", "reward_model.model", "teacher")
    ),
    # read through mlp_tiles, over which an MLP runs (tests/memory/activations/test_tiled_mlp.py)
    *(f"{role}.model.tiled_mlp.{key}" for role in ("actor_rollout_ref", "critic") for key in ("enabled", "num_shards")),
    # read only where FSDP2 gathers a model, or one device casts it (tests/end_to_end/test_combinations.py, with several ranks)
    *(
        f"{role}.fsdp_config.forward_prefetch"
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic.model", "reward_model.model", "teacher")
    ),
    "critic.model.fsdp_config.reshard_after_forward",
    # read through converses (tests/config/test_agent_settings.py)
    "actor_rollout_ref.rollout.multi_turn.enable",
    # read only where the rows are a stream (tests/trainer/test_build.py)
    "data.shuffle_buffer_size",
    # read only where there is a sandbox service (tests/rewards/test_sandbox.py)
    "reward_model.sandbox_fusion.max_concurrent",
    "reward_model.sandbox_fusion.memory_limit_mb",
}
CHECKED_ONLY = {
    # have a single value, which tests/config/test_checks.py holds
    "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.actor.strategy",
    "critic.strategy",
    "critic.enable",
    "actor_rollout_ref.rollout.mode",
    # other keys follow these (tests/config/test_links.py)
    "actor_rollout_ref.actor.clip_ratio",
    # verl's switch, which an estimator that reads the sums requires (tests/config/test_correction_rules.py)
    "actor_rollout_ref.actor.calculate_sum_pi_squared",
    # the number of checkpoints is one (tests/config/test_critic_rules.py)
    "trainer.max_critic_ckpt_to_keep",
    # can only be the temperature of the rollouts (tests/recipe/rlt/test_rules.py)
    "reward_model.rlt.unbias_student_log_probs_temp",
}
PLUGINS = """
from verl_memopt.data.dataset import PromptDataset

class Rows(PromptDataset):
    pass

class Backwards:
    def __init__(self, num_rows, seed, epoch):
        self.order = list(range(num_rows))[::-1]
    def __iter__(self):
        return iter(self.order)

def score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["index"] % 2:
        raise ValueError("odd")
    return 1.0

def parts(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "short": 1.0 / (1 + len(solution_str))}

def compute_advantages(token_level_rewards, response_mask, index, config):
    return token_level_rewards - config.gamma, token_level_rewards

def compute_loss(log_prob, advantages):
    return -log_prob * advantages

class Room:
    def reset(self, **row):
        return None

def look(place: str) -> str:
    '''Look.

    Args:
        place: Where.
    '''
    return place

def calls(text):
    return [("look", {"place": "x"})]
"""


def common(toy, folder):
    return [
        f"data.train_files={toy}/train.parquet", f"data.val_files={toy}/val.parquet", "data.seed=3", "data.train_batch_size=4",
        f"actor_rollout_ref.model.path={toy}/model", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=2", f"trainer.default_local_dir={folder}",
        "data.max_prompt_length=16", "data.max_response_length=4", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
        "trainer.worker_group=local", "trainer.save_freq=2", "trainer.test_freq=2", "trainer.logger=[jsonl]",
        "trainer.device=cpu", "actor_rollout_ref.rollout.dtype=fp32", "data.val_max_samples=4",
    ]  # fmt: skip


def runs(toy, folder):
    """Gives the settings of short runs that turn every key between them."""
    plugins = folder / "plugins.py"
    plugins.write_text(PLUGINS)
    plain = [
        "actor_rollout_ref.actor.use_dynamic_bsz=true", "algorithm.use_kl_in_reward=true", "data.truncation=left",
        "algorithm.filter_groups.enable=true",
        "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla", "trainer.total_training_steps=2",
        "algorithm.rollout_correction.bypass_mode=true", "algorithm.rollout_correction.loss_type=reinforce",
        "algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_batch_normalize=true",
    ]  # fmt: skip
    other = [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16", "actor_rollout_ref.actor.shuffle=true",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "actor_rollout_ref.actor.entropy_coeff=0.001",
        "actor_rollout_ref.actor.entropy_ctrl.target=0.5",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", "algorithm.kl_ctrl.type=adaptive",
        "actor_rollout_ref.actor.optim.state_dtype=int8", "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
        "algorithm.use_kl_in_reward=true", "data.train_max_samples=8", "trainer.total_epochs=1",
        f"data.custom_cls.path={plugins}", "data.custom_cls.name=Rows",
        "actor_rollout_ref.model.enable_activation_offload=true", "actor_rollout_ref.model.tiled_mlp.enabled=true",
        f"data.sampler.class_path={plugins}", "data.sampler.class_name=Backwards",
        "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov", "algorithm.use_pf_ppo=true",
        "algorithm.rollout_correction.rollout_rs=token_k1", "algorithm.rollout_correction.rollout_rs_threshold=9",
        f"custom_reward_function.path={plugins}", "custom_reward_function.name=score", "custom_reward_function.on_error=score",
        "reward_model.reward_manager=dapo", "reward_model.reward_kwargs.overlong_buffer_cfg.enable=true",
        "reward_model.reward_kwargs.overlong_buffer_cfg.len=2", "actor_rollout_ref.ref.sync_every_steps=1", "trainer.save_freq=1",
    ]  # fmt: skip
    resumed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/other/global_step_1"]
    resumed += ["algorithm.adv_estimator=gpg"]
    yield load_settings("grpo_trainer", common(toy, folder / "other") + other)
    yield load_settings("grpo_trainer", common(toy, folder / "other") + other + resumed)
    dump = [f"trainer.rollout_data_dir={folder}/dump", "trainer.total_training_steps=1"]
    dump += ["actor_rollout_ref.actor.use_dynamic_bsz=true"]
    likes = ["actor_rollout_ref.actor.policy_loss.loss_mode=sapo", "algorithm.adv_estimator=optimal_token_baseline"]
    likes += ["actor_rollout_ref.actor.calculate_sum_pi_squared=true"]
    yield load_settings("rloo_trainer", common(toy, folder / "dumped") + dump + likes)
    replayed = [f"actor_rollout_ref.rollout.skip_dump_dir={folder}/dump", "actor_rollout_ref.rollout.skip_rollout=true"]
    custom = ["algorithm.adv_estimator=custom", f"algorithm.custom_estimator.path={plugins}"]
    custom += ["actor_rollout_ref.actor.policy_loss.loss_mode=custom"]
    custom += [f"actor_rollout_ref.actor.policy_loss.custom.path={plugins}"]
    yield load_settings("rloo_trainer", common(toy, folder / "replayed") + dump[1:] + replayed + custom)
    several = [f"custom_reward_function.path={plugins}", "custom_reward_function.name=parts", "algorithm.adv_estimator=gdpo"]
    several += ["algorithm.gdpo_reward_keys=[score,short]", "algorithm.gdpo_reward_weights=[1,2]", *dump[1:]]
    several += ["actor_rollout_ref.actor.policy_loss.loss_mode=cispo"]
    yield load_settings("grpo_trainer", common(toy, folder / "several") + several)
    lora = ["actor_rollout_ref.model.lora_rank=2", "actor_rollout_ref.actor.use_kl_loss=true"]
    lora += ["actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]"]
    reward_model, _ = classifier(folder / "reward_model", toy / "model")
    lora += ["reward_model.enable=true", f"reward_model.model.path={reward_model}", "reward_model.max_length=20"]
    yield load_settings("rloo_trainer", common(toy, folder / "lora") + plain + lora)
    ppo = ["actor_rollout_ref.actor.use_dynamic_bsz=true", "trainer.total_training_steps=2", "trainer.critic_warmup=2"]
    ppo += ["critic.ppo_max_token_len_per_gpu=64", "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov"]
    critic = [
        "critic.use_dynamic_bsz=false", "critic.ppo_micro_batch_size_per_gpu=2", "critic.model.lora_rank=2",
        "critic.model.enable_activation_offload=true", "critic.model.tiled_mlp.enabled=true", "critic.shuffle=true",
        "critic.loss_agg_mode=seq-mean-token-sum-norm", "critic.optim.lr_scheduler_type=cosine",
        "critic.optim.state_dtype=int8", "critic.model.fsdp_config.optimizer_offload=true",
        "critic.model.gradient_checkpointing_mode=every_n",
    ]  # fmt: skip
    yield load_settings("ppo_trainer", common(toy, folder / "critic") + ppo + critic)
    further = ["trainer.total_training_steps=3", "critic.use_dynamic_bsz=true"]
    further += ["actor_rollout_ref.actor.policy_loss.loss_mode=vespo"]
    yield load_settings("ppo_trainer", common(toy, folder / "critic") + ppo + critic + further)
    supervised = [*ppo[:2], "data.response_key=extra_info.answer"]
    yield load_settings("sft_trainer", common(toy, folder / "sft") + supervised + ["actor_rollout_ref.rollout.n=1"])
    for form in ("jsd", "sampled"):
        taught = [f"teacher.model.path={toy}/model", f"distill.divergence={form}", *dump[1:], *plain[:1]]
        yield load_settings("distill_trainer", common(toy, folder / form) + taught)
    rollout = "actor_rollout_ref.rollout"
    agent = [
        f"{rollout}.agent.{section}.{key}={value}"
        for section, name in (("environment", "Room"), ("tools", "[look]"))
        for key, value in (("path", plugins), ("name", name))
    ]
    agent += [f"{rollout}.multi_turn.format={plugins}:calls", f"{rollout}.multi_turn.max_assistant_turns=2", *dump[1:]]
    agent += ["data.max_response_length=40", f"{rollout}.stop_token_ids={list(range(20, 120))}"]
    yield load_settings("rloo_trainer", common(toy, folder / "agent") + agent)
    overlong = {f"{rlt.RLT}.max_student_len": 42, f"{rlt.RLT}.overlong": "skip"}
    yield rlt.settings_of(rlt.brief_toy(folder / "rlt_toy"), folder / "rlt", overlong)


@pytest.fixture(scope="module")
def read(toy, tmp_path_factory):
    seen = set()
    for settings in runs(toy, tmp_path_factory.mktemp("keys")):
        with record_reads(settings) as keys, ready(settings) as trainer:
            trainer.run()
        seen |= keys
    return seen


def test_every_accepted_key_is_read(read):
    assert set(leaf_types()) - read - READ_ELSEWHERE - CHECKED_ONLY == set()


def test_the_exceptions_are_still_exceptions(read):
    assert (READ_ELSEWHERE | CHECKED_ONLY) & read == set()
    assert set(leaf_types()) >= READ_ELSEWHERE | CHECKED_ONLY
