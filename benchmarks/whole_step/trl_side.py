"""TRL's GRPOTrainer at the settings of the work, with its phases timed.

``python -m benchmarks.whole_step.trl_side PLAN RECORD`` is one run. It runs in this project's environment, with TRL and what TRL
needs from the peers' environment behind it, so that torch, transformers and vLLM are the same for all contestants.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

site.addsitedir(os.environ["PEERS"])  # at the end of sys.path, where it hides nothing of this environment

import torch
import trl.trainer.utils
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.toy_trl.work import hash_of, store, stored
from benchmarks.whole_step.work import Plan, Record, Stopwatch
from recipe.real_model.reward import compute_score


class Steps(TrainerCallback):
    def __init__(self, trainer: MeasuredTrainer) -> None:
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.step.enter_context(self.trainer.stopwatch.step())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.updating.close()
        self.trainer.step.close()


class MeasuredTrainer(GRPOTrainer):
    """GRPOTrainer with the same work in the same order; what is overridden only measures what it calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stopwatch, self.step, self.updating = Stopwatch(), ExitStack(), ExitStack()
        self.prompt_ids: list[str] = []
        self.prompt_tokens: list[int] = []
        self.response_tokens: list[int] = []
        self.rewards: list[float] = []
        self.is_updating = False

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self.use_vllm and self.state.global_step != self._last_loaded_step:
            with self.stopwatch.phase("sync"):
                self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step
        with self.stopwatch.phase("rollout"):
            answers = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.prompt_ids.append(hash_of([[list(ids) for ids in prompt_ids]]))
        self.prompt_tokens.append(sum(map(len, prompt_ids)) // self.num_generations)
        self.response_tokens.append(sum(map(len, answers[0])))
        return answers

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self.stopwatch.phase("reference"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _calculate_rewards(self, *args: Any) -> Any:
        with self.stopwatch.phase("reward"):
            rewards = super()._calculate_rewards(*args)
        self.rewards.append(rewards.mean().item())
        return rewards

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        if not self.is_updating:
            self.updating.enter_context(self._update())
        return inputs

    @contextmanager
    def _update(self) -> Iterator[None]:
        self.is_updating = True
        with self.stopwatch.phase("update"):
            yield
        self.is_updating = False


def config(plan: Plan) -> GRPOConfig:
    work, vllm = plan.work, plan.contestant.engine == "vllm"
    lengthened = {"min_tokens": work.response_tokens} if vllm else {"min_new_tokens": work.response_tokens}
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": False, "vllm_max_model_length": 256}
    return GRPOConfig(
        output_dir=f"{plan.folder}/run", use_cpu=True, bf16=work.dtype == "bf16", gradient_checkpointing=False,
        max_steps=plan.steps, per_device_train_batch_size=plan.micro_batch_rows,
        gradient_accumulation_steps=work.rows // plan.micro_batch_rows, num_generations=work.samples,
        max_completion_length=work.response_tokens, temperature=1.0, shuffle_dataset=False, beta=work.kl, num_iterations=1,
        epsilon=work.clip_ratio, learning_rate=work.learning_rate, lr_scheduler_type="constant", max_grad_norm=work.clip_grad,
        seed=plan.seed, logging_steps=1, report_to="none", disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False,
        generation_kwargs=lengthened, vllm_importance_sampling_correction=False, **(engine if vllm else {}),
    )  # fmt: skip


def build(plan: Plan) -> MeasuredTrainer:
    """Gives a trainer, ready to train.

    The optimizer is made here because TRL's own leaves norm weights out of the weight decay.
    """
    model = AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float32)
    if plan.contestant.trimmed:
        # Asked by the caller of the head only, to choose its positions; the head itself asks elsewhere, and runs in torch.
        trl.trainer.utils._use_triton = lambda device: True
    if plan.contestant.engine == "vllm":
        prepare_vllm(plan)
    work = plan.work
    trainer = MeasuredTrainer(
        model=model, reward_funcs=right_answer, args=config(plan),
        train_dataset=Dataset.from_parquet(f"{plan.task}/train.parquet"),
        processing_class=AutoTokenizer.from_pretrained(plan.model, padding_side="left"),
        optimizers=(
            torch.optim.AdamW(model.parameters(), lr=work.learning_rate, weight_decay=work.weight_decay, fused=True), None,
        ),
    )  # fmt: skip
    trainer.add_callback(Steps(trainer))
    return trainer


def prepare_vllm(plan: Plan) -> None:
    """Makes TRL's colocated vLLM run on a CPU.

    vLLM's CPU build packs the weights of linear layers once they are loaded and leaves empty parameters without the attributes
    that its loaders need ("'Parameter' object has no attribute 'weight_loader'"). TRL calls these loaders directly at each sync.
    vLLM's own way in, ``reload_weights``, makes the layers again before it loads and packs them after. TRL also names neither
    the dtype nor the size of the KV cache.
    """
    from trl.generation import vllm_generation

    class Engine(vllm_generation.LLM):  # type: ignore[misc, name-defined]
        def __init__(self, **arguments: Any) -> None:
            dtype = {"fp32": "float32", "bf16": "bfloat16"}[plan.work.dtype]
            super().__init__(**arguments, dtype=dtype, enforce_eager=True, block_size=32, kv_cache_memory_bytes=2**29)

    def sync_weights(self: Any) -> None:
        weights = ((name, tensor.clone()) for name, tensor in self._iter_named_params())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.reset_prefix_cache()

    vllm_generation.LLM = Engine
    vllm_generation.VLLMGeneration.sync_weights = sync_weights


def right_answer(completions: list[Any], reward_model: list[Any], **_: Any) -> list[float]:
    truths = [row["ground_truth"] for row in reward_model]
    return [compute_score("", answer[0]["content"], truth) for answer, truth in zip(completions, truths, strict=True)]


def run(plan: Plan) -> Record:
    trainer = build(plan)
    trainer.train()
    return Record(trainer.stopwatch.steps, trainer.prompt_ids, trainer.prompt_tokens, trainer.response_tokens, trainer.rewards)


if __name__ == "__main__":
    asked, found = map(Path, sys.argv[1:])
    store(run(stored(asked)), found)
