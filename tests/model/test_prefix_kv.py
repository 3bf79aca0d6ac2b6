import statistics
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.update_pass.flops import count
from tests.memory import activation_cases as act
from tests.memory.batching.test_shared_prompt import counts_of, grouped, sharing
from tests.ranks import run_ranks
from tests.tensors import whole_of
from verl_memopt.config.keys import replaced
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.distributed.device import training_mesh
from verl_memopt.model import attention_dense
from verl_memopt.model.prefix_kv import PrefixRecorder
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.trainer.micro_batching import Budget, cut_ranks
from verl_memopt.worker.trained_model import micro_batches_of

OWN = {"recompute_elementwise": True}
BOUND = 2e-6
"""Of the difference of a gradient, relative to its norm, in fp32."""

WINDOW = {"override_config": {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2}}
"""Each token sees itself and the five before it: the first tokens of answers see the end of the prompt, the later ones do not."""

BATCH, PARTS = sharing(grouped(40, [9, 5, 1, 12, 3, 7])), [[0, 1], [2, 3], [4, 5]]


def results(policy, batch, parts, reuse):
    """Gives log-probs, entropies and every whole gradient, of parts that reuse the prefix KV or compute the prompt again."""
    policy.model.supports_prefix_kv = reuse
    scores = policy.compute_log_probs(batch, parts, 0.9, True)
    metrics = policy.accumulate(micro_batches_of(batch, parts, reuse), counts_of(batch), 0.9)
    found = [whole_of(parameter.grad).clone() for parameter in policy.model.parameters() if parameter.grad is not None]
    policy.trained.optimizer.zero_grad()
    return [scores.log_probs, scores.entropy, metrics["actor/loss"], *found]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recompute": True, "gradient_checkpointing_mode": "selective"},
        {"recompute": True, "offload": (1, 2)},
        {"lora_rank": 4, "lora_alpha": 8.0},
        {"attn_implementation": "eager"},
        {"prune_last_block": False},
        WINDOW,
        {**WINDOW, "attn_implementation": "eager", "recompute": True},
    ],
    ids=["alone", "selective", "full and offload", "lora", "eager", "whole last block", "window", "window, eager"],
)
def test_log_probs_and_gradients_differ_by_rounding_only(untied_folder, one_rank, options):
    found = [results(act.build(untied_folder, one_rank, **OWN, **options), BATCH, PARTS, reuse) for reuse in (False, True)]
    assert act.largest_difference(*found) <= BOUND


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4, "lora_alpha": 8.0}], ids=["alone", "lora"])
def test_layers_with_a_state_hand_it_on(tmp_path, one_rank, options):
    folder = make_tiny_model(tmp_path / "model", TinyShape("qwen3_5_text", num_layers=4), seed=3)
    prefix_kv, again = (results(act.build(folder, one_rank, **OWN, **options), BATCH, PARTS, reuse) for reuse in (True, False))
    assert_near(prefix_kv, again)


def assert_near(prefix_kv, again):
    rounding = 2**-22 * flat(again[3:]).norm()
    for one, other in zip(prefix_kv, again, strict=True):
        assert (one - other).norm() <= BOUND * max(other.norm(), 1.0 if other.ndim == 0 else 0.0) + rounding


def naive(policy, batch):
    """Gives every gradient of the rows side by side, each with its prompt."""
    policy.accumulate(micro_batches_of(sharing(batch, False), [[*range(6)]], False), counts_of(batch), 0.9)
    return flat([whole_of(parameter.grad) for parameter in policy.model.parameters()])


