"""The batch of one step: prompts, responses and what each pass adds to them, as ragged tensors in prompt-major order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorClass
from torch import Tensor

from verl_memopt.data.ragged import Ragged, token_index
from verl_memopt.memory.batching.shared_prompt import RowTokens

TOKEN_FIELDS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages")
"""Fields that are flat over response tokens, in the order of ``responses.flat``."""


class RolloutBatch(TensorClass):
    """Prompts with n responses each. Row = prompt_index * n + sample_index.

    ``group`` is int64 [B]: the prompt that each row answers. The optional fields are fp32 [R], one value for each response
    token of all rows.
    """

    prompts: Ragged
    responses: Ragged
    group: Tensor
    rollout_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    advantages: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows, B."""
        return int(self.group.shape[0])

    def row_tokens(self, shared: bool) -> RowTokens:
        """Return the number of tokens that a pass computes for each row.

        Args:
            shared: Rows of one group compute their prompt once, together.
        """
        pairs = list(zip(self.prompts.sizes(), self.responses.sizes(), strict=True))
        return RowTokens(
            prompts=tuple(prompt if response else 0 for prompt, response in pairs),
            answers=tuple(max(response - 1, 0) for _, response in pairs),
            groups=tuple(self.group.tolist()) if shared else tuple(range(len(pairs))),
        )

    def response_row(self) -> Tensor:
        """Return int64 [R]: the row of each response token."""
        return torch.repeat_interleave(torch.arange(self.num_rows), self.responses.lengths)

    def select(self, rows: Sequence[int]) -> RolloutBatch:  # type: ignore[override]
        """Return the chosen rows in the given order, with every field that is set."""
        if list(rows) == list(range(self.num_rows)):
            return self
        tokens = token_index(self.responses.sizes(), rows)
        flat = {name: getattr(self, name) for name in TOKEN_FIELDS}
        return RolloutBatch(
            prompts=self.prompts.select(rows),
            responses=self.responses.select(rows),
            group=self.group[torch.as_tensor(rows, dtype=torch.int64)],
            **{name: value[tokens] for name, value in flat.items() if value is not None},
            batch_size=[],
        )


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
