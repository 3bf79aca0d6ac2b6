import inspect
import pickle

import pytest

from verl_memopt import errors

CODES = {
    **dict.fromkeys([errors.ConfigError, errors.DataError], 2),
    **dict.fromkeys([errors.RewardError, errors.RolloutError, errors.TrainingError, errors.WorkerError], 1),
    errors.CheckpointError: 1,
}


def test_every_error_is_one_the_user_can_mend_and_says_when_it_is_raised():
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BaseException)]
    assert [kind for kind in kinds if not issubclass(kind, errors.UserError)] == [errors.Stopped]
    assert all(kind.__doc__ for kind in kinds)


@pytest.mark.parametrize("kind", CODES)
def test_what_is_wrong_before_a_run_begins_ends_with_code_2_and_what_goes_wrong_in_it_with_code_1(kind):
    assert kind.exit_code == CODES[kind]


def test_the_figures_of_a_full_device_cross_from_a_worker_to_the_driver():
    figures = errors.OutOfMemory("gen", 3, 8, 10)
    error = pickle.loads(pickle.dumps(errors.DeviceMemoryError("gen: full", figures)))
    assert (str(error), error.figures) == ("gen: full", figures)
