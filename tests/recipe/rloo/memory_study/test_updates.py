"""Every update that saves gives the loss and the gradient of the published one, on real tensors.

The published update in float64 has the exact gradient. In fp32 it is 5e-6 from that, for it sums 151,669 terms of a row to the
large one of the target. The mended updates sum in the same way, and are compared with it in fp32. This project's updates add the
target's term last, and are compared with the exact gradient.
"""

import dataclasses

import pytest
import torch

from recipe.rloo.memory_study.cells import FULL, TRUNCATED, Arm
from recipe.rloo.memory_study.measure import run_arm
from recipe.rloo.memory_study.shapes import SMALL, make_model
from recipe.rloo.memory_study.updates import Options, own_settings

ONE_EPOCH = dataclasses.replace(SMALL, epochs=1)
LONGER = dataclasses.replace(ONE_EPOCH, name="longer", prompt=240, truncated=80, response=16)
CUT_OTHERWISE = [
    pytest.param(update, rows, marks=pytest.mark.slow) for update, rows in (("no_retention", 4), ("response_only", 2))
]
MENDED = [("legacy", 2), ("no_retention", 1), ("response_only", 4), *CUT_OTHERWISE]
OWN = [("chunked", 1), ("shared_prompt", 4), ("shared_prompt_checkpointing", 4)]
PUBLISHED_UPDATE = Arm("legacy", "token", FULL, "legacy", 4, 4)


def values(arm, shapes, folder, dtype=torch.float32):
    options = Options(arm.micro_batch, autocast=False, for_values=True, dtype=dtype)
    return run_arm(arm, shapes, "cpu", None, 0, folder, options)[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("updates"), SMALL, 0)


@pytest.fixture(scope="module")
def published(folder):
    return values(PUBLISHED_UPDATE, ONE_EPOCH, folder)


@pytest.fixture(scope="module")
def exact(folder):
    return values(PUBLISHED_UPDATE, ONE_EPOCH, folder, torch.float64)


def difference(first, second):
    """Return the norm of the difference of two gradients over the norm of the second, all tensors as one vector."""
    assert first.keys() == second.keys()
    apart = sum(float((first[name].double() - second[name].double()).square().sum()) for name in second)
    return (apart / sum(float(tensor.double().square().sum()) for tensor in second.values())) ** 0.5


@pytest.mark.parametrize(("update", "rows"), MENDED)
def test_a_mended_update_has_loss_and_gradient_of_the_published_one(update, rows, folder, published):
    mended = values(Arm("arm", "token", FULL, update, 4, rows), ONE_EPOCH, folder)
    assert abs(mended.loss / published.loss - 1) < 2e-6
    assert abs(mended.grad_norm / published.grad_norm - 1) < 2e-6
    assert difference(mended.gradients, published.gradients) < 2e-6


@pytest.mark.parametrize(("update", "rows"), OWN)
def test_an_own_update_has_the_loss_and_the_exact_gradient_of_the_published_one(update, rows, folder, published, exact):
    own = values(Arm("arm", "token", FULL, update, 4, rows), ONE_EPOCH, folder)
    for other in (exact, published):
        assert abs(own.loss / other.loss - 1) < 2e-6
        assert abs(own.grad_norm / other.grad_norm - 1) < 2e-6
    assert difference(own.gradients, exact.gradients) < 1e-6
    assert difference(published.gradients, exact.gradients) < 1e-5  # how far depends on the processor's order of sums


@pytest.mark.slow
@pytest.mark.parametrize(("update", "dtype"), [("response_only", torch.float32), ("shared_prompt_checkpointing", torch.float64)])
def test_the_same_holds_for_a_prompt_five_times_as_long(update, dtype, folder):
    ours = values(Arm("arm", "token", FULL, update, 2, 2), LONGER, folder)
    published = values(dataclasses.replace(PUBLISHED_UPDATE, k=2, micro_batch=2), LONGER, folder, dtype)
    assert abs(ours.loss / published.loss - 1) < 2e-6
    assert difference(ours.gradients, published.gradients) < 2e-6


def test_a_truncated_prompt_has_another_gradient(folder, published):
    cut = values(dataclasses.replace(PUBLISHED_UPDATE, prompt=TRUNCATED), ONE_EPOCH, folder)
    assert difference(cut.gradients, published.gradients) > 0.01


@pytest.mark.parametrize(
    ("update", "shared", "checkpointing"),
    [("chunked", False, False), ("shared_prompt", True, False), ("shared_prompt_checkpointing", True, True)],
)
def test_an_own_update_switches_on_what_its_name_says(update, shared, checkpointing, folder):
    settings = own_settings(Arm("arm", "token", FULL, update, 4, 2), SMALL, folder)
    assert settings.actor.use_prefix_grouper is shared
    assert settings.model.enable_gradient_checkpointing is checkpointing
    assert settings.actor.ppo_micro_batch_size_per_gpu == (None if shared else 2)
