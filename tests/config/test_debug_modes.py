from typing import get_args

import pytest

from verl_memopt.config.debug_modes import MODES, REPLAYING, mode_settings
from verl_memopt.config.keys import leaf_types
from verl_memopt.config.loader import PACKAGED, load_settings
from verl_memopt.errors import ConfigError

AR = "actor_rollout_ref"
MODEL = [f"{AR}.model.path=m", f"{AR}.actor.use_dynamic_bsz=true"]
LEAST = [*MODEL, "data.train_files=a", "data.val_files=null"]


def refused(*more):
    with pytest.raises(ConfigError) as error:
        load_settings("rloo_trainer", [*LEAST, *more])
    return str(error.value)


def test_every_mode_is_a_choice_and_a_file_of_the_group():
    assert set(MODES) == set(get_args(leaf_types()["debug.mode"])) == {path.stem for path in (PACKAGED / "debug").glob("*.yaml")}


@pytest.mark.parametrize("name", MODES)
def test_the_file_of_a_mode_sets_it_and_replaying_follows_it(name):
    settings = load_settings("rloo_trainer", [*LEAST, f"debug={name}"])
    assert settings.debug.mode == name
    assert settings.actor_rollout_ref.rollout.skip_rollout is (name in REPLAYING)


def test_modes_decide_keys_that_exist():
    assert {key for name in MODES for key in mode_settings(name)} <= set(leaf_types())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["debug=forge", "trainer.val_only=true", "data.val_files=b"], "a validation alone runs none of what this mode checks"),
        (["debug=train_only", f"{AR}.rollout.skip_rollout=false"], "this mode replays stored rollouts"),
        (["debug=sync_check", f"{AR}.rollout.skip_rollout=true"], "this mode does not replay stored rollouts"),
        (["debug=train_only", "algorithm.adv_estimator=remax"], "a dump has no greedy responses"),
        (["debug=forge", "algorithm.adv_estimator=remax"], "forged rows have no greedy responses"),
        (["debug=train_only", "algorithm.filter_groups.enable=true"], "a dump holds the groups that were kept"),
        (["debug=sync_check", f"{AR}.rollout.calculate_log_probs=false"], "the check compares the engine's log-probs"),
        (["debug=rollout"], "dry"),
    ],
)
def test_what_a_mode_cannot_do_is_refused(more, says):
    assert says in refused(*more)


def test_data_that_is_missing_is_no_problem_of_a_mode_that_reads_none():
    settings = load_settings("rloo_trainer", [*MODEL, "debug=forge"])
    assert (settings.data.train_files, settings.data.val_files) == (None, None)
