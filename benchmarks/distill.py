"""``python -m benchmarks.distill``: bytes of an update that learns from a teacher, beside the same update without one.

A student of Qwen3-0.6B's shape and a teacher of Qwen3-1.7B's, on fake tensors of a GPU, which have no values. Bytes do not depend
on values. There are two micro-batches of one prompt with 8 answers, so gradients exist at the peak. "Beyond" is the peak without
parameters, gradients and optimizer state.

``--peers`` (in ``.venv-peers``) runs the losses of TRL and verl on the rows of one micro-batch, where gradients exist already.
TRL's trainers run on fake tensors of a GPU, where Triton kernels need no temporary tensors. verl's engine runs on real tensors of
a CPU, because its nested tensors cannot be fake.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.common import NONE, commit, text_table, version_of
from benchmarks.gpu.reach_cases import SHAPES, make_model_folder
from benchmarks.gpu_cost.update import Case
from benchmarks.update_pass.work import Batch, Workload, shrunk_shape
from recipe.rloo.memory_study.fake_guard import call_in_fake_process
from tests.virtual_gpu.device import VirtualGpu
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.observe.phase import MIB

STUDENT, TEACHER = SHAPES["0.6b"], SHAPES["1.7b"]
PROMPT, RESPONSE, ROWS, TOP = 64, 256, 8, 64
TOKENS = ROWS * RESPONSE
AR, STREAM = "actor_rollout_ref", "teacher.fsdp_config.param_offload=stream"
BF16 = (f"{AR}.actor.fsdp_config.model_dtype=bfloat16", "teacher.fsdp_config.model_dtype=bfloat16")
BASE = (
    "algorithm.adv_estimator=grpo", f"{AR}.actor.policy_loss.loss_mode=vanilla", f"{AR}.actor.use_dynamic_bsz=true",
    f"{AR}.actor.ppo_max_token_len_per_gpu={PROMPT + TOKENS}",
)  # fmt: skip
WAYS = {
    "reverse_kl": ("distill.divergence=reverse_kl",),
    "forward_kl": ("distill.divergence=forward_kl",),
    "jsd": ("distill.divergence=jsd",),
    f"top_k={TOP}": (f"distill.top_k={TOP}",),
}
BETAS = {"forward_kl": 0.0, "jsd": 0.5, "reverse_kl": 1.0}
"""Divergence -> its name in TRL."""


# This project.


def ours(case: Case) -> dict[str, float]:
    """Return MiB of the update of a case and of its teacher's pass."""
    found = call_in_fake_process("benchmarks.gpu_cost.one_copy:phases", case, True)
    phases = found["phases"]
    peak, kinds, policy = phases["update_actor"]["peak"], phases["update_actor"]["kinds"], 2 * found["params"]
    judged = phases.get("teacher", {})
    matrix = 0  # a teacher on the device lends its head, and of one that streams the head is copied
    if case.teacher is not None and STREAM in case.overrides and not any("top_k" in each for each in case.overrides):
        matrix = 2 * case.teacher.vocab_size * case.teacher.hidden_size
    return {
        "peak": peak / MIB, "teacher": (kinds["params"] - policy) / MIB, "head": matrix / MIB,
        "beyond": (peak - kinds["params"] - policy - kinds["optimizer"] - matrix) / MIB,
        "pass": judged.get("peak", 0) / MIB, "host": judged.get("host_kinds", {}).get("teacher states", 0) / MIB,
    }  # fmt: skip


