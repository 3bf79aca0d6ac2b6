"""Blocks that run as graphs. A graph of a CPU stands in for a CUDA graph: it repeats the operations on the tensors it saw."""

import logging

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.memory.sharded import WHOLE, policy_of, share
from tests.worker.test_policy import batch, micro_batches, shares
from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import Model, TrainedFsdp
from verl_memopt.memory.resharding_torch import abandon_pass
from verl_memopt.memory.token_packing import SIZES_IN_OCTAVE, bucket_of
from verl_memopt.model.assembly import ModelUse, build_policy
from verl_memopt.model.captured_block import CapturedBlocks

GRAPHS = {"cuda_graphs": True}
HALF = {"dtype": "bfloat16"}
BF16_AT_REST = HALF | {"model_dtype": "bfloat16"}


class Recording(TorchDispatchMode):
    """Keeps operations with their very tensors, so that :meth:`replay` does what a CUDA graph would do.

    Like a capture, it leaves the tensors of others as they were.
    """

    def __init__(self):
        super().__init__()
        self._operations, self._made, self._before = [], {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a capture must not read values"
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made:
                self._before.setdefault(storage._cdata, (storage, storage.clone()))
        result = func(*args, **(kwargs or {}))
        self._made |= {tensor.untyped_storage()._cdata: tensor for tensor in _tensors(result) if not self._is_known(tensor)}
        if func._schema.is_mutable or not any(argument.alias_info for argument in func._schema.arguments):
            self._operations.append((func, args, kwargs or {}, result))
        return result

    def _is_known(self, tensor):
        return tensor.untyped_storage()._cdata in {*self._before, *self._made}

    def __exit__(self, *exception):
        super().__exit__(*exception)
        for storage, before in self._before.values():
            storage.copy_(before)

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, result in self._operations:
                again = func(*args, **kwargs)
                if not func._schema.is_mutable:
                    for room, values in zip(_tensors(result), _tensors(again), strict=True):
                        room.copy_(values)


def _tensors(result):
    return [value for value in tree_iter(result) if isinstance(value, torch.Tensor)]


class Recorder:
    """Stands in for CUDA graphs, and counts captures and replays."""

    def __init__(self):
        self.captures = self.replays = 0

    def warm_up(self, function):
        function()

    def capture(self, function):
        self.captures += 1
        with Recording() as recording:
            function()

        def replay():
            self.replays += 1
            recording.replay()

        return replay


def captured(folder, mesh, settings=None, recorder=None):
    policy = policy_of(folder, mesh, (settings or {}) | GRAPHS, recompute=True)
    if recorder is not None:
        assert all(block.captured is policy.model.graphs is not None for block in policy.model.blocks())
        policy.model.graphs = CapturedBlocks(recorder)
        for block in policy.model.blocks():
            block.captured = policy.model.graphs
    return policy


def outcome(policy, minis):
    """Returns log-probs of all rows of all mini-batches, and the sum of their gradients, in two vectors."""
    found = [policy.compute_log_probs(mini.batch, mini.micro_batches, 0.9, False).log_probs for mini in minis]
    for mini in minis:
        policy.accumulate(micro_batches(mini), mini.counts, 0.9)
    return torch.cat(found), torch.cat([parameter.grad.flatten().float() for parameter in policy.model.parameters()])


def minis(count=3, budget=60):
    return [shares(batch(seed=seed), 1, budget)[0] for seed in range(count)]


@pytest.mark.parametrize("settings", [{}, HALF, BF16_AT_REST], ids=["fp32", "bf16 over fp32", "bf16"])
def test_a_graph_does_for_every_block_and_length_what_the_functions_do(tiny_folder, one_rank, settings):
    recorder = Recorder()
    called = outcome(captured(tiny_folder, one_rank, settings), minis())
    replayed = outcome(captured(tiny_folder, one_rank, settings, recorder), minis())
    assert recorder.replays > 3 * recorder.captures > 0
    for values, expected in zip(replayed, called, strict=True):
        assert torch.equal(values, expected)


@pytest.mark.parametrize(
    ("settings", "nats", "share_of_gradient"), [({}, 2e-6, 1e-6), (HALF, 6e-3, 1e-2), (BF16_AT_REST, 6e-3, 1e-2)],
    ids=["fp32", "bf16 over fp32", "bf16"],
)  # fmt: skip
def test_captured_blocks_compute_what_blocks_compute(tiny_folder, one_rank, settings, nats, share_of_gradient):
    plain = outcome(policy_of(tiny_folder, one_rank, settings, recompute=True), minis())
    found = outcome(captured(tiny_folder, one_rank, settings, Recorder()), minis())
    assert (found[0] - plain[0]).abs().max() <= nats
    assert (found[1] - plain[1]).norm() <= share_of_gradient * plain[1].norm()


def test_nothing_new_is_captured_once_every_size_was_seen(tiny_folder, one_rank):
    recorder = Recorder()
    policy = captured(tiny_folder, one_rank, {}, recorder)
    steps = minis(20)
    for mini in [*steps, *steps]:
        policy.update([mini], 0.9)
    seen = recorder.captures
    sizes = {bucket_of(mini.batch.row_tokens().cost(rows), 60) for mini in steps for rows in mini.micro_batches}
    assert 0 < seen <= 4 * len(sizes)
    for mini in steps:
        policy.update([mini], 0.9)
    assert recorder.captures == seen


def test_what_cannot_be_captured_runs_as_it_is_and_is_said(tiny_folder, one_rank, caplog):
    class Failing(Recorder):
        def capture(self, function):
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    called = outcome(captured(tiny_folder, one_rank), minis())
    with caplog.at_level(logging.WARNING):
        found = outcome(captured(tiny_folder, one_rank, {}, Failing()), minis())
    assert all(torch.equal(values, expected) for values, expected in zip(found, called, strict=True))
    assert "operation not permitted when stream is capturing" in caplog.text


def test_blocks_begin_anew_after_their_graphs_were_freed(tiny_folder, one_rank):
    recorder = Recorder()
    policy, expected = captured(tiny_folder, one_rank, {}, recorder), outcome(captured(tiny_folder, one_rank), minis())
    outcome(policy, minis())
    before = recorder.captures
    policy.trained.optimizer.zero_grad()
    abandon_pass(policy.model)
    assert all(torch.equal(*pair) for pair in zip(outcome(policy, minis()), expected, strict=True))
    assert recorder.captures == 2 * before


def test_what_an_earlier_micro_batch_left_in_the_buffers_changes_nothing(tiny_folder, one_rank):
    policy = captured(tiny_folder, one_rank, {}, Recorder())
    whole, small = share(0, 1, WHOLE), share()
    expected = outcome(captured(tiny_folder, one_rank, {}, Recorder()), [whole, small])
    bad = whole.batch.advantages.clone()
    whole.batch.advantages[:] = float("nan")
    policy.accumulate(micro_batches(whole), whole.counts, 0.9)
    assert any(not parameter.grad.isfinite().all() for parameter in policy.model.parameters())
    policy.trained.optimizer.zero_grad()
    whole.batch.advantages[:] = bad
    for values, same in zip(outcome(policy, [whole, small]), expected, strict=True):
        assert torch.equal(values, same)


@pytest.mark.parametrize(
    ("settings", "model", "recompute", "reason"),
    [
        ({}, {}, False, "not checkpointed"),
        ({}, {"gradient_checkpointing_mode": "selective"}, True, "not checkpointed in mode full"),
        ({}, {"recompute_elementwise": False}, True, "recompute_elementwise"),
        ({}, {"block_tile_tokens": 16}, True, "block_tile_tokens"),
        ({}, {"lora_rank": 4}, True, "adapters"),
        ({"offload_policy": True}, {}, True, "offload_policy"),
    ],
)  # fmt: skip
def test_blocks_that_cannot_be_captured_are_named_with_the_reason(
    tiny_folder, one_rank, caplog, settings, model, recompute, reason
):
    fsdp = replaced(TrainedFsdp(dtype="fp32"), settings | GRAPHS)
    section = replaced(Model(path=str(tiny_folder), attn_implementation="sdpa"), model)
    with caplog.at_level(logging.WARNING):
        policy = build_policy(
            section, fsdp, tiny_folder, one_rank, torch.device("cpu"), ModelUse(recompute=recompute, trained=True)
        )
    said = [record.getMessage() for record in caplog.records if "cuda_graphs" in record.getMessage()]
    assert len(said) == 1
    assert reason in said[0]
    assert all(getattr(block, "captured", None) is None for block in policy.blocks())


def test_padding_is_at_most_an_eighth_and_sizes_are_few():
    for tokens in range(8, 20_000, 7):
        assert tokens <= bucket_of(tokens) <= tokens * (1 + 1 / SIZES_IN_OCTAVE) + 1
        assert bucket_of(bucket_of(tokens)) == bucket_of(tokens)
    for largest in (64, 1_000, 16_384):
        sizes = {bucket_of(tokens, largest) for tokens in range(1, largest + 1)}
        assert largest // 4 <= min(sizes)
        assert len(sizes) <= 2 * SIZES_IN_OCTAVE + 1
