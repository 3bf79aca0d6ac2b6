import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.update_pass.flops import count
from tests.memory import activation_cases as act
from tests.memory.activation_cases import LORA, TILED
from tests.memory.batching.test_shared_prompt import counts_of, grouped, sharing
from tests.tensors import whole_of
from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import ActorRolloutRef
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.plan.formulas import Shapes
from verl_memopt.worker.trained_model import micro_batch

ON, OFF = {"prune_last_block": True}, {"prune_last_block": False}
OWN, PLAIN = {"recompute_elementwise": True}, {"recompute_elementwise": False}
BOUND = 2e-6
"""Of the difference of a gradient, relative to its norm, in fp32."""

RAGGED = grouped(20, [5, 1, 9, 0, 3], groups=2)


def gradients(policy, batch, shared):
    """Gives the log-probs of a batch in one pack, and every whole gradient."""
    batch, rows = sharing(batch, shared), list(range(batch.num_rows))
    scores = policy.compute_log_probs(batch, [rows], 0.9, True)
    policy.accumulate([micro_batch(batch, rows)], counts_of(batch), 0.9)
    found = [whole_of(parameter.grad).clone() for parameter in policy.model.parameters() if parameter.grad is not None]
    policy.trained.optimizer.zero_grad()
    return [scores.log_probs, scores.entropy, *found]


OPTIONS = {"alone": {}, "full": {"recompute": True}, "tiled": TILED, "lora": LORA, "eager": {"attn_implementation": "eager"}}


@pytest.mark.parametrize(("name", "shared"), [*((name, True) for name in OPTIONS), ("full", False), ("eager", False)])
@pytest.mark.parametrize("block", [OWN, PLAIN], ids=["own", "plain"])
def test_log_probs_and_gradients_differ_by_rounding_only(untied_folder, one_rank, name, block, shared):
    found = [gradients(act.build(untied_folder, one_rank, **OPTIONS[name], **block, **own), RAGGED, shared) for own in (OFF, ON)]
    assert act.largest_difference(*found) <= BOUND


@st.composite
def packs(draw):
    """Draws a batch of any groups, and whether they share their prompts."""
    answers = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
    return grouped(draw(st.integers(1, 20)), answers, draw(st.integers(1, 3)), seed=len(answers)), draw(st.booleans())


PACKS = packs()


def assert_near_for(pack, plain, ours):
    expected, found = (gradients(policy, *pack) for policy in (plain, ours))
    # Over a single key the gradient of queries is 0, and what is computed of it is rounding of numbers of the others' size.
    rounding = 2**-22 * torch.stack([gradient.norm() for gradient in expected[2:]]).norm()
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= BOUND * other.norm() + rounding


@pytest.fixture
def pair(tiny_folder, one_rank):
    return [act.build(tiny_folder, one_rank, **OWN, **own) for own in (OFF, ON)]


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PACKS)
def test_for_packs_of_any_groups_as_well(pair, pack):
    assert_near_for(pack, *pair)


@pytest.mark.parametrize(("model_type", "block"), [("llama", OWN), ("qwen2", PLAIN)], ids=str)
def test_of_another_known_model(tmp_path, one_rank, model_type, block):
    folder = make_tiny_model(tmp_path / model_type, TinyShape(model_type=model_type), seed=3)
    found = [gradients(act.build(folder, one_rank, **block, **own), RAGGED, True) for own in (OFF, ON)]
    assert act.largest_difference(*found) <= BOUND


def assert_near_in_half_precision(folder, mesh, plain, ours, batches):
    """Asserts that in bfloat16 the gradients of ``ours`` are as near to those of ``plain`` in fp32 as those of ``plain``."""
    squares, asked = torch.zeros(2), (("fp32", plain), ("bfloat16", plain), ("bfloat16", ours))
    policies = [act.build(folder, mesh, dtype=dtype, **model) for dtype, model in asked]
    for seed in range(batches):
        batch = grouped(20, [5, 1, 9, 0, 3], groups=2, seed=seed)
        found = [torch.cat([one.flatten() for one in gradients(policy, batch, True)[2:]]) for policy in policies]
        squares += torch.tensor([act.largest_difference([one], [found[0]]) ** 2 for one in found[1:]])
    assert squares[1].sqrt() <= 1.01 * squares[0].sqrt()  # both are made of thousands of roundings, of different ones


