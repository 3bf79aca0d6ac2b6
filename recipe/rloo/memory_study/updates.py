"""The programs that are measured: the published trainer, its mended forms, this project's update, and a whole step of it.

The published order of statements is written anew. What makes it large is kept on purpose: logits of every position, in fp32; a
view of them divided by the temperature in place, for which autograd writes two more tensors of full size in backward; the output
and its logits, held until the epoch ends; the scores of the generation, held through the update, which give the old log-probs.

Left out, because no tensor of it is large: the reward model, the shuffling of rows, evaluation. The answers are given, and are
replayed token by token through the same forwards that would have drawn them, so that every arm learns from the same ids.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention, softmax

from recipe.rloo.memory_study.cells import CHUNKED, RESPONSE_ONLY, SHARED_CHECKPOINTING, WHOLE_RUN, Arm
from recipe.rloo.memory_study.shapes import Shapes, StudyBatch
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import ActorRolloutRef
from verl_memopt.data.batch import Ragged, RolloutBatch, rollout_batch
from verl_memopt.distributed.device import join_process_group, leave_process_group, training_mesh
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.weights import named_weights
from verl_memopt.observe.phase import PhaseMemory
from verl_memopt.rollout.engine import train_sampling
from verl_memopt.trainer.micro_batching import budgets
from verl_memopt.worker.group import LocalGroup
from verl_memopt.worker.policy import Policy
from verl_memopt.worker.roles import WorkerPlan
from verl_memopt.worker.trained_model import MiniBatch, micro_batches_of
from verl_memopt.worker.worker import Worker

if TYPE_CHECKING:
    from recipe.rloo.memory_study.measure import Meter

KL_COEF = 0.05
ATTENTION = "memory_study"
"""Name of the attention function in a config of transformers."""
FAKE_STEPS = 8
"""Number of generation steps that run on a fake device. Each later step would create the same tensors, with a cache that is one
token longer, so only its scores are created."""
aten = torch.ops.aten


@dataclass(frozen=True)
class Options:
    """How an update runs, apart from its shapes."""

    micro_batch: int
    autocast: bool = True
    """Run the policy under bf16 autocast, with its logits cast to fp32, as published."""
    for_values: bool = False
    """Take the old log-probs from the update's own forward, moved by the batch's drift, and leave the KL out of the reward. Every
    ratio is then known exactly, so that loss and gradient can be compared between programs. Otherwise the published difference of
    two sums over a whole answer loses about 1e-4 of a ratio."""
    dtype: torch.dtype = torch.float32
    """Dtype of the weights. float64 gives reference values almost without rounding."""


@dataclass(frozen=True)
class Values:
    """Loss, gradient norm and gradient of the first epoch. None = the tensors had no values."""

    loss: float | None = None
    grad_norm: float | None = None
    gradients: dict[str, Tensor] | None = None


# The published trainer.


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
    """Return causal attention without a mask tensor, [batch, length, heads, D], by the kernel that a GPU would use."""
    causal, fake = query.shape[2] > 1, isinstance(query, FakeTensor)
    if fake and torch.is_autocast_enabled("cuda"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (query, key, value))
    if fake and query.dtype != torch.float32:
        output = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scaling)[0]
        return output.transpose(1, 2).contiguous(), None
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if fake:
        backward = torch.is_grad_enabled() and query.requires_grad
        kernel = aten._scaled_dot_product_efficient_attention
        output = kernel(query, key, value, None, backward, 0.0, causal, scale=scaling)[0]
    else:
        output = scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


@contextmanager
def autocast(kind: str) -> Iterator[None]:
    """Run the body under bf16 autocast for a kind of device. Unlike ``torch.autocast``, it works without such a device."""
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
    """Return a model's output for ids [B, T]. ``mixed``: under bf16 autocast, with the logits cast to fp32."""
    # No row has padding. With a prepared mask, transformers need not read values to find this out.
    with autocast(ids.device.type) if mixed else nullcontext():
        output = model(input_ids=ids, attention_mask={"full_attention": None}, **options)
    if mixed:
        output.logits = output.logits.float()
    return output


def token_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-prob of each id, fp32 [B, R]: its logit of [B, R, V] minus the log-sum-exp, row by row."""
    chosen = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([row.logsumexp(-1) for row in logits])


def sequence_loss(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Return RLOO's clipped loss of each row, fp32 [B]: one ratio for a whole answer, clipped on both sides."""
    ratio = log_ratio.exp()
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))


