import dataclasses
import gc
import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import run_ranks
from tests.tensors import local_of, whole_of
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Actor, Fsdp, Model, Optim, TrainedFsdp
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.distributed.device import training_mesh
from verl_memopt.distributed.sharded_state import load_training_state, save_training_state
from verl_memopt.memory.lora_torch import initialize_adapters
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.weights import named_weights
from verl_memopt.observe.device_ledger import state_tensors
from verl_memopt.trainer.micro_batching import Budget, cut_ranks, rows_per_rank
from verl_memopt.worker.policy import Policy
from verl_memopt.worker.trained_model import MiniBatch, micro_batch

CPU = torch.device("cpu")
ACTOR = Actor(
    use_prefix_grouper=False,
    use_dynamic_bsz=True,
    clip_ratio_low=0.2,
    clip_ratio_high=0.2,
    entropy_coeff=0.01,
    use_kl_loss=True,
    kl_loss_coef=0.1,
    optim=Optim(lr=1e-2),
)
WHOLE, SMALL = 10_000, 17


def batch(rows=16, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def sizes(low, high):
        return torch.randint(low, high, (rows,), generator=generator).tolist()

    def ids(lengths):
        return Ragged.from_rows([torch.randint(256, (n,), generator=generator) for n in lengths], torch.int64)

    prompts, responses = ids(sizes(2, 9)), ids([0, *sizes(1, 9)[1:]])
    tokens = int(responses.lengths.sum())
    old, reference, advantages = (torch.randn(tokens, generator=generator) for _ in range(3))
    return RolloutBatch(
        prompts=prompts,
        responses=responses,
        group=torch.arange(rows) // 4,
        old_log_probs=old * 0.05 - 5.7,
        ref_log_probs=reference * 0.05 - 5.7,
        advantages=advantages,
        batch_size=[],
    )


def policy_for(folder, mesh, world_size, attention="sdpa", recompute=False, dtype="fp32", actor=ACTOR, fill=True, prune=True):
    settings = Model(path=str(folder), attn_implementation=attention, logprob_chunk_tokens=8, prune_last_block=prune)
    model = build_policy(settings, Fsdp(dtype=dtype), folder, mesh, CPU, ModelUse(recompute=recompute))
    if fill:
        materialize(model, folder, CPU)
    return Policy(model, actor, 10, world_size, CPU)


def shares(whole, world_size, budget):
    tokens, sizes = whole.row_tokens(), whole.responses.sizes()
    rows = rows_per_rank(tokens, range(whole.num_rows), world_size, True)
    names = [[str(row) for row in own] for own in rows]
    micro = cut_ranks([tokens.select(own) for own in rows], names, Budget(True, budget, None, "key"))
    counts = GlobalCounts(float(sum(sizes)), float(whole.num_rows))
    return [MiniBatch(whole.select(own), bins, counts) for own, bins in zip(rows, micro, strict=True)]


def micro_batches(mini):
    return [micro_batch(mini.batch, rows) for rows in mini.micro_batches]


def accumulated(policy, mini):
    return policy.accumulate(micro_batches(mini), mini.counts, 0.9)


def first_step(folder, mesh, rank=0, world_size=1, budget=WHOLE, **options):
    """Gives this rank's loss and gradient norm of one step, and the whole gradients."""
    policy = policy_for(folder, mesh, world_size, **options)
    mini = shares(batch(), world_size, budget)[rank]
    accumulated(policy, mini)
    gradients = {name: whole_of(parameter.grad).clone() for name, parameter in named_weights(policy.model)}
    policy.trained.optimizer.zero_grad()
    metrics = policy.update([mini], 0.9)
    return metrics, gradients


def relative(one, other):
    return abs(one - other) / abs(other)


def assert_same_step(found, expected):
    for name in ("actor/loss", "actor/grad_norm"):
        assert relative(found[0][name], expected[0][name]) <= 1e-5, name
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= 2e-5 * gradient.norm(), name


def two_rank_steps(rank, folder):
    steps = {budget: first_step(folder, training_mesh("cpu", 2, -1), rank, 2, budget) for budget in (WHOLE, SMALL)}
    steps["hsdp"] = first_step(folder, training_mesh("cpu", 2, 1), rank, 2, WHOLE)
    return {key: (metrics, {name: tensor.numpy() for name, tensor in full.items()}) for key, (metrics, full) in steps.items()}


def test_the_first_step_does_not_depend_on_how_it_is_computed(tiny_folder, one_rank):
    expected, each = first_step(tiny_folder, one_rank), {"budget": SMALL, "recompute": True, "attention": "eager"}
    for options in (*({name: value} for name, value in each.items()), each):
        assert_same_step(first_step(tiny_folder, one_rank, **options), expected)


def test_the_first_step_does_not_depend_on_the_number_of_ranks(untied_folder, one_rank):
    expected = first_step(untied_folder, one_rank)
    answers = run_ranks(two_rank_steps, 2, untied_folder)
    for key in answers[0]:
        both = [answer[key][0] for answer in answers]
        metrics = {"actor/loss": sum(each["actor/loss"] for each in both), "actor/grad_norm": both[0]["actor/grad_norm"]}
        weights = {name: torch.from_numpy(array) for name, array in answers[0][key][1].items()}
        assert_same_step((metrics, weights), expected)


def naive_gradients(folder, device=CPU, dtype=torch.float32):
    """The same loss from whole logits, one row at a time, in transformers."""
    from transformers import AutoModelForCausalLM

    model, whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device), batch()
    sizes = whole.responses.sizes()
    flat = {name: getattr(whole, name).split(sizes) for name in ("old_log_probs", "ref_log_probs", "advantages")}
    total, tokens = torch.zeros((), device=device), sum(sizes)
    for row, (prompt, response) in enumerate(zip(whole.prompts.rows(), whole.responses.rows(), strict=True)):
        if not len(response):
            continue
        prompt, response = prompt.to(device), response.to(device)
        old, reference, advantage = (flat[name][row].to(device) for name in flat)
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].float() / 0.9
        log_p = logits.log_softmax(-1)
        log_probs = log_p.gather(-1, response[:, None])[:, 0]
        ratio = (log_probs - old).exp()
        clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        clipped = torch.where(advantage < 0, torch.minimum(clipped, -advantage * 3.0), clipped)
        entropy = -(log_p.exp() * log_p).sum(-1)
        gap = reference - log_probs
        total = total + (clipped - 0.01 * entropy + 0.1 * (gap.exp() - gap - 1)).sum() / tokens
    total.backward()
    return total.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_loss_and_gradients_equal_those_of_whole_logits(untied_folder, one_rank):
    loss, gradients = naive_gradients(untied_folder)
    policy = policy_for(untied_folder, one_rank, 1)
    metrics = accumulated(policy, shares(batch(), 1, SMALL)[0])
    assert relative(float(metrics["actor/loss"]), loss) <= 2e-6
    for name, parameter in named_weights(policy.model):
        expected, found = gradients[name], whole_of(parameter.grad)
        assert (found - expected).norm() <= 2e-6 * max(expected.norm(), gradients["lm_head.weight"].norm())