def updates(layers: int | None, chunk: int, ways: Sequence[str], further: Sequence[str]) -> list[list[str]]:
    student, teacher = (shrunk_shape(shape, layers, 1) for shape in (STUDENT, TEACHER))
    settings = (*BASE, f"{AR}.model.logprob_chunk_tokens={chunk}", *further)
    of_student = tuple(each for each in settings if not each.startswith("teacher"))
    plain = ours(Case(student, PROMPT, RESPONSE, ROWS, groups=2, overrides=of_student))
    rows = [["none", f"{plain['peak']:,.0f}", *([NONE] * 2), f"{plain['beyond']:,.0f}", *([NONE] * 4)]]
    for name in ways:
        overrides = (*settings, *WAYS[name])
        found = ours(Case(student, PROMPT, RESPONSE, ROWS, groups=2, overrides=overrides, teacher=teacher))
        ratios = (each / plain["beyond"] for each in (found["beyond"], found["beyond"] + found["head"]))
        rows.append([
            name, *(f"{found[key]:,.0f}" for key in ("peak", "teacher", "head", "beyond")), *(f"{each:.2f}" for each in ratios),
            *(f"{found[key]:,.0f}" for key in ("pass", "host")),
        ])  # fmt: skip
    return rows


# TRL, on the virtual GPU.


class KnownMasks(VirtualGpu):
    """A virtual GPU on which each mask selects the response tokens of the work: fake masks have no values to count."""

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.index.Tensor and any(part is not None and part.dtype is torch.bool for part in args[1]):
            (mask,) = args[1]
            with self.fake:
                places = [torch.empty(TOKENS, dtype=torch.int64, device="cuda") for _ in range(mask.dim())]
            args = (args[0], places)
        return super()._computed(func, args, kwargs)


