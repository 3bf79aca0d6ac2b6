"""``verl-memopt score``: scores stored explanations with the student of RLT, and ranks the explanations of each question."""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml

from verl_memopt.config.keys import field_types
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import Actor, Fsdp, Model, ScoringModel
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.data.sources import RawRow, read_rows
from verl_memopt.distributed.device import join_process_group, leave_process_group, local_device, resolve_device, training_mesh
from verl_memopt.errors import ConfigError, DataError
from verl_memopt.memory.precision import Precision
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.folder import check_vocabulary, end_tokens, load_tokenizer, resolve_folder
from verl_memopt.model.packed_model import PolicyModel, dtype_of
from verl_memopt.model.packing_check import check_architecture, check_packing
from verl_memopt.observe.files import json_line, replace_text
from verl_memopt.observe.phase import MemoryProbe, PhaseClock, PhaseMemory
from verl_memopt.recipes.rlt.dataset import FORMATS, RltPrompts
from verl_memopt.recipes.rlt.scorer import ExplanationBatch, RltScored, RltScorer
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student import Student, StudentPlan, check_same_tokenizer
from verl_memopt.recipes.rlt.student_rows import NAMES, SKIPPED, StudentEncoder
from verl_memopt.run.argument_types import new_file_of
from verl_memopt.trainer.micro_batching import Budget
from verl_memopt.worker.group import LocalGroup, Placement, TimedGroup
from verl_memopt.worker.policy import LogProbs, compute_log_probs
from verl_memopt.worker.worker import Reply

Result = TypeVar("Result")
TIMEOUT_SECONDS = 600


class ScoringWorker:
    """Holds the models of a scoring command on one device.

    Args:
        student: Folder of the student's model.
        teacher: Folder of the teacher's model; None if the reward needs no teacher.
        rlt: Settings of the reward.
        dtype: Dtype of weights and arithmetic.
        trusts: True = code in the model folders may run.
        placement: The worker's place in its group.
    """

    def __init__(
        self, student: str, teacher: str | None, rlt: RltReward, dtype: Precision, trusts: bool, placement: Placement
    ) -> None:
        self._dtype, self._trusts = dtype, trusts
        self.device = local_device(placement.device, placement.local_rank)
        self._models: list[PolicyModel] = []
        self.probe = MemoryProbe(self.device, self._resident)
        join_process_group(
            self.device, placement.rank, placement.world_size, placement.master_addr, placement.master_port, TIMEOUT_SECONDS
        )
        with self.probe.phase("init", False) as report:
            plan = StudentPlan(ScoringModel(path=student), rlt, "separate", student, shares_prompts=True)
            self.student = Student(self._build(student, "--student"), plan, self.device)
            self.teacher = None if teacher is None else self._build(teacher, "--teacher")
        self._init = report()

    def started(self) -> PhaseMemory:
        return self._init

    def call(self, phase: str, track: bool, method: str, *args: Any) -> Reply:
        with self.probe.phase(phase, track) as report:
            value = getattr(self, method)(*args)
        return Reply(value, report())

    def call_role(self, method: Callable[..., Result], *args: Any) -> Result:
        return method(self.student, *args)

    def policy_log_probs(self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]], temperature: float) -> LogProbs:
        assert self.teacher is not None
        return compute_log_probs(self.teacher, batch, micro_batches, temperature, False, self.device)

    ref_log_probs = policy_log_probs
    """``kl_teacher=reference`` uses the same model, because this command has only one teacher."""

    def close(self) -> None:
        self._models = []
        del self.student, self.teacher
        leave_process_group()

    def _build(self, folder: str, key: str) -> PolicyModel:
        model = Model(path=folder, trust_remote_code=self._trusts, enable_gradient_checkpointing=False)
        fsdp = Fsdp(model_dtype=self._dtype, dtype=self._dtype)
        mesh = training_mesh(self.device.type, 1, -1)
        built = build_policy(model, fsdp, Path(folder), mesh, self.device, ModelUse(fsdp_key=f"{key}.fsdp_config"))
        built.requires_grad_(False)
        materialize(built, Path(folder), self.device)
        check_packing(built, self.device, dtype_of(self._dtype, "--dtype"), Actor(), folder, key)
        self._models.append(built)
        return built

    def _resident(self) -> Iterator[tuple[str, torch.Tensor]]:
        for model in self._models:
            yield from (("params", parameter) for parameter in model.parameters())