def test_an_on_policy_batch_needs_no_old_log_probs(tiny_folder, one_rank):
    whole = batch()
    policy = policy_for(tiny_folder, one_rank, 1, actor=dataclasses.replace(ACTOR, use_kl_loss=False))
    whole.old_log_probs = policy.compute_log_probs(whole, [range(whole.num_rows)], 0.9, False).log_probs
    with_old = accumulated(policy, shares(whole, 1, WHOLE)[0])
    gradients = [whole_of(parameter.grad).clone() for parameter in policy.model.parameters()]
    policy.trained.optimizer.zero_grad()
    whole.old_log_probs = None
    without = accumulated(policy, shares(whole, 1, WHOLE)[0])
    assert relative(float(without["actor/loss"]), float(with_old["actor/loss"])) <= 1e-6
    for one, parameter in zip(gradients, policy.model.parameters(), strict=True):
        assert (one - whole_of(parameter.grad)).norm() <= 2e-6 * one.norm()


def test_a_step_without_old_log_probs_gives_those_it_found_and_the_metrics_of_a_step_with_them(tiny_folder, one_rank):
    actor = dataclasses.replace(ACTOR, use_kl_loss=False)
    whole = batch()
    whole.old_log_probs = (
        policy_for(tiny_folder, one_rank, 1, actor=actor).compute_log_probs(whole, [range(16)], 0.9, False).log_probs
    )
    with_old = policy_for(tiny_folder, one_rank, 1, actor=actor).update([shares(whole, 1, SMALL)[0]], 0.9)
    expected, whole.old_log_probs = whole.old_log_probs, None
    found = policy_for(tiny_folder, one_rank, 1, actor=actor).update_on_policy(shares(whole, 1, SMALL)[0], 0.9)
    torch.testing.assert_close(found.log_probs, expected, rtol=0, atol=2e-6)
    assert found.metrics.keys() == with_old.keys()
    for name, value in with_old.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_a_step_clips_the_gradient_and_moves_every_parameter(tiny_folder, one_rank):
    policy = policy_for(tiny_folder, one_rank, 1)
    before = {name: whole_of(p).detach().clone() for name, p in named_weights(policy.model)}
    metrics = policy.update([shares(batch(), 1, WHOLE)[0]], 0.9)
    assert metrics["actor/lr"] == pytest.approx(1e-2)
    assert all((whole_of(p) != before[name]).any() for name, p in named_weights(policy.model))