class Nothing:
    """Stands in for a Triton kernel: it allocates nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given, **named: None


def trl_peak(trainer: str, beta: float, layers: int | None) -> int:
    """Return the bytes that the loss of a trainer and its backward add. In a process that has the fake device."""
    import trl.kernels.chunked_divergence as kernels
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DistillationConfig, DistillationTrainer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    kinds = {"DistillationTrainer": (DistillationTrainer, DistillationConfig), "GKDTrainer": (GKDTrainer, GKDConfig)}
    kind, config = kinds[trainer]
    with tempfile.TemporaryDirectory() as parent:
        # The trainer is built with tiny models, because building copies values. Then it gets the fake ones.
        tiny = make_tiny_model(Path(parent) / "tiny", TinyShape())
        one, other = (AutoModelForCausalLM.from_pretrained(tiny) for _ in range(2))
        made = kind(
            model=one, teacher_model=other, processing_class=AutoTokenizer.from_pretrained(tiny, padding_side="left"),
            train_dataset=Dataset.from_list([{"prompt": "1"}] * ROWS),
            args=config(output_dir=parent, use_cpu=True, bf16=False, report_to="none", beta=beta, gradient_checkpointing=False),
        )  # fmt: skip
        with KnownMasks(total_bytes=2**40) as gpu:
            gpu.truth = True  # no row is padded
            student, made.teacher_model = (_on_device(shape, layers, Path(parent)) for shape in (STUDENT, TEACHER))
            made.teacher_model.requires_grad_(False)
            student.train()
            student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            for parameter in student.parameters():
                parameter.grad = torch.empty_like(parameter)

            def ids(tokens: int) -> Tensor:
                return torch.ones(ROWS, tokens, dtype=torch.int64).to("cuda")

            held = gpu.peak = gpu.allocated
            if trainer == "GKDTrainer":
                whole = {name: ids(PROMPT + RESPONSE) for name in ("input_ids", "attention_mask", "labels")}
                made.compute_loss(student, whole, num_items_in_batch=TOKENS).backward()
            else:
                given = {f"prompt_{name}": ids(PROMPT) for name in ("ids", "mask")}
                given |= {f"completion_{name}": ids(RESPONSE) for name in ("ids", "mask")}
                names = ("_stats_kernel", "_jsd_kernel", "_backward_kernel")
                with mock.patch.multiple(kernels, **{name: Nothing() for name in names}):
                    made._compute_loss(student, given, TOKENS)[0].backward()
            return gpu.peak - held


def _on_device(shape: TinyShape, layers: int | None, parent: Path) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = make_model_folder(shrunk_shape(shape, layers, 1), parent / str(shape.hidden_size))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.config.use_cache = False
    model.to_empty(device="cuda").tie_weights()
    return model


# verl, on a CPU.


def verl_peak(layers: int | None) -> int:
    """Return the bytes that verl's forward KL over the k most probable tokens and its backward add."""
    from verl.trainer.distillation import distillation_ppo_loss
    from verl.utils import tensordict_utils
    from verl.workers.config import DistillationConfig, DistillationLossConfig

    from benchmarks.update_pass import verl_side
    from benchmarks.update_pass.sides import Job

    shape = shrunk_shape(STUDENT, layers, 1)
    batch = Batch([[7] * PROMPT], [[7] * RESPONSE] * ROWS, [0.0] * ROWS)
    work = Workload("", shape, groups=1, k=ROWS, prompt=PROMPT, answer=RESPONSE, dtype="bfloat16")
    with tempfile.TemporaryDirectory() as parent:
        folder = make_tiny_model(Path(parent) / "model", shape)
        job = Job(work, batch, folder, True, torch.device("cpu"), [torch.zeros(RESPONSE)] * ROWS)
        engine, data = verl_side._engine(job, False), verl_side.micro_batch(job, range(ROWS), False)
        tokens = PROMPT + RESPONSE
        data["teacher_logprobs"] = verl_side.nested([torch.full((tokens, TOP), -5.0)] * ROWS, job.device)
        data["teacher_ids"] = verl_side.nested([torch.arange(TOP).repeat(tokens, 1)] * ROWS, job.device)
        tensordict_utils.assign_non_tensor(data, distillation_use_topk=True, distillation_only=True)
        own = DistillationLossConfig(loss_mode="forward_kl_topk", topk=TOP, use_policy_gradient=False, use_task_rewards=False)
        settings = DistillationConfig(distillation_loss=own)
        loss_of = functools.partial(distillation_ppo_loss, config=verl_side._actor(), distillation_config=settings)
        parameters = list(engine.module.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with ByteTracker() as tracker:
            tracker.mark("params", [*parameters, *(parameter.grad for parameter in parameters)])
            tracker.enter("update")
            engine.forward_step(data, loss_function=loss_of, forward_only=False)[0].backward()
            peak = tracker.peaks[DEVICE]
    return peak.bytes - peak.kinds["params"]


def peers(layers: int | None) -> list[list[str]]:
    rows = [
        [f"TRL {trainer}", name, f"{call_in_fake_process('benchmarks.distill:trl_peak', trainer, beta, layers) / MIB:,.0f}"]
        for trainer in ("GKDTrainer", "DistillationTrainer")
        for name, beta in BETAS.items()
    ]
    return [*rows, ["verl forward_kl_topk", f"top_k={TOP}", f"{verl_peak(layers) / MIB:,.0f}"]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distill", description=__doc__)
    parser.add_argument("--peers", action="store_true", help="only the losses of TRL and verl")
    parser.add_argument("--layers", type=int, help="in place of the models'")
    parser.add_argument("--chunks", type=int, nargs="+", default=[512], help="logprob_chunk_tokens (default: 512)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="of learning from the teacher (default: all)")
    parser.add_argument("overrides", nargs="*", help="further settings, as on a command line")
    asked = parser.parse_args(argv)
    versions = [f"{name} {version_of(name)}" for name in ("torch", "trl", "verl") if version_of(name)]
    print(f"commit {commit()}, {', '.join(versions)}; {TOKENS:,} response tokens of {ROWS} rows, MiB")
    if asked.peers:
        print(text_table(("loss", "divergence", "beyond"), peers(asked.layers), left=(0, 1)))
        return 0
    heads = (
        "divergence",
        "peak",
        "teacher",
        "copy of\nits head",
        "beyond",
        "of none",
        "with\nthe copy",
        "teacher's\npass",
        "host",
    )
    for chunk in asked.chunks:
        print(f"\nlogprob_chunk_tokens={chunk} {' '.join(asked.overrides)}")
        print(text_table(heads, updates(asked.layers, chunk, asked.ways, (*BF16, *asked.overrides))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
