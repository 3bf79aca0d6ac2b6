import pytest

from recipe.rloo.memory_study.arms import ARMS, WHOLE_RUN, main_arms, saving_arms, whole_run_arms
from recipe.rloo.memory_study.plan import device_chooser

SHAPE = (3015, 100, 151_669)
GIB = 2**30


@pytest.mark.parametrize(("asked", "has_gpu"), [("cpu", True), ("fake", True), ("cuda", True), ("cpu", False)])
def test_a_device_that_is_asked_for_is_taken(asked, has_gpu):
    device = device_chooser(asked, has_gpu, 0, SHAPE)
    assert {device(arm) for arm in ARMS if arm.update != WHOLE_RUN} == {asked}
    # A worker samples and reads values, which fake tensors have not.
    assert {device(arm) for arm in whole_run_arms()} == {"cpu" if asked == "fake" else asked}


def test_without_a_gpu_the_published_trainer_is_always_simulated():
    device = device_chooser("auto", False, 10**15, SHAPE)
    assert {device(arm) for arm in main_arms()} == {"fake"}
    assert {device(arm) for arm in saving_arms()} == {"cpu"}


def test_without_a_gpu_what_saves_has_real_tensors_where_they_fit():
    device = device_chooser("auto", False, GIB, SHAPE)
    assert {(arm.update, device(arm)) for arm in saving_arms([8])} == {
        ("no_retention", "fake"),
        ("response_only", "fake"),
        ("chunked", "cpu"),
        ("shared_prompt", "cpu"),
        ("shared_prompt_checkpointing", "cpu"),
    }