def test_in_half_precision_gradients_are_as_near_to_the_truth(untied_folder, one_rank):
    assert_near_in_half_precision(untied_folder, one_rank, {**OWN, **OFF}, {**OWN, **ON}, 6)


# Cost.

SHAPE = TinyShape(hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16)


@pytest.mark.parametrize("recompute", [False, True])
def test_of_the_last_block_queries_attention_and_mlp_run_for_what_is_read(tmp_path, one_rank, recompute):
    folder, counted = make_tiny_model(tmp_path / "model", SHAPE, seed=3), []
    prompt, answers = 70, [11] * 4  # too many for one call of attention with a mask, which would compute all pairs
    batch = sharing(grouped(prompt, answers))
    for own in (OFF, ON):
        policy = act.build(folder, one_rank, recompute=recompute, **OWN, **own)
        micro = [micro_batch(batch, list(range(4)))]
        counted.append(count(lambda policy=policy, micro=micro: policy.accumulate(micro, counts_of(batch), 0.9)))
    skipped, query = prompt - 1, SHAPE.num_heads * SHAPE.head_dim
    down = 2 * SHAPE.hidden_size * SHAPE.intermediate_size
    products = 2 * 2 * SHAPE.hidden_size * query + 3 * down  # of a token: queries, attention's output, and the MLP
    pairs = prompt * (prompt + 1) // 2 - prompt  # the last token sees all
    forwards = 4 if recompute else 3
    saved = skipped * (forwards * products - (down if recompute else 0))
    # Attention makes two products forward and five backward.
    assert counted[0] - counted[1] == saved + (2 * (forwards - 2) + 5) * 2 * query * pairs


def shapes(batch, **model):
    actor = replaced(ActorRolloutRef().actor, {"fsdp_config": replaced(ActorRolloutRef().actor.fsdp_config, {"dtype": "fp32"})})
    given = replaced(ActorRolloutRef(), {"actor": actor, "model": replaced(ActorRolloutRef().model, model)})
    computed = batch.row_tokens()
    rows = range(batch.num_rows)
    return Shapes(
        settings=given, layers=act.LAYERS, hidden=act.WIDTH, mlp=act.MLP, heads=act.H, kv_heads=act.KV, head_dim=act.D,
        vocab=act.SHAPE.vocab_size, params=1, block_params=1, tied=False, tokens=computed.cost(rows),
        responses=sum(batch.responses.sizes()), suffix_tokens=computed.suffixes(rows),
        skipped=computed.skipped(rows),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "answers", "shared", "recompute"),
    [(1024, [64] * 8, True, True), (512, [256] * 4, False, False)],
)
def test_activations_fall_by_what_the_formula_says(deep_folder, prompt, answers, shared, recompute):
    batch, peaks, formula = sharing(grouped(prompt, answers), shared), [], []
    with act.fake_ranks(2) as mesh:
        for own in (OFF, ON):
            micro = [micro_batch(batch, list(range(len(answers))))]
            policy = act.build(deep_folder, mesh, recompute=recompute, **OWN, **own)
            tracker = act.tracked_step(policy, micro, counts_of(batch), steps=1)
            peaks.append(tracker.peaks[act.DEVICE].kinds["activations"])
            formula.append(shapes(batch, enable_gradient_checkpointing=recompute, **OWN, **own).activation_bytes)
    assert act.close(peaks[0] - peaks[1], formula[0] - formula[1])
    assert peaks[1] < peaks[0]


# What it leaves alone.


def test_a_few_skipped_tokens_are_computed_with_the_others(untied_folder, one_rank):
    batch = grouped(5, [30] * 2)
    found = [gradients(act.build(untied_folder, one_rank, **OWN, **own), batch, True) for own in (OFF, ON)]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
