"""The prompts of each step with their ids, prepared while the workers compute the previous step."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.encoder import PromptEncoder
from verl_memopt.data.expansion import expand
from verl_memopt.data.loader import StepLoader


@dataclass(frozen=True)
class StepPrompts:
    """A step's prompts, the ids of all their samples as :class:`Expanded` has them, and what truncation removed."""

    prompts: list[PromptRow]
    prompt_ids: list[list[int]]
    rows_truncated: int
    tokens_dropped: int


class PromptPrefetcher:
    """Prepares the prompts one step ahead of the caller.

    :meth:`state_dict` is the loader's state after the last step that was returned, so a resumed run loses and repeats nothing.

    Args:
        loader: Returns the prompts of each step.
        n: Samples of each prompt.
        expansion: How the samples of a prompt get their ids, a key of ``EXPANSIONS``.
        encoder: An encoder of the prefetcher's own, because it works in its own thread.
    """

    def __init__(self, loader: StepLoader, n: int, expansion: str, encoder: PromptEncoder) -> None:
        """Create the thread. It prepares nothing until the first :meth:`next`."""
        self._loader = loader
        self._n = n
        self._expansion = expansion
        self._encoder = encoder
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompt-prefetcher")
        self._state, self.epoch = loader.state_dict(), loader.epoch
        self._before = self._state, self.epoch
        self._prepared: Future[tuple[StepPrompts, dict[str, Any], int]] | None = None

    def next(self) -> StepPrompts:
        """Return the next step's prompts and start to prepare those of the step after it.

        Raises:
            DataError: As the loader and the encoder raise it.
        """
        self._before = self._state, self.epoch
        return self.more()

    def more(self) -> StepPrompts:
        """Return further prompts for the same step. :meth:`give_back` undoes them with the :meth:`next` before them.

        Raises:
            DataError: As the loader and the encoder raise it.
        """
        prepared = self._thread.submit(self._prepare) if self._prepared is None else self._prepared
        step, self._state, self.epoch = prepared.result()
        self._prepared = self._thread.submit(self._prepare)
        return step

    def give_back(self) -> None:
        """Undo the last :meth:`next`, and :meth:`more` after it, in :meth:`state_dict`, because that step was abandoned.

        No further step may be requested after this.
        """
        self._state, self.epoch = self._before

    def state_dict(self) -> dict[str, Any]:
        """Return what the loader needs to continue after the last returned step."""
        return self._state

    def close(self) -> None:
        """End the thread. What it has prepared is dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _prepare(self) -> tuple[StepPrompts, dict[str, Any], int]:
        encoder, loader = self._encoder, self._loader
        # The encoder counts over the whole run, so the step's own numbers are differences.
        rows, tokens = encoder.rows_truncated, encoder.tokens_dropped
        expanded = expand(loader.dataset, loader.next_indices(), self._n, self._expansion, encoder)
        cut = encoder.rows_truncated - rows, encoder.tokens_dropped - tokens
        return StepPrompts(expanded.prompts, expanded.ids, *cut), loader.state_dict(), loader.epoch
