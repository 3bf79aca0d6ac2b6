"""Gradients that rest on the host: the same step bit for bit, and no more than two blocks' of them on the device.

Those of a matrix of the vocabulary that is larger than a bucket come and go in tiles.
"""

import gc
import math
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from tests.memory.optimizers import whole_share
from tests.memory.sharded import assert_equal_runs, local, policy_of, three_steps, wide_model
from tests.ranks import run_ranks
from tests.tensors import Operations
from tests.virtual_gpu.late_streams import late_streams
from tests.worker.test_policy import ACTOR, CPU, micro_batches
from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import Model, TrainedFsdp
from verl_memopt.distributed.device import training_mesh
from verl_memopt.memory.bucketed_adamw_torch import BucketedAdamW
from verl_memopt.memory.chunked_logprob_torch import head_log_probs
from verl_memopt.memory.embedding_gradient import TrainedEmbedding, _SortedIds, tiles_of
from verl_memopt.memory.fused import recorded_calls
from verl_memopt.memory.grad_offload_torch import KIND, OffloadedGradients
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.memory.logit_tiles import Head
from verl_memopt.memory.precision import MixedPrecision
from verl_memopt.memory.teaching import Divergence, Teaching
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.observe.byte_tracker import ByteTracker
from verl_memopt.observe.phase import MIB
from verl_memopt.worker.policy import Policy

SPLIT = {"dtype": "bfloat16", "split_master_weights": True}
KINDS = {
    "state on the device": ({}, 1),
    "state on the host": ({"optimizer_offload": True}, 4),
    "split masters, bfloat16 gradients": (SPLIT | {"mixed_precision": MixedPrecision(reduce_dtype="bfloat16")}, 2),
    "sharded": ({"dtype": "bfloat16"}, 4),
}
"""Settings, and the number of micro-batches."""


def policy(folder, mesh, offload, fsdp=None, world_size=1, recompute=False, **optim):
    plain = policy_of(folder, mesh, fsdp, world_size, recompute)
    fsdp = replaced(plain.actor.fsdp_config, {"grad_offload": offload})
    actor = replaced(plain.actor, {"fsdp_config": fsdp, "optim": replaced(ACTOR.optim, optim)})
    return Policy(plain.model, actor, 10, world_size, CPU)


def cut(mini, count):
    """Gives the rows of a rank in so many micro-batches."""
    rows = range(mini.batch.num_rows)
    mini.micro_batches[:] = [list(rows[at::count]) for at in range(count)]
    return mini


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_are_those_of_gradients_on_the_device_bit_for_bit(tmp_path, one_rank, kind):
    fsdp, count = KINDS[kind]
    folder = wide_model(tmp_path, tie_embeddings=kind != "sharded")
    found, expected = (
        three_steps(policy(folder, one_rank, offload, fsdp, clip_grad=0.5), cut(whole_share(), count))
        for offload in (True, False)
    )
    assert_equal_runs(found, expected)
    assert all(metrics["actor/grad_norm"] > 0.5 for _, metrics in found[0])


def two_rank_steps(rank, folder):
    mesh, mini = training_mesh("cpu", 2, -1), cut(whole_share(rank, 2), 4)
    assert_equal_runs(
        *(three_steps(policy(folder, mesh, offload, world_size=2, clip_grad=0.5), mini) for offload in (True, False))
    )


def test_two_ranks_take_the_steps_of_gradients_on_the_device_bit_for_bit(wide):
    run_ranks(two_rank_steps, 2, wide)


def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was_and_the_next_step_begins_anew(wide, one_rank):
    one, other = (policy(wide, one_rank, offload) for offload in (True, False))
    before = [local(parameter).clone() for parameter in one.model.parameters()]
    for each in (one, other):
        broken = whole_share()
        broken.batch.advantages = broken.batch.advantages * math.inf
        assert each.update([broken], 0.9)["actor/skipped_updates"] == 1
    assert all(torch.equal(was, local(now)) for was, now in zip(before, one.model.parameters(), strict=True))
    assert_equal_runs(*(three_steps(each, cut(whole_share(), 2)) for each in (one, other)))