WAITING = (
    torch.ops.aten._local_scalar_dense, torch.ops.aten.is_nonzero, torch.ops.aten.nonzero, torch.ops.aten.masked_select,
    torch.ops.aten._unique2, torch.ops.aten.unique_consecutive, torch.ops.aten.equal, torch.ops.aten.bincount,
    torch.ops.aten.repeat_interleave,
)  # fmt: skip
"""Operators that a GPU's host would wait for: their result is a number, or has a size that values decide."""


class NothingWaits(TorchDispatchMode):
    """Fails at an operator that a GPU's host would wait for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in WAITING, func
        masks = args[1] if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put) else ()
        assert all(mask is None or mask.dtype != torch.bool for mask in masks), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", [False, True])
def test_the_host_waits_for_nothing_between_the_micro_batches_of_a_step(tiny_folder, one_rank, recompute):
    policy = policy_for(tiny_folder, one_rank, 1, recompute=recompute)
    (mini,) = shares(batch(), 1, SMALL)
    micros = [micro_batch(mini.batch, rows) for rows in mini.micro_batches]
    with NothingWaits():
        metrics = policy.trained.take_step(policy.accumulate(micros, mini.counts, 0.9))
    assert float(metrics["actor/grad_norm"]) > 0
    with NothingWaits(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.ones(1).item()


def test_no_tensor_of_a_micro_batch_outlives_it(tiny_folder, one_rank):
    policy = policy_for(tiny_folder, one_rank, 1)
    references, alive = [], []
    forward = policy.model.forward

    def watched(*args, **kwargs):
        gc.collect()
        alive.append(sum(reference() is not None for reference in references))
        output = forward(*args, **kwargs)
        references.append(weakref.ref(output[0]))
        return output

    policy.model.forward = watched
    accumulated(policy, shares(batch(), 1, SMALL)[0])
    assert len(references) >= 8
    assert alive == [0] * len(references)


# What is not finite is not applied.

KNOBS = {
    "none": {},
    "no clipping": {"clip_grad": None},
    "moments on the host": {"fsdp": {"optimizer_offload": True}},
    "FSDP2's own offload": {"fsdp": {"offload_policy": True}},
    "bfloat16 moments": {"state_dtype": "bfloat16"},
    "8-bit moments on the host": {"state_dtype": "int8", "fsdp": {"optimizer_offload": True}},
    "4-bit moments": {"state_dtype": "int4"},
    "stochastic rounding": {"stochastic_rounding": True, "fsdp": {"model_dtype": "bfloat16"}},
    "another optimizer": {"optimizer": "SGD"},
    "adapters": {"lora_rank": 4},
    "in backward": {"in_backward": True, "clip_grad": None},
    "in backward, 8-bit on the host": {
        "in_backward": True, "clip_grad": None, "state_dtype": "int8", "fsdp": {"optimizer_offload": True},
    },
    "in backward, clipped": {"in_backward": True, "state_dtype": "int8", "fsdp": {"optimizer_offload": True}},
    "in backward, stochastic rounding": {
        "in_backward": True, "clip_grad": None, "stochastic_rounding": True, "state_dtype": "int4",
        "fsdp": {"model_dtype": "bfloat16"},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def narrow_folder(tmp_path_factory):
    """A model whose rows are long enough for blocks of every format, and which is quick."""
    from verl_memopt.model.tiny import TinyShape, make_tiny_model

    shape = TinyShape(vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, tie_embeddings=False)
    return make_tiny_model(tmp_path_factory.mktemp("narrow") / "model", shape, seed=3)


def policy_with_knobs(folder, mesh, world_size=1, fsdp=None, lora_rank=0, **optim):
    fsdp = TrainedFsdp(**{"dtype": "fp32", **(fsdp or {})})
    actor = dataclasses.replace(ACTOR, entropy_coeff=0.0, fsdp_config=fsdp, optim=dataclasses.replace(ACTOR.optim, **optim))
    model = Model(path=str(folder), attn_implementation="sdpa", logprob_chunk_tokens=8, lora_rank=lora_rank, lora_alpha=8)
    policy_model = build_policy(model, fsdp, folder, mesh, CPU, ModelUse(trained=True))
    materialize(policy_model, folder, CPU)
    initialize_adapters(policy_model, 5)
    return Policy(policy_model, actor, 10, world_size, CPU)


def in_bytes(policy):
    """Gives all that an update may change, as bytes."""
    tensors = [*policy.model.parameters(), *state_tensors(policy.trained.optimizer)]
    found = [local_of(tensor).detach().contiguous().flatten().view(torch.uint8).clone() for tensor in tensors]
    return found, (
        policy.trained.schedule.last_epoch,
        policy.trained.schedule.get_last_lr(),
        getattr(policy.trained.optimizer, "_num_steps", 0),
    )


def same_bytes(one, other):
    return one[1] == other[1] and all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


def mini_of(seed, bad=None, rank=0, world_size=1):
    """Gives a rank's share of a mini-batch. bad: the advantage of its last token, where that is no number."""
    mini = shares(batch(rows=4, seed=seed), world_size, WHOLE)[rank]
    if bad is not None:
        mini.batch.advantages[-1] = bad
    return mini


