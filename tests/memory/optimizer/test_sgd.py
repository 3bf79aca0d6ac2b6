"""SGD in buckets: torch's own numbers with no state at all, or with momentum alone, under every knob that AdamW has."""

import pytest
import torch
from torch import nn

from tests.memory.optimizer.test_bucketed_adamw import ALL, CPU
from tests.memory.optimizers import give_gradients, parameters, same, weights_after, whole_share
from tests.memory.sharded import policy_of
from tests.tensors import whole_of
from tests.worker.test_policy import ACTOR
from tests.worker.test_worker import AR, call, mini_batch, place, plan_of
from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import Optim, TrainedFsdp
from verl_memopt.distributed.device import leave_process_group
from verl_memopt.errors import ConfigError
from verl_memopt.memory.bucketed_adamw_torch import BucketedSGD
from verl_memopt.memory.grad_offload_torch import StepInBackward
from verl_memopt.worker.optimizer import build_optimizer
from verl_memopt.worker.policy import Policy
from verl_memopt.worker.worker import Worker

KINDS = {
    "no state": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "decay": {"momentum": 0.5, "weight_decay": 0.1},
}


def torchs(params, **options):
    return torch.optim.SGD(params, lr=1e-2, fused=True, **options)


def ours(params, **options):
    return BucketedSGD(params, lr=1e-2, **options)


@pytest.mark.parametrize("places", [{}, {"bucket_megabytes": 0.002}, {"bucket_megabytes": 0.01, "offload": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_torchs_fused_sgd_bit_for_bit(kind, places):
    mine = weights_after(lambda params: ours(params, **KINDS[kind], **places))
    assert same(mine, weights_after(lambda params: torchs(params, **KINDS[kind])))


def test_the_state_is_torchs():
    found = []
    for make in (ours, torchs):
        params = parameters()
        optimizers = [make(params), make(params, momentum=0.9)]
        for optimizer in optimizers:
            give_gradients(params, 1)
            optimizer.step()
        found.append([[optimizer.state[each] for each in params] for optimizer in optimizers])
    for (none, some), (torchs_none, torchs_some) in [found]:
        assert none == torchs_none == [{}] * len(none)
        assert [each.keys() for each in some] == [each.keys() for each in torchs_some]
        assert all(
            torch.equal(one["momentum_buffer"], other["momentum_buffer"]) for one, other in zip(some, torchs_some, strict=True)
        )


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "state_dtype": "bfloat16"}])
def test_a_step_in_backward_is_that_after_it_and_one_that_is_not_finite_moves_nothing(options):
    found = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(64, 64, bias=False)
        optimizer = ours(layer.parameters(), **options)
        stepping = StepInBackward(optimizer) if in_backward else None
        for step in range(3):
            layer(torch.ones(2, 64) * (step + 1)).sum().backward()
            if stepping is not None:
                stepping.norm()
            optimizer.step()
            optimizer.zero_grad()
        found.append(layer.weight.detach().clone())
        if stepping is not None:
            (layer(torch.ones(2, 64)).sum() * float("inf")).backward()
            assert torch.equal(layer.weight, found[-1])
    if "state_dtype" not in options:
        assert torch.equal(*found)
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("fsdp", "clip", "momentum"),
    [
        ({"optimizer_offload": True}, None, 0.9),
        ({"grad_offload": True}, 0.01, 0.0),
        ({"grad_offload": True, "optimizer_offload": True}, 0.01, 0.9),
    ],
)
def test_offloads_change_no_bit_of_an_update_with_or_without_clipping(tiny_folder, one_rank, fsdp, clip, momentum):
    found = []
    for more in ({}, fsdp):
        optim = replaced(ACTOR.optim, {"optimizer": "SGD", "momentum": momentum, "lr": 0.5, "clip_grad": clip})
        fsdp_config = replaced(TrainedFsdp(dtype="fp32"), more)
        policy = Policy(
            policy_of(tiny_folder, one_rank).model, replaced(ACTOR, {"optim": optim, "fsdp_config": fsdp_config}), 10, 1, CPU
        )
        for _ in range(2):
            metrics = policy.update([whole_share()], 1.0)
        found.append(([whole_of(each).detach().clone() for each in policy.model.parameters()], metrics["actor/grad_norm"]))
    assert found[0][1] == found[1][1]
    assert same(found[0][0], found[1][0])


def test_settings_and_arguments_reach_it_and_others_are_refused_by_name():
    optim = Optim(optimizer="SGD", momentum=0.8, lr=0.5, weight_decay=0.1, override_optimizer_config={"nesterov": True})
    weight = nn.Parameter(torch.ones(64, 64))
    group = build_optimizer([weight], optim).param_groups[0]
    assert (group["momentum"], group["lr"], group["weight_decay"], group["nesterov"]) == (0.8, 0.5, 0.1, True)
    wrong = Optim(optimizer="SGD", override_optimizer_config={"dampening": 0.1})
    with pytest.raises(ConfigError, match="dampening"):
        build_optimizer([weight], wrong, True)


def test_a_run_with_split_masters_and_everything_on_the_host_goes_on_from_a_checkpoint_bit_for_bit(tiny_folder, tmp_path):
    sgd = {"optim.optimizer": "SGD", "optim.momentum": 0.9, "optim.lr": 0.5, "fsdp_config.dtype": "bfloat16"}
    more = {f"{AR}.actor.{key}": value for key, value in sgd.items()}
    split = {f"{AR}.actor.fsdp_config.{key}": True for key in ("split_master_weights", "grad_offload", "optimizer_offload")}
    found = []
    for steps, settings in (((1, 2, 3), more | split), ((3,), more | split), ((3,), more)):
        leave_process_group()
        worker = Worker(plan_of(tiny_folder, settings), place())
        if len(steps) == 1:
            call(worker, "load", str(tmp_path), ALL)
        for step in steps:
            metrics = call(worker, "update_actor", [mini_batch(rows=step)])
            if step == 2:
                call(worker, "save", str(tmp_path), ALL)
        trained = worker.policy.trained
        masters = [whole_of(trained.master(each)).detach().clone() for each in worker.policy.model.parameters()]
        found.append((metrics["actor/grad_norm"], masters))
        worker.close()
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])
    # Whole masters go on from it as well; FSDP2 reduces their gradients in another way.
    for one, other in zip(found[0][1], found[2][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
