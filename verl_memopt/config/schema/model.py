"""The section ``actor_rollout_ref.model``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from verl_memopt.config.schema.data import REQUIRED
from verl_memopt.config.schema.training import ModelKnobs
from verl_memopt.knobs.chunked_logprob import ChunkedLogprob
from verl_memopt.knobs.load_mode import LoadMode


@dataclass(frozen=True)
class Model(LoadMode, ChunkedLogprob, ModelKnobs):
    """The policy's model, with the settings of the knobs that act in it."""

    path: str = REQUIRED
    """Folder in Hugging Face format, or a hub id; ``verl-memopt toy`` makes a tiny one."""
    hf_config_path: str | None = None
    """Read config.json from this folder in place of ``path``."""
    tokenizer_path: str | None = None
    """Read the tokenizer from this folder in place of ``path``."""
    trust_remote_code: bool = False
    """Let transformers run code from the model's folder."""
    external_lib: str | None = None
    """Module imported before the model is built (it may register architectures)."""
    custom_chat_template: str | None = None
    """Jinja text that replaces the tokenizer's chat template."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Merged into the model's config.json; a name the config does not have is an error."""
    attn_implementation: Literal["auto", "flash_attention_2", "sdpa", "eager"] = "auto"
    """auto, flash_attention_2, sdpa, eager. auto = flash kernels where device and dtype support them, else sdpa."""
