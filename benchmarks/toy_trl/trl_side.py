"""TRL's RLOOTrainer at the settings of the work, with its phases timed and counted. Runs in TRL's own environment.

``python -m benchmarks.toy_trl.trl_side PLAN RECORD`` is one run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import trl.trainer.utils
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import RLOOConfig, RLOOTrainer

from benchmarks.toy_trl.work import (
    TRACKED_STEP,
    WORK,
    Contestant,
    Peak,
    Plan,
    Record,
    hash_of,
    peak_of,
    store,
    stored,
)
from verl_memopt.observe.phase import MemoryProbe
from verl_memopt.rewards.rules import exact_match


class Meter:
    """Seconds and, when asked, peak bytes of each phase of each step. ``model`` and ``optimizer`` are set once they exist."""

    def __init__(self, track: bool) -> None:
        self.model: Any = None
        self.optimizer: Any = None
        self.starts: list[float] = []
        self.phases: list[dict[str, float]] = []
        self.peaks: list[dict[str, Peak]] = []
        self._track = track
        self._probe = MemoryProbe(torch.device("cpu"), self._resident)
        self._update = ExitStack()
        self._updating = False

    def begin_step(self) -> None:
        self.starts.append(time.process_time())
        self.phases.append({})
        self.peaks.append({})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.process_time()
        with self._probe.phase(name, self._track) as report:
            yield
        memory = report()
        self.phases[-1][name] = self.phases[-1].get(name, 0.0) + time.process_time() - began
        if memory.peak_allocated_bytes is not None:
            self.peaks[-1][name] = peak_of(memory.peak_allocated_bytes, memory.kinds)

    def begin_update(self) -> None:
        if not self._updating:
            self._update.enter_context(self.phase("update"))
            self._updating = True

    def end_update(self) -> None:
        self._update.close()
        self._updating = False

    def _resident(self) -> Iterator[tuple[str, Tensor]]:
        if self.model is not None:
            yield from (("params", parameter) for parameter in self.model.parameters())
        if self.optimizer is not None:
            states = (value for state in self.optimizer.state.values() for value in state.values())
            yield from (("optimizer", value) for value in states if isinstance(value, Tensor))


class Steps(TrainerCallback):
    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.end_update()


class MeasuredTrainer(RLOOTrainer):
    """RLOOTrainer with the same work in the same order; what is overridden only measures what it calls."""

    def __init__(self, *args: Any, meter: Meter, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.meter = meter
        self.prompt_ids: list[list[list[int]]] = []
        self.response_tokens: list[int] = []

    def _generate_single_turn(self, prompt_ids: Any, *args: Any) -> Any:
        with self.meter.phase("rollout"):
            answers = super()._generate_single_turn(prompt_ids, *args)
        self.prompt_ids.append([list(ids) for ids in prompt_ids])
        self.response_tokens.append(sum(len(ids) for ids in answers))
        return answers

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self.meter.phase("log_prob"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _calculate_rewards(self, *args: Any) -> Any:
        with self.meter.phase("reward"):
            return super()._calculate_rewards(*args)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        self.meter.optimizer = self.optimizer
        self.meter.begin_update()
        return inputs


def config(contestant: Contestant, folder: Path, steps: int, seed: int) -> RLOOConfig:
    return RLOOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, gradient_checkpointing=False, max_steps=steps,
        per_device_train_batch_size=contestant.rows_per_micro_batch, gradient_accumulation_steps=contestant.micro_batches,
        num_generations=WORK.samples, max_completion_length=WORK.max_response_tokens, temperature=WORK.temperature,
        shuffle_dataset=False, beta=0.0, num_iterations=1, epsilon=WORK.clip_ratio, normalize_advantages=False,
        learning_rate=WORK.learning_rate, lr_scheduler_type="constant", max_grad_norm=WORK.clip_grad, seed=seed, logging_steps=1,
        report_to="none", disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip


def build(contestant: Contestant, task: Path, folder: Path, steps: int, seed: int, track: bool) -> MeasuredTrainer:
    """Gives a trainer on the toy task, ready to train.

    The optimizer is made here because TRL's own leaves norm weights out of the weight decay.
    """
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    if contestant.trimmed:
        trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = model.config.vocab_size
        # Asked by the caller of the head only, to choose its positions; the head itself asks elsewhere, and runs in torch.
        trl.trainer.utils._use_triton = lambda device: True
    meter = Meter(track)
    meter.model = model
    return MeasuredTrainer(
        model=model,
        reward_funcs=right_answer,
        args=config(contestant, folder, steps, seed),
        train_dataset=Dataset.from_list(rows(task / "train.parquet")),
        processing_class=AutoTokenizer.from_pretrained(task / "model", padding_side="left"),
        callbacks=[Steps(meter)],
        optimizers=(
            torch.optim.AdamW(model.parameters(), lr=WORK.learning_rate, weight_decay=WORK.weight_decay, fused=True),
            None,
        ),
        meter=meter,
    )


def rows(path: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    table = parquet.read_table(path).to_pylist()
    return [{"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]} for row in table]


def right_answer(completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
    return [exact_match(answer[0]["content"], truth) for answer, truth in zip(completions, ground_truth, strict=True)]


def greedy_accuracy(trainer: MeasuredTrainer, task: Path) -> float:
    held_out, tokenizer = rows(task / "val.parquet"), trainer.processing_class
    prompts = tokenizer.apply_chat_template(
        [row["prompt"] for row in held_out], add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    )
    trainer.model.eval()
    with torch.no_grad():
        made = trainer.model.generate(**prompts, do_sample=False, max_new_tokens=WORK.max_response_tokens)
    texts = tokenizer.batch_decode(made[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(exact_match(text, row["ground_truth"]) for text, row in zip(texts, held_out, strict=True)) / len(held_out)


def run(plan: Plan) -> Record:
    task = Path(plan.task)
    trainer = build(plan.contestant, task, Path(plan.folder) / "run", plan.steps, plan.seed, plan.track)
    trainer.train()
    meter = trainer.meter
    return Record(
        starts=meter.starts, phases=meter.phases, response_tokens=trainer.response_tokens,
        accuracy=greedy_accuracy(trainer, task), peaks=meter.peaks[TRACKED_STEP - 1] if plan.track else {},
        prompt_ids=hash_of(trainer.prompt_ids) if plan.track else "",
    )  # fmt: skip


if __name__ == "__main__":
    asked, found = map(Path, sys.argv[1:])
    store(run(stored(asked)), found)
