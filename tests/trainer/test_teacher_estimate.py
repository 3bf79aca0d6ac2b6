"""What the gradient of the sampled divergence means, on a model whose answers can all be listed."""

import itertools

import pytest
import torch

from verl_memopt.config.schema import Distill
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.trainer.rollouts import StepBatch

END, LENGTH = 0, 3


def answers():
    """All answers of up to three tokens of three kinds, of which one ends an answer."""
    for length in range(1, LENGTH + 1):
        for tokens in itertools.product(range(3), repeat=length):
            if END not in tokens[:-1] and (length == LENGTH or tokens[-1] == END):
                yield tokens


PREFIXES = sorted({tokens[:place] for tokens in answers() for place in range(len(tokens))})


@pytest.fixture
def models():
    """Logits of policy and teacher after each prefix."""
    draw = torch.Generator().manual_seed(2)
    policy, teacher = (torch.randn(len(PREFIXES), 3, generator=draw, dtype=torch.float64) for _ in range(2))
    return policy.requires_grad_(), teacher


def log_probs_of(table, tokens):
    return torch.stack([table[PREFIXES.index(tokens[:place])].log_softmax(-1)[token] for place, token in enumerate(tokens)])


def estimated(models, rows, discount):
    """The mean gradient of a policy gradient over answers, with what the teacher subtracts from the advantages."""
    policy, teacher = models
    own = [log_probs_of(policy, tokens) for tokens, _ in rows]
    batch = RolloutBatch(
        prompts=Ragged.from_rows([torch.ones(1)] * len(rows), torch.int64),
        responses=Ragged.from_rows([torch.tensor(tokens) for tokens, _ in rows], torch.int64),
        group=torch.arange(len(rows)),
        old_log_probs=torch.cat(own).detach().float(),
        teacher_log_probs=torch.cat([log_probs_of(teacher, tokens) for tokens, _ in rows]).float(),
        batch_size=[],
    )
    term = StepBatch(1, None, None, batch)._teacher_term(Distill(coef=1.0, divergence="sampled", discount=discount))
    terms = term.double().split([len(tokens) for tokens, _ in rows])
    loss = sum(weight * (term * log_probs).sum() for (_, weight), term, log_probs in zip(rows, terms, own, strict=True))
    return torch.autograd.grad(loss, policy)[0]


def all_rows(policy):
    return [(tokens, log_probs_of(policy, tokens).sum().exp().detach()) for tokens in answers()]


def exact(models, through_prefixes):
    """The gradient of the divergences at all prefixes, each with the probability of its prefix."""
    policy, teacher = models
    total = torch.zeros((), dtype=torch.float64)
    for place, prefix in enumerate(PREFIXES):
        reached = log_probs_of(policy, prefix).sum().exp() if prefix else torch.ones((), dtype=torch.float64)
        a, b = policy[place].log_softmax(-1), teacher[place].log_softmax(-1)
        total = total + (reached if through_prefixes else reached.detach()) * (a.exp() * (a - b)).sum()
    return torch.autograd.grad(total, policy)[0]


def test_all_answers_together_have_probability_one(models):
    assert sum(weight for _, weight in all_rows(models[0])) == pytest.approx(1.0)


def test_without_discounted_later_tokens_the_mean_gradient_is_that_of_the_exact_form(models):
    """So it leaves out what a token changes in later divergences: it is no gradient of the divergence of whole answers."""
    found = estimated(models, all_rows(models[0]), 0.0)
    torch.testing.assert_close(found, exact(models, False), rtol=1e-5, atol=1e-7)
    whole = exact(models, True)
    assert (found - whole).norm() > 0.05 * whole.norm()
    assert torch.nn.functional.cosine_similarity(found.flatten(), whole.flatten(), 0) > 0


def test_with_all_later_tokens_the_mean_gradient_is_that_of_the_divergence_of_whole_answers(models):
    torch.testing.assert_close(estimated(models, all_rows(models[0]), 1.0), exact(models, True), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_samples_give_this_mean_within_their_error(models, discount):
    rows = all_rows(models[0])
    weights, draws = torch.stack([weight for _, weight in rows]), 4000
    counts = torch.multinomial(weights, draws, replacement=True, generator=torch.Generator().manual_seed(1)).bincount(
        minlength=len(rows)
    )
    sampled = [(tokens, counts[place] / draws) for place, (tokens, _) in enumerate(rows)]
    found, mean = estimated(models, sampled, discount), exact(models, discount == 1.0)
    each = torch.stack([estimated(models, [(tokens, torch.ones(()))], discount) for tokens, _ in rows])
    deviation = (weights[:, None, None] * (each - mean).square()).sum(0).sqrt()
    assert ((found - mean).abs() <= 4.5 * deviation / draws**0.5 + 1e-6).all()
    assert (found - mean).norm() > 1e-4
