import logging
from contextlib import contextmanager, nullcontext

import pytest
import torch

from tests.memory.sharded import policy_of, share
from tests.tensors import whole_of
from tests.worker.test_policy import CPU, batch, policy_for, shares
from tests.worker.test_worker import AR
from verl_memopt.config.schema import Memory
from verl_memopt.errors import DeviceMemoryError
from verl_memopt.memory.activation_offload_torch import ActivationOffload
from verl_memopt.memory.host_buffers import GIB
from verl_memopt.memory.token_budget_torch import oom_retry

MIDDLE = 34
"""A cap that makes several micro-batches of several rows each."""


@contextmanager
def out_of_memory(model, number, in_backward=False, error=torch.OutOfMemoryError):
    """Let forward or backward number ``number`` through the last block fail, once."""
    count = [0]

    def fail():
        count[0] += 1
        if count[0] == number + 1:
            raise error("CUDA out of memory. Tried to allocate 2.00 GiB")

    def forward_hook(module, arguments, output):
        if not in_backward:
            fail()
        elif torch.is_grad_enabled():
            tensor = output if isinstance(output, torch.Tensor) else output[0]
            tensor.register_hook(lambda grad: fail())

    handle = model.blocks()[-1].register_forward_hook(forward_hook)
    try:
        yield count
    finally:
        handle.remove()


def weights(model):
    return {name: whole_of(p).detach().clone() for name, p in model.named_parameters()}


def assert_close(one, other, atol):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=atol)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bfloat16"])
def test_a_pass_that_fails_at_any_micro_batch_gives_what_it_would_have_given(untied_folder, one_rank, number, dtype):
    policy, (mini,) = policy_for(untied_folder, one_rank, 1, dtype=dtype), shares(batch(), 1, MIDDLE)
    assert len(mini.micro_batches) > 3
    expected = policy.compute_log_probs(mini.batch, mini.micro_batches, 0.9, True)
    with oom_retry(CPU, True) as record, out_of_memory(policy.model, number):
        results = policy.compute_log_probs(mini.batch, mini.micro_batches, 0.9, True)
    assert record.retries == 1
    assert record.cap <= MIDDLE // 2
    atol = 1e-5 if dtype == "fp32" else 5e-2
    torch.testing.assert_close(results.log_probs, expected.log_probs, rtol=0, atol=atol)
    torch.testing.assert_close(results.entropy, expected.entropy, rtol=0, atol=atol)


def test_what_was_computed_before_the_error_is_kept(untied_folder, one_rank):
    policy, (mini,) = policy_for(untied_folder, one_rank, 1), shares(batch(), 1, MIDDLE)
    num_bins = len(mini.micro_batches)
    with oom_retry(CPU, True), out_of_memory(policy.model, num_bins - 1) as count:
        policy.compute_log_probs(mini.batch, mini.micro_batches, 0.9, False)
    assert count[0] == num_bins + 2  # the last one failed, and its rows were computed in two


PLACES = [(0, False), (2, False), (0, True), (2, True)]
FSDP = [{"grad_offload": True}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "gradient_sync": "last"}, {"offload_policy": True}]


@pytest.mark.parametrize(
    ("number", "in_backward", "fsdp"),
    [*((*place, {}) for place in PLACES), *((2, True, fsdp) for fsdp in FSDP)],
)
def test_an_update_that_fails_at_any_micro_batch_is_the_same_update(untied_folder, one_rank, number, in_backward, fsdp):
    clean, policy = (policy_of(untied_folder, one_rank, fsdp) for _ in range(2))
    metrics = clean.update([share(budget=MIDDLE)], 0.9)
    mini = share(budget=MIDDLE)
    num_bins = len(mini.micro_batches)
    with oom_retry(CPU, True) as record, out_of_memory(policy.model, number, in_backward):
        again = policy.update([mini], 0.9)
    assert record.retries == 1
    assert len(mini.micro_batches) > num_bins
    assert max(mini.batch.row_tokens().cost(rows) for rows in mini.micro_batches) <= record.cap
    atol = 2e-2 if "dtype" in fsdp else 1e-5
    assert again == {name: pytest.approx(value, abs=atol, rel=atol) for name, value in metrics.items()}


