"""What the start says that a parameter takes on the device and on the host, by hand."""

import pytest

from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import ActorRolloutRef
from verl_memopt.memory.shared_weights import bytes_a_parameter

FSDP = "actor.fsdp_config"
SPLIT = {f"{FSDP}.split_master_weights": True, f"{FSDP}.optimizer_offload": True, f"{FSDP}.grad_offload": True}


@pytest.mark.parametrize(
    ("changes", "devices", "shares", "sleeps", "update", "rollout"),
    [
        # Weights 4, gradients 4, moments 8, and the engine's weights 2.
        ({}, 1, False, True, (16, 0), (14, 0)),
        ({}, 1, False, False, (18, 0), (14, 0)),
        ({"rollout.sleep_level": 1}, 1, False, True, (16, 2), (14, 0)),
        ({f"{FSDP}.param_offload": True}, 1, False, True, (16, 4), (10, 4)),
        ({f"{FSDP}.offload_policy": True}, 1, False, True, (0, 16), (2, 12)),
        ({"actor.optim.in_backward": True}, 1, False, True, (12, 0), (14, 0)),
        # Weights 2 that the engine shares, and on the host gradients 4, moments 8, remainders 2.
        (SPLIT, 1, True, True, (2, 14), (2, 14)),
        # Each of two engines has all the weights, and the rest is sharded.
        (SPLIT, 2, True, True, (4, 14), (4, 14)),
        ({}, 2, False, False, (20, 0), (16, 0)),
    ],
)
def test_the_bytes_of_a_parameter_are_those_that_rest_where_they_are_said_to(changes, devices, shares, sleeps, update, rollout):
    roles = ActorRolloutRef()
    for key, value in changes.items():
        roles = replaced(roles, {key: value})
    assert bytes_a_parameter(roles, devices, shares, sleeps) == {"update": update, "rollout": rollout}
