"""Chooses the task of the example scripts when no model is named, and the settings that this machine needs for it.

``python -m recipe.choose_model --device auto --model ID --dataset ID --train-file PATH`` prints one line for the shell:
``gsm8k`` or ``toy``, and then overrides. If this is not the usual choice, a sentence on standard error gives the reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_memopt.errors import UserError
from verl_memopt.model.folder import files_of_index, why_no_answer
from verl_memopt.run.builds import device_of, vllm_build

# Checks whether model and dataset are available before a run needs them: first in the local cache, and then on the hub.


MODEL_FILES = ("config.json", "*.safetensors")
"""Files that every model folder has."""


def cached(repo_id: str, repo_type: str, wanted: Sequence[str]) -> bool:
    """Return whether the local cache has a file for each pattern, and each file that a weight index lists.

    ``repo_id``: ``owner/name``. ``repo_type``: ``model`` or ``dataset``. ``wanted``: glob patterns below the repository's root.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo_id, repo_type=repo_type, local_files_only=True))
    except LocalEntryNotFoundError:
        return False
    listed = [name for index in folder.glob("*.safetensors.index.json") for name in files_of_index(index)]
    return all(any(folder.glob(pattern)) for pattern in (*wanted, *listed))


GPU_TOY = "+device=gpu"
"""Config group of ``recipe/rloo`` with the settings of the toy task for a GPU."""
OWN_GENERATION = "actor_rollout_ref.rollout.name=hf"


def choose(device: str, model: str, dataset: str | None, train_file: str, gpu_listed: bool) -> tuple[list[str], str | None]:
    """Return the task with its overrides, and an explanation if it is not the usual choice.

    On a CPU the choice is always the toy task. ``model``, ``dataset``: ids on the hub; None = the user's own files are the data.
    ``train_file``: the file that is prepared from the dataset. ``gpu_listed``: nvidia-smi lists a GPU.
    """
    if device_of(device) == "cpu":
        task, sentences = ["toy"], []
        if gpu_listed and device == "auto":
            sentences.append(
                "nvidia-smi lists a GPU, but the installed PyTorch sees none, so the toy task is trained on the CPU. "
                "VERL_MEMOPT_BUILD=gpu ./setup_env.sh installs the build for GPUs."
            )
        if vllm_build() == "gpu":
            task.append(OWN_GENERATION)
            sentences.append("The installed vLLM is a build for GPUs, so transformers generates.")
        return task, " ".join(sentences) or None
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.choose_model", description="Choose what a script trains.")
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