SHARDED = {"offload_policy": True, "gradient_sync": "last"}


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(
    ("fsdp", "recomputes", "offloads"),
    [({}, False, False), ({}, False, True), ({}, True, True), (SHARDED, True, False)],
)
def test_no_gradient_of_the_failed_window_is_left(untied_folder, one_rank, in_backward, fsdp, recomputes, offloads):
    """One SGD step of size 1 shows the gradient, up to the sign."""
    after = []
    for fails in (False, True):
        policy, mini = policy_of(untied_folder, one_rank, fsdp, recompute=recomputes), share(budget=MIDDLE)
        policy.trained.optimizer = torch.optim.SGD(policy.model.parameters(), lr=1.0)
        policy.trained.schedule = torch.optim.lr_scheduler.LambdaLR(policy.trained.optimizer, lambda step: 1.0)
        if offloads:
            policy.trained.offload = ActivationOffload(policy.model, CPU, 1, 2)
        before = weights(policy.model)
        with oom_retry(CPU, True) as record, out_of_memory(policy.model, 2 if fails else 10_000, in_backward):
            policy.update([mini], 0.9)
        assert record.retries == int(fails)
        after.append({name: before[name] - weight for name, weight in weights(policy.model).items()})
    assert_close(after[1], after[0], 1e-5)
    assert max(float(gradient.abs().max()) for gradient in after[0].values()) > 1e-3


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_log_probs_of_a_restarted_update_are_those_of_its_second_forward(untied_folder, one_rank, in_backward):
    policy, mini = policy_of(untied_folder, one_rank), share(budget=MIDDLE)
    expected = policy.compute_log_probs(mini.batch, mini.micro_batches, 0.9, False).log_probs
    with oom_retry(CPU, True), out_of_memory(policy.model, 1, in_backward):
        updated = policy.update_on_policy(mini, 0.9)
    torch.testing.assert_close(updated.log_probs, expected, rtol=0, atol=1e-5)


def raising(text):
    class RaisedError(RuntimeError):
        def __init__(self, _):
            super().__init__(text)

    return RaisedError


@pytest.mark.parametrize(
    ("allowed", "error", "goes_on"),
    [
        (False, torch.OutOfMemoryError, False),
        (True, raising("CUDA error: out of memory"), True),  # the driver's own memory counts too
        (True, raising("shapes differ"), False),
    ],
)
def test_an_update_goes_on_with_leave_after_errors_about_memory_alone(untied_folder, one_rank, allowed, error, goes_on):
    policy, mini = policy_of(untied_folder, one_rank), share(budget=MIDDLE)
    ends = nullcontext() if goes_on else pytest.raises(error)
    with oom_retry(CPU, allowed) as record, out_of_memory(policy.model, 0, error=error), ends:
        policy.update([mini], 0.9)
    assert record.retries == int(goes_on)


def test_a_row_that_is_too_long_alone_is_raised(untied_folder, one_rank):
    policy, whole = policy_of(untied_folder, one_rank), batch()
    with oom_retry(CPU, True), out_of_memory(policy.model, 3), pytest.raises(torch.OutOfMemoryError):
        policy.compute_log_probs(whole, [[row] for row in range(16)], 0.9, False)


def test_each_error_is_logged_with_the_new_cap(untied_folder, one_rank, caplog):
    policy, mini = policy_of(untied_folder, one_rank), share(budget=MIDDLE)
    with oom_retry(CPU, True) as record, out_of_memory(policy.model, 0), caplog.at_level(logging.WARNING):
        policy.compute_log_probs(mini.batch, mini.micro_batches, 0.9, False)
    assert f"going on with at most {record.cap}" in caplog.text


WHOLE_LOGITS = {f"{AR}.model.logprob_chunk_tokens": 0}


def test_a_device_that_is_too_small_for_one_micro_batch_computes_it_in_several(made):
    """The limit is real: the tracker refuses the allocation that passes it."""

    def log_probs(worker):
        return worker.call("old_log_prob", True, "old_log_probs", batch(), [[*range(16)]], False)

    worker = made(WHOLE_LOGITS)
    free = log_probs(worker)
    rest = sum(tensor.nbytes for _, tensor in worker._resident())
    limit = rest + (free.memory.peak_allocated_bytes - rest) * 7 // 10
    with pytest.raises(DeviceMemoryError, match="old_log_prob: out of device memory"):
        log_probs(made(WHOLE_LOGITS, memory=Memory(device_limit_gb=limit / GIB)))
    reply = log_probs(made(WHOLE_LOGITS, memory=Memory(device_limit_gb=limit / GIB), adaptive_phases=("old_log_prob",)))
    torch.testing.assert_close(reply.value.log_probs, free.value.log_probs, rtol=0, atol=1e-5)
    assert reply.retries == 1
    assert reply.cap_after_error <= batch().row_tokens().cost(range(16)) // 2
    assert reply.budget_bytes == pytest.approx(limit, abs=1)