def test_under_fsdp_in_half_precision_gradients_are_as_near_to_the_truth_as_naive_ones(untied_folder, one_rank):
    cut = {"logprob_chunk_tokens": 8}  # so small that both heads sum as many parts of a half-precision gradient
    plain, ratios = {"recompute_elementwise": False, "prune_last_block": False, **cut}, []
    for seed in range(5):
        batch = sharing(grouped(40, [9, 5, 1, 12, 3, 7], seed=seed))
        truth = naive(act.build(untied_folder, one_rank, **plain), batch)
        rounded = naive(act.build(untied_folder, one_rank, dtype="bfloat16", **plain), batch)
        prefix_kv = flat(results(act.build(untied_folder, one_rank, dtype="bfloat16", **OWN, **cut), batch, PARTS, True)[3:])
        ratios.append(act.largest_difference([prefix_kv], [truth]) / act.largest_difference([rounded], [truth]))
    # Each is made of thousands of roundings, of different ones; where one falls on the other side of a clip it is far off.
    assert statistics.median(ratios) <= 1.01


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.fixture
def policy(tiny_folder, one_rank):
    return act.build(tiny_folder, one_rank, **OWN)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_of_any_answers_in_any_parts(policy, data):
    answers = data.draw(st.lists(st.integers(0, 6), min_size=2, max_size=8).filter(lambda some: sum(some) > len(some)))
    batch = sharing(grouped(data.draw(st.integers(8, 30)), answers, 2, seed=sum(answers)))
    size, rows = data.draw(st.integers(1, 3)), list(range(len(answers)))
    parts = [[row + group * len(rows) for row in rows[at : at + size]] for group in range(2) for at in range(0, len(rows), size)]
    assert_near(*(results(policy, batch, parts, reuse) for reuse in (True, False)))


SHAPE = TinyShape(hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)


def test_the_prompt_is_computed_once(tmp_path, one_rank, monkeypatch):
    # With a mask, few tokens of a pack make products of all pairs.
    monkeypatch.setattr(attention_dense, "PACKED_CPU_FLASH", replace(attention_dense.PACKED_CPU_FLASH, masked_products=0))
    policy, counted = act.build(make_tiny_model(tmp_path / "model", SHAPE, seed=3), one_rank, **OWN), {}
    for name, reuse, parts in (("whole", False, [[*range(6)]]), ("cut", False, PARTS), ("prefix_kv", True, PARTS)):
        micros = list(micro_batches_of(BATCH, parts, reuse))
        counted[name] = count(lambda micros=micros: policy.accumulate(micros, counts_of(BATCH), 0.9))
    assert counted["prefix_kv"] == counted["whole"] < counted["cut"]


def joined(one, other):
    """Gives the rows of two batches as one."""
    tensors = {
        name: torch.cat([getattr(one, name), getattr(other, name) + (name == "group") * one.num_rows])
        for name in ("group", "old_log_probs", "ref_log_probs", "advantages")
    }
    rows = {name: [*getattr(one, name).rows(), *getattr(other, name).rows()] for name in ("prompts", "responses")}
    ragged = {name: Ragged.from_rows(each, torch.int64) for name, each in rows.items()}
    return sharing(RolloutBatch(**ragged, **tensors, batch_size=[]))


LENGTHS = [9, 5, 1, 12, 3, 7]
RAGGED = joined(grouped(40, LENGTHS, 3), grouped(12, [8, 30, 9, 31], 1))
GROUPS = "a group each"
SHARES = {
    GROUPS: (sharing(grouped(40, LENGTHS, 2)), [[*range(6)], [*range(6, 12)]]),
    # The second has two groups to carry. The first has one, and fills in with rows of a group that it does not carry.
    "ragged": (RAGGED, [[*range(6), *range(18, 22)], [*range(6, 18)]]),
    # The second carries nothing, or has nothing at all.
    "one of two": (RAGGED, [[*range(6), *range(8, 12)], [*range(18, 22)]]),
    "nothing left": (RAGGED, [[*range(12)], []]),
}
WAYS = {
    "gathered": {"fsdp": {"reshard_after_forward": False}},
    "checkpointed and offloaded": {"recompute": True, "offload": (1, 2)},
}


