"""Files and tokenizers for the data room's tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from verl_memopt.model.tiny import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def row(content: Any = "1+1=", **columns: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return {"data_source": "toy/arithmetic", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "2"}} | columns


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows (dicts) or raw lines (texts) to a .jsonl file and gives its path."""

    def write(*lines: dict[str, Any] | str, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return str(path)

    return write
