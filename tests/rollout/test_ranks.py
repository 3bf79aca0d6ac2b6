"""Engines in several processes that are joined by a gloo group, as workers are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.rollout.tools import (
    largest_difference,
    model_of,
    naive_log_probs,
    place_at,
    prompts,
    rollout_settings,
    sampling,
    weights_of,
)
from verl_memopt.rollout.engine import Generation, build_engine


def answer_of_rank(rank: int, folder: Path, world_size: int, tensor_parallel_size: int) -> tuple[list[list[int]], float, float]:
    """Response ids, the largest difference from transformers' log-probs, and an all-reduce after the shutdown."""
    place = place_at(folder, rank=rank, world_size=world_size, tensor_parallel_size=tensor_parallel_size)
    engine = build_engine(rollout_settings("vllm"), place)
    model = model_of(folder)
    engine.load_weights((name, tensor * 0) for name, tensor in weights_of(model))
    engine.load_weights(weights_of(model))
    group = rank // tensor_parallel_size
    rows = prompts(6)[: 6 - group]
    answer: Generation = engine.generate(rows, list(range(len(rows))), sampling(max_tokens=6))
    naive = [naive_log_probs(model, row, ids, 1.0) for row, ids in zip(rows, answer.response_ids, strict=True)]
    engine.shutdown()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert answer.log_probs is not None
    return answer.response_ids, largest_difference(answer.log_probs, naive), total.item()


def check(folder: Path, world_size: int, tensor_parallel_size: int) -> None:
    answers = run_ranks(answer_of_rank, world_size, folder, world_size, tensor_parallel_size)
    for rank, (ids, difference, total) in enumerate(answers):
        assert len(ids) == 6 - rank // tensor_parallel_size
        assert ids == answers[0][0][: len(ids)]
        assert difference <= 1e-5
        assert total == world_size


def test_one_engine_on_each_of_two_ranks_answers_rows_of_its_own(tied_folder: Path) -> None:
    check(tied_folder, world_size=2, tensor_parallel_size=1)


def test_one_engine_shared_by_two_ranks_gives_both_the_same_answer(tied_folder: Path) -> None:
    check(tied_folder, world_size=2, tensor_parallel_size=2)


@pytest.mark.slow
def test_two_engines_of_two_ranks_each_answer_rows_of_their_own(tied_folder: Path) -> None:
    check(tied_folder, world_size=4, tensor_parallel_size=2)