@pytest.mark.parametrize(
    ("unit", "rollouts"), [("rollouts", [0.0, 0.25, 0.5, 0.75, 1.0]), ("updates", [0.5, 1.0, 1.0, 1.0, 1.0])]
)
def test_all_mini_batches_of_a_rollout_have_one_rate_where_the_schedule_counts_rollouts(narrow_folder, one_rank, unit, rollouts):
    optim = Optim(lr=1.0, lr_warmup_steps=4, lr_schedule_steps=unit)
    policy = policy_for(narrow_folder, one_rank, 1, actor=dataclasses.replace(ACTOR, optim=optim))
    # The mean over four mini-batches; by updates 1/5 to 4/5 in the first rollout.
    assert [policy.update([mini_of(0)] * 4, 0.9)["actor/lr"] for _ in rollouts] == pytest.approx(rollouts)


@pytest.mark.parametrize(("knob", "bad"), [("none", math.inf), *((knob, math.nan) for knob in KNOBS)])
def test_an_update_whose_gradient_norm_is_not_finite_changes_no_byte(narrow_folder, one_rank, knob, bad):
    policy, other = (policy_with_knobs(narrow_folder, one_rank, **KNOBS[knob]) for _ in range(2))
    for each in (policy, other):
        assert each.update([mini_of(0)], 0.9)["actor/skipped_updates"] == 0
    before = in_bytes(policy)
    metrics = policy.update([mini_of(1, bad)], 0.9)
    assert not math.isfinite(metrics["actor/grad_norm"])
    assert metrics["actor/skipped_updates"] == 1
    assert metrics.get("actor/partial_updates", 0.0) == 0
    assert same_bytes(in_bytes(policy), before)
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    for each in (policy, other):
        each.update([mini_of(2)], 0.9)
    assert same_bytes(in_bytes(policy), in_bytes(other))
    assert not same_bytes(in_bytes(policy), before)


