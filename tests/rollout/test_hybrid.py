"""Engines of models with layers of linear attention, whose state depends on every token before."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.architectures import tiny_folder
from tests.model.test_text_part import exported
from tests.rollout.tools import difference_from_naive, engine_at, model_of, sampling
from verl_memopt.errors import ConfigError
from verl_memopt.model.tiny import build_tokenizer

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
SIZES = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "max_position_embeddings": 256}
"""vLLM's kernels for a CPU take heads of this size."""


def last_line_of(module, *arguments):
    """Run a module in a process of its own, which sees a stand-in for torchvision if there is none. Return its last line."""
    stand_in = [] if HAS_TORCHVISION else [str(Path(__file__).parent / "stand_in")]
    path = os.pathsep.join([*stand_in, str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", module, *map(str, arguments)]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout.splitlines()[-1]


def hybrid(at, deviation=0.06, kind="qwen3_5_text", **sizes):
    folder = tiny_folder(at, kind, deviation, **sizes)
    build_tokenizer(320).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hybrid(tmp_path_factory.mktemp("hybrid") / "model", **SIZES)


def test_left_padding_does_not_reach_the_state_of_a_row(folder):
    engine, model = engine_at("hf", folder, load_format="auto"), model_of(folder)
    rows = [[3 + (row + 7 * place) % 290 for place in range(size)] for row, size in enumerate((2, 3, 4, 63, 64, 65, 130))]
    for asked in (rows, [[5], *rows], [*rows, rows[2], rows[5], rows[5]]):  # the last computes equal prompts once
        together = engine.generate(asked, list(range(len(asked))), sampling())
        assert difference_from_naive(model, asked, together) <= 2e-5
        alone = [engine.generate([row], [seed], sampling()).response_ids[0] for seed, row in enumerate(asked)]
        assert alone == together.response_ids


def test_vllm_answers_with_the_weights_of_the_last_load_and_shares_them(folder, tmp_path):
    pytest.importorskip("vllm")
    other = hybrid(tmp_path / "other", 0.07, **SIZES)
    found = json.loads(last_line_of("tests.rollout.hybrid_engine", folder, other))
    assert max(found["differences"]) <= 0.1
    assert found["again"] == [True] * 6
    assert found["compared"] == [found["weights"], [], []]
    # One copy of all matrices. vLLM holds the decay in fp32, and packs the convolution.
    assert found["shared"] == found["weights"]
    assert found["apart"] == ["linear_attn.A_log", "linear_attn.conv1d.weight"]


@pytest.mark.slow
def test_vllm_answers_with_the_experts_of_the_last_load(tmp_path):
    pytest.importorskip("vllm")
    folders = [hybrid(tmp_path / str(deviation), deviation, "qwen3_5_moe_text", **SIZES) for deviation in (0.06, 0.07)]
    found = json.loads(last_line_of("tests.rollout.hybrid_engine", *folders))
    assert max(found["differences"]) <= 0.1
    assert found["again"] == [True] * 4
    assert found["shared"] == 0


def test_vllm_on_a_cpu_refuses_another_dtype_than_its_kernels_have_before_it_starts(folder):
    with pytest.raises(ConfigError, match=r"rollout\.dtype=float32: on a CPU vLLM.*dtype=bfloat16, or .*rollout\.name=hf"):
        engine_at("vllm", folder)


@pytest.mark.skipif(HAS_TORCHVISION, reason="torchvision is installed")
def test_vllm_without_torchvision_is_told_what_to_install(folder, no_shared_engine):
    pytest.importorskip("vllm")
    with pytest.raises(ConfigError, match=r"Here: install torchvision.*rollout\.name=hf"):
        engine_at("vllm", folder, dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "bound"),
    [
        *((kind, "float32", 1e-5) for kind in ("qwen3_vl", "gemma3", "gemma4")),
        *((kind, "bfloat16", 0.1) for kind in ("qwen3_5", "qwen3_5_moe")),
    ],
)
def test_vllm_loads_a_saved_multimodal_folder_and_scores_its_text_as_transformers_does(tmp_path, kind, dtype, bound):
    pytest.importorskip("vllm")
    sizes = SIZES if kind.startswith("qwen3_5") else {"max_position_embeddings": 256}
    # All experts compute a token, because in half precision vLLM and transformers may choose different ones.
    source = tiny_folder(tmp_path / "source", kind, head_dim=32, num_experts_per_tok=4, **sizes)
    saved = exported(source, tmp_path / "saved")
    build_tokenizer(320).save_pretrained(saved)
    assert float(last_line_of("tests.rollout.whole_engine", saved, dtype)) <= bound
