"""TRL's RLOOTrainer at the settings of the work, with its phases timed and counted. Runs in TRL's own environment.

``python -m benchmarks.toy_trl.trl_side run PLAN RECORD`` is one run. ``... gate TASK FOLDER SIDE`` writes its loss and gradient
of the gate's batch.
"""

from __future__ import annotations

import sys
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
from trl.trainer.utils import pad

from benchmarks.toy_trl.gate import CASES, MICRO_BATCHES, TRL_SIDES, Batch, Finding, file_of, slices
from benchmarks.toy_trl.work import (
    NOTHING,
    TRACKED_STEP,
    TRL,
    WORK,
    Contestant,
    Moment,
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
        self.starts: list[Moment] = []
        self.phases: list[dict[str, Moment]] = []
        self.peaks: list[dict[str, Peak]] = []
        self._track = track
        self._probe = MemoryProbe(torch.device("cpu"), self._resident)
        self._update = ExitStack()
        self._updating = False

    def begin_step(self) -> None:
        self.starts.append(Moment.now())
        self.phases.append({})
        self.peaks.append({})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the body as a phase of the present step."""
        began = Moment.now()
        with self._probe.phase(name, self._track) as report:
            yield
        memory = report()
        self.phases[-1][name] = self.phases[-1].get(name, NOTHING) + (Moment.now() - began)
        if memory.peak_allocated_bytes is not None:
            self.peaks[-1][name] = peak_of(memory.peak_allocated_bytes, memory.kinds)

    def begin_update(self) -> None:
        """Opens the update: all micro-batches, clipping and the optimizer's step."""
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
    """Tells a meter where steps begin and updates end."""

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
        self.rewards: list[float] = []

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
            rewards = super()._calculate_rewards(*args)
        self.rewards.append(float(rewards.mean()))
        return rewards

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        self.meter.optimizer = self.optimizer
        self.meter.begin_update()
        return inputs


def config(contestant: Contestant, folder: Path, steps: int, seed: int) -> RLOOConfig:
    return RLOOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=steps,
        per_device_train_batch_size=contestant.rows_per_micro_batch,
        gradient_accumulation_steps=contestant.micro_batches,
        num_generations=WORK.samples,
        max_completion_length=WORK.max_response_tokens,
        temperature=WORK.temperature,
        shuffle_dataset=False,
        beta=0.0,
        num_iterations=1,
        epsilon=WORK.clip_ratio,
        normalize_advantages=False,
        learning_rate=WORK.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=WORK.clip_grad,
        seed=seed,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )


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
    """Gives the prompts of a split, as chat messages, with their answers."""
    from pyarrow import parquet

    table = parquet.read_table(path).to_pylist()
    return [{"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]} for row in table]


def right_answer(completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
    """Gives the same reward as verl_memopt's rule for this task."""
    return [exact_match(answer[0]["content"], truth) for answer, truth in zip(completions, ground_truth, strict=True)]


def greedy_accuracy(trainer: MeasuredTrainer, task: Path) -> float:
    """Gives the share of held-out prompts that the trained model answers right, greedily."""
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
        starts=meter.starts,
        phases=meter.phases,
        response_tokens=trainer.response_tokens,
        rewards=trainer.rewards,
        accuracy=greedy_accuracy(trainer, task),
        peaks=meter.peaks[TRACKED_STEP - 1] if plan.track else {},
        prompt_ids=hash_of(trainer.prompt_ids) if plan.track else "",
    )


def padded(rows: list[list[int]], value: int, side: str) -> tuple[Tensor, Tensor]:
    """Gives ids and mask, int64 [B, T], as the trainer makes them."""
    ids = [torch.tensor(row) for row in rows]
    return pad(ids, padding_value=value, padding_side=side), pad(
        [torch.ones_like(row) for row in ids], padding_value=0, padding_side=side
    )


def inputs(trainer: MeasuredTrainer, batch: Batch) -> dict[str, Tensor]:
    """Gives what the trainer's loss takes, old log-probs left out."""
    blank = trainer.processing_class.pad_token_id
    prompt_ids, prompt_mask = padded(batch.prompts, blank, "left")
    completion_ids, completion_mask = padded(batch.responses, blank, "right")
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor(batch.advantages),
    }


def log_probs(trainer: MeasuredTrainer, given: dict[str, Tensor]) -> Tensor:
    """Gives the policy's log-probs, [B, T] with zeros where there is no response token."""
    ids = torch.cat([given["prompt_ids"], given["completion_ids"]], dim=1)
    mask = torch.cat([given["prompt_mask"], given["completion_mask"]], dim=1)
    with torch.no_grad():
        found, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, given["completion_ids"].shape[1])
    return found * given["completion_mask"]


def find(trainer: MeasuredTrainer, batch: Batch, case: str, micro_batches: int, folder: Path) -> None:
    """Writes loss, gradient and log-probs of a case."""
    trainer.model.zero_grad()
    trainer.model.train()
    given = inputs(trainer, batch)
    scores = log_probs(trainer, given)
    given["old_logps"] = scores.sum(1) + torch.tensor([batch.shift(row, case) for row in range(WORK.rows)])
    loss = 0.0
    for rows_of_part in slices(micro_batches):
        cut = {name: value[list(rows_of_part)] for name, value in given.items()}
        # The trainer divides by the number of accumulation steps outside its loss function.
        part = trainer._compute_loss(trainer.model, cut) / micro_batches
        part.backward()
        loss += part.item()
    gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    kept = [row[: len(response)].tolist() for row, response in zip(scores, batch.responses, strict=True)]
    store(Finding(loss, kept, gradients), file_of(folder, case, micro_batches))


def gate(task: Path, folder: Path, side: str) -> None:
    contestant = Contestant(TRL, "hf", 1, trimmed=TRL_SIDES[side])
    trainer = build(contestant, task, folder / side / "run", steps=1, seed=0, track=False)
    trainer.meter.begin_step()
    for case in CASES:
        for micro_batches in MICRO_BATCHES:
            find(trainer, stored(folder / "batch.pickle"), case, micro_batches, folder / side)


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "gate":
        gate(Path(words[0]), Path(words[1]), words[2])
    else:
        store(run(stored(Path(words[0]))), Path(words[1]))
