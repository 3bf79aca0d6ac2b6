"""Suggest a key for an unknown one: the nearest known key, or the one that does what a key of TRL or RLT does."""

from __future__ import annotations

from difflib import SequenceMatcher

from verl_memopt.config.keys import leaf_keys
from verl_memopt.knobs.index import knobs

_AR = "actor_rollout_ref"

FOREIGN = {
    "rloo_k": f"{_AR}.rollout.n",
    "num_generations": f"{_AR}.rollout.n",
    "num_generations_eval": f"{_AR}.rollout.val_kwargs.n",
    "beta": f"algorithm.use_kl_in_reward with algorithm.kl_ctrl.kl_coef (RLOO), or {_AR}.actor.use_kl_loss with "
    f"{_AR}.actor.kl_loss_coef (GRPO)",
    "kl_penalty_reward_coeff": "custom_reward_function.reward_kwargs",
    "answer_log_prob_coeff": "custom_reward_function.reward_kwargs",
    "unbias_student_log_probs_temp": "custom_reward_function.reward_kwargs",
    "kl_coef": "algorithm.kl_ctrl.kl_coef with algorithm.use_kl_in_reward",
    "cliprange": f"{_AR}.actor.clip_ratio",
    "epsilon": f"{_AR}.actor.clip_ratio",
    "epsilon_high": f"{_AR}.actor.clip_ratio_high",
    "num_ppo_epochs": f"{_AR}.actor.ppo_epochs",
    "num_iterations": f"{_AR}.actor.ppo_epochs",
    "num_mini_batches": f"{_AR}.actor.ppo_mini_batch_size (data.train_batch_size divided by it is that number)",
    "steps_per_generation": f"{_AR}.actor.ppo_mini_batch_size (data.train_batch_size divided by it is that number)",
    "generation_batch_size": f"data.train_batch_size (prompts; times {_AR}.rollout.n samples)",
    "generation_aggregation_steps": "data.train_batch_size (a whole step is generated at once)",
    "response_length": f"data.max_response_length (and {_AR}.rollout.ignore_eos to generate exactly that many)",
    "max_completion_length": "data.max_response_length",
    "max_prompt_length": "data.max_prompt_length (data.truncation says what happens beyond it)",
    "total_episodes": f"trainer.total_training_steps (episodes = steps x data.train_batch_size x {_AR}.rollout.n)",
    "max_steps": "trainer.total_training_steps",
    "num_train_epochs": "trainer.total_epochs",
    "temperature": f"{_AR}.rollout.temperature",
    "learning_rate": f"{_AR}.actor.optim.lr",
    "max_grad_norm": f"{_AR}.actor.optim.clip_grad",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "loss_type": f"{_AR}.actor.loss_agg_mode (grpo = seq-mean-token-mean, dapo = token-mean, dr_grpo = seq-mean-token-sum-norm)",
    "missing_eos_penalty": "custom_reward_function.path (the penalty belongs in the reward function)",
    "reward_clip_range": "custom_reward_function.path (the clip belongs in the reward function)",
    "reward_funcs": "custom_reward_function.path",
    "vllm_mode": f"{_AR}.rollout.name (the engine always lives in the worker's process)",
    "use_vllm_server": f"{_AR}.rollout.name (the engine always lives in the worker's process)",
    "use_vllm": f"{_AR}.rollout.name",
    "use_ray": "trainer.worker_group",
    "vllm_tensor_parallel_size": f"{_AR}.rollout.tensor_model_parallel_size",
    "sft_model_path": f"{_AR}.model.path",
    "model_name_or_path": f"{_AR}.model.path",
    "exp_name": "trainer.experiment_name",
    "run_name": "trainer.experiment_name",
    "output_dir": "trainer.default_local_dir",
    "report_to": "trainer.logger",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "save_completions_probability": "trainer.rollout_data_dir",
    **{name: key for knob in knobs() for name, key in knob.known_as.items()},
}
"""Key of TRL or RLT -> what to set here. Hints only: none of these names is accepted."""

_ALIKE = 0.6
"""Share of letters in common, of the last part of a key, from which a key counts as near."""


def hint(key: str) -> str:
    """Return a sentence that names what to use in place of an unknown key."""
    answer = FOREIGN.get(key.rpartition(".")[2]) or nearest(key)
    return f"Did you mean {answer}?" if answer else "docs/configuration.md lists every key."


def nearest(key: str) -> str | None:
    """Return the known key most like an unknown one, by its last part first, then by the whole, or None."""
    last = key.rpartition(".")[2]
    likeness = {known: _alike(last, known.rpartition(".")[2]) for known in leaf_keys()}
    near = [known for known in likeness if likeness[known] >= _ALIKE]
    return max(near, key=lambda known: 2 * likeness[known] + _alike(key, known), default=None)


def _alike(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio()
