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

Answer = tuple[list[list[int]], float, float]


def answer_of_rank(rank: int, folder: Path, world_size: int, tensor_parallel_size: int) -> Answer:
    """Response ids, the largest difference from transformers' log-probs, and an all-reduce after the shutdown.

    The first engine gets 6 rows, each further one a row less: engines do not wait for one another.
    """
    place = place_at(folder, rank=rank, world_size=world_size, tensor_parallel_size=tensor_parallel_size)
    engine = build_engine(rollout_settings("vllm"), place)
    model = model_of(folder)
    engine.load_weights((name, tensor * 0) for name, tensor in weights_of(model))
    engine.load_weights(weights_of(model))
    rows = prompts(6)[: 6 - rank // tensor_parallel_size]
    answer: Generation = engine.generate(rows, list(range(len(rows))), sampling(max_tokens=6))
    naive = [naive_log_probs(model, row, ids, 1.0) for row, ids in zip(rows, answer.response_ids, strict=True)]
    engine.shutdown()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert answer.log_probs is not None
    return answer.response_ids, largest_difference(answer.log_probs, naive), total.item()


def answers_of_both(rank: int, folder: Path) -> list[Answer]:
    """One engine on each of two ranks, then one engine shared by them, in the same processes: an import costs seconds."""
    return [answer_of_rank(rank, folder, 2, size) for size in (1, 2)]


@pytest.fixture(scope="module")
def two_ranks(tied_folder: Path) -> list[list[Answer]]:
    return run_ranks(answers_of_both, 2, tied_folder, timeout=300)


def check(answers: list[Answer], tensor_parallel_size: int) -> None:
    for rank, (ids, difference, total) in enumerate(answers):
        assert len(ids) == 6 - rank // tensor_parallel_size
        assert ids == answers[0][0][: len(ids)]
        assert difference <= 1e-5
        assert total == len(answers)


def test_one_engine_on_each_of_two_ranks_answers_rows_of_its_own(two_ranks: list[list[Answer]]) -> None:
    check([answers[0] for answers in two_ranks], tensor_parallel_size=1)


def test_one_engine_shared_by_two_ranks_gives_both_the_same_answer(two_ranks: list[list[Answer]]) -> None:
    check([answers[1] for answers in two_ranks], tensor_parallel_size=2)


def test_an_engine_shared_by_two_ranks_draws_what_an_engine_alone_draws(two_ranks: list[list[Answer]]) -> None:
    assert two_ranks[0][0][0] == two_ranks[0][1][0]


@pytest.mark.slow
def test_two_engines_of_two_ranks_each_answer_rows_of_their_own(tied_folder: Path) -> None:
    check(run_ranks(answer_of_rank, 4, tied_folder, 4, 2, timeout=300), tensor_parallel_size=2)
