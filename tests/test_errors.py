import inspect
import pickle

import pytest

from verl_memopt import errors

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
KINDS = [kind for kind in CLASSES if issubclass(kind, BaseException) and kind is not errors.Stopped]


def test_what_was_given_up_on_request_is_no_error_of_the_users():
    assert not issubclass(errors.Stopped, errors.UserError)


def test_every_error_is_one_the_user_can_mend():
    assert all(issubclass(kind, errors.UserError) for kind in KINDS)


@pytest.mark.parametrize("kind", [errors.ConfigError, errors.DataError])
def test_what_is_wrong_before_a_run_begins_ends_with_code_2(kind):
    assert kind.exit_code == 2


@pytest.mark.parametrize(
    "kind", [errors.RewardError, errors.RolloutError, errors.TrainingError, errors.WorkerError, errors.CheckpointError]
)
def test_what_goes_wrong_in_a_run_ends_with_code_1(kind):
    assert kind.exit_code == 1


def test_every_error_says_when_it_is_raised():
    assert all(kind.__doc__ for kind in KINDS)


def test_the_figures_of_a_full_device_cross_from_a_worker_to_the_driver():
    figures = errors.OutOfMemory("gen", 3, 8, 10)
    error = pickle.loads(pickle.dumps(errors.DeviceMemoryError("gen: full", figures)))
    assert (str(error), error.figures) == ("gen: full", figures)
