"""``python -m benchmarks.router_replay``: what the replay of experts changes, on a random mixture of experts, on a CPU.

The engine samples in bfloat16, and the trainer computes in fp32. One optimizer step is taken on the answers. For each mode of
``router_replay`` two log-ratios of sampled tokens are measured: trainer minus engine before the step, and the policy after the
step minus the policy before it. Without replay both contain tokens whose experts have changed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import verl_memopt
from benchmarks.common import commit, processor, text_table
from verl_memopt.model.tiny import TinyShape, make_tiny_model

AR = "actor_rollout_ref"
SHAPE = TinyShape(
    "qwen3_moe", hidden_size=256, num_layers=8, num_experts=64, experts_per_token=8, expert_size=64, initializer_range=0.06
)
DIFFERS = "actor/router_replay_differs"


def settings_of(mode: str, rate: float) -> dict[str, Any]:
    return {
        "worker_group": "local", f"{AR}.rollout.name": "hf", f"{AR}.rollout.dtype": "bf16", f"{AR}.rollout.ignore_eos": True,
        f"{AR}.actor.fsdp_config.dtype": "fp32", f"{AR}.actor.router_replay.mode": mode, f"{AR}.actor.optim.lr": rate,
        f"{AR}.actor.use_kl_loss": False, f"{AR}.rollout.max_logprob_diff": None, "data.max_response_length": 64, "data.seed": 1,
        "trainer.track_memory_every_steps": 0,
    }  # fmt: skip


def spread(log_ratio: Tensor) -> list[str]:
    size = log_ratio.abs()
    return [f"{float(size.mean()):.5f}", f"{float(log_ratio.std()):.5f}", f"{float(size.max()):.4f}"]


def measured(model: Path, folder: Path, mode: str, rate: float, prompts: int) -> list[str]:
    with verl_memopt.session(str(model), run_dir=folder, **settings_of(mode, rate)) as session:
        answers = session.generate([f"{number}+{number + 1}=" for number in range(prompts)], n=4)
        engine = torch.tensor([value for row in answers.engine_log_probs or () for value in row])
        before = torch.cat(session.log_probs(answers))
        gains = torch.linspace(-1, 1, len(answers)).tolist()
        first = session.update(answers, gains).get(DIFFERS)
        after = torch.cat(session.log_probs(answers))
        # Nothing is changed by this gradient. Its forward compares the replayed experts with the router after the step.
        last = session.forward_backward(answers, gains).get(DIFFERS)
    shares = ["" if share is None else f"{100 * share:.2f} %" for share in (first, last)]
    return [mode, shares[0], *spread(before - engine), shares[1], *spread(after - before)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router_replay", description=__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-5)
    options = parser.parse_args(arguments)
    head = [
        *("mode", "before the step\nother experts", "trainer - engine\nmean of abs", "std", "max of abs"),
        *("after the step\nother experts", "after - before\nmean of abs", "std", "max of abs"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", SHAPE, seed=0)
        modes = ("disabled", "R2", "R3")
        rows = [measured(model, Path(folder) / mode, mode, options.rate, options.prompts) for mode in modes]
    print(f"{commit()}, {processor()}, torch {torch.__version__}. Log-ratios in nats of {options.prompts * 4 * 64} tokens.")
    print(f"{SHAPE.num_layers} layers, {SHAPE.num_experts} experts, {SHAPE.experts_per_token} per token, rate {options.rate}")
    print("Other experts: of the tokens in each layer, those whose replayed experts the fp32 router would not choose.")
    print(text_table(head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
