"""The batch of one step: prompts, responses and what each pass adds to them, as ragged tensors in prompt-major order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorClass
from torch import Tensor

from verl_memopt.config.schema import Actor
from verl_memopt.data.ragged import Ragged, token_index
from verl_memopt.data.shared_rows import SharedRows
from verl_memopt.memory.batching.row_tokens import RowTokens
from verl_memopt.memory.batching.shared_prompt import prompt_groups

TOKEN_FIELDS = (
    "rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages", "selected", "old_values", "returns", "weights", "kept",
)  # fmt: skip
"""Fields that are flat over response tokens, in the order of ``responses.flat``."""


class RolloutBatch(TensorClass):
    """Prompts with n responses each. Row = prompt_index * n + sample_index.

    ``prompts`` holds the prompt of each row, or each prompt once with an index from row to prompt (``algorithm.expansion=lazy``).
    ``group`` is int64 [B]: the prompt that each row answers. ``prompt_group`` is int64 [B], or None: rows with the same number
    compute their prompt once, together. None = each row computes its own. ``selected`` is bool [R]: the tokens that the losses
    ``clip_cov`` and ``kl_cov`` act on. ``kept`` is bool [R]: False for the tokens that the rollout correction rejects. The other
    optional fields are fp32 [R], one value for each response token of all rows: ``old_values`` are the critic's when the
    advantages were computed, ``returns`` are what it learns, and ``weights`` are the importance weights of the rollout
    correction.
    """

    prompts: Ragged | SharedRows
    responses: Ragged
    group: Tensor
    prompt_group: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    selected: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    weights: Tensor | None = None
    kept: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows, B."""
        return int(self.group.shape[0])

    def prompt_groups(self) -> Sequence[int]:
        """Return a number for each row. Rows with the same number compute their prompt once, together."""
        return range(self.num_rows) if self.prompt_group is None else self.prompt_group.tolist()

    def row_tokens(self) -> RowTokens:
        """Return the number of tokens that a pass computes for each row."""
        pairs = list(zip(self.prompts.sizes(), self.responses.sizes(), strict=True))
        return RowTokens(
            prompts=tuple(prompt if response else 0 for prompt, response in pairs),
            answers=tuple(max(response - 1, 0) for _, response in pairs),
            groups=tuple(self.prompt_groups()),
        )

    def response_row(self) -> Tensor:
        """Return int64 [R]: the row of each response token."""
        return torch.repeat_interleave(torch.arange(self.num_rows), self.responses.lengths)

    def kept_sizes(self) -> list[int]:
        """Return the response tokens of each row that the rollout correction keeps: all without a correction."""
        if self.kept is None:
            return self.responses.sizes()
        return torch.zeros_like(self.responses.lengths).index_add(0, self.response_row(), self.kept.long()).tolist()

    def select(self, rows: Sequence[int]) -> RolloutBatch:  # type: ignore[override]
        """Return the chosen rows in the given order, with every field that is set."""
        # Nothing to choose, so nothing is copied: the usual case on one rank with one mini-batch.
        if list(rows) == list(range(self.num_rows)):
            return self
        tokens = token_index(self.responses.sizes(), rows)
        index = torch.as_tensor(rows, dtype=torch.int64)
        flat = {name: getattr(self, name) for name in TOKEN_FIELDS}
        return RolloutBatch(
            prompts=self.prompts.select(rows),
            responses=self.responses.select(rows),
            group=self.group[index],
            prompt_group=None if self.prompt_group is None else self.prompt_group[index],
            **{name: value[tokens] for name, value in flat.items() if value is not None},
            batch_size=[],
        )


def rollout_batch(
    prompts: Ragged | SharedRows, responses: Ragged, group: Tensor, actor: Actor, rollout_log_probs: Tensor | None = None
) -> RolloutBatch:
    """Return the batch of a step, with the rows that compute their prompt together as the settings say.

    Args:
        prompts: The prompt of each row.
        responses: The response of each row.
        group: int64 [B], the prompt that each row answers.
        actor: The ``actor`` section of the settings.
        rollout_log_probs: fp32 [R], the engine's log-probs.
    """
    return RolloutBatch(
        prompts=prompts,
        responses=responses,
        group=group,
        prompt_group=torch.tensor(prompt_groups(group.tolist(), actor), dtype=torch.int64),
        rollout_log_probs=rollout_log_probs,
        batch_size=[],
    )


def shares_prompts(actor: Actor) -> bool:
    """Return whether rows with the same prompt compute it once, together.

    Args:
        actor: The ``actor`` section of the settings.
    """
    return len(set(prompt_groups((0, 0), actor))) == 1


def scatter_tokens(parts: Sequence[tuple[Sequence[int], Tensor]], lengths: Sequence[int]) -> Tensor:
    """Return fp32 [R] on the host, in batch order, from parts that each hold the tokens of some rows.

    All values reach the host in one copy.

    Args:
        parts: (rows, values [tokens of those rows]), all on one device. Together they hold every row once.
        lengths: Response length of each row.
    """
    if not parts:
        return torch.empty(0, dtype=torch.float32)
    index = torch.cat([token_index(lengths, rows) for rows, _ in parts])
    values = torch.cat([values.detach() for _, values in parts]).cpu()
    out = torch.empty(sum(lengths), dtype=torch.float32)
    out[index] = values
    return out
