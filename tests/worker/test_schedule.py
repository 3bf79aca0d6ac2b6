import functools
import math
import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from verl_memopt.config.schema import Optim
from verl_memopt.config.values import choices
from verl_memopt.errors import ConfigError
from verl_memopt.memory.bucketed_adamw_torch import BucketedAdamW, BucketedSGD
from verl_memopt.worker.optimizer import build_optimizer, build_schedule, learning_rate_factors

KEY = "actor_rollout_ref.actor.optim"


def weights():
    return [nn.Parameter(torch.ones(2))]


def factors(warmup, total, **settings):
    factor = learning_rate_factors(warmup, total, Optim(lr_schedule_steps="updates", **settings))
    return [factor(step) for step in range(total)]


def test_a_constant_rate_climbs_linearly_to_its_peak_and_stays():
    assert factors(3, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_by_rollouts_a_warm_up_begins_at_0_as_in_verl():
    by_rollouts = learning_rate_factors(4, 8, Optim())
    assert [by_rollouts(step) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    cosine = learning_rate_factors(2, 6, Optim(lr_scheduler_type="cosine", min_lr_ratio=0.1))
    # verl's: max(floor, 0.45 cos(pi progress) + 0.55)
    expected = [0.0, 0.5, 1.0, *(0.45 * math.cos(math.pi * part) + 0.55 for part in (0.25, 0.5, 0.75))]
    assert [cosine(step) for step in range(6)] == pytest.approx(expected, abs=1e-12)


def cosine(step, warmup, total, floor, cycles):
    """Half a cosine wave a half cycle, written out."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return floor + (1.0 - floor) * (0.5 * (1.0 + math.cos(2.0 * math.pi * cycles * progress)))


@pytest.mark.parametrize("cycles", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 97), (10, 97), (97, 97), (120, 97)])
def test_a_cosine_is_the_written_out_one_to_the_bit(warmup, total, floor, cycles):
    settings = Optim(lr_scheduler_type="cosine", min_lr_ratio=floor, num_cycles=cycles, lr_schedule_steps="updates")
    factor = learning_rate_factors(warmup, total, settings)
    assert [factor(step) for step in range(150)] == [cosine(step, warmup, total, floor, cycles) for step in range(150)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_scheduler_type": "linear"}, [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25]),
        ({"lr_scheduler_type": "linear", "min_lr_ratio": 0.2}, [1 / 3, 2 / 3, 1.0, 0.8, 0.6, 0.4]),
        ({"lr_scheduler_type": "polynomial"}, [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25]),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2}}, [1 / 3, 2 / 3, 1.0, 0.5625, 0.25, 0.0625]),
        ({"lr_scheduler_type": "inverse_sqrt"}, [1 / 3, 2 / 3, 1.0, (2 / 3) ** 0.5, 0.5**0.5, 0.4**0.5]),
        (
            {"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": 1}},
            [1 / 3, 2 / 3, 1.0, 2**-0.5, 3**-0.5, 0.5],
        ),
        ({"lr_scheduler_type": "cosine_with_restarts", "num_cycles": 2}, [1 / 3, 2 / 3, 1.0, 0.5, 1.0, 0.5]),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 2, "decay_type": "linear"}},
            [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 0.5],
        ),
        ({"lr_scheduler_type": "constant_with_warmup"}, [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0]),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "min_lr_ratio": 0.2},
            [1 / 3, 2 / 3, 1.0, (6 + 2 * 2**0.5) / 10, 0.6, (6 - 2 * 2**0.5) / 10],
        ),
    ],
)
def test_other_schedules_follow_the_warm_up(settings, expected):
    assert factors(2, 6, **settings) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", choices()[f"{KEY}.lr_scheduler_type"])
def test_a_schedule_of_any_name_stays_where_it_ends(name):
    more = {"num_cycles": 1.0} if name == "cosine_with_restarts" else {}
    more |= {"lr_scheduler_kwargs": {"num_decay_steps": 2}} if name == "warmup_stable_decay" else {}
    factor = learning_rate_factors(1, 5, Optim(lr_scheduler_type=name, **more))
    assert factor(5) == factor(6) == factor(50)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"slope": 2}}, "unexpected keyword argument 'slope'"),
        ({"lr_scheduler_kwargs": {"power": 2}}, "it takes no arguments"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "num_decay_steps"),
        ({"lr_scheduler_type": "cosine_with_restarts"}, "num_cycles=0.5 is not a whole number of cycles"),
        ({"lr_scheduler_type": "cosine_with_restarts", "num_cycles": 1.5}, "num_cycles=1.5 is not a whole number of cycles"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 2.0}}, "must be smaller"),
        ({"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": 0}}, "division by zero"),
    ],
)
def test_arguments_that_a_schedule_does_not_take_are_refused_under_their_key(settings, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        learning_rate_factors(0, 10, Optim(**settings))
    assert str(caught.value).startswith(f"{KEY}.lr_scheduler_type=")


def test_a_schedule_leaves_the_optimizer_alone_but_for_its_rate():
    optimizer = build_optimizer(weights(), Optim(lr=2.0))
    build_schedule(optimizer, Optim(lr=2.0, lr_scheduler_type="linear", lr_warmup_steps=1, lr_schedule_steps="updates"), 5)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["initial_lr"]) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_warmup_steps": 2}, [0.0, 0.5]),
        ({"lr_warmup_steps": 0}, [1.0, 1.0]),
        # As in verl: 0 gives way to the share.
        ({"lr_warmup_steps": 0, "lr_warmup_steps_ratio": 0.5}, [0.0, 0.2]),
        ({"lr_warmup_steps_ratio": 0.1}, [0.0, 1.0]),
        ({"lr_warmup_steps_ratio": 0.1, "lr_schedule_steps": "updates"}, [0.5, 1.0]),
        ({"lr_warmup_steps_ratio": 0.1, "total_training_steps": 30}, [0.0, 1 / 3]),
    ],
)
def test_the_length_of_the_warm_up_is_given_or_a_share_of_the_schedule(settings, expected):
    optim = Optim(lr=2.0, **settings)
    schedule = build_schedule(build_optimizer(weights(), optim), optim, 10)
    assert schedule.get_last_lr() == pytest.approx([2.0 * expected[0]])
    assert [schedule.lr_lambdas[0](step) for step in (0, 1)] == pytest.approx(expected)


def test_the_optimizer_has_its_settings_is_fused_and_takes_further_arguments():
    group = build_optimizer(weights(), Optim(lr=0.5, weight_decay=0.25, betas=(0.5, 0.75))).param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"], group["fused"]) == (0.5, 0.25, (0.5, 0.75), True)
    optim = Optim(override_optimizer_config={"eps": 1e-3, "fused": False})
    group = build_optimizer(weights(), optim).param_groups[0]
    assert (group["eps"], group["fused"]) == (1e-3, False)


@pytest.mark.parametrize("name", ["SGD", "Adafactor", "RMSprop"])
def test_an_optimizer_without_betas_is_not_given_any(name):
    optimizer = build_optimizer(weights(), Optim(optimizer=name, lr=0.5))
    assert type(optimizer) is (BucketedSGD if name == "SGD" else getattr(torch.optim, name))
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "Adamw"}, "optimizer_impl=torch.optim, optimizer=Adamw: module 'torch.optim' has no attribute"),
        ({"optimizer_impl": "no_such_module"}, "optimizer_impl=no_such_module, optimizer=AdamW: No module named"),
        ({"override_optimizer_config": {"epsilon": 1}}, "override_optimizer_config={'epsilon': 1}: "),
        ({"override_optimizer_config": {"eps": -1.0}}, "override_optimizer_config={'eps': -1.0}: Invalid epsilon"),
        ({"override_optimizer_config": {"foreach": True}}, "`fused` and `foreach` cannot be `True` together"),
        ({"optimizer": "lr_scheduler"}, "optimizer=lr_scheduler, override_optimizer_config=None: "),
    ],
)
def test_what_cannot_be_built_is_refused_under_its_key(settings, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        build_optimizer(weights(), Optim(**settings))
    assert str(caught.value).startswith(KEY)


@pytest.mark.parametrize(
    ("dtype", "settings", "offload", "expected"),
    [
        (torch.float32, {}, False, torch.optim.AdamW),
        (torch.float32, {"state_dtype": "fp32"}, False, torch.optim.AdamW),
        (torch.bfloat16, {"state_dtype": "bfloat16"}, False, torch.optim.AdamW),
        (torch.bfloat16, {}, False, torch.optim.AdamW),
        (torch.bfloat16, {"state_dtype": "fp32"}, False, BucketedAdamW),
        (torch.float32, {"state_dtype": "int8"}, False, BucketedAdamW),
        (torch.float32, {}, True, BucketedAdamW),
        (torch.float32, {"in_backward": True}, False, BucketedAdamW),
        (torch.bfloat16, {"stochastic_rounding": True}, False, BucketedAdamW),
        (torch.float32, {"optimizer": "SGD"}, False, BucketedSGD),
        (torch.float32, {"optimizer": "SGD", "override_optimizer_config": {"dampening": 0.1}}, False, torch.optim.SGD),
    ],
)
def test_adamw_is_torchs_until_something_is_asked_that_only_ours_does(dtype, settings, offload, expected):
    parameter = nn.Parameter(torch.ones(64, 64, dtype=dtype))
    assert type(build_optimizer([parameter], Optim(**settings), offload)) is expected


def test_moments_follow_the_parameters_unless_told():
    parameter = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = build_optimizer([parameter], Optim(stochastic_rounding=True))
    assert optimizer.state[parameter]["exp_avg"].dtype == torch.bfloat16


def test_our_adamw_takes_the_settings_and_overrides_and_refuses_others_by_name():
    settings = Optim(state_dtype="int8", lr=0.5, betas=(0.8, 0.9), weight_decay=0.1, override_optimizer_config={"eps": 1e-6})
    group = build_optimizer([nn.Parameter(torch.ones(64, 64))], settings).param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"], group["eps"]) == (0.5, (0.8, 0.9), 0.1, 1e-6)
    settings = Optim(state_dtype="int8", override_optimizer_config={"amsgrad": True})
    with pytest.raises(ConfigError, match="amsgrad"):
        build_optimizer(weights(), settings)


def test_an_8_bit_optimizer_of_torchao_steps_over_sharded_weights_in_half_precision(one_rank, monkeypatch):
    pytest.importorskip("torchao")
    # The graph is compiled no further, which is where a state that a DTensor views has to keep its dtype.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    nn.init.zeros_(layer.weight)
    fully_shard(layer, mesh=one_rank)
    settings = Optim(optimizer_impl="torchao.optim", optimizer="AdamW8bit", lr=0.5, weight_decay=0.0)
    optimizer = build_optimizer(layer.parameters(), settings)
    layer(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    # The first step of Adam is as long as the learning rate.
    torch.testing.assert_close(layer.weight.full_tensor(), torch.full((64, 64), -0.5, dtype=torch.bfloat16))
