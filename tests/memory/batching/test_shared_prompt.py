import dataclasses

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.tensors import whole_of
from tests.worker.test_policy import ACTOR, policy_for
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Actor
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.memory.shared_prompt import prompt_groups
from verl_memopt.model.weights import named_weights
from verl_memopt.worker.trained_model import micro_batch


def test_rows_of_a_group_compute_their_prompt_together_only_where_the_settings_say_so():
    assert list(prompt_groups([4, 4, 7], Actor(use_prefix_grouper=True))) == [4, 4, 7]
    assert list(prompt_groups([4, 4, 7], Actor(use_prefix_grouper=False))) == [0, 1, 2]


def sharing(batch, shared=True):
    """Gives the same batch, in which the rows of a group compute their prompt together, or each its own."""
    return dataclasses.replace(batch, prompt_group=batch.group if shared else None)


def grouped(prompt, answers, groups=1, seed=0):
    """Gives ``groups`` groups: a random prompt each, and answers of the given lengths. Each row computes its own prompt."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(256, (prompt,), generator=generator) for _ in range(groups)]
    responses = [torch.randint(256, (length,), generator=generator) for _ in range(groups) for length in answers]
    tokens = sum(map(len, responses))
    return RolloutBatch(
        prompts=Ragged.from_rows([each for each in prompts for _ in answers], torch.int64),
        responses=Ragged.from_rows(responses, torch.int64),
        group=torch.arange(groups).repeat_interleave(len(answers)),
        old_log_probs=torch.randn(tokens, generator=generator) * 0.05 - 5.7,
        ref_log_probs=torch.randn(tokens, generator=generator) * 0.05 - 5.7,
        advantages=torch.randn(tokens, generator=generator),
        batch_size=[],
    )


def counts_of(batch):
    return GlobalCounts(float(batch.responses.lengths.sum()), float(batch.num_rows))


def gradients(policy, batch, bins, shared):
    """Gives the loss and every whole gradient of one mini-batch."""
    micros = [micro_batch(sharing(batch, shared), rows) for rows in bins]
    metrics = policy.accumulate(micros, counts_of(batch), 0.9)
    found = {name: whole_of(weight.grad).clone() for name, weight in named_weights(policy.model)}
    policy.trained.optimizer.zero_grad()
    return metrics["actor/loss"], found


def is_clear_of_the_clip(policy, batch):
    """Says whether no ratio is so near a bound of its clip that rounding decides on which side of the gradient's jump it lies."""
    log_probs = policy.compute_log_probs(batch, [[row] for row in range(batch.num_rows)], 0.9, False).log_probs
    ratio = (log_probs - batch.old_log_probs).exp()
    bounds = torch.tensor([1 - ACTOR.clip_ratio_low, 1 + ACTOR.clip_ratio_high, ACTOR.clip_ratio_c])
    return bool((ratio[:, None] - bounds).abs().gt(1e-5).all())


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_loss_and_gradients_are_those_of_the_repeated_prompt(untied_folder, one_rank, data):
    answers = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any))
    batch = grouped(data.draw(st.integers(1, 20)), answers, data.draw(st.integers(1, 3)), seed=len(answers))
    policy = policy_for(untied_folder, one_rank, 1)
    assume(is_clear_of_the_clip(policy, batch))
    naive, expected = gradients(policy, batch, [[row] for row in range(batch.num_rows)], False)
    loss, found = gradients(policy, batch, [list(range(batch.num_rows))], True)
    # A loss is a mean of terms of about the advantages' size, 1, whose sum may cancel.
    assert abs(float(loss) - float(naive)) <= 2e-6 * max(abs(float(naive)), 1)
    # Over a single key the gradient of queries is 0, and what is computed of it is rounding of numbers of the others' size.
    rounding = 2**-22 * torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 2e-6 * gradient.norm() + rounding, name


def test_scores_of_split_groups_are_those_of_whole_ones(tiny_folder, one_rank):
    batch, policy = sharing(grouped(12, [4, 1, 0, 7], groups=2)), policy_for(tiny_folder, one_rank, 1)
    whole = policy.compute_log_probs(batch, [list(range(8))], 0.9, True)
    split = policy.compute_log_probs(batch, [[0, 5], [1, 4, 6], [2, 3, 7]], 0.9, True)
    torch.testing.assert_close(whole.log_probs, split.log_probs, rtol=0, atol=3e-6)
    torch.testing.assert_close(whole.entropy, split.entropy, rtol=0, atol=3e-6)