class PublishedTrainer:
    """One step of the published trainer, phase by phase, and the repaired forms of it."""

    def __init__(self, policy: nn.Module, reference: nn.Module, shapes: Shapes, options: Options, meter: Meter) -> None:
        self.policy, self.reference = policy, reference.requires_grad_(False)
        self.shapes, self.options, self.meter = shapes, options, meter
        # Unlike other kernels, the fused one reads no value on the host, so it works with fake tensors.
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=shapes.learning_rate, weight_decay=0.0, fused=True)

    def train(self, batch: StudyBatch) -> Values:
        meter, temperature = self.meter, self.shapes.temperature
        queries, responses = (self._on_device(rows) for rows in (batch.prompts, batch.answers))
        rewards = self._on_device(batch.rewards)
        context = queries.shape[1]
        with torch.no_grad():
            with meter.phase("rollout"):
                # As published, this stays alive until the method returns, although nothing reads it after the next phase.
                scores = self._scores(queries, responses)
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
        return self._epochs(self._epoch, batch, query_responses, responses, old_log_probs, advantages)

    def _epochs(self, epoch: Callable[..., Values], batch: StudyBatch, *tensors: Tensor) -> Values:
        drift = self._on_device(batch.drift) if self.options.for_values else None
        values = [epoch(number, *tensors, drift) for number in range(self.shapes.epochs)]
        return values[0]

    def _on_device(self, rows: Any) -> Tensor:
        return torch.tensor(rows).to(self.meter.device)

    def _scores(self, queries: Tensor, responses: Tensor) -> Tensor:
        """Replay the answers and return their scores, fp32 [B, R, V]."""
        from transformers import DynamicCache

        cache = DynamicCache()
        steps: list[Tensor] = []
        inputs = (queries, *responses[:, :-1].split(1, dim=1))
        for ids in inputs[:FAKE_STEPS] if isinstance(queries, FakeTensor) else inputs:
            start = cache.get_seq_length()
            output = forward(
                self.policy, ids, self.options.autocast, past_key_values=cache, use_cache=True, logits_to_keep=1,
                position_ids=torch.arange(start, start + ids.shape[1], device=ids.device).unsqueeze(0),
            )  # fmt: skip
            steps.append(output.logits[:, -1] / self.shapes.temperature)
        steps.extend(torch.empty_like(steps[0]) for _ in inputs[len(steps) :])
        scores = torch.stack(steps, 1)
        del steps, cache, output
        # The published code pads all scores to one length, which copies them once more.
        padded = torch.full_like(scores, 0.0)
        padded.copy_(scores)
        return padded

    def _epoch(
        self, epoch: int, ids: Tensor, responses: Tensor, old_log_probs: Tensor, advantages: Tensor, drift: Tensor | None
    ) -> Values:
        meter, shapes, size = self.meter, self.shapes, self.options.micro_batch
        context, shares = ids.shape[1] - responses.shape[1], len(ids) // size
        total, values = torch.zeros((), device=meter.device), Values()
        # As in the published loop, the tensors of a micro-batch live until the next one assigns the same variables.
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
                    values = self._step(epoch, total)
                with torch.no_grad():
                    probabilities = softmax(logits, dim=-1)
                    entropy = logits.logsumexp(-1) - (probabilities * logits).sum(-1)
        del output, logits, log_probs, old, log_ratio, loss, probabilities, entropy
        with meter.phase("optimizer", epoch):
            meter.empty_cache()
        return values

    def _step(self, epoch: int, loss: Tensor) -> Values:
        """Make the optimizer step, and return the values of its gradient. With fake tensors these are empty."""
        values = Values() if isinstance(loss, FakeTensor) else self._values(loss, self.options.for_values and epoch == 0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return values

    def _values(self, loss: Tensor, keep: bool) -> Values:
        gradients = {name: weight.grad for name, weight in self.policy.named_parameters() if weight.grad is not None}
        norm = torch.linalg.vector_norm(torch.stack([part.norm(dtype=torch.float64) for part in gradients.values()]))
        copies = {name: part.detach().cpu().clone() for name, part in gradients.items()} if keep else None
        return Values(float(loss), float(norm), copies)

    def train_mended(self, batch: StudyBatch, update: str) -> Values:
        """Run the published step without its retention: outputs are dropped at once, no scores are kept, no division is in place.

        The passes without gradient score ``micro_batch`` rows at a time too. RESPONSE_ONLY computes logits for answers only.
        """
        meter, size = self.meter, self.options.micro_batch
        responses = self._on_device(batch.answers)
        ids = torch.cat((self._on_device(batch.prompts), responses), 1)
        advantages = self._on_device(batch.advantages())

        def log_probs(model: nn.Module, rows: Tensor, answers: Tensor, mixed: bool) -> Tensor:
            length = answers.shape[1]
            kept = {"logits_to_keep": length + 1} if update == RESPONSE_ONLY else {}
            logits = forward(model, rows, mixed, use_cache=False, **kept).logits
            logits = logits[:, -length - 1 : -1] / self.shapes.temperature
            return token_log_probs(logits, answers)

        def of_all(model: nn.Module, mixed: bool) -> Tensor:
            pairs = zip(ids.split(size), responses.split(size), strict=True)
            return torch.cat([log_probs(model, rows, answers, mixed) for rows, answers in pairs])

        with torch.no_grad():
            with meter.phase("old_log_prob"):
                old_log_probs = of_all(self.policy, self.options.autocast)
                meter.empty_cache()
            with meter.phase("reference"):
                of_all(self.reference, False)
                meter.empty_cache()
        return self._epochs(functools.partial(self._mended_epoch, log_probs), batch, ids, responses, old_log_probs, advantages)

    def _mended_epoch(
        self, log_probs_of: Callable[..., Tensor], epoch: int, ids: Tensor, responses: Tensor, old_log_probs: Tensor,
        advantages: Tensor, drift: Tensor | None,
    ) -> Values:  # fmt: skip
        meter, size = self.meter, self.options.micro_batch
        shares = len(ids) // size
        total = torch.zeros((), device=meter.device)
        for start in range(0, len(ids), size):
            rows = slice(start, start + size)
            with meter.phase("forward", epoch):
                log_probs = log_probs_of(self.policy, ids[rows], responses[rows], self.options.autocast)
                old = old_log_probs[rows].sum(1) if drift is None else log_probs.detach().sum(1) - drift[rows]
                loss = sequence_loss(log_probs.sum(1) - old, advantages[rows], self.shapes.clip).mean() / shares
                del log_probs
            with meter.phase("backward", epoch):
                loss.backward()
                total += loss.detach()
        with meter.phase("optimizer", epoch):
            values = self._step(epoch, total)
            meter.empty_cache()
        return values


# This project.

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"


def own_settings(arm: Arm, shapes: Shapes, folder: Path) -> ActorRolloutRef:
    """Return this project's settings for an arm: the defaults, except for keys that the arm or the study sets.

    Compute is in fp32, so that values can be compared. Loss, epochs and temperature are the published ones.
    """
    shared = arm.update != CHUNKED
    rows = {f"{ACTOR}.use_dynamic_bsz": True} if shared else {f"{ACTOR}.ppo_micro_batch_size_per_gpu": arm.micro_batch}
    settings = settings_from_mapping(
        {
            "data.train_files": "none",
            "data.val_files": None,
            "data.train_batch_size": 1,
            "data.max_prompt_length": shapes.prompt,
            "data.max_response_length": shapes.response,
            "algorithm.adv_estimator": "rloo",
            f"{MODEL}.path": str(folder),
            f"{MODEL}.enable_gradient_checkpointing": arm.update in (SHARED_CHECKPOINTING, WHOLE_RUN),
            f"{ACTOR}.use_prefix_grouper": shared,
            f"{ACTOR}.ppo_mini_batch_size": 1,
            f"{ACTOR}.ppo_epochs": shapes.epochs,
            f"{ACTOR}.policy_loss.loss_mode": "sequence",
            f"{ACTOR}.clip_ratio": shapes.clip,
            f"{ACTOR}.optim.lr": shapes.learning_rate,
            f"{ACTOR}.optim.clip_grad": None,
            f"{ACTOR}.optim.weight_decay": 0.0,
            f"{ACTOR}.fsdp_config.dtype": "fp32",
            f"{ROLLOUT}.name": "hf",
            f"{ROLLOUT}.n": arm.k,
            f"{ROLLOUT}.dtype": "fp32",
            f"{ROLLOUT}.temperature": shapes.temperature,
            "trainer.worker_group": "local",
        }
        | rows
    )
    return settings.actor_rollout_ref


@contextmanager
def own_policy(settings: ActorRolloutRef, epochs: int, device: torch.device) -> Iterator[Policy]:
    """Build the policy as a worker builds it, on one rank, and leave its process group at the end."""
    model, actor = settings.model, settings.actor
    folder, fsdp = Path(model.path), actor.fsdp_config
    join_process_group(device, 0, 1, "", 0, 600)
    try:
        mesh = training_mesh(device.type, 1, fsdp.fsdp_size)
        use = ModelUse(recompute=model.enable_gradient_checkpointing, trained=True)
        policy_model = build_policy(model, fsdp, folder, mesh, device, use)
        materialize(policy_model, folder, device)
        yield Policy(policy_model, actor, epochs, 1, device)
    finally:
        leave_process_group()


def train_own(
    policy: Policy, settings: ActorRolloutRef, shapes: Shapes, for_values: bool, meter: Meter, batch: StudyBatch
) -> Values:
    """Run this project's log-prob pass and update, and return the values of the first epoch.

    The phase ``backward`` is the whole forward and backward of an epoch, micro-batch by micro-batch.
    """
    rows = project_batch(batch, settings)
    names = [f"answer {row}" for row in range(batch.rows)]
    update_cuts, old_cuts = (budget.micro_batches(rows.row_tokens(), names) for budget in budgets(settings)[:2])
    with meter.phase("old_log_prob"):
        rows.old_log_probs = policy.compute_log_probs(rows, old_cuts, shapes.temperature, False).log_probs
    if for_values:
        assert rows.old_log_probs is not None
        rows.old_log_probs[:: batch.response_len] -= torch.tensor(batch.drift)
    counts = GlobalCounts(tokens=float(batch.rows * batch.response_len), sequences=float(batch.rows))

    def epoch(number: int) -> Values:
        trained = policy.trained
        with meter.phase("backward", number):
            micro_batches = micro_batches_of(rows, update_cuts, policy.model.supports_prefix_kv)
            metrics = policy.accumulate(micro_batches, counts, shapes.temperature)
        with meter.phase("optimizer", number):
            keep = for_values and number == 0
            gradients = {name: _whole(parameter) for name, parameter in named_weights(policy.model)} if keep else None
            values = Values(float(metrics["actor/loss"]), float(trained.clip()), gradients)
            trained.apply()
            trained.optimizer.zero_grad(set_to_none=True)
        return values

    first, *_ = [epoch(number) for number in range(shapes.epochs)]
    return first


def project_batch(batch: StudyBatch, settings: ActorRolloutRef) -> RolloutBatch:
    """Return the study's batch as the trainer holds it, without log-probs."""
    prompts, responses = (Ragged.from_rows([list(row) for row in ids], torch.int64) for ids in (batch.prompts, batch.answers))
    rows = rollout_batch(prompts, responses, torch.zeros(batch.rows, dtype=torch.int64), settings.actor)
    rows.advantages = torch.tensor(batch.advantages()).repeat_interleave(batch.response_len)
    return rows


def _whole(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().cpu().clone()


def whole_step(arm: Arm, shapes: Shapes, folder: Path, batch: StudyBatch, device: str) -> list[PhaseMemory]:
    """Run one step of this project on the prompts of a batch, and return its phases: gen, old_log_prob, ref, update_*.

    The worker is that of a training run, with the project's defaults, transformers' generation and fp32. The byte tracker counts
    the policy, the reference, the optimizer state, the engine's weights and its KV cache. That cache is transformers' own and
    exists only during the rollout; vLLM's has the size that the user gives it.
    """
    k, settings = arm.k, own_settings(arm, shapes, folder)
    folders: dict[str, Any] = dict.fromkeys(("folder", "engine_folder", "reference_folder", "tokenizer_folder"), str(folder))
    plan = WorkerPlan(
        settings=settings, **folders, eos_token_ids=(0,), schedule_steps=shapes.epochs,
        free_engine=bool(settings.rollout.free_cache_engine), track_init=False,
    )  # fmt: skip
    phases: list[PhaseMemory] = []
    group = LocalGroup(functools.partial(Worker, plan), device)

    def call(phase: str, method: str, *args: Any) -> Any:
        (reply,) = group.all("call", phase, True, method, *args)
        phases.append(reply.memory)
        return reply.value

    try:
        sampling = dataclasses.replace(train_sampling(settings.rollout), max_tokens=shapes.response, ignore_eos=True)
        # Like a training run, sync the weights once before the first rollout.
        group.all("call", "update_weights", False, "update_weights")
        generation = call("gen", "generate", [list(prompt) for prompt in batch.prompts], list(range(k)), sampling)
        group.all("call", "gen", False, "release_engine")
        rows = project_batch(dataclasses.replace(batch, answers=tuple(map(tuple, generation.response_ids))), settings)
        names = [f"answer {row}" for row in range(k)]
        update, old, ref = (budget.micro_batches(rows.row_tokens(), names) for budget in budgets(settings))
        rows.old_log_probs = call("old_log_prob", "old_log_probs", rows, old, False).log_probs
        rows.ref_log_probs = call("ref", "ref_log_probs", rows, ref).log_probs
        counts = GlobalCounts(tokens=float(k * shapes.response), sequences=float(k))
        call("update_actor", "update_actor", [MiniBatch(rows, update, counts)] * shapes.epochs)
        call("update_weights", "update_weights")
    finally:
        group.shutdown()
    return phases
