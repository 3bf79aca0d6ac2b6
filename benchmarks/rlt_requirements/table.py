"""The table of what a card needs: the measured passes, and with them weights, the engine, and what lies outside of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.rlt_requirements.passes import PassPeaks, Rows
from tests.config.card_memory import CARDS, GIB, MIB, MODELS, OUTSIDE, RESERVED, ModelShape
from verl_memopt.config.schema import Settings
from verl_memopt.memory.formulas import width
from verl_memopt.rollout.engine import kv_bytes_per_token

HEAD = ("model", "policy", "update", "log-probs", "score", "engine", "KV", "largest phase", "GiB", "card", "host", "LoRA", "card")
NO_CARD = "-"


@dataclass(frozen=True)
class Needs:
    """Bytes of a run on one card, phase by phase: those of torch's allocator, with what it reserves besides."""

    shape: ModelShape
    peaks: PassPeaks
    settings: Settings
    rows: Rows

    @property
    def masters(self) -> int:
        """Bytes of the policy's parameters, and once more of their gradients."""
        return self.shape.params * width(self.settings.actor_rollout_ref.actor.fsdp_config.model_dtype)

    @property
    def student(self) -> int:
        """Bytes of a student of the policy's size."""
        return self.shape.params * width(self.settings.reward_model.model.fsdp_config.model_dtype)

    @property
    def engine(self) -> int:
        """Bytes of the engine's weights."""
        return self.shape.params * width(self.settings.actor_rollout_ref.rollout.dtype)

    @property
    def kv(self) -> int:
        """Bytes of the KV cache for all rows of a step at their longest."""
        shape, rollout = self.shape, self.settings.actor_rollout_ref.rollout
        count = self.settings.data.train_batch_size * rollout.n
        each = kv_bytes_per_token(shape.layers, shape.kv_heads, shape.head_dim, width(rollout.dtype), 1)
        return count * (self.rows.prompt + self.rows.response) * each

    def phases(self) -> dict[str, float]:
        """Return the bytes of each phase on the card. Everything that is not in it rests on the host."""
        peaks, ref = self.peaks, self.settings.actor_rollout_ref.ref.fsdp_config
        reference = self.shape.params * width(ref.model_dtype)
        in_torch = {
            "old_log_prob": self.masters + peaks.log_probs,
            "reward": self.student + peaks.score,
            "ref": reference + peaks.log_probs,
            "update_actor": self.masters + peaks.update,
            "update_weights": self.masters,
        }
        phases = {name: size * RESERVED + OUTSIDE for name, size in in_torch.items()}
        phases["update_weights"] += self.engine
        # A step needs the cache of one group at least; more rows at a time are faster.
        phases["gen"] = self.engine + self.kv / self.settings.data.train_batch_size + OUTSIDE
        return phases

    @property
    def lora(self) -> float:
        """Bytes of the largest phase with LoRA on bfloat16 weights. Its update is at most the full one without the gradients."""
        frozen = self.shape.params * 2
        update = (frozen + self.peaks.update - self.masters) * RESERVED
        return max(update, frozen * RESERVED + self.engine) + OUTSIDE

    @property
    def host(self) -> int:
        """Bytes on the host: masters, two moments in fp32, reference and student."""
        reference = self.shape.params * width(self.settings.actor_rollout_ref.ref.fsdp_config.model_dtype)
        return self.masters + 8 * self.shape.params + reference + self.student


def card_of(size: float) -> str:
    """Return the smallest card of a memory profile that holds so many bytes."""
    return next((name for name, mib in CARDS.items() if size <= mib * MIB), NO_CARD)


def table(peaks: Mapping[str, PassPeaks], settings: Settings, rows: Rows) -> str:
    """Return the table as text.

    Args:
        peaks: Model preset -> its measured passes.
        settings: Of the recipe.
        rows: The longest rows of a run.
    """
    lines = [HEAD]
    for model, measured in peaks.items():
        needs = Needs(MODELS[model], measured, settings, rows)
        phases = needs.phases()
        largest = max(phases, key=phases.__getitem__)
        sizes = (needs.masters, measured.update, measured.log_probs, measured.score, needs.engine, needs.kv)
        lines.append(
            (
                model, *map(_gib, sizes), largest, _gib(phases[largest]), card_of(phases[largest]), _gib(needs.host),
                _gib(needs.lora), card_of(needs.lora),
            )
        )  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    body = "\n".join("  ".join(cell.rjust(size) for cell, size in zip(line, widths, strict=True)) for line in lines)
    budget = settings.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    lengths = f"{rows.prompt} + {rows.response} tokens, {budget} in a micro-batch"
    return f"""GiB of an RLT step on one card, with a student of the policy's size: {lengths}.
Measured on fake tensors at full depth: update (gradients included), log-probs and score, each beside the parameters.
Computed: policy (fp32 masters), engine (bfloat16 weights), KV (cache of all rows at their longest), host, LoRA, and the phases
with {RESERVED} reserved bytes for a live one and {OUTSIDE / GIB:.1f} GiB outside of torch's allocator. No card has measured them.

{body}
"""


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