@pytest.mark.parametrize(
    ("streams", "vocabulary"), [(nullcontext, 4096), (nullcontext, 320), (late_streams, 4096)], ids=["at once", "small", "late"]
)
def test_on_the_device_is_one_matrix_of_the_vocabulary_or_two_blocks_at_most(tmp_path, one_rank, vocabulary, streams):
    folder = wide_model(tmp_path, vocab_size=vocabulary)
    found = {}
    for offload in (False, True):
        with streams(), ByteTracker() as tracker:
            one, mini = policy(folder, one_rank, offload, recompute=True), cut(whole_share(), 2)
            tracker.mark("params", one.model.parameters())
            one.accumulate(micro_batches(mini), mini.counts, 0.9)
            found[offload] = tracker.most()[KIND], tracker.kinds()[KIND] if not offload else tracker.kinds().get(KIND, 0)
            on_host = tracker.kinds("host").get(KIND, 0)
    params = [parameter.numel() for parameter in one.model.parameters()]
    block = sum(parameter.numel() for parameter in one.model.blocks()[0].parameters())
    labelled = 4 * (sum(params) - 64)  # all but that of the final norm
    assert found[False] == (labelled, labelled)
    most, left = found[True]
    if streams is nullcontext:  # the last ones may leave late
        assert left <= 4 * len(params)  # norms
    assert most <= 4 * max(2 * block, vocabulary * 64) + 4 * (len(params) + 64)  # norms, and the gradient of the final one
    assert on_host == 4 * sum(params)


def test_a_policy_that_is_let_go_leaves_nothing_on_the_host(wide, one_rank):
    gc.collect()
    held = host_allocator().held_bytes
    one = policy(wide, one_rank, True)
    three_steps(one, whole_share())
    optimizer = weakref.ref(one.trained.optimizer)
    assert host_allocator().held_bytes - held == 4 * sum(parameter.numel() for parameter in one.model.parameters())
    del one
    gc.collect()
    assert optimizer() is None
    assert host_allocator().held_bytes == held


BUCKET = 0.1
"""MiB. Three tiles of 128 rows in fp32 fit, of the 4,096 rows of the wide model; on two ranks 64 of each."""
HALF = {"dtype": "bfloat16"}
TILED = {
    "tied": ({}, True, 1e-7),
    "not tied": ({}, False, 1e-7),
    "split masters, bfloat16 gradients": (
        HALF | {"split_master_weights": True, "mixed_precision": MixedPrecision(reduce_dtype="bfloat16")}, False, 1e-5,
    ),
    # FSDP2 adds head and embedding in bfloat16 before it reduces their sum; tiles are added in fp32.
    "gathered and tied": (HALF, True, 2**-8),
}  # fmt: skip
"""Settings, whether head and embedding are tied, and how far the gradient of a matrix may be from that of a whole one."""


def learner(folder, mesh, fsdp, chunk=8, bucket=BUCKET, world_size=1):
    """Gives a policy whose gradients rest on the host, with logits of so many tokens at once."""
    fsdp = replaced(TrainedFsdp(dtype="fp32"), fsdp | {"grad_offload": True})
    settings = Model(path=str(folder), attn_implementation="sdpa", logprob_chunk_tokens=chunk)
    model = build_policy(settings, fsdp, folder, mesh, CPU, ModelUse(recompute=True, trained=True))
    materialize(model, folder, CPU)
    optim = replaced(ACTOR.optim, {"bucket_megabytes": bucket, "clip_grad": 0.5})
    return Policy(model, replaced(ACTOR, {"fsdp_config": fsdp, "entropy_coeff": 0.0, "optim": optim}), 10, world_size, CPU)