RLT = "reward_model.rlt"
LEAST = {
    "data.train_files": "explanations.jsonl",
    "data.val_files": None,
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.model.path": "teacher",
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "reward_model.enable": True,
    "reward_model.reward_manager": "rlt",
    "reward_model.model.path": "student",
}
"""The other settings of a run. With them, the rules of a run can check the settings of the reward."""
LONGEST = 4096
"""If ``max_student_len`` is null, the model must support sequences of this many tokens."""
EPILOG = """\
Rows have the columns question, solution and explanation. The files may also be
a dump of an RLT run (trainer.rollout_data_dir), whose response tokens are
scored unchanged. An explanation without an end tag gets one, but not in a dump.

Without --teacher the reward is r_ss + match: the student's log-probs of the
solution, and the penalty for a missing end tag. With --teacher it is the
complete reward of RLT. key=value pairs set keys of reward_model.rlt, such as
tag_format=r1 or max_student_len=4096.
"""


@dataclass(frozen=True)
class StoredExplanation:
    """A row of the input.

    Attributes:
        question: The question.
        solution: The solution of the question, without tags.
        explanation: The text of the explanation.
        response_ids: The tokens of the explanation; None = the text is tokenized.
        address: File and row, counted from 1.
    """

    question: str
    solution: str
    explanation: str
    response_ids: list[int] | None
    address: str


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-memopt score",
        description="Score stored explanations with the student of RLT, and rank the explanations of each question.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", metavar="FILE | key=value", help="explanations as .parquet, .json or .jsonl")
    parser.add_argument("--student", required=True, metavar="FOLDER", help="model that reads question, explanation and solution")
    parser.add_argument("--teacher", metavar="FOLDER", help="model that wrote the explanations (default: none, so no r_kl)")
    parser.add_argument("--out", type=new_file_of, required=True, metavar="FILE", help="scored rows, as .jsonl")
    parser.add_argument("--best", type=new_file_of, metavar="FILE", help="the best explanation of each question, as .jsonl")
    parser.add_argument("--temperature", type=float, default=0.7, help="divides the logits of both models (default: 0.7)")
    parser.add_argument("--dtype", choices=("fp32", "bfloat16"), default="fp32", help="dtype of the computation (default: fp32)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where the models run")
    parser.add_argument("--rows", type=int, default=512, help="rows that are scored together (default: 512)")
    parser.add_argument("--trust-remote-code", action="store_true", help="allow code in the model folders to run")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        ConfigError: A folder or a setting does not fit.
        DataError: A file or a row cannot be read.
        RewardError: A log-prob is not finite. The message names the row.
    """
    parser = build_parser()
    parsed = parser.parse_intermixed_args(arguments)
    if not (math.isfinite(parsed.temperature) and parsed.temperature > 0 and parsed.rows > 0):
        parser.error("--temperature and --rows must be above 0")
    settings = reward_settings([word for word in parsed.files if "=" in word], parsed.teacher is not None, parsed.temperature)
    stored = read_explanations([word for word in parsed.files if "=" not in word])
    with scorer(parsed, settings) as score:
        rows: list[dict[str, Any]] = []
        for start in range(0, len(stored), parsed.rows):
            part = stored[start : start + parsed.rows]
            rows += scored_rows(part, score.score(explained(part, score)))
    ranked = with_ranks(rows)
    write_rows(parsed.out, ranked)
    best = [row for row in ranked if row["rank"] == 1]
    if parsed.best is not None:
        write_rows(parsed.best, best)
    sys.stdout.write("\n".join(summary_lines(ranked, best)) + f"\n{parsed.out}\n")
    return 0


def reward_settings(words: Sequence[str], has_teacher: bool, temperature: float) -> RltReward:
    """Return the settings of the reward, checked like those of a run.

    Args:
        words: ``key=value`` pairs, keys of ``reward_model.rlt``.
        has_teacher: A teacher is given. Without one, ``r_kl`` has weight 0, unless it is computed from the student alone.
        temperature: Temperature of the rollouts.

    Raises:
        ConfigError: A key or a value is wrong.
    """
    values = dict[str, Any]()
    for word in words:
        key, _, text = word.partition("=")
        if key not in field_types(RltReward):
            raise ConfigError(f"{RLT}.{key}: no such key. Use {', '.join(field_types(RltReward))}.")
        try:
            values[key] = yaml.safe_load(text)
        except yaml.YAMLError as problem:
            raise ConfigError(f"{RLT}.{word}: the value cannot be read. Quote text with special characters.") from problem
    own = {f"{RLT}.{key}": value for key, value in values.items()}
    settings = settings_from_mapping({**LEAST, "actor_rollout_ref.rollout.temperature": temperature, **own}).reward_model.rlt
    if has_teacher or not settings.include_teacher_think_entropy:
        return settings
    if "include_teacher_think_entropy" in values:
        raise ConfigError(f"{RLT}.include_teacher_think_entropy=true: there is no teacher. Add --teacher FOLDER.")
    return replace(settings, include_teacher_think_entropy=False, kl_penalty_reward_coeff=[0.0] * len(settings.reduction_kl_fn))


def read_explanations(files: Sequence[str]) -> list[StoredExplanation]:
    """Return the explanations of some files, in order.

    Raises:
        ConfigError: No file is named.
        DataError: A file or a row cannot be read.
    """
    if not files:
        raise ConfigError("no file is named. Give a .parquet, .json or .jsonl file.")
    return [_stored(row) for row in read_rows(list(files), "FILE")]


def _stored(row: RawRow) -> StoredExplanation:
    # The row is from a dump, or it has the columns question, solution and explanation.
    address, columns = row
    is_dump = "response_ids" in columns and isinstance(columns.get("extra_info"), Mapping)
    texts = {**columns["extra_info"], "explanation": columns.get("output")} if is_dump else columns
    for name in ("question", "solution", "explanation"):
        if not isinstance(texts.get(name), str):
            raise DataError(f"{address}: the column {name!r} must be text, but it is {texts.get(name)!r:.100}. Correct the row.")
    if not texts["solution"].strip():
        raise DataError(f"{address}: the solution is empty, so nothing can be scored. Remove the row.")
    ids = columns["response_ids"] if is_dump else None
    if ids is not None and not all(type(token) is int and token >= 0 for token in ids):
        raise DataError(f"{address}: response_ids must be token ids, but it is {ids!r:.100}. Correct the row.")
    return StoredExplanation(texts["question"], texts["solution"], texts["explanation"], ids, address)


@contextmanager
def scorer(parsed: argparse.Namespace, settings: RltReward) -> Iterator[RltScorer]:
    """Load the models in this process and yield an object that scores explanations.

    Raises:
        ConfigError: A folder has no model that can run here, or the tokenizers of the models differ.
    """
    trusts = parsed.trust_remote_code
    student = resolve_folder(parsed.student, "--student", trusts)
    teacher = None if parsed.teacher is None else resolve_folder(parsed.teacher, "--teacher", trusts)
    tokenizer = load_tokenizer(student, Model(path=str(student)), trusts)
    for folder, key in ((student, "--student"), (teacher, "--teacher")):
        if folder is not None:
            model = Model(path=str(folder), trust_remote_code=trusts)
            checked = check_architecture(model, folder, settings.max_student_len or LONGEST)
            check_vocabulary(tokenizer, checked.embedding_rows, f"{key}={folder}")
    if teacher is not None:
        check_same_tokenizer(load_tokenizer(teacher, Model(path=str(teacher)), trusts), tokenizer, str(student))
    prompts = RltPrompts(tokenizer, FORMATS[settings.tag_format])
    padding = tokenizer.pad_token_id
    encoder = StudentEncoder(prompts, settings, {*end_tokens(student, tokenizer), *([] if padding is None else [padding])})
    folders = str(student), None if teacher is None else str(teacher)
    worker = functools.partial(ScoringWorker, *folders, settings, parsed.dtype, trusts)
    group = LocalGroup(worker, resolve_device(parsed.device))
    try:
        budget = Budget(True, settings.max_tokens_per_micro_batch, None, "max_tokens_per_micro_batch")
        workers = TimedGroup(group, PhaseClock(), in_process=True)
        yield RltScorer(workers, settings, encoder, parsed.temperature, budget, budget)
    finally:
        group.shutdown()


def explained(rows: Sequence[StoredExplanation], score: RltScorer) -> ExplanationBatch:
    prompts = score.encoder.prompts
    tokenizer, tag = prompts.tokenizer, prompts.rlt_format.explanation.end
    ids = []
    for row in rows:
        text = row.explanation if tag in row.explanation else row.explanation + tag
        ids.append(tokenizer(text, add_special_tokens=False)["input_ids"] if row.response_ids is None else row.response_ids)
        if max(ids[-1], default=0) >= len(tokenizer):
            raise DataError(f"{row.address}: response_ids holds {max(ids[-1])}, which is not a token of the student's tokenizer.")
    questions, solutions, addresses = ([getattr(row, name) for row in rows] for name in ("question", "solution", "address"))
    return ExplanationBatch(questions, solutions, Ragged.from_rows(ids, torch.int64), addresses)


def scored_rows(stored: Sequence[StoredExplanation], scored: RltScored) -> list[dict[str, Any]]:
    # Each explanation with its reward and the reward's parts. The reward of a skipped row is null.
    scores = scored.scores
    columns = {"r_ss": scores.r_ss, "r_kl": scores.r_kl, "match": scores.match, **scores.parts}
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    rows = []
    for row, reward, status, own in zip(stored, scores.reward.tolist(), scores.status.tolist(), values, strict=True):
        texts = {"question": row.question, "solution": row.solution, "explanation": row.explanation, "address": row.address}
        parts = dict(zip(columns, own, strict=True))
        rows.append({**texts, "reward": None if status == SKIPPED else reward, "status": NAMES[status], **parts})
    return rows


def with_ranks(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row its rank among the rows with the same question and solution: 1 = the best, null = not scored.

    Equal rewards rank in the order of the rows.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for place, row in enumerate(rows):
        if row["reward"] is not None:
            groups.setdefault((row["question"], row["solution"]), []).append(place)
    ranks = {
        place: rank
        for places in groups.values()
        for rank, place in enumerate(sorted(places, key=lambda place: -rows[place]["reward"]), start=1)
    }
    return [{**row, "rank": ranks.get(place)} for place, row in enumerate(rows)]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, "".join(json_line(row) for row in rows))


def summary_lines(rows: Sequence[dict[str, Any]], best: Sequence[dict[str, Any]]) -> list[str]:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    lines = [f"{len(rows)} explanations of {len(best)} questions"]
    if rewards:
        mean_best = sum(row["reward"] for row in best) / len(best)
        lines.append(f"mean reward {sum(rewards) / len(rewards):.4f}, of the best {mean_best:.4f}")
    counts = {name: sum(row["status"] == name for row in rows) for name in NAMES.values()}
    return [*lines, ", ".join(f"{name} {count}" for name, count in counts.items() if count)]
