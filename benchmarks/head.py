"""``python -m benchmarks.head``: bytes and seconds of the LM head in an update, without and with a teacher.

One update of the head alone: the hidden states of some tokens, their log-probs, a divergence from a teacher, and the gradients of
states and head. The loss is per token, so the gradients are computed in the forward. Beside it the same with full logits, by
autograd. Bytes are the peak of a byte tracker beyond the inputs and the gradient of the head; fake tensors give them for real
shapes without values. Seconds are processor seconds of one thread, the least of some rounds in which the contestants take turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.common import NONE, commit, load, processor, text_table
from verl_memopt.memory.chunked_logprob_torch import head_log_probs
from verl_memopt.memory.logit_tiles import Head
from verl_memopt.memory.teaching import Divergence, Teaching, TopTeaching
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.observe.phase import MIB

VOCABULARY, TOP, TILE = 151_936, 64, 16_384
NAMES = {
    "plain": None,
    "reverse KL": "reverse_kl",
    "forward KL": "forward_kl",
    "JSD, beta 0.5": "jsd",
    f"top {TOP}, reverse KL": "reverse_kl",
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Inputs:
    """Hidden states [R, h] and head [V, h] of student and teacher, the targets, and ones, which are gradients."""

    hidden: Tensor
    weight: Tensor
    states: Tensor
    teacher: Tensor
    targets: Tensor
    ones: Tensor

    @classmethod
    def drawn(cls, tokens: int, widths: tuple[int, int], dtype: torch.dtype) -> Inputs:
        torch.manual_seed(0)
        hidden, states = (torch.randn(tokens, width).to(dtype) for width in widths)
        weight, teacher = (torch.randn(VOCABULARY, width).mul_(2 * width**-0.5).to(dtype) for width in widths)
        weight.requires_grad_().grad = torch.zeros_like(weight)
        targets = torch.randint(VOCABULARY, (tokens,))
        return cls(hidden.requires_grad_(), weight, states, teacher, targets, torch.ones(tokens))

    def teaching(self, name: str) -> Teaching | TopTeaching | None:
        kind: Any = NAMES[name]
        if kind is None:
            return None
        if not name.startswith("top"):
            return Teaching(Divergence(kind), Head(self.teacher, None, 1.0, 0, 0), self.states)
        # A record of no particular teacher: the divergence costs the same.
        ids = (torch.arange(TOP) * 2011 + self.targets[:, None]) % VOCABULARY
        return TopTeaching(kind, ids.int(), torch.full(ids.shape, -5.0), torch.full(ids.shape[:1], -1.0))


def ours(inputs: Inputs, name: str, tile: int, chunk: int) -> Callable[[], None]:
    teaching, ones = inputs.teaching(name), inputs.ones

    def gradient(rows: slice, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return ones[rows], None, *(() if teaching is None else (ones[rows],))

    def update() -> None:
        head = Head(inputs.weight, None, 1.0, chunk, tile)
        found = head_log_probs(head, inputs.hidden, inputs.targets, gradient, in_place=True, teaching=teaching)
        sum(value.sum() for value in found if value is not None).backward()

    return update


def full_logits(inputs: Inputs, name: str) -> Callable[[], None]:
    def update() -> None:
        log_p = (inputs.hidden @ inputs.weight.t()).float().log_softmax(-1)
        loss = log_p.gather(-1, inputs.targets[:, None]).sum()
        if NAMES[name] is not None:
            with torch.no_grad():
                log_q = (inputs.states @ inputs.teacher.t()).float().log_softmax(-1)
            if name.startswith("reverse"):
                loss = loss + (log_p.exp() * (log_p - log_q)).sum()
            elif name.startswith("forward"):
                loss = loss + (log_q.exp() * (log_q - log_p)).sum()
            else:
                log_m = torch.logaddexp(log_p, log_q) - torch.tensor(2.0).log()
                loss = loss + 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum()
        loss.backward()

    return update


def contestants(inputs: Inputs, chunk: int) -> dict[tuple[str, str], Callable[[], None]]:
    found = {}
    for name in NAMES:
        for way, tile in (("whole rows", 0), (f"tiles of {TILE:,}", TILE)):
            found[name, way] = ours(inputs, name, tile, chunk)
        if not name.startswith("top"):
            found[name, "full logits"] = full_logits(inputs, name)
    return found


def peaks(tokens: int, widths: tuple[int, int], dtype: torch.dtype, chunk: int) -> dict[tuple[str, str], int]:
    """Return the bytes of each contestant beyond its inputs."""
    found = {}
    with FakeTensorMode():
        inputs = Inputs.drawn(tokens, widths, dtype)
        for name, update in contestants(inputs, chunk).items():
            inputs.hidden.grad, inputs.weight.grad = None, torch.zeros_like(inputs.weight)
            with ByteTracker() as tracker:
                tracker.mark("params", [*vars(inputs).values(), inputs.weight.grad])
                update()
                kinds = tracker.peaks[DEVICE].kinds
                found[name] = tracker.peaks[DEVICE].bytes - kinds["params"]
    return found


def seconds(tokens: int, widths: tuple[int, int], dtype: torch.dtype, chunk: int, rounds: int) -> dict[tuple[str, str], float]:
    inputs = Inputs.drawn(tokens, widths, dtype)
    found: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for name, update in contestants(inputs, chunk).items():
            start = time.process_time()
            update()
            found[name] = min(found.get(name, float("inf")), time.process_time() - start)
    return found


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--tokens", type=int, default=2048, help="tokens whose bytes are counted")
    parser.add_argument("--timed-tokens", type=int, default=128, help="tokens of which an update is timed; 0 = time nothing")
    parser.add_argument("--chunk", type=int, default=512, help="logprob_chunk_tokens, where bytes are counted")
    parser.add_argument("--timed-chunk", type=int, default=64, help="the same, where seconds are counted")
    parser.add_argument("--widths", type=int, nargs=2, default=(2048, 5120), help="hidden sizes of student and teacher")
    parser.add_argument("--timed-widths", type=int, nargs=2, default=(512, 1024), help="the same, where seconds are counted")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the products whose bytes are counted")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"commit {commit()}, {processor()}, load {load()}, vocabulary {VOCABULARY:,}")
    print(f"MiB: {options.tokens} tokens, chunk {options.chunk}, widths {options.widths}, {options.dtype}")
    print(f"seconds: {options.timed_tokens} tokens, chunk {options.timed_chunk}, widths {options.timed_widths}, fp32\n")
    peak = peaks(options.tokens, tuple(options.widths), DTYPES[options.dtype], options.chunk)
    timed: dict[tuple[str, str], float] = {}
    if options.timed_tokens:
        size = options.timed_tokens, tuple(options.timed_widths)
        timed = seconds(*size, torch.float32, options.timed_chunk, options.rounds)
    plain = timed.get(("plain", "whole rows"), 0.0)
    rows = [
        [*name, f"{peak[name] / MIB:,.0f}", *([f"{timed[name]:.2f}", f"{timed[name] / plain:.2f}"] if timed else [NONE] * 2)]
        for name in peak
    ]
    print(text_table(["divergence", "way", "MiB beyond inputs", "seconds", "of plain"], rows, left=(0, 1)))


if __name__ == "__main__":
    main(sys.argv[1:])
