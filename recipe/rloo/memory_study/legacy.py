"""The published trainer's order of statements, written anew as the baseline of the study.

What makes it large is kept on purpose: logits of every position, in fp32; a view of them divided by the temperature in place, for
which autograd writes two more tensors of full size in backward; the output and its logits, held until the epoch ends; the scores
of the generation, held through the whole update, from which the old log-probs come.

Left out, because no tensor of it is large: the reward model, the shuffling of rows, evaluation. The answers are given, and are
replayed token by token through the same forwards that would have drawn them, so that every arm learns from the same ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import scaled_dot_product_attention, softmax

from recipe.rloo.memory_study.meters import Meter
from recipe.rloo.memory_study.shapes import Shapes, StudyBatch

KL_COEF = 0.05
ATTENTION = "memory_study"
"""Name of the attention function in a config of transformers."""
FAKE_STEPS = 8
"""Steps of a generation that run on a fake device. Each later step would make the same tensors, and a cache one token longer. Of
them only the scores are made there."""
aten = torch.ops.aten


@dataclass(frozen=True)
class Options:
    """How an update runs, beside its shapes."""

    micro_batch: int
    """Rows of one forward and backward."""
    autocast: bool = True
    """Run the policy under bf16 autocast, with its logits cast to fp32, as published."""
    for_values: bool = False
    """Take the old log-probs from the update's own forward, moved by the batch's drift, and leave the KL out of the reward. Every
    ratio is then known exactly, so that loss and gradient can be compared between programs. Otherwise the published difference of
    two sums over a whole answer loses about 1e-4 of a ratio."""
    dtype: torch.dtype = torch.float32
    """Of the weights. float64 gives the values that rounding moves the programs away from."""


@dataclass(frozen=True)
class Values:
    """Loss and gradient norm of the first epoch, and its gradient. None = the tensors had no values."""

    loss: float | None
    grad_norm: float | None
    gradients: dict[str, Tensor] | None = None


def build_model(folder: Path, device: torch.device, fake: bool, dtype: torch.dtype) -> nn.Module:
    """Return the causal LM of a folder, in training mode. On a fake device its weights have no values."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    AttentionInterface.register(ATTENTION, _attention)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION}
    model: Any
    if fake:
        with device:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        model.to(device)
    trained: nn.Module = model.train()
    return trained


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Return causal attention without a mask tensor, [batch, length, heads, D]. No row has padding."""
    causal = query.shape[2] > 1
    if isinstance(query, FakeTensor):
        output = _fake_gpu_attention(query, key, value, causal, scaling)
    else:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        output = scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


def _fake_gpu_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, scaling: float | None) -> Tensor:
    """Run the kernel that a GPU takes: flash attention in half precision, else memory-efficient attention."""
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (query, key, value))
    if query.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scaling)[0]
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    needs_backward = torch.is_grad_enabled() and query.requires_grad
    return aten._scaled_dot_product_efficient_attention(query, key, value, None, needs_backward, 0.0, causal, scale=scaling)[0]


@contextmanager
def autocast(kind: str) -> Iterator[None]:
    """Run the body under bf16 autocast of a kind of device. Unlike ``torch.autocast`` it does not ask whether there is one."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, torch.bfloat16)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])


def forward(model: nn.Module, ids: Tensor, mixed: bool, **options: Any) -> Any:
    """Return the model's output.

    Args:
        model: A causal LM of transformers.
        ids: int64 [B, T], without padding.
        mixed: Compute under bf16 autocast, and cast the logits to fp32.
        **options: Further arguments of the model.
    """
    # No row has padding. Given a prepared mask, transformers does not read values to find that out.
    with autocast(ids.device.type) if mixed else nullcontext():
        output = model(input_ids=ids, attention_mask={"full_attention": None}, **options)
    if mixed:
        output.logits = output.logits.float()
    return output


def token_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-prob of each id, fp32 [B, R]: its logit minus the log-sum-exp, row by row.

    Args:
        logits: fp32 [B, R, V].
        ids: int64 [B, R].
    """
    chosen = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([row.logsumexp(-1) for row in logits])


def sequence_loss(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Return RLOO's clipped loss of each row, fp32 [B]: one ratio for a whole answer.

    Args:
        log_ratio: fp32 [B], summed over the answer.
        advantages: fp32 [B].
        clip: Clip of the ratio on both sides.
    """
    ratio = log_ratio.exp()
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))


