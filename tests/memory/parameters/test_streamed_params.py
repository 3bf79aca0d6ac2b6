"""A frozen model that streams: the log-probs of one that stays, and two blocks of its parameters on the device."""

import gc

import pytest
import torch

from tests.model.architectures import tiny_folder
from tests.tensors import Operations
from tests.worker.test_policy import CPU, batch
from tests.worker.test_reward_scores import classifier, conversations
from verl_memopt.config.schema import Fsdp, Model, ScoringModel
from verl_memopt.errors import HostMemoryError
from verl_memopt.memory.host_buffers import ALIGNMENT, host_allocator, host_limits
from verl_memopt.model.assembly import ModelUse, build_policy, build_reward_model, materialize, materialize_critic
from verl_memopt.model.packing_check import REWARD_KEY
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import named_weights
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.worker.policy import compute_log_probs, compute_scores
from verl_memopt.worker.roles import quantization_error

PRECISIONS = {"fp32": ("fp32", "fp32"), "cast": ("fp32", "bfloat16"), "bf16": ("bfloat16", "bfloat16")}


def frozen(folder, mesh, streams, precision="fp32", quantization="none", **model):
    masters, compute = PRECISIONS[precision]
    fsdp = Fsdp(model_dtype=masters, dtype=compute, param_offload="stream" if streams else False)
    settings = Model(path=str(folder), logprob_chunk_tokens=8, **{"attn_implementation": "sdpa", **model})
    policy = build_policy(settings, fsdp, folder, mesh, CPU, ModelUse(quantization=quantization))
    policy.requires_grad_(False)
    materialize(policy, folder, CPU)
    return policy


def log_probs(model, parts=3):
    rows = list(range(batch().num_rows))
    micro_batches = [rows[part::parts] for part in range(parts)]
    return compute_log_probs(model, batch(), micro_batches, 0.9, False, CPU).log_probs


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    """A model of an odd number of blocks. The matrix of its vocabulary is larger than two of them where it is tied."""
    vocab = 4096 if request.param else 320
    shape = TinyShape(vocab_size=vocab, hidden_size=64, intermediate_size=192, num_layers=5, tie_embeddings=request.param)
    return make_tiny_model(tmp_path_factory.mktemp("streamed") / "model", shape, seed=4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_log_probs_are_those_of_a_model_that_stays_to_the_last_bit(folder, one_rank, precision):
    stays, streams = (log_probs(frozen(folder, one_rank, each, precision)) for each in (False, True))
    assert torch.equal(stays, streams)


@pytest.mark.parametrize(
    "more",
    [{"quantization": "int8"}, {"quantization": "nf4"}, {"block_tile_tokens": 4}, {"recompute_elementwise": False}],
    ids=str,
)
def test_the_other_knobs_of_a_frozen_model_work_with_it(folder, one_rank, more):
    stays, streams = (frozen(folder, one_rank, each, "cast", **more) for each in (False, True))
    assert torch.equal(log_probs(stays), log_probs(streams))
    if "quantization" in more:
        assert quantization_error(stays, folder, CPU, 1.0) == quantization_error(streams, folder, CPU, 1.0)


@pytest.mark.parametrize("kind", ["olmo2", "gemma2", "phi"])
def test_a_model_whose_blocks_transformers_computes_streams_too(tmp_path, one_rank, kind):
    """The first gets rotary tables in fp32, which FSDP2 casts; the second scales its embedding; the third's head has a bias."""
    other = tiny_folder(tmp_path / "model", kind, 0.02)
    stays, streams = (log_probs(frozen(other, one_rank, each, "cast", attn_implementation="auto")) for each in (False, True))
    assert torch.equal(stays, streams)


def test_two_blocks_or_a_matrix_are_on_the_device_and_never_the_model(folder, one_rank):
    gc.collect()
    held = host_allocator().held_bytes
    with ByteTracker() as tracker:
        tracker.enter("init")
        model = frozen(folder, one_rank, True)
        size = sum(weight.nbytes for _, weight in named_weights(model))
        norm = model.decoder.norm.weight.nbytes
        block = sum(weight.nbytes for weight in model.blocks()[0].parameters())
        assert norm <= tracker.peaks[DEVICE].bytes < block / 4
        tracker.enter("pass")
        log_probs(model)
        most = max(2 * block, model.embedding_weight.nbytes)
        assert most <= tracker.most()["params"] <= 1.02 * most
        assert "params" not in tracker.kinds(DEVICE)
    padding = ALIGNMENT * len(list(model.parameters()))
    assert size - norm <= host_allocator().held_bytes - held <= size + padding


def test_a_host_too_small_is_told_before_a_weight_is_read(folder, one_rank):
    with host_limits(2**16, None), pytest.raises(HostMemoryError, match=r"memory\.host_limit_gb=.*: params needs .* Raise it"):
        frozen(folder, one_rank, True)


def test_each_micro_batch_brings_the_model_once(folder, one_rank):
    model, found = frozen(folder, one_rank, True), []

    def look(func, args, kwargs):  # whole units come as bytes
        found[-1] += args[0].nbytes if func is torch.ops.aten.copy_.default and args[0].dtype == torch.uint8 else 0

    for parts in (3, 1):
        found.append(0)
        with Operations(look):
            log_probs(model, parts)
    again = model.embedding_weight.nbytes if model.tied else 0  # the head of one micro-batch is the embedding of the next
    whole = model.stream.num_bytes + again
    assert found == [3 * whole - 2 * again, whole]


def test_a_pass_that_fails_leaves_a_model_that_computes_as_before(folder, one_rank):
    model = frozen(folder, one_rank, True)
    before = log_probs(model)
    broken = model.blocks()[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with ByteTracker() as tracker:
        with pytest.raises(ZeroDivisionError):
            log_probs(model)
        broken.remove()
        assert tracker.kinds(DEVICE)["params"] > 0
        model.stream.to_host()
        assert tracker.kinds(DEVICE).get("params", 0) == 0
    assert torch.equal(log_probs(model), before)


def test_a_reward_model_streams_and_keeps_its_head_in_fp32(tmp_path, tiny_folder, one_rank):
    scorer, _ = classifier(tmp_path / "scorer", tiny_folder)
    found = []
    for offload in (False, "stream"):
        settings = ScoringModel(fsdp_config=Fsdp(param_offload=offload))
        model = build_reward_model(settings, Model(path=str(tiny_folder)), scorer, one_rank, CPU)
        model.requires_grad_(False)
        materialize_critic(model, scorer, CPU, REWARD_KEY)
        found.append(compute_scores(model, conversations(False), [[0, 1], [2, 3, 4]], CPU))
    assert torch.equal(*found)
    assert model.head.weight.dtype == torch.float32