def test_a_bad_mini_batch_costs_its_own_update_and_no_other(narrow_folder, one_rank):
    policy, other = (policy_with_knobs(narrow_folder, one_rank) for _ in range(2))
    metrics = policy.update([mini_of(0), mini_of(1, math.nan), mini_of(2), mini_of(3, math.inf)], 0.9)
    assert metrics["actor/skipped_updates"] == 2
    assert other.update([mini_of(0), mini_of(2)], 0.9)["actor/skipped_updates"] == 0
    assert same_bytes(in_bytes(policy), in_bytes(other))


def test_a_first_update_that_is_skipped_leaves_a_state_that_can_be_saved(narrow_folder, one_rank, tmp_path):
    parts = ["model", "optimizer", "extra"]
    policy, other = (policy_with_knobs(narrow_folder, one_rank) for _ in range(2))
    policy.update([mini_of(0, math.nan)], 0.9)
    save_training_state(tmp_path, policy.model, policy.trained.optimizer, policy.trained.schedule, CPU, parts)
    resumed = policy_with_knobs(narrow_folder, one_rank)
    load_training_state(tmp_path, resumed.model, resumed.trained.optimizer, resumed.trained.schedule, CPU, parts)
    for each in (policy, resumed, other):
        each.update([mini_of(1)], 0.9)
    assert same_bytes(in_bytes(policy), in_bytes(other))
    assert same_bytes(in_bytes(resumed), in_bytes(other))


SKIPPING = ("none", "in backward", "in backward, clipped")


def skipped_on_two_ranks(rank, folder):
    """Gives, for each kind, whether this rank's update left every byte, and its metrics."""
    found = {}
    for kind in SKIPPING:
        policy = policy_with_knobs(folder, training_mesh("cpu", 2, -1), 2, **KNOBS[kind])
        policy.update([mini_of(0, None, rank, 2)], 0.9)
        before = in_bytes(policy)
        metrics = policy.update([mini_of(1, math.nan if rank == 1 else None, rank, 2)], 0.9)
        found[kind] = (same_bytes(in_bytes(policy), before), metrics)
    return found


def test_ranks_skip_together_when_only_one_has_a_bad_row(narrow_folder):
    answers = run_ranks(skipped_on_two_ranks, 2, narrow_folder)
    for kind in SKIPPING:
        for unchanged, metrics in (answer[kind] for answer in answers):
            assert unchanged
            assert metrics["actor/skipped_updates"] == 1
            assert metrics.get("actor/partial_updates", 0.0) == 0


def test_in_backward_a_bad_gradient_after_good_ones_is_told_as_a_partial_update(narrow_folder, one_rank):
    policy = policy_with_knobs(narrow_folder, one_rank, in_backward=True, clip_grad=None)
    policy.update([mini_of(0)], 0.9)
    # Backward comes to the embedding last, when every other parameter is updated.
    embedding = policy.model.lm.get_input_embeddings().weight
    handle = embedding.register_hook(lambda gradient: gradient * math.nan)
    before, kept = in_bytes(policy), embedding.detach().clone()
    metrics = policy.update([mini_of(1)], 0.9)
    handle.remove()
    assert (metrics["actor/skipped_updates"], metrics["actor/partial_updates"]) == (1, 1)
    assert torch.equal(embedding, kept)
    assert not same_bytes(in_bytes(policy), before)
    assert "actor/partial_updates" not in policy.update([mini_of(2)], 0.9)
