import json

import pytest
from tokenizers.processors import TemplateProcessing

from verl_memopt.model.tiny import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="session")
def with_bos():
    """A tokenizer that begins each text with BOS, and whose chat template adds it too."""
    made = build_tokenizer()
    made.add_special_tokens({"bos_token": "<|begin|>"})
    begin = ("<|begin|>", made.bos_token_id)
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    made.chat_template = "<|begin|>" + made.chat_template
    return made


def row(content="1+1=", **columns):
    prompt = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return {"data_source": "toy/arithmetic", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "2"}} | columns


@pytest.fixture
def jsonl(tmp_path):
    """Return a function that writes rows (dicts) or raw lines (texts) to a .jsonl file, and returns its path."""

    def write(*lines, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return str(path)

    return write
