"""Tiny local stand-ins for the models and rows that TRL's tests name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_memopt.model.tiny import build_tokenizer

OWNER = "trl-internal-testing"
"""The hub's owner of the models and rows of TRL's tests."""

_WORDS = (
    "Short is", "Rain falls on", "A small boat", "Numbers are", "Better late than", "The old door", "Warm bread is", "Far away",
)  # fmt: skip
SPLITS = {"train": 4, "test": 2}
"""Rows of a split. TRL's have 17 and 2."""

_SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "output_router_logits": True, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
TYPES = {
    "Cohere2": "cohere2", "Glm4Moe": "glm4_moe", "GptOss": "gpt_oss", "Qwen2": "qwen2", "Qwen3": "qwen3", "Qwen3Moe": "qwen3_moe",
    "NemotronH": "nemotron_h", "Llama": "llama", "Mistral": "mistral", "Gemma2": "gemma2",
}  # fmt: skip
"""Beginning of a class name of transformers -> model type."""

REMOTE = """
from transformers import PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM


class RemoteConfig(Qwen2Config):
    model_type = "remote"


class RemoteForCausalLM(Qwen2ForCausalLM):
    config_class = RemoteConfig
"""


def make_models(names: set[str], folder: Path) -> dict[str, str]:
    """Make a tiny model for each name that is one of text, and return name -> folder. The others map to nothing."""
    made = {}
    for name in sorted(names):
        found = re.fullmatch(r"tiny-(\w+?)For(CausalLM|SequenceClassification)(-[\w.]+)?", name)
        if found is None or found[1] not in (*TYPES, "Remote"):
            continue
        path = folder / name
        if not (path / "config.json").is_file():
            make_model(found[1], found[2], path)
        made[f"{OWNER}/{name}"] = str(path)
    return made


def make_model(kind: str, head: str, path: Path) -> None:
    """Write a tiny model with random weights and its tokenizer. The seed is fixed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    tokenizer = build_tokenizer(320)
    if kind == "Llama":  # a test takes a pad token of Llama's by name
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|finetune_right_pad_id|>"]})
    sizes: dict[str, Any] = {**_SIZES, "vocab_size": max(320, len(tokenizer))}
    sizes |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    kind_of = TYPES.get(kind, "qwen2")
    if "Moe" in kind or kind == "GptOss":
        sizes |= _EXPERTS
    if kind == "NemotronH":
        sizes |= {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8}
    config = AutoConfig.for_model(kind_of, **sizes)
    torch.manual_seed(0)
    if head == "CausalLM":
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        config.num_labels = 1
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # untrained models of this width answer nearly alike, and nothing would be learned of equal scores
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    if kind == "Remote":
        _make_remote(path)


def _make_remote(path: Path) -> None:
    """Turn a folder into one whose classes are its own code."""
    import json

    config = json.loads((path / "config.json").read_text())
    places = {"AutoConfig": "remote.RemoteConfig", "AutoModelForCausalLM": "remote.RemoteForCausalLM"}
    config |= {"model_type": "remote", "architectures": ["RemoteForCausalLM"], "auto_map": places}
    (path / "config.json").write_text(json.dumps(config))
    (path / "remote.py").write_text(REMOTE)


def load_dataset(name: str, config: str | None = None, split: str | None = None, streaming: bool = False) -> Any:
    """Return local rows with the columns of TRL's test data, as ``datasets.load_dataset`` does."""
    import datasets

    wrap: Callable[[str], Any] = {
        "standard_prompt_only": lambda text: text,
        "conversational_prompt_only": lambda text: [{"role": "user", "content": text}],
    }.get(config or "", str)
    if name != f"{OWNER}/zen" or config not in ("standard_prompt_only", "conversational_prompt_only"):
        raise NotImplementedError(f"{name}, {config}: there are no local rows of this kind")
    start, made = 0, {}
    for part, number in SPLITS.items():
        rows = datasets.Dataset.from_dict({"prompt": [wrap(text) for text in _WORDS[start : start + number]]})
        made[part] = rows.to_iterable_dataset() if streaming else rows
        start += number
    if split is not None:
        return made[split]
    return (datasets.IterableDatasetDict if streaming else datasets.DatasetDict)(made)
