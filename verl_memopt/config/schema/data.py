"""The section ``data``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from verl_memopt.knobs.values import NOT_NEGATIVE, POSITIVE, CountOrMinusOne, PositiveInt

REQUIRED: Any = "???"
"""Marks a key that has no default; the loader reports every one that is still missing."""


@dataclass(frozen=True)
class CustomClass:
    """A dataset class of the user's own."""

    path: str | None = None
    """Python file that holds the class; null = the built-in one."""
    name: str | None = None
    """Class name inside ``path``."""


@dataclass(frozen=True)
class CustomSampler:
    """A sampler class of the user's own."""

    class_path: str | None = None
    """Python file that holds a sampler class; it is called with (num_rows, seed, epoch) and yields row indices."""
    class_name: str | None = None
    """Class name inside ``class_path``."""


@dataclass(frozen=True)
class Data:
    """Rows, their prompts and how they are drawn."""

    train_files: Any = REQUIRED
    """A path or a list of paths: .parquet, .json, .jsonl. ``reward_model.reward_manager`` says what else a recipe reads."""
    val_files: Any = REQUIRED
    """As ``train_files``; null switches validation off."""
    train_max_samples: CountOrMinusOne = -1
    """Cap on training rows: a seeded random subset with ``shuffle``, else the first rows; -1 = all."""
    val_max_samples: CountOrMinusOne = -1
    """Cap on validation rows; -1 = all."""
    max_prompt_length: PositiveInt = 512
    """Hard cap of a prompt in tokens; what happens beyond it is ``truncation``."""
    max_response_length: PositiveInt = 512
    """Hard cap of a response in tokens."""
    train_batch_size: PositiveInt = 1024
    """Prompts per step (each is answered ``rollout.n`` times)."""
    gen_batch_size: Annotated[int | None, POSITIVE] = None
    """Prompts of one round of generation under ``algorithm.filter_groups``; follows ``train_batch_size``."""
    val_batch_size: Annotated[int | None, POSITIVE] = None
    """Prompts per validation call; null = the whole validation set at once."""
    shuffle: bool = True
    """Draw a new order of the training rows each epoch."""
    validation_shuffle: bool = False
    """Shuffle the validation rows once."""
    seed: Annotated[int | None, NOT_NEGATIVE] = None
    """Seed of the data order; null = drawn once, logged, saved in the checkpoint."""
    filter_overlong_prompts: bool = False
    """Drop prompts over ``max_prompt_length`` when the dataset is read; the number dropped is logged. Supervised fine-tuning also
    drops responses over ``max_response_length``."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a prompt over the cap: error, left, right, middle. Tokens lost are counted and logged. Supervised
    fine-tuning then cuts the end of a response over its cap, too."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a list of {role, content}, or a text or a list of token ids that is used as it is."""
    response_key: str = "response"
    """Supervised fine-tuning: column that holds the response, a text. A dot leads into an object: ``extra_info.answer``."""
    messages_key: str = "messages"
    """Supervised fine-tuning, in rows without ``response_key``: column that holds a whole conversation, a list of
    {role, content}. Its last turn is the assistant's and is the response. The turns before it are the prompt."""
    allow_special_tokens: bool = False
    """Let the tokenizer read special tokens such as ``<|im_end|>`` inside prompts as tokens. false = they are plain text, except
    those of the chat template. Set true for prompts whose text is already rendered."""
    reward_fn_key: str = "data_source"
    """Column that chooses the default reward and groups validation metrics."""
    trust_remote_code: bool = False
    """Let the tokenizer run code from its folder."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the tokenizer's chat template."""
    custom_cls: CustomClass = field(default_factory=CustomClass)
    """A dataset class of the user's own."""
    sampler: CustomSampler = field(default_factory=CustomSampler)
    """A sampler of the user's own."""
