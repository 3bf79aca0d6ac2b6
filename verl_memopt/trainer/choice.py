"""Chooses what the example scripts train when no model is named: the task, and the settings that this machine needs for it.

``python -m verl_memopt.trainer.choice --device auto --model ID --dataset ID --train-file PATH`` prints one line for the shell:
``gsm8k`` or ``toy``, then overrides. Where this is not the usual choice, a sentence on standard error says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_memopt.distributed.device import resolve_device
from verl_memopt.errors import UserError
from verl_memopt.models.hub import MODEL_FILES, cached, why_no_answer
from verl_memopt.rollout.vllm_build import vllm_build

GPU_TOY = "+device=gpu"
"""Config group of ``recipe/rloo`` with the settings of the toy task for a GPU."""
OWN_GENERATION = "actor_rollout_ref.rollout.name=hf"


def choose(device: str, model: str, dataset: str | None, train_file: str, gpu_listed: bool) -> tuple[list[str], str | None]:
    """Return the task with its overrides, and a sentence where it is not the usual choice.

    Args:
        device: ``trainer.device``. The CPU always means the toy task.
        model: Hub id of the model to train on a GPU.
        dataset: Hub id of its data; None for the user's own files.
        train_file: Path of the hub's data once it is prepared.
        gpu_listed: Whether ``nvidia-smi`` lists a GPU.

    Raises:
        ConfigError: The device is unknown, or it is cuda and PyTorch sees no GPU.
    """
    if resolve_device(device) == "cpu":
        return _toy_on_cpu(gpu_unseen=gpu_listed and device == "auto")
    missing = [] if cached(model, "model", MODEL_FILES) else [("model", model)]
    if dataset is not None and not Path(train_file).exists() and not cached(dataset, "dataset", ("main/train*", "main/test*")):
        missing.append(("dataset", dataset))
    for kind, name in missing:
        if (reason := why_no_answer(name, kind)) is not None:
            return ["toy", GPU_TOY], (
                f"the {kind} {name} is not in the local cache and the hub cannot give it ({reason}), so the toy task is trained "
                "on the GPU. For a model of yours set MODEL_PATH, TRAIN_FILES and VAL_FILES."
            )
    return ["gsm8k"], None


def _toy_on_cpu(gpu_unseen: bool) -> tuple[list[str], str | None]:
    sentences = []
    if gpu_unseen:
        sentences.append(
            "nvidia-smi lists a GPU and the installed PyTorch sees none, so the toy task is trained on the CPU. "
            "VERL_MEMOPT_BUILD=gpu ./setup_env.sh installs the build for GPUs."
        )
    overrides = []
    if vllm_build() == "gpu":
        overrides.append(OWN_GENERATION)
        sentences.append("The installed vLLM is a build for GPUs, so transformers generates.")
    return ["toy", *overrides], " ".join(sentences) or None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the choice and return the exit code: 0, or that of a user's error."""
    parser = argparse.ArgumentParser(prog="python -m verl_memopt.trainer.choice", description="Choose what a script trains.")
    for name in ("device", "model", "dataset", "train-file"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--own-data", action="store_true", help="the data is the user's own, not the hub's")
    parser.add_argument("--nvidia-smi", action="store_true", help="nvidia-smi lists a GPU")
    parsed = parser.parse_args(argv)
    try:
        dataset = None if parsed.own_data else parsed.dataset
        task, sentence = choose(parsed.device, parsed.model, dataset, parsed.train_file, parsed.nvidia_smi)
    except UserError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code
    if sentence is not None:
        sys.stderr.write(f"{sentence}\n")
    sys.stdout.write(" ".join(task) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
