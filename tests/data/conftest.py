import json

import pytest

from verl_memopt.model.tiny import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


def row(content="1+1=", **columns):
    prompt = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return {"data_source": "toy/arithmetic", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "2"}} | columns


@pytest.fixture
def jsonl(tmp_path):
    """Writes rows (dicts) or raw lines (texts) to a .jsonl file and gives its path."""

    def write(*lines, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return str(path)

    return write
