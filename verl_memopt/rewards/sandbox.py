"""Scores of code tasks: a SandboxFusion service runs the program of a response on the test cases, over HTTP.

The service is https://github.com/bytedance/SandboxFusion, at ``reward_model.sandbox_fusion.url``. No program of a response ever
runs in a process of the run.

The score is the share of the first ten test cases that the program passes, and 0 for a response without code. If the service does
not answer, or the row's ground truth is not a code task, verl counts a wrong answer. Here the row has an error, and
``custom_reward_function.on_error`` decides, as for every reward function. Cases after the tenth are not run, because they would
not count. If a function that is called by name raises an error or does not exist, the case fails. verl then compares the text
that was printed before the error, so such a program passes a case that expects no output.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from verl_memopt.config.reward_limits import CASE_SECONDS, CASES, URL
from verl_memopt.errors import RewardError
from verl_memopt.rewards.code_task import CODE_SOURCES, CodeTask, Trial, Verdict, prints, program_in, verdict_of
from verl_memopt.rewards.judge import LongAnswerError, Patience, ask
from verl_memopt.rewards.rules import score_by_rule

if TYPE_CHECKING:
    from verl_memopt.config.schema import SandboxFusion

PATIENCE = Patience(
    limit_seconds=45,
    attempt_seconds=3 * CASE_SECONDS,
    name="sandbox service",
    way_out=f"Start the service, or correct {URL}.",
)
"""Limits of the requests for one run. The service may need the time limits for compiling and for running, and may also queue."""

TRIES = 3
"""Number of attempts with a program that the service could not run."""


@dataclass(frozen=True)
class Sandbox:
    url: str
    """Address to which programs are posted."""
    slots: int
    """Largest number of programs that this process runs at the same time."""
    memory_limit_mb: int
    """Memory limit of a program."""


def share_out(settings: SandboxFusion, num_processes: int) -> list[Sandbox]:
    """Divide the service among the reward processes, so that their slots add up to ``max_concurrent``.

    The result may be shorter than ``num_processes``, so that each process has slots for all test cases of a row. One process can
    wait for many programs at the same time.
    """
    assert settings.url is not None
    total = settings.max_concurrent
    count = max(1, min(num_processes, total // CASES))
    return [Sandbox(settings.url, total // count + (place < total % count), settings.memory_limit_mb) for place in range(count)]


class Grader:
    """Scores responses to code tasks.

    At most ``slots`` calls of the service run at the same time, even after rows were abandoned.
    """

    def __init__(self, sandbox: Sandbox, patience: Patience = PATIENCE) -> None:
        self._sandbox = sandbox
        self._patience = patience
        self._threads = ThreadPoolExecutor(sandbox.slots, thread_name_prefix="sandbox")

    async def score(self, solution: str, ground_truth: Any) -> float:
        """Return the share of the test cases that the program of a response passes.

        If one case shows that the program does not compile, the cases after it count as failed.

        Raises:
            RewardError: The ground truth is not a code task, or the service gives no answer.
        """
        code = program_in(solution)
        try:
            task = CodeTask.read(ground_truth)
            if code is None:
                return 0.0
            verdicts = await self._verdicts(task, code)
        except RewardError as problem:
            raise RewardError(f"cannot score this row: {problem}") from problem
        compiled = takewhile(lambda verdict: verdict is not Verdict.NOT_COMPILED, verdicts)
        return sum(verdict is Verdict.PASSED for verdict in compiled) / len(verdicts)

    async def _verdicts(self, task: CodeTask, code: str) -> Sequence[Verdict]:
        loop = asyncio.get_running_loop()
        # All cases run at the same time. After the first error, the cases that still wait are cancelled.
        calls = [loop.run_in_executor(self._threads, self.run, task.trial(code, case)) for case in task.cases]
        try:
            return await asyncio.gather(*calls)
        finally:
            for call in calls:
                # Calls that have begun cannot be stopped. Calls that wait for a thread can, and would only burden the service.
                call.cancel()

    def run(self, trial: Trial) -> Verdict:
        """Run a program on a test case. If its output is too long for an answer of the service, the program has failed.

        Raises:
            RewardError: The service gives no answer, or could not run the program in ``TRIES`` attempts.
        """
        body: dict[str, Any] = {
            "code": trial.program,
            "language": "python",
            "stdin": trial.stdin,
            "compile_timeout": CASE_SECONDS,
            "run_timeout": CASE_SECONDS,
            "memory_limit_MB": self._sandbox.memory_limit_mb,
            "files": {},
            "fetch_files": [],
        }
        for attempt in range(TRIES):
            # The first attempt starts at once. Each later one waits longer, because the service may be overloaded.
            time.sleep(self._patience.backoff_seconds * attempt)
            try:
                answer = ask(self._sandbox.url, body, self._patience)
                verdict = verdict_of(answer, trial.passes)
            except LongAnswerError:
                return Verdict.FAILED
            except RewardError as problem:
                raise RewardError(f"{URL}={self._sandbox.url}: {problem}") from problem
            if verdict is Verdict.PASSED and trial.then is not None:
                return self.run(trial.then(str(answer["run_result"].get("stdout") or "")))
            if verdict is not Verdict.UNKNOWN:
                return verdict
        reason = " ".join(str(answer.get("message") or "without a reason").split())[:200]
        raise RewardError(
            f"{URL}={self._sandbox.url}: the service failed {TRIES} times to run the program ({reason}). See the service's log."
        )


def check_service(settings: SandboxFusion, patience: Patience = PATIENCE) -> None:
    """Let the service run a first program, so that a wrong address is found before a run begins. Does nothing without a URL."""
    if settings.url is None:
        return
    [sandbox] = share_out(settings, 1)
    if Grader(sandbox, patience).run(Trial("print(input() * 2)", "ab", prints("abab"))) is not Verdict.PASSED:
        raise RewardError(
            f"{URL}={settings.url}: the service ran a first program, print(input() * 2), which failed. See the service's log."
        )


def rules_with_sandbox(sandbox: Sandbox, whole_batch: bool = False, tolerant: bool = False) -> Callable[..., Awaitable[Any]]:
    grader = Grader(sandbox)

    async def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> Any:
        if data_source in CODE_SOURCES:
            return await grader.score(solution_str, ground_truth)
        return score_by_rule(data_source, solution_str, ground_truth, tolerant=tolerant)

    async def score_batch(
        data_sources: Sequence[str], solution_strs: Sequence[str], ground_truths: Sequence[Any], extra_infos: Sequence[Any]
    ) -> list[Any]:
        return await asyncio.gather(*map(score, data_sources, solution_strs, ground_truths))

    return score_batch if whole_batch else score
