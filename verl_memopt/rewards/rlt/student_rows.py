"""What the student reads: prefix, explanation, bridge, solution and end, put together from token ids.

Nothing is searched for. The explanation keeps the teacher's own tokens, so the log-probs of both models belong to the same
tokens, and the places of explanation and solution are known because the row was built from its parts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_memopt.config.schema.rlt import RltReward
from verl_memopt.data.encoder import tokenize
from verl_memopt.data.ragged import Ragged
from verl_memopt.data.rlt.prompts import RltPrompts
from verl_memopt.data.special_tokens import Spans
from verl_memopt.errors import ConfigError
from verl_memopt.rewards.rlt.explanations import Explanations, locate_explanations
from verl_memopt.rewards.rlt.retokenize import Parts, retokenized_parts
from verl_memopt.rewards.rlt.status import EMPTY_THINK, NO_END_TAG, OK, SKIPPED, THINK_TRUNCATED
from verl_memopt.rewards.rlt.token_bytes import TokenBytes

PREFIX, THINK, BRIDGE, SOLUTION, END = range(5)
"""The parts of a row, in order."""
NUM_PARTS = 5

_NOTHING: Parts = ([], [], [], [], [])


@dataclass(frozen=True)
class StudentRows:
    """The student's sequences. A skipped row has no token.

    Attributes:
        ids: int64, N rows: all parts of each row, one after another.
        parts: int64 [N, 5], tokens of each part.
        status: int8 [N], a value of :mod:`verl_memopt.rewards.rlt.status`.
        matched: bool [N], whether the explanation has an end tag.
        has_text_after: bool [N], whether text follows the end tag.
    """

    ids: Ragged
    parts: Tensor
    status: Tensor
    matched: Tensor
    has_text_after: Tensor

    @property
    def num_rows(self) -> int:
        """Number of rows, skipped ones included."""
        return int(self.parts.shape[0])

    def part(self, which: int) -> Ragged:
        """Return one part of every row, such as ``THINK`` or ``SOLUTION``."""
        return Ragged(flat=self.ids.flat[self.part_of_token() == which], lengths=self.parts[:, which], batch_size=[])

    def part_of_token(self) -> Tensor:
        """Return int64 [tokens]: the part of each token of ``ids``."""
        return torch.arange(NUM_PARTS).repeat(self.num_rows).repeat_interleave(self.parts.flatten())

    def scored(self) -> Tensor:
        """Return bool [N]: False for skipped rows."""
        return self.status != SKIPPED

    def select(self, rows: Sequence[int]) -> StudentRows:
        """Return the chosen rows in the given order."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        return StudentRows(
            ids=self.ids.select(rows),
            parts=self.parts[index],
            status=self.status[index],
            matched=self.matched[index],
            has_text_after=self.has_text_after[index],
        )