def cut_for_ranks(batch, shares, budget=60):
    tokens = batch.row_tokens()
    return cut_ranks(
        [tokens.select(rows) for rows in shares], [list(map(str, rows)) for rows in shares], Budget(True, budget, None, "key")
    )


def on_ranks(rank, folder, mesh, case, options, sync="every"):
    """Gives what :func:`results` gives of a rank's share without and with carried prompts.

    With a group each, it gives the FLOPs of both updates as well.
    """
    batch, shares = SHARES[case]
    cut, own = cut_for_ranks(batch, shares)[rank], batch.select(shares[rank])
    policy, counts = (
        act.build(folder, mesh, len(shares), **OWN, **options),
        counts_of(batch.select([row for rows in shares for row in rows])),
    )
    policy.trained.fsdp = replaced(policy.trained.fsdp, {"gradient_sync": sync})
    found, flops = [], []
    for reuse in (False, True):
        policy.model.supports_prefix_kv = reuse
        scores = policy.compute_log_probs(own, cut, 0.9, True)
        micros = list(micro_batches_of(own, cut, reuse))
        update = partial(policy.accumulate, micros, counts, 0.9)
        flops.append(count(update) if case == GROUPS else update())
        gradients = [whole_of(parameter.grad).clone() for parameter in policy.model.parameters() if parameter.grad is not None]
        policy.trained.optimizer.zero_grad()
        found.append([each.numpy() for each in (scores.log_probs, scores.entropy, *gradients)])
    return found, flops


def each_way(rank, folder):
    mesh = training_mesh("cpu", 2, -1)
    whole = {case: on_ranks(rank, folder, mesh, case, {}) for case in SHARES}
    return whole | {way: on_ranks(rank, folder, mesh, "ragged", options, "last") for way, options in WAYS.items()}


def test_ranks_carry_prompts_in_step(untied_folder, one_rank):
    answers = run_ranks(each_way, 2, untied_folder)
    for name in answers[0]:
        for (again, carried), _ in (answer[name] for answer in answers):
            assert act.largest_difference(*(map(torch.from_numpy, side) for side in (again, carried))) <= BOUND, name
    # As many products as one rank alone makes of each group.
    batch, shares = SHARES[GROUPS]
    policy = act.build(untied_folder, one_rank, **OWN)
    for rank, rows in enumerate(shares):
        own = batch.select(rows)
        micros = list(micro_batches_of(own, cut_for_ranks(own, [[*range(6)]])[0], True))
        alone = count(lambda micros=micros: policy.accumulate(micros, counts_of(batch), 0.9))
        again, carried = answers[rank][GROUPS][1]
        assert carried == alone < again


def test_beside_the_prompts_own_bytes_lie_keys_and_values(tmp_path, one_rank):
    folder, batch = make_tiny_model(tmp_path / "model", SHAPE, seed=3), sharing(grouped(512, [33] * 8))
    parts, peaks = [[0, 1, 2, 3], [4, 5, 6, 7]], {}
    for reuse in (False, True):
        policy = act.build(folder, one_rank, **OWN)
        micros = list(micro_batches_of(batch, parts, reuse))
        assert (micros[0].prompt is not None) is reuse
        peaks[reuse] = act.tracked_step(policy, micros, counts_of(batch)).peaks[act.DEVICE].kinds["activations"]
    # Of 512 tokens, two of 32 channels in two blocks: beside the answers', and a gradient each.
    beside = 2 * 512 * 2 * 32 * 4
    assert peaks[True] <= peaks[False] + 2 * beside


def test_what_is_computed_again_is_not_recorded_again():
    recorder, tables = PrefixRecorder(), (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    first, again = torch.ones(2, 3), torch.ones(2, 3)
    assert recorder.extend(0, first, first, tables)[0] is first
    assert recorder.extend(0, again, again, tables)[0] is again
    assert recorder.outputs()[2] is first
