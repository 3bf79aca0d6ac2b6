"""The update with a teacher of another size against whole logits in float64, and what must change nothing in it."""

import dataclasses

import pytest
import torch

from tests.ranks import run_ranks
from tests.tensors import whole_of
from tests.worker.test_policy import ACTOR, CPU, SMALL, WHOLE, batch, micro_batches, policy_for, relative, shares
from verl_memopt.config.schema import Distill
from verl_memopt.data.batch import Ragged
from verl_memopt.distributed.device import training_mesh
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import named_weights
from verl_memopt.worker.teacher import Teacher, Teachers, TokenStore

HEAT = 0.9
"""The temperature of ``tests.worker.test_policy``."""
ON_POLICY = dataclasses.replace(ACTOR, use_kl_loss=False, entropy_coeff=0.0)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    """A model with the policy's vocabulary, which is wider and deeper than it."""
    shape = TinyShape(hidden_size=96, num_layers=3, initializer_range=0.05, tie_embeddings=False)
    return make_tiny_model(tmp_path_factory.mktemp("teacher") / "wide", shape, seed=9)


def distilled(folder, teacher, mesh, distill, world_size=1, rank=0, budget=WHOLE, told=None, **options):
    """Return the metrics of an update without rewards, and its gradients."""
    policy = policy_for(folder, mesh, world_size, **{"actor": ON_POLICY, **options})
    model = policy.model if teacher is None else policy_for(teacher, mesh, world_size).model
    role = Teacher(model, distill, HEAT, CPU, 320)
    whole = batch()
    whole.advantages = torch.zeros_like(whole.advantages)
    whole.old_log_probs = whole.ref_log_probs = None
    whole.places = torch.arange(whole.advantages.shape[0])
    whole.teacher_prompts = told
    mini = shares(whole, world_size, budget)[rank]
    read = mini.batch.for_teacher()
    role.compute(read, [[row] for row in reversed(range(read.num_rows))])
    policy.distill_coef, policy.teaching = distill.coef, Teachers([role]).of
    with role.in_update(1):
        metrics = policy.accumulate(micro_batches(mini), mini.counts, HEAT)
    gradients = {name: whole_of(parameter.grad).clone().numpy() for name, parameter in named_weights(policy.model)}
    return {name: float(value) for name, value in metrics.items()}, gradients


def divergence_of(distill, student, teacher):
    """The divergence of two [R, V] tensors of log-probs, fp64, from its definition."""
    p, q = student.exp(), teacher.exp()
    if distill.divergence == "reverse_kl":
        return (p * (student - teacher)).sum(-1)
    if distill.divergence == "forward_kl":
        return (q * (teacher - student)).sum(-1)
    mixed = (distill.beta * q + (1 - distill.beta) * p).log()
    return distill.beta * (q * (teacher - mixed)).sum(-1) + (1 - distill.beta) * (p * (student - mixed)).sum(-1)


def naive(folder, teacher, distill, told=None):
    """The same from whole logits in float64, one row at a time, in transformers."""
    from transformers import AutoModelForCausalLM

    student = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    frozen = AutoModelForCausalLM.from_pretrained(teacher or folder, dtype=torch.float64)
    whole, total = batch(), torch.zeros((), dtype=torch.float64)
    prompts = (whole.prompts if told is None else told).rows()
    for own, prompt, response in zip(whole.prompts.rows(), prompts, whole.responses.rows(), strict=True):
        if len(response):
            log_p, log_q = (
                (model(torch.cat([before, response])[None]).logits[0, len(before) - 1 : -1] / HEAT).log_softmax(-1)
                for model, before in ((student, own), (frozen, prompt))
            )
            total = total + divergence_of(distill, log_p, log_q.detach()).sum()
    total = distill.coef * total / len(whole.responses.flat)
    total.backward()
    return total.item(), {name: parameter.grad for name, parameter in student.named_parameters()}


FORMS = [
    Distill(coef=0.7, divergence="reverse_kl"),
    Distill(coef=0.7, divergence="forward_kl"),
    Distill(coef=0.7, divergence="jsd", beta=0.3),
]


