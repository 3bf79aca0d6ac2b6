import torch.distributed as dist

from tests.ranks import run_ranks
from verl_memopt.rollout.vllm_engine import STEPS_PER_AGREEMENT, agreed


def steps_until_stopped(rank):
    """Gives the engine steps that a rank takes, of which rank 1 alone wants to stop from its third question on."""
    questions = []

    def stopped():
        questions.append(rank)
        return rank == 1 and len(questions) >= 3

    any_stopped, steps = agreed(stopped, dist.group.WORLD), 0
    while not any_stopped():
        steps += 1
        assert steps < 10 * STEPS_PER_AGREEMENT
    return steps, len(questions)


def test_all_ranks_stop_after_the_same_step_when_one_of_them_wants_to():
    assert run_ranks(steps_until_stopped, 2) == [(3 * STEPS_PER_AGREEMENT - 1, 3)] * 2