def on_the_host(one):
    """Gives what each parameter's gradient is on the host, and the bytes of the buffers that hold them."""
    (optimizer,) = [one.trained.optimizer]
    found = {}
    for section in optimizer._sections:
        for member in section.members:
            part = section.gradients[member.start : member.start + member.numel]
            found[id(member.parameter)] = part.view(local(member.parameter).shape)
    return {name: found[id(each)].clone() for name, each in one.model.named_parameters()}


def learned(one, mini):
    """Gives the gradients of a mini-batch and their norm."""
    one.accumulate(micro_batches(mini), mini.counts, 0.9)
    return on_the_host(one), one.trained._norm()


def relative(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def check_tiles(found, expected, bound):
    """Checks gradients that came in tiles against whole ones: of the vocabulary within a bound, and all others bit for bit."""
    for name, each in found.items():
        if bound and each.ndim == 2 and "layers" not in name:
            assert (each - expected[name]).norm() <= bound * expected[name].norm(), name
        else:
            assert torch.equal(each, expected[name]), name


@pytest.mark.parametrize("kind", TILED)
def test_matrices_of_the_vocabulary_have_in_tiles_the_gradients_that_they_have_whole(tmp_path, one_rank, kind):
    fsdp, tied, bound = TILED[kind]
    folder = wide_model(tmp_path, tie_embeddings=tied)
    for count, chunk in ((4, 8), (2, 512)):
        mini = cut(whole_share(), count)
        (found, norm), (expected, _) = (learned(learner(folder, one_rank, fsdp, chunk, size), mini) for size in (BUCKET, 64))
        # One chunk has all tokens, so the gradient of its logits is the same.
        check_tiles(found, expected, bound if chunk == 8 or kind == "gathered and tied" else 0)
        exact = math.sqrt(sum(each.double().square().sum() for each in found.values()))
        digits = 1e-2 if "bfloat16" in kind else 2e-6  # norms of other tensors are rounded to bfloat16
        assert float(norm) == pytest.approx(exact, rel=digits)


def two_ranks_in_tiles(rank, folder, fsdp):
    mini = cut(whole_share(rank, 2), 2)
    return [
        learned(learner(folder, training_mesh("cpu", 2, -1), fsdp, 512, size, 2), mini)[0] for size in (BUCKET, 64)
    ]  # fmt: skip


@pytest.mark.parametrize(("tied", "bound"), [(False, 0), (True, 1e-6)])
def test_on_two_ranks_each_reduces_its_rows_of_a_tile(tmp_path, tied, bound):
    for found, expected in run_ranks(two_ranks_in_tiles, 2, wide_model(tmp_path, tie_embeddings=tied, vocab_size=4095), {}):
        check_tiles(found, expected, bound)


@pytest.mark.parametrize(("streams", "tied"), [(nullcontext, True), (late_streams, False)], ids=["at once, tied", "late"])
def test_a_matrix_of_the_vocabulary_in_tiles_takes_a_bucket_of_the_device(tmp_path, one_rank, tied, streams):
    folder, found = wide_model(tmp_path, tie_embeddings=tied), {}
    expected, _ = learned(learner(folder, one_rank, {}), cut(whole_share(), 3))
    with streams(), ByteTracker() as tracker:
        one = learner(folder, one_rank, {})
        tracker.mark("params", one.model.parameters())
        tracker.enter("update")
        mini = cut(whole_share(), 3)
        one.accumulate(micro_batches(mini), mini.counts, 0.9)
        one.trained._norm()
        found = on_the_host(one)
    block = 4 * sum(parameter.numel() for parameter in one.model.blocks()[0].parameters())
    assert BUCKET * MIB < block < 4 * 4096 * 64
    # Also the sums so far of a block's largest tensor, norms, and the gradient of the final norm.
    assert tracker.most()[KIND] <= 2 * block + 4 * 64 * 256 + 4 * 200
    assert check_tiles(found, expected, 0) is None


def crossed(folder, mesh, bucket, count):
    """Gives the elements that an update copies to the host buffers of gradients, and from them."""
    one, mini, found = learner(folder, mesh, {}, bucket=bucket), cut(whole_share(), count), [0, 0]
    buffers = {section.gradients.untyped_storage()._cdata for section in one.trained.optimizer._sections}

    def look(func, args, kwargs):
        if func is torch.ops.aten.copy_.default:
            for place, each in enumerate(args[:2]):
                found[place] += args[1].numel() * (each.untyped_storage()._cdata in buffers)

    with Operations(look):
        one.accumulate(micro_batches(mini), mini.counts, 0.9)
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_tiles_cross_the_bus_as_often_as_whole_matrices_or_less(tmp_path, one_rank, tied):
    """The ids of the batch are below 256, so the embedding has tokens in two of its 32 tiles."""
    folder = wide_model(tmp_path, tie_embeddings=tied)
    for count in (1, 3):
        found, expected = (crossed(folder, one_rank, bucket, count) for bucket in (BUCKET, 64))
        # A head that is tied has begun each gradient of the embedding.
        spared = (count if tied else count - 1) * 30 * 128 * 64
        assert [whole - tiles for tiles, whole in zip(found, expected, strict=True)] == [spared, spared]


def one_matrix(vocabulary=700, hidden=16, bucket=0.02):
    """Gives an embedding, and what takes the gradient of its weight to the host, in 11 tiles of 64 rows or whole."""
    torch.manual_seed(5)
    embedding = TrainedEmbedding(nn.Embedding(vocabulary, hidden))
    optimizer = BucketedAdamW([embedding.weight], lr=1e-3, bucket_megabytes=bucket)
    return embedding, OffloadedGradients(optimizer, [], [embedding]), optimizer._sections[0].gradients.view(vocabulary, hidden)


def ahead(rows, log_probs, entropy):
    return torch.full_like(log_probs, 0.5), None if entropy is None else torch.full_like(entropy, 0.25)


HEADS = {
    "plain": {},
    "whole rows": {"vocab_tile": 700},
    "tiles of logits": {"vocab_tile": 90},
    "entropy": {"with_entropy": True},
    "capped": {"cap": 2.0, "with_entropy": True},
    "compiled": {"compiled": True, "with_entropy": True},
    "all tokens at once": {"chunk_tokens": 0},
}


@pytest.mark.parametrize("told", [True, False], ids=["told ahead", "in backward"])
@pytest.mark.parametrize("name", HEADS)
def test_a_tied_matrix_in_tiles_has_the_gradient_of_float64(name, told):
    ids, targets = (torch.randint(0, 700, (29,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    options = {"temperature": 0.7, "chunk_tokens": 7, "vocab_tile": 0} | HEADS[name]
    embedding, home, found = one_matrix()
    for _ in range(2):
        head = Head(embedding.weight, None, **options)
        with recorded_calls(lambda function, tensors, others, _: function(*tensors, *others)):
            values = head_log_probs(head, embedding(ids), targets, ahead if told else None, in_place=True)
            sum(each.sum() * share for each, share in zip(values, (0.5, 0.25), strict=True) if each is not None).backward()
    exact = embedding.weight.detach().double().requires_grad_()
    logits = exact[ids] @ exact.T
    logits = logits if head.cap is None else head.cap * torch.tanh(logits / head.cap)
    log_p = (logits / 0.7).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1) if head.with_entropy else torch.zeros(29)
    (2 * (0.5 * log_p.gather(-1, targets[:, None]).sum() + 0.25 * entropy.sum())).backward()
    assert relative(found, exact.grad) <= 8e-7
    assert float(home.norm()) == pytest.approx(float(exact.grad.norm()), rel=1e-6)


@pytest.mark.parametrize("told", [True, False], ids=["told ahead", "in backward"])
@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_a_tied_matrix_in_tiles_learns_from_a_teacher_of_fewer_entries(kind, told):
    ids, targets = (torch.randint(0, 500, (29,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    embedding, home, found = one_matrix()
    draw = torch.Generator().manual_seed(3)
    weight, states = torch.randn(610, 9, generator=draw), torch.randn(29, 9, generator=draw)
    # Warm, because the tied matrix predicts its own inputs with large logits.
    head, teacher = Head(embedding.weight, None, 4.0, 7, 90 if told else 0), Head(weight, None, 4.0, 0, 0)

    def ahead(rows, log_probs, entropy):
        return torch.zeros_like(log_probs), None, torch.full_like(log_probs, 0.5)

    more = {"in_place": True, "teaching": Teaching(Divergence(kind), teacher, states)}
    for _ in range(2):
        values = head_log_probs(head, embedding(ids), targets, ahead if told else None, **more)
        (0.5 * values[2].sum()).backward()
    exact = embedding.weight.detach().double().requires_grad_()
    a = ((exact[ids] @ exact.T)[:, :610] / 4.0).log_softmax(-1)
    b = ((states.double() @ weight.double().T) / 4.0).log_softmax(-1)
    log_m = torch.logaddexp(a, b) - math.log(2)
    p, q = {"reverse_kl": (a, b), "forward_kl": (b, a), "jsd": (a, log_m)}[kind]
    value = (p.exp() * (p - q)).sum()
    if kind == "jsd":
        value = 0.5 * value + 0.5 * (b.exp() * (b - log_m)).sum()
    value.backward()
    assert relative(found, exact.grad) <= 2e-6
    assert float(home.norm()) == pytest.approx(float(exact.grad.norm()), rel=2e-6)


SHARDS = 333
"""Rows over two ranks: the second has one less, and neither has whole tiles."""
FIRST, LAST = [0, 5, 5, 166, 167], [100, 237, 300, 332, 332]
"""Tokens of the first and the last of three tiles, and of the second and the last."""


def sums_of_tiles(rank):
    """Gives this rank's rows of a gradient after two micro-batches, of which each rank has other tokens."""
    mesh, width = training_mesh("cpu", 2, -1), 16
    rows = nn.Parameter(distribute_tensor(torch.zeros(SHARDS, width), mesh, [Shard(0)]))
    optimizer = BucketedAdamW([rows], lr=1e-3, bucket_megabytes=0.008)
    whole, module = nn.Parameter(torch.zeros(SHARDS, width)), nn.Module()
    module.weight = rows
    home = OffloadedGradients(optimizer, [], [module])
    home.adopt(whole, rows)
    for ids in ((FIRST, LAST), (LAST, FIRST)):
        ids = torch.tensor(ids[rank])
        _SortedIds(ids, home.tiles(whole)).add_rows(ids[:, None] + torch.ones(len(ids), width))
    assert home.tiles(whole).count == 3
    return optimizer._sections[0].gradients.view(-1, width)[:, 0].tolist()


def test_ranks_with_tokens_of_other_tiles_add_to_the_rows_of_each_though_shards_are_no_whole_tiles():
    expected = [0.0] * SHARDS
    for token in FIRST + LAST:
        expected[token] += token + 1.0  # twice, in the mean of two ranks
    first, second = run_ranks(sums_of_tiles, 2, timeout=60)
    assert first + second == expected


def test_a_pass_that_fails_in_the_middle_of_its_tiles_leaves_nothing_to_the_next_one():
    def add_to_each(fails):
        for tile in tiles_of(embedding.weight).passing():
            tile.rows.add_(1)
            assert not fails or tile.number < 4

    with late_streams():
        embedding, home, found = one_matrix()
        with pytest.raises(AssertionError):
            add_to_each(True)
        add_to_each(False)
        add_to_each(False)
        assert float(home.norm()) == pytest.approx(2 * math.sqrt(found.numel()))
    assert torch.equal(found, torch.full_like(found, 2.0))
