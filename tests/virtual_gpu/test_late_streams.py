"""Offloads beside streams that copy as late as they may: the numbers of a run are those of one without streams, bit for bit."""

import pytest
import torch

from tests.end_to_end.covering import all_off
from tests.end_to_end.knob_runs import run_row
from tests.virtual_gpu.late_streams import late_streams
from tests.virtual_gpu.life import STREAMS
from verl_memopt.distributed.device import CopyStream, leave_process_group
from verl_memopt.errors import ConfigError
from verl_memopt.memory import activation_offload_torch, optimizer_offload_torch, residency

SMALL = {"bucket": "small", "actor optimizer_offload": "on"}
ROWS = {
    "activations": {"activation offload": "on"},
    "activations of checkpoints": {"activation offload": "one in flight", "checkpointing": "full", "recomputed values": "on"},
    "a prefix kv": {"activation offload": "on", "recomputed values": "on", "shared prompt": "on", "batching": "tokens"},
    "moments": SMALL,
    "moments in int8": SMALL | {"state": "int8"},
    "moments in backward": SMALL | {"in backward": "on", "clip": "none"},
    "gradients": SMALL | {"actor grad_offload": "on", "batching": "tokens"},
    "parameters": {"actor param_offload": "on", "ref param_offload": "on"},
    "a streamed reference": {"shared prompt": "on", "batching": "tokens", "recomputed values": "on"},
    "a mapped reference": {"ref param_offload": "on", "load": "mmap"},
    "the engine": {"engine": "level 1"},
    "all of it": SMALL
    | {"activation offload": "on", "checkpointing": "every_n", "actor param_offload": "on", "ref param_offload": "on"}
    | {"engine": "level 1", "sync": "one", "shared prompt": "on", "batching": "tokens", "recomputed values": "on"},
}


ALONE = ("activations", "a prefix kv", "moments", "parameters", "the engine")
"""Rows whose offloads are all in another row."""


@pytest.fixture(autouse=True)
def no_group():
    leave_process_group()
    yield
    leave_process_group()


def numbers(outcome):
    tensors = [*outcome.log_probs, *outcome.ref_log_probs, outcome.weights]
    return torch.cat([torch.tensor([*outcome.loss, *outcome.grad_norm]), *(tensor.flatten() for tensor in tensors)])


@pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.slow) if each in ALONE else each for each in ROWS])
def test_late_copies_change_no_number(name, folder):
    row = all_off() | ROWS[name]
    plain = numbers(run_row(row, folder))
    with late_streams():
        late = numbers(run_row(row, folder, more=STREAMS if name == "a streamed reference" else None))
    assert torch.equal(plain, late)


@pytest.mark.parametrize(
    ("name", "owner", "attribute"),
    [
        ("moments", optimizer_offload_torch, "wait_for"),
        ("activations", activation_offload_torch._Stored, "_wait"),
        ("parameters", residency, "_enter"),
        ("a streamed reference", CopyStream, "wait"),
    ],
)
def test_without_its_wait_an_offload_is_caught(name, owner, attribute, folder, monkeypatch):
    row = all_off() | ROWS[name]
    plain = numbers(run_row(row, folder))
    monkeypatch.setattr(owner, attribute, lambda *_: None)
    with late_streams():
        try:
            late = numbers(run_row(row, folder, more=STREAMS if name == "a streamed reference" else None))
        except (AssertionError, RuntimeError, ConfigError):
            return  # memory that was let go before its copy, or a check of the pass itself, or that of packed rows
    assert not torch.equal(plain, late)
