"""Engines in several processes that are joined by a gloo group, as workers are."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.ranks import run_ranks
from tests.rollout.tools import difference_from_naive, model_of, place_at, prompts, rollout_settings, sampling
from verl_memopt.rollout import vllm_engine
from verl_memopt.rollout.engine import build_engine


def answer_of_rank(rank, folder, world_size, tensor_parallel_size):
    """Response ids, the largest difference from transformers' log-probs, and an all-reduce after the shutdown.

    The first engine gets 6 rows, each further one a row less: engines do not wait for one another.
    """
    place = place_at(folder, rank=rank, world_size=world_size, tensor_parallel_size=tensor_parallel_size)
    engine = build_engine(rollout_settings("vllm"), place)
    sharded = trained_beside(folder, world_size)
    engine.load_weights((name, tensor.detach().full_tensor()) for name, tensor in sharded.named_parameters())
    model = model_of(folder)
    model.load_state_dict({name: tensor.full_tensor() for name, tensor in sharded.state_dict().items()})
    rows = prompts(6)[: 6 - rank // tensor_parallel_size]
    answer = engine.generate(rows, list(range(len(rows))), sampling(max_tokens=6))
    difference = difference_from_naive(model, rows, answer)
    with engine.serving() as requests:
        if requests.leads:
            check_served(requests, rows, answer.response_ids)
        else:
            requests.follow()
    engine.shutdown()
    total = torch.ones(1)
    dist.all_reduce(total)
    return answer.response_ids, difference, total.item()


def check_served(requests, rows, response_ids):
    served, waiting = {}, list(range(len(rows)))
    while waiting or requests.under_way:
        if waiting:
            number = waiting.pop()
            requests.add(number, rows[number], number, sampling(max_tokens=6))
        served |= requests.step()
    assert [served[number].response_ids for number in range(len(rows))] == response_ids


def trained_beside(folder, world_size):
    """A sharded model after one training step, in a process where an engine runs."""
    model = model_of(folder).train()
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor(prompts(9)[8:])
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    return model


@pytest.fixture(scope="module")
def apart(tied_folder):
    return run_ranks(answer_of_rank, 2, tied_folder, 2, 1, timeout=300)


def queue_left(rank):
    """Gives whether the name of a queue of two ranks is left once they have removed it. The rank that made it is late."""
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

    queue = ShmRingBuffer(1, 1024, 2) if rank == 0 else None
    handle = [queue and queue.handle()]
    dist.broadcast_object_list(handle)
    queue = queue or ShmRingBuffer(*handle[0])
    if rank == 0:
        prompt = vllm_engine._unlink_message_queues
        vllm_engine._unlink_message_queues = lambda: (time.sleep(1), prompt())
    vllm_engine._unlink_shared_memory(place_at("", rank=rank, world_size=2, tensor_parallel_size=2))
    return Path("/dev/shm", queue.shared_memory.name).exists()


def test_ranks_remove_the_names_of_their_shared_memory_whoever_comes_first():
    assert run_ranks(queue_left, 2) == [False, False]


def check(answers, tensor_parallel_size):
    for rank, (ids, difference, total) in enumerate(answers):
        assert len(ids) == 6 - rank // tensor_parallel_size
        assert ids == answers[0][0][: len(ids)]
        assert difference <= 1e-5
        assert total == len(answers)


def test_one_engine_on_each_of_two_ranks_answers_rows_of_its_own(apart):
    check(apart, tensor_parallel_size=1)


@pytest.mark.slow
def test_one_engine_shared_by_two_ranks_gives_both_the_answer_that_an_engine_alone_draws(apart, tied_folder):
    shared = run_ranks(answer_of_rank, 2, tied_folder, 2, 2, timeout=300)
    check(shared, tensor_parallel_size=2)
    assert shared[0][0] == apart[0][0]


@pytest.mark.slow
def test_two_engines_of_two_ranks_each_answer_rows_of_their_own(tied_folder):
    check(run_ranks(answer_of_rank, 4, tied_folder, 4, 2, timeout=300), tensor_parallel_size=2)