def on_device(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return ids as int64 [B, length]."""
    return torch.tensor(rows, dtype=torch.int64).to(device)


def build_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Return AdamW in one fused kernel, which reads no value on the host."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)


def read_values(model: nn.Module, loss: Tensor, keep: bool) -> Values:
    """Return the values of an update whose gradient is complete: nothing on fake tensors, the gradients only if ``keep``."""
    if isinstance(loss, FakeTensor):
        return Values(None, None)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    norm = torch.linalg.vector_norm(torch.stack([gradient.norm(dtype=torch.float64) for gradient in gradients.values()]))
    copies = {name: gradient.detach().cpu().clone() for name, gradient in gradients.items()} if keep else None
    return Values(float(loss), float(norm), copies)


class LegacyTrainer:
    """One step of the published trainer, phase by phase.

    Args:
        policy: The trained model.
        reference: The frozen model.
        shapes: Temperature, clip, epochs and learning rate.
        options: Micro-batch and precision.
        meter: Measures the phases.
        rounds: The published lazy and sampler branches generate the k answers in k rounds, and keep every round's scores beside
            their concatenation. 1 = all rows in one round.
    """

    def __init__(
        self, policy: nn.Module, reference: nn.Module, shapes: Shapes, options: Options, meter: Meter, rounds: int = 1
    ) -> None:
        """Build the optimizer."""
        self.policy, self.reference = policy, reference.requires_grad_(False)
        self.shapes, self.options, self.meter, self.rounds = shapes, options, meter, rounds
        self.optimizer = build_optimizer(policy, shapes.learning_rate)

    def train(self, batch: StudyBatch) -> Values:
        """Run the step on a batch and return the values of its first epoch."""
        meter, temperature = self.meter, self.shapes.temperature
        queries, responses = on_device(batch.prompts, meter.device), on_device(batch.answers, meter.device)
        rewards = torch.tensor(batch.rewards).to(meter.device)
        context = queries.shape[1]
        with torch.no_grad():
            with meter.phase("rollout"):
                # Both stay alive until this method returns, though nothing reads them after the next phase.
                _pieces, scores = self._generate(queries, responses)
                query_responses = torch.cat((queries, responses), 1)
            with meter.phase("old_log_prob"):
                logits = scores[:]
                old_log_probs = token_log_probs(logits, responses)
                del logits
                meter.empty_cache()
            with meter.phase("reference"):
                output = forward(self.reference, query_responses, mixed=False, output_hidden_states=True)
                logits = output.logits[:, context - 1 : -1]
                logits /= temperature
                ref_log_probs = token_log_probs(logits, responses)
                del output, logits
                meter.empty_cache()
            kl = 0.0 if self.options.for_values else KL_COEF * (old_log_probs - ref_log_probs).sum(1)
            rewards = rewards - kl
            advantages = rewards - (rewards.sum() - rewards) / (batch.rows - 1)
        drift = torch.tensor(batch.drift).to(meter.device) if self.options.for_values else None
        tensors = query_responses, responses, old_log_probs, advantages, drift
        epochs = [self._epoch(epoch, *tensors) for epoch in range(self.shapes.epochs)]
        return epochs[0]

    def _generate(self, queries: Tensor, responses: Tensor) -> tuple[list[Tensor], Tensor]:
        """Replay the answers. Return the scores of each round, and those of all rows, fp32 [B, R, V]."""
        size = len(queries) // self.rounds
        pieces = [
            self._scores(queries[start : start + size], responses[start : start + size]) for start in range(0, len(queries), size)
        ]
        # The published padding of the pieces to one length copies them once more.
        whole = torch.full_like(pieces[0], 0.0) if self.rounds == 1 else torch.cat(pieces)
        if self.rounds == 1:
            whole.copy_(pieces.pop())
        return pieces, whole

    def _scores(self, queries: Tensor, responses: Tensor) -> Tensor:
        from transformers import DynamicCache

        cache = DynamicCache()
        steps: list[Tensor] = []
        inputs = (queries, *responses[:, :-1].split(1, dim=1))
        for ids in inputs[:FAKE_STEPS] if isinstance(queries, FakeTensor) else inputs:
            output = forward(
                self.policy, ids, self.options.autocast, past_key_values=cache, use_cache=True, logits_to_keep=1,
                position_ids=_positions(ids, cache.get_seq_length()),
            )  # fmt: skip
            steps.append(output.logits[:, -1] / self.shapes.temperature)
        steps.extend(torch.empty_like(steps[0]) for _ in inputs[len(steps) :])
        return torch.stack(steps, 1)

    def _epoch(
        self, epoch: int, ids: Tensor, responses: Tensor, old_log_probs: Tensor, advantages: Tensor, drift: Tensor | None
    ) -> Values:
        """Take one optimizer step over all rows."""
        meter, shapes, size = self.meter, self.shapes, self.options.micro_batch
        context, shares = ids.shape[1] - responses.shape[1], len(ids) // size
        total, values = torch.zeros((), device=meter.device), Values(None, None)
        # What a micro-batch binds here lives until the next one binds it again, as in the published loop.
        for start in range(0, len(ids), size):
            rows = slice(start, start + size)
            with meter.phase("forward", epoch):
                output = forward(self.policy, ids[rows], self.options.autocast, output_hidden_states=True)
                logits = output.logits[:, context - 1 : -1]
                logits /= shapes.temperature
                log_probs = token_log_probs(logits, responses[rows])
                old = old_log_probs[rows].sum(1) if drift is None else log_probs.detach().sum(1) - drift[rows]
                log_ratio = log_probs.sum(1) - old
                loss = sequence_loss(log_ratio, advantages[rows], shapes.clip).mean()
            with meter.phase("backward", epoch):
                (loss / shares).backward()
                total += loss.detach() / shares
            with meter.phase("optimizer", epoch):
                if rows.stop == len(ids):
                    values = read_values(self.policy, total, self.options.for_values and epoch == 0)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                with torch.no_grad():
                    probabilities = softmax(logits, dim=-1)
                    entropy = logits.logsumexp(-1) - (probabilities * logits).sum(-1)
        del output, logits, log_probs, old, log_ratio, loss, probabilities, entropy
        with meter.phase("optimizer", epoch):
            meter.empty_cache()
        return values


def _positions(ids: Tensor, start: int) -> Tensor:
    """Return int64 [1, length]: the positions of ids that follow ``start`` others."""
    return torch.arange(start, start + ids.shape[1], device=ids.device).unsqueeze(0)
