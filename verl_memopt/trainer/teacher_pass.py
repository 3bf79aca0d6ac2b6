"""What a teacher says of the responses of a step: a model in the workers, a server, or a column of the rows."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_memopt.agents.loop import Conversation
from verl_memopt.config.role_settings import SAMPLED
from verl_memopt.config.schema import Distill, Settings, TeacherEndpoint
from verl_memopt.data.batch import Ragged, RolloutBatch, prompt_rows, token_index
from verl_memopt.data.dataset import TEACHER_PROMPT
from verl_memopt.data.encoder import tokenize
from verl_memopt.data.text_alignment import Retold
from verl_memopt.errors import ConfigError, DataError, RewardError, TeacherError
from verl_memopt.memory.knob import teacher_is_elsewhere
from verl_memopt.rewards.judge import Patience, ask
from verl_memopt.trainer.micro_batching import Budget, cut_ranks
from verl_memopt.trainer.rollouts import ForwardPass, LogProbPass, RowAnswers, StepBatch
from verl_memopt.worker.group import TimedGroup
from verl_memopt.worker.trained_model import MiniBatch
from verl_memopt.worker.worker import Worker

URL = "teacher.endpoint.url"
BYTES_PER_ENTRY = 160
"""More bytes than a server needs for one log-prob, with the id, the rank and the text of the token."""
PROBE_TOKENS = 16

Reading = tuple[list[int], list[tuple[int, int]]]
"""Token ids that the teacher reads, and the spans of the sampled tokens among them."""


@dataclass(frozen=True)
class TeacherPass:
    """The teacher's pass over the responses of a step, in the phase ``teacher``.

    Attributes:
        budget: Cuts the rows of a rank into micro-batches.
        distill: What is learned from the teacher.
        tokenizer: Encodes the prompts of the teacher; None = it reads the policy's prompts.
        elsewhere: What the teacher says comes from here; None = from a model in the workers.
        retells: Gives a response in the tokens of a teacher with another tokenizer; None = it reads the policy's tokens.
    """

    workers: TimedGroup
    budget: Budget
    balance: bool
    distill: Distill
    tokenizer: Any = None
    elsewhere: Endpoint | Column | None = None
    retells: Callable[[list[int]], Retold] | None = None

    def read(self, batch: StepBatch) -> None:
        """Add what the teacher says to the rows of a step, except the states of a model in the workers.

        Raises:
            DataError: As for :meth:`tell`.
            TeacherError: A server gave no answer, or another one than log-probs of these tokens.
        """
        self.tell(batch)
        if self.retells is not None:
            self._read_text(batch, self.retells)
        elif self.distill.divergence == SAMPLED:
            batch.rows.teacher_log_probs = self._sampled(batch.rows, batch.names, batch.answers.conversations)
        elif self.elsewhere is not None:
            with self.workers.clock.phase("teacher"):
                said = self.elsewhere.say(batch.answers, batch.rows, batch.names)
            batch.rows.teacher_ids, batch.rows.teacher_top = said.top()
        elif self._judges.is_apart:
            self._read_top(batch.rows, batch.names)

    @property
    def _judges(self) -> TimedGroup:
        # The workers that have the teacher.
        return self.workers.of("teacher")

    def _read_top(self, rows: RolloutBatch, names: Sequence[str]) -> None:
        told, tokens, k = rows.for_teacher(), rows.responses.flat.shape[0], self.distill.top_k
        assert k is not None, "the rules refuse other exact forms"
        ids, log_probs, rest = torch.zeros(tokens, k, dtype=torch.int32), torch.zeros(tokens, k), torch.zeros(tokens)
        sizes = told.responses.sizes()
        for number, of_teacher in _by_teacher(told, range(told.num_rows)).items():
            asked = ForwardPass(self._judges, "teacher", Worker.teacher_top, self.budget, self.balance, (number,))
            answers = asked.begin(told.select(of_teacher), [names[row] for row in of_teacher]).result()
            for share, answer in answers:
                places = token_index(sizes, [of_teacher[row] for row in share])
                for whole, part in zip((ids, log_probs, rest), answer, strict=True):
                    whole[places] = part
        rows.teacher_ids, rows.teacher_top, rows.teacher_rest = ids, log_probs, rest

    def judge(self, batch: StepBatch) -> Tensor:
        """Return the log-probs of all response tokens of a step, fp32 [R], whatever is learned from the teacher.

        Raises:
            ConfigError: The teacher reads text, in tokens of its own.
            DataError, TeacherError: As for :meth:`read`.
        """
        if self.retells is not None:
            raise ConfigError(
                "distill.align=text: the teacher reads tokens of its own, so the policy's have no log-probs there. Choose a "
                "teacher with the policy's tokenizer."
            )
        self.tell(batch)
        return self._sampled(batch.rows, batch.names, batch.answers.conversations, reads_head=True)

    def _sampled(
        self,
        rows: RolloutBatch,
        names: Sequence[str],
        conversations: Sequence[Conversation] | None,
        reads_head: bool = False,
    ) -> Tensor:
        if self.elsewhere is None:
            return self.log_probs(rows, names, reads_head)
        assert isinstance(self.elsewhere, Endpoint), "the rules refuse a column"
        with self.workers.clock.phase("teacher"):
            return self.elsewhere.ask(_readings(rows, conversations), names).log_probs

    def _read_text(self, batch: StepBatch, retells: Callable[[list[int]], Retold]) -> None:
        rows = batch.rows
        retold, old = [retells(row.tolist()) for row in rows.responses.rows()], rows.old_log_probs
        assert old is not None, "the sampled divergence needs old log-probs"
        assert rows.teacher_prompts is not None, "the prompts are in the teacher's template"
        told = RolloutBatch(
            prompts=rows.teacher_prompts,
            responses=Ragged.from_rows([each.ids for each in retold], torch.int64),
            group=rows.group,
            prompt_group=rows.prompt_group,
            batch_size=[],
        )
        said = self._sampled(told, batch.names, None).split(told.responses.sizes())
        own = old.split(rows.responses.sizes())
        found = [each.in_runs(one, other) for each, one, other in zip(retold, own, said, strict=True)]
        rows.teacher_log_probs = torch.cat([log_probs for log_probs, _ in found])
        batch.teacher_shares = torch.cat([shares for _, shares in found])

    def tell(self, batch: StepBatch) -> None:
        """Add the number and weight of its teacher to each row of a step, and the prompts that the teachers read.

        Raises:
            DataError: A row has no such prompt, because a user's class made it.
        """
        numbers = [row.teacher_number for row in batch.answers.rows]
        batch.rows.teacher = torch.tensor(numbers) if any(numbers) else None
        if self.distill.weight_key is not None:
            weights = torch.tensor([row.teacher_weight for row in batch.answers.rows], dtype=torch.float32)
            batch.rows.teacher_weights = weights.repeat_interleave(batch.rows.responses.lengths)
        if self.tokenizer is None:
            return
        rows = list({id(row): row for row in batch.answers.rows}.values())
        without = next((row for row in rows if row.teacher is None), None)
        if without is not None:
            raise DataError(f"{without.address}: PromptRow.teacher is not set, and {TEACHER_PROMPT} cannot fill it. Set it.")
        told = [row.teacher for row in rows if row.teacher is not None]
        encoded = tokenize(
            self.tokenizer, [text for text, _ in told], [plain for _, plain in told], [row.is_text for row in rows]
        )
        ids = {id(row): own for row, own in zip(rows, encoded, strict=True)}
        # Rows with one prompt share a list, which is stored once.
        batch.rows.teacher_prompts = prompt_rows([ids[id(row)] for row in batch.answers.rows])

    def log_probs(self, batch: RolloutBatch, names: Sequence[str], reads_head: bool = False) -> Tensor:
        """Return the teachers' log-probs of all response tokens, fp32 [R], in batch order.

        ``reads_head``: the divergence is exact, so that the teacher's head is not on the device in the teacher's own phase.
        """
        phase = "teacher_log_probs" if reads_head else "teacher"
        batch = batch.for_teacher()
        found, sizes = torch.zeros(batch.responses.flat.shape[0]), batch.responses.sizes()
        for number, rows in _by_teacher(batch, range(batch.num_rows)).items():
            asked = LogProbPass(self._judges, phase, Worker.teacher_log_probs, self.budget, self.balance, (number,))
            own = asked.compute(batch.select(rows), [names[row] for row in rows])
            found[token_index(sizes, rows)] = own.log_probs
        return found

    def states(self, batch: RolloutBatch, names: Sequence[str], per_rank: Sequence[Sequence[MiniBatch]]) -> None:
        """Let each rank compute the teachers' states of the tokens in its own mini-batches, and keep them for the update.

        So the states never leave the rank. ``batch`` holds the rows of all mini-batches, with ``places``.
        """
        batch = batch.for_teacher()
        row_of, tokens = batch.response_row(), batch.row_tokens()
        numbered = [[mini.batch.places for mini in minis if mini.batch.places is not None] for minis in per_rank]
        places = [torch.cat(own) for own in numbered]
        rows_of = [row_of[own].unique().tolist() for own in places]
        if batch.teacher_ids is not None:  # the ranks only keep what their tokens need
            self.workers.each("teacher", Worker.teacher_states, [(batch.select(rows), []) for rows in rows_of])
            return
        shares = [_by_teacher(batch, rows) for rows in rows_of]
        for number in sorted({number for share in shares for number in share}):
            own = [share.get(number, []) for share in shares]
            rank_tokens = [tokens.select(rows) for rows in own]
            bins = cut_ranks(rank_tokens, [[names[row] for row in rows] for rows in own], self.budget)
            arguments = [(batch.select(rows), cut, number) for rows, cut in zip(own, bins, strict=True)]
            self.workers.each("teacher", Worker.teacher_states, arguments)
            self.budget.learn(zip(rank_tokens, bins, strict=True), self.workers.figures)


def _by_teacher(batch: RolloutBatch, rows: Sequence[int]) -> dict[int, list[int]]:
    # Number of a teacher -> its rows.
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(0 if batch.teacher is None else int(batch.teacher[row]), []).append(row)
    return found


@dataclass(frozen=True)
class Said:
    """What a teacher says of R tokens.

    Attributes:
        log_probs: fp32 [R], the log-probs of these tokens. Empty = the source has none.
        most_probable: For each token the ids and log-probs of at least k tokens, the most probable ones of the teacher.
        k: ``distill.top_k``; 0 = the most probable tokens are not read.
    """

    log_probs: Tensor
    most_probable: Sequence[Sequence[tuple[int, float]]]
    k: int

    def top(self) -> tuple[Tensor, Tensor]:
        """Return the ids, int32 [R, k], and the log-probs, fp32 [R, k], of the k most probable tokens, most probable first."""
        kept = [sorted(entries, key=lambda entry: -entry[1])[: self.k] for entries in self.most_probable]
        ids = torch.tensor([[token for token, _ in entries] for entries in kept], dtype=torch.int32).view(-1, self.k)
        return ids, torch.tensor([[value for _, value in entries] for entries in kept], dtype=torch.float32).view(-1, self.k)


@dataclass(frozen=True)
class Column:
    """A teacher whose log-probs are in the rows (``teacher.log_probs_key``)."""

    k: int

    def say(self, answers: RowAnswers, rows: RolloutBatch, names: Sequence[str]) -> Said:
        return Said(torch.empty(0), [entries for row in answers.rows for entries in row.teacher_top], self.k)


@dataclass(frozen=True)
class Endpoint:
    """A teacher that a server runs.

    Attributes:
        k: ``distill.top_k``; 0 = only the log-probs of the sampled tokens are asked for.
        vocabulary: Number of ids of the policy.
    """

    settings: TeacherEndpoint
    k: int
    vocabulary: int

    def check(self, tokenizer: Any) -> None:
        """Ask for the log-probs of some tokens, before a run starts.

        Raises:
            ConfigError: There is no key, or the server gives no log-probs, or its tokens are others than those of ``tokenizer``.
        """
        key = self.settings.api_key_env
        if key is not None and not os.environ.get(key):
            raise ConfigError(
                f"teacher.endpoint.api_key_env={key}: there is no such environment variable, or it is empty. Set it to the key "
                "of the server, or remove the setting."
            )
        ids = _words(tokenizer)
        if len(ids) < 2:
            return
        try:
            _, names = self._entries(ids, "the trial before the run")
        except TeacherError as problem:
            raise ConfigError(str(problem)) from problem
        for token, name in zip(ids, names, strict=True):
            own = tokenizer.decode([token])
            if name is not None and not name.startswith("token_id:") and name.strip() != own.strip():
                raise ConfigError(
                    f"{URL}={self.settings.url}: token {token} is {name!r} there and {own!r} in the policy's tokenizer. Teacher "
                    "and policy are compared token by token: serve a model with the policy's tokenizer."
                )

    def say(self, answers: RowAnswers, rows: RolloutBatch, names: Sequence[str]) -> Said:
        return self.ask(_readings(rows, answers.conversations), names)

    def ask(self, readings: Iterator[list[Reading]], names: Sequence[str]) -> Said:
        """Ask for the log-probs of all sampled tokens of the readings of each row. ``names``: names of the rows for errors.

        Raises:
            TeacherError: As for :meth:`TeacherPass.read`.
        """
        asked = [(name, *reading) for name, row in zip(names, readings, strict=True) for reading in row]
        executor = ThreadPoolExecutor(self.settings.requests_at_once, thread_name_prefix="teacher")
        try:
            answers = list(executor.map(lambda each: self._entries(each[1], each[0])[0], asked))
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
        told = [
            (ids[place], answer[place])
            for (_, ids, spans), answer in zip(asked, answers, strict=True)
            for first, last in spans
            for place in range(first, last)
        ]
        log_probs = torch.tensor([entries[token] for token, entries in told], dtype=torch.float32)
        return Said(log_probs, [list(entries.items()) for _, entries in told] if self.k else [], self.k)

    def _entries(self, ids: list[int], name: str) -> tuple[list[dict[int, float]], list[str | None]]:
        """Return the log-probs of known tokens at each place, and what the server calls each token (None = it does not say).

        The first token of a row has no log-prob.
        """
        settings = self.settings
        body: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "temperature": 1.0}
        if settings.model is not None:
            body["model"] = settings.model
        if settings.api == "vllm":
            body |= {"prompt_logprobs": self.k}
        else:
            body |= {"echo": True, "logprobs": 1}
        try:
            answer = ask(str(settings.url), body, self._patience(len(ids)))
        except RewardError as problem:
            raise TeacherError(f"{URL}: {problem}") from problem
        read = _of_vllm if settings.api == "vllm" else _of_openai
        try:
            found = read(answer["choices"][0], ids)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as problem:
            raise TeacherError(
                f"{URL}={settings.url}: the answer to {name} has no log-probs of the prompt's tokens in the form of "
                f"teacher.endpoint.api={settings.api}: {answer!r:.200}. Correct the address or teacher.endpoint.api."
            ) from problem
        entries, _ = found
        few = next((each for each in entries[1:] if len(each) < self.k), None)
        if len(entries) != len(ids) or few is not None:
            what = f"{len(entries)} log-probs for {len(ids)} tokens"
            if few is not None:
                what = f"the log-probs of {len(few)} tokens at a place, and distill.top_k={self.k} needs as many"
            raise TeacherError(
                f"{URL}={settings.url}: the answer to {name} has {what}. Let the server return more (vLLM: --max-logprobs, "
                "--max-model-len), or lower distill.top_k or data.max_response_length."
            )
        for place, (token, each) in enumerate(zip(ids[1:], entries[1:], strict=True), 1):
            wrong = token not in each or not all(math.isfinite(value) and value < 1e-3 for value in each.values())
            if wrong or (self.k and max(each) >= self.vocabulary):
                raise TeacherError(
                    f"{URL}={settings.url}: the answer to {name} has {each!r:.100} at token {place}, which are no log-probs of "
                    f"token {token} and of others below {self.vocabulary}. Serve a model with the policy's tokenizer."
                )
        return found

    def _patience(self, tokens: int) -> Patience:
        settings = self.settings
        headers = {} if settings.api_key_env is None else {"Authorization": f"Bearer {os.environ.get(settings.api_key_env, '')}"}
        return Patience(
            limit_seconds=3 * settings.timeout_seconds,
            attempt_seconds=settings.timeout_seconds,
            headers=headers,
            name="teacher",
            way_out="Start the server, or raise teacher.endpoint.timeout_seconds.",
            place=URL,
            largest_bytes=(1 << 20) + tokens * (self.k + 2) * BYTES_PER_ENTRY,
        )


def _of_vllm(choice: Mapping[str, Any], ids: Sequence[int]) -> tuple[list[dict[int, float]], list[str | None]]:
    places = [place or {} for place in choice["prompt_logprobs"]]
    entries = [{int(token): float(entry["logprob"]) for token, entry in place.items()} for place in places]
    named = (place.get(str(token), {}) for token, place in zip(ids, places, strict=False))
    return entries, [entry.get("decoded_token") for entry in named]


def _of_openai(choice: Mapping[str, Any], ids: Sequence[int]) -> tuple[list[dict[int, float]], list[str | None]]:
    said = choice["logprobs"]
    values, names = said["token_logprobs"][: len(ids)], said.get("tokens") or []
    entries = [{} if value is None else {token: float(value)} for token, value in zip(ids, values, strict=False)]
    return entries, [*names[: len(ids)], *[None] * (len(ids) - len(names))]


def teacher_elsewhere(settings: Settings, vocabulary: int) -> Endpoint | Column | None:
    """Return where a run asks what its teacher says; None = there is no teacher, or its model is in the workers.

    ``vocabulary``: number of ids of the policy.
    """
    if not teacher_is_elsewhere(settings):
        return None
    k = 0 if settings.distill.divergence == SAMPLED else settings.distill.top_k or 0
    return Column(k) if settings.teacher.endpoint.url is None else Endpoint(settings.teacher.endpoint, k, vocabulary)


def _readings(rows: RolloutBatch, conversations: Sequence[Conversation] | None) -> Iterator[list[Reading]]:
    # What the teacher reads for each row. Its spans, one after another, are the response of the row.
    if conversations is not None:
        for each in conversations:
            yield list(_of_turns([(turn.prompt_ids, turn.output_ids) for turn in each.turns]))
        return
    rows = rows.for_teacher()
    prompts = rows.prompts.flat.split(rows.prompts.sizes())
    for prompt, response in zip(prompts, rows.responses.rows(), strict=True):
        ids = [*prompt.tolist(), *response.tolist()]
        yield [(ids, [(len(prompt), len(ids))])] if len(response) else []


def _of_turns(turns: Sequence[tuple[list[int], list[int]]]) -> Iterator[Reading]:
    # A turn whose prompt begins with all that came before is read together with it.
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for prompt, output in turns:
        if spans and prompt[: len(ids)] != ids:
            yield ids, spans
            spans = []
        ids = [*prompt, *output]
        spans = [*spans, (len(prompt), len(ids))]
    if spans:
        yield ids, spans


def _words(tokenizer: Any) -> list[int]:
    # Tokens that are words in any way of writing a token down.
    ids = sorted(tokenizer.get_vocab().values())
    texts = ((token, tokenizer.decode([token]).strip()) for token in ids[:: max(len(ids) // (4 * PROBE_TOKENS), 1)])
    return [token for token, text in texts if text.isascii() and text.isalnum()][:PROBE_TOKENS]