@pytest.mark.parametrize("distill", FORMS, ids=lambda distill: distill.divergence)
def test_loss_and_gradients_equal_those_of_whole_logits(tiny_folder, teacher_folder, one_rank, distill):
    loss, gradients = naive(tiny_folder, teacher_folder, distill)
    metrics, found = distilled(tiny_folder, teacher_folder, one_rank, distill, budget=SMALL)
    assert relative(metrics["actor/loss"], loss) <= 2e-6
    assert metrics["actor/distill_loss"] * distill.coef == pytest.approx(metrics["actor/loss"])
    largest = max(gradient.norm() for gradient in gradients.values())
    for name, gradient in found.items():
        assert (torch.from_numpy(gradient) - gradients[name]).norm() <= 2e-6 * largest, name


def test_a_policy_learns_from_itself_with_another_prompt(tiny_folder, one_rank):
    generator = torch.Generator().manual_seed(4)
    told = Ragged.from_rows([torch.randint(256, (3 + row % 4,), generator=generator) for row in range(16)], torch.int64)
    loss, gradients = naive(tiny_folder, None, FORMS[0], told)
    metrics, found = distilled(tiny_folder, None, one_rank, FORMS[0], told=told)
    assert relative(metrics["actor/loss"], loss) <= 2e-6
    largest = max(gradient.norm() for gradient in gradients.values())
    for name, gradient in found.items():
        assert (torch.from_numpy(gradient) - gradients[name]).norm() <= 4e-6 * largest, name


def test_a_policy_with_its_own_prompt_has_nothing_to_learn_from_itself(tiny_folder, one_rank):
    metrics, found = distilled(tiny_folder, None, one_rank, FORMS[0])
    assert abs(metrics["actor/loss"]) < 1e-9
    assert max(abs(gradient).max() for gradient in found.values()) < 1e-7


def two_ranks(rank, folder, teacher):
    return distilled(folder, teacher, training_mesh("cpu", 2, -1), FORMS[0], 2, rank, SMALL)


def test_two_ranks_learn_what_one_learns(tiny_folder, teacher_folder, one_rank):
    loss, gradients = naive(tiny_folder, teacher_folder, FORMS[0])
    answers = run_ranks(two_ranks, 2, tiny_folder, teacher_folder)
    assert relative(sum(metrics["actor/loss"] for metrics, _ in answers), loss) <= 2e-6
    largest = max(gradient.norm() for gradient in gradients.values())
    for name, gradient in answers[0][1].items():
        assert (torch.from_numpy(gradient) - gradients[name]).norm() <= 2e-6 * largest, name


def test_entries_are_found_by_the_numbers_of_their_tokens():
    places = torch.tensor([30, 10, 20, 40])
    store = TokenStore(places, [(3, torch.float32), (1, torch.int32)], CPU)
    values, ids = torch.arange(12.0).view(4, 3), torch.tensor([[7], [8], [9], [10]], dtype=torch.int32)
    for positions in ([2, 0], [3, 1]):
        store.put(torch.tensor(positions), [values[positions], ids[positions]])
    found = store.at(torch.tensor([20, 40, 20, 30]))
    torch.testing.assert_close(found[0], values[[2, 3, 2, 0]])
    assert found[1].flatten().tolist() == [9, 10, 9, 7]


def test_all_but_one_token_and_the_rest_are_the_whole_vocabulary(tiny_folder, teacher_folder, one_rank):
    for distill in FORMS[:2]:
        whole = distilled(tiny_folder, teacher_folder, one_rank, distill)
        top = distilled(tiny_folder, teacher_folder, one_rank, dataclasses.replace(distill, top_k=319), budget=SMALL)
        assert relative(top[0]["actor/loss"], whole[0]["actor/loss"]) <= 1e-5
        for name, gradient in whole[1].items():
            assert abs(top[1][name] - gradient).max() <= 1e-5 * abs(gradient).max(), name
