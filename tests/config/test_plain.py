import json

import yaml

from verl_memopt.config.keys import flatten, leaf_keys
from verl_memopt.config.loader import to_plain, to_yaml


def test_the_plain_tree_holds_every_key_and_only_plain_values(settled):
    plain = to_plain(settled({}))
    assert list(flatten(plain)) == leaf_keys()
    assert json.loads(json.dumps(plain)) == plain


def test_yaml_reads_back_to_the_plain_tree(settled):
    settings = settled({"trainer.experiment_name": "ünïcode: #1", "actor_rollout_ref.actor.optim.lr": 1e-6})
    assert yaml.safe_load(to_yaml(settings)) == to_plain(settings)


def test_changing_the_plain_tree_leaves_the_settings_alone(settled):
    settings = settled({"ray_kwargs.ray_init": {"num_cpus": 2}})
    to_plain(settings)["ray_kwargs"]["ray_init"]["num_cpus"] = 3
    assert settings.ray_kwargs.ray_init == {"num_cpus": 2}


def test_yaml_keeps_the_order_of_the_schema(settled):
    assert list(yaml.safe_load(to_yaml(settled({})))) == list(dict.fromkeys(key.split(".")[0] for key in leaf_keys()))