class StudentEncoder:
    """Builds the student's sequences from questions, solutions and the teacher's responses.

    Args:
        prompts: Renders the student's prompt with the tokenizer that teacher and student share.
        settings: How rows are aligned and what happens to long ones.
        stop_ids: Tokens that end a response, and padding.

    Raises:
        ConfigError: The tokenizer is not byte-level.
        DataError: The chat template cannot render an answer.
    """

    def __init__(self, prompts: RltPrompts, settings: RltReward, stop_ids: Collection[int]) -> None:
        """Tokenize the parts that all rows share."""
        self._prompts = prompts
        self._format = prompts.rlt_format
        self._settings = settings
        self._stop_ids = frozenset(stop_ids)
        self._token_bytes = TokenBytes(prompts.tokenizer)
        self._end_text = self._format.solution.end + prompts.end_of_turn()
        forced, bridge, end = tokenize(prompts.tokenizer, [self._format.padding, self._format.bridge, self._end_text])
        self._forced = forced if settings.include_forced_prefix else []
        self._bridge, self._end = bridge, end

    def encode(
        self, questions: Sequence[str], solutions: Sequence[str], responses: Ragged, addresses: Sequence[str]
    ) -> StudentRows:
        """Return the student's sequence of each response.

        Args:
            questions: The question of each row.
            solutions: Its solution, without tags.
            responses: int64, the teacher's tokens after the forced prefix.
            addresses: File and row of each question, for errors.

        Raises:
            ConfigError: A sequence is longer than ``max_student_len``, and ``overlong`` is ``error``.
        """
        explanations = locate_explanations(responses, self._token_bytes, self._format.explanation.end, self._stop_ids)
        build = self._retokenized if self._settings.align == "retokenize" else self._concatenated
        built = build(questions, solutions, responses, explanations)
        rows = [self._fit(parts, address) for parts, address in zip(built, addresses, strict=True)]
        status = torch.tensor([status for _, status in rows], dtype=torch.int8)
        return StudentRows(
            ids=Ragged.from_rows([[token for part in parts for token in part] for parts, _ in rows], torch.int64),
            parts=torch.tensor([[len(part) for part in parts] for parts, _ in rows], dtype=torch.int64).reshape(-1, NUM_PARTS),
            status=torch.where(explanations.matched, status, status.clamp(min=NO_END_TAG)),
            matched=explanations.matched,
            has_text_after=explanations.has_text_after,
        )

    def _concatenated(
        self, questions: Sequence[str], solutions: Sequence[str], responses: Ragged, explanations: Explanations
    ) -> list[Parts]:
        """Return the parts of each row, with the teacher's own tokens as the explanation."""
        tokenizer, of_prefix = self._prompts.tokenizer, {question: self._opening(question) for question in questions}
        prefixes = tokenize(tokenizer, [text for text, _ in of_prefix.values()], [plain for _, plain in of_prefix.values()])
        prefix_of = dict(zip(of_prefix, prefixes, strict=True))
        plain = [self._prompts.plain(solution) for solution in solutions]
        thoughts = [ids[:length].tolist() for ids, length in zip(responses.rows(), explanations.lengths.tolist(), strict=True)]
        return [
            (prefix_of[question], [*self._forced, *thought], self._bridge, solution, self._end)
            for question, thought, solution in zip(questions, thoughts, tokenize(tokenizer, solutions, plain), strict=True)
        ]

    def _retokenized(
        self, questions: Sequence[str], solutions: Sequence[str], responses: Ragged, explanations: Explanations
    ) -> list[Parts]:
        """Return the parts of each row, tokenized again as one text."""
        rows: list[Parts] = []
        forced = self._format.padding if self._settings.include_forced_prefix else ""
        for question, solution, thought in zip(questions, solutions, explanations.texts, strict=True):
            opening, plain = self._opening(question)
            texts = (opening, forced + thought.decode(errors="replace"), self._format.bridge, solution, self._end_text)
            spans = (plain, (), (), self._prompts.plain(solution), ())
            rows.append(retokenized_parts(self._prompts.tokenizer, self._token_bytes, texts, spans))
        return rows

    def _opening(self, question: str) -> tuple[str, Spans]:
        """Return the text before the explanation, without the padding where that is scored."""
        text, plain = self._prompts.student(question)
        return text.removesuffix(self._format.padding) if self._settings.include_forced_prefix else text, plain

    def _fit(self, parts: Parts, address: str) -> tuple[Parts, int]:
        """Return the parts that are scored, and the row's status so far."""
        prefix, think, bridge, solution, end = parts
        limit = self._settings.max_student_len
        length = sum(map(len, parts))
        if not solution:  # only after a second tokenization that merged it with its tags
            return _NOTHING, SKIPPED
        if limit is None or length <= limit:
            return parts, OK if think else EMPTY_THINK
        if self._settings.overlong == "error":
            raise ConfigError(
                f"max_student_len={limit}: the student's sequence for {address} has {length} tokens. Raise it to at least "
                f"{length}, lower data.max_response_length, or set overlong to truncate_think or skip."
            )
        room = len(think) - (length - limit)
        if self._settings.overlong == "skip" or room < 0:
            return _NOTHING, SKIPPED
        return (prefix, think[:room], bridge, solution, end), THINK_TRUNCATED


def needs_teacher_pass(settings: RltReward, temperature: float) -> bool:
    """Return whether the teacher's log-probs of the explanation are others than those that the rollouts were scored with.

    Args:
        settings: Settings of the reward.
        temperature: Temperature of the rollouts.
    """
    own_tokens = settings.align == "concat" and not settings.include_forced_prefix
    own_temperature = settings.unbias_teacher_log_probs or temperature == 1
    return settings.include_teacher_think_entropy and not (own_tokens and own_temperature)


def reused_log_probs(log_probs: Ragged, think_lengths: Tensor) -> Tensor:
    """Return the log-probs of the explanations out of those of the whole responses, fp32 [all tokens of THINK].

    Args:
        log_probs: fp32, the log-prob of each response token.
        think_lengths: int64 [N], tokens of each explanation, which starts with its response.
    """
    row = torch.repeat_interleave(torch.arange(log_probs.num_rows), log_probs.lengths)
    starts = log_probs.lengths.cumsum(0) - log_probs.lengths
    place = torch.arange(len(row)) - starts[row]
    return log_probs.flat[place < think_lengths[row]]
