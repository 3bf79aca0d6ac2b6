"""Write a model folder in Hugging Face format, tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor
from transformers import PretrainedConfig

from verl_memopt.models.safetensors_writer import SafetensorsWriter

FILE_BYTES = 2 * 2**30
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
)


def export_folder(
    folder: Path, config: PretrainedConfig, tokenizer_folder: Path, weights: Iterator[tuple[str, Tensor]] | None, writes: bool
) -> None:
    """Write config, generation config, tokenizer and, where given, weights.

    Args:
        folder: The folder to write.
        config: Config of the model.
        tokenizer_folder: Whose tokenizer files are copied.
        weights: (name, whole tensor) pairs, consumed by every rank in step; None for no weights.
        writes: Whether this rank writes anything.
    """
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(folder, config)
        _copy_tokenizer(tokenizer_folder, folder)
        if getattr(config, "auto_map", None):
            _copy_code(Path(str(config.name_or_path)), folder)
    if weights is not None:
        _write_weights(folder, weights, writes)


def _write_config(folder: Path, config: PretrainedConfig) -> None:
    plain = config.to_dict()
    # Training switches the cache off, and a model that others load should generate with one.
    plain["use_cache"] = True
    # The name of the kernel exists in this package only.
    plain.pop("_attn_implementation", None)
    (folder / "config.json").write_text(json.dumps(plain, indent=2, default=str, sort_keys=True) + "\n")


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for pattern in (*TOKENIZER_FILES, "generation_config.json"):
        for file in source.glob(pattern):
            if file.is_file() and not file.name.endswith(".safetensors"):
                shutil.copyfile(file, folder / file.name)


def _copy_code(source: Path, folder: Path) -> None:
    """Copy the Python files of a model with code of its own, so that the written folder loads as its source does."""
    for file in source.glob("*.py"):
        shutil.copyfile(file, folder / file.name)


def _write_weights(folder: Path, weights: Iterator[tuple[str, Tensor]], writes: bool) -> None:
    files: list[SafetensorsWriter] = []
    with ExitStack() as stack:
        for name, tensor in weights:
            if not writes:
                continue
            if not files or files[-1].num_bytes + tensor.nbytes > FILE_BYTES or not files[-1].has_room(name, tensor):
                # The file before is complete, and closing it writes its header.
                stack.pop_all().close()
                files.append(stack.enter_context(SafetensorsWriter(folder / f"part-{len(files):05d}.safetensors")))
            files[-1].add(name, tensor)
    if writes:
        _name_files(folder, [(file.path, file.names) for file in files], sum(file.num_bytes for file in files))


def _name_files(folder: Path, files: list[tuple[Path, list[str]]], total: int) -> None:
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    weight_map = {}
    for index, (path, names) in enumerate(files):
        final = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        # The names hold the number of files, which is known only now.
        path.rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    (folder / "model.safetensors.index.json").write_text(index_text + "\n")
