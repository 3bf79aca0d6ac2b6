"""Updates and passes of conversations, against rows that each have one turn and share nothing."""

import dataclasses
import random

import pytest
import torch

from tests.critics import critic_for, with_value_head
from tests.memory.activation_cases import ELEMENTWISE, FULL, LORA, SELECTIVE, TILED, build
from tests.memory.limits.test_recutting import out_of_memory
from tests.model.architectures import tiny_folder
from tests.tensors import whole_of
from tests.worker.test_log_probs import SQUARES
from tests.worker.test_policy import ACTOR, CPU, policy_for
from verl_memopt.algorithms.custom import load_statistic
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.aliases import PRESETS
from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import PolicyLoss
from verl_memopt.data.batch import Ragged, RolloutBatch, prompt_rows, rollout_batch
from verl_memopt.errors import ConfigError
from verl_memopt.memory.logit_tiles import Head, TokenStatistics
from verl_memopt.memory.pass_order import InParts
from verl_memopt.memory.teaching import Divergence, Teaching
from verl_memopt.memory.token_budget_torch import oom_retry
from verl_memopt.memory.token_packing import spans
from verl_memopt.model.forest import Turn, build_forest
from verl_memopt.model.packing import pack_rows
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import named_weights
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.trainer.micro_batching import Budget, cut_ranks, rows_per_rank
from verl_memopt.worker.policy import Objective, compute_log_probs, pack_log_probs
from verl_memopt.worker.trained_model import MicroBatch, MiniBatch, micro_batch

HEAT = 0.9
BUDGET = Budget(True, 60, None, "key")
BUDGETS = [10_000, 60, 20, 3]
"""One micro-batch; several; several passes, because some row alone has more tokens; and nodes in pieces."""


def ids(draw, least, most):
    return [draw.randrange(256) for _ in range(draw.randint(least, most))]


def conversation(draw, prompt):
    """Turns that go on after the output and a tool's tokens, or that went back to keep only a part of what was said."""
    seen, turns = list(prompt), []
    for _ in range(draw.randint(1, 4)):
        turns.append(Turn(list(seen), ids(draw, 1, 5)))
        whole = seen + turns[-1].output_ids
        if draw.random() < 0.4:
            whole = whole[: draw.randint(len(prompt), len(whole))]
        seen = whole + ids(draw, 1, 6)
    return turns


def conversations(groups=3, samples=3, seed=0):
    """Rows of turns: a system prompt, then a prompt for each group. One row samples what another did, one samples nothing."""
    draw = random.Random(seed)
    system = ids(draw, 4, 4)
    rows = [conversation(draw, prompt) for prompt in [system + ids(draw, 3, 9) for _ in range(groups)] for _ in range(samples)]
    rows[1] = rows[0][:1]
    rows[samples] = []
    return rows, torch.arange(groups).repeat_interleave(samples)


def batch_of(rows, group, seed=0):
    """A batch with random numbers for each sampled token. Its log-probs are about those of a fresh model."""
    count, generator = sum(len(turn.output_ids) for row in rows for turn in row), torch.Generator().manual_seed(seed)
    names = ("advantages", "old_values", "returns", "rollout_log_probs", "old_log_probs", "ref_log_probs")
    fields = {name: torch.randn(count, generator=generator) for name in names}
    for name in ("rollout_log_probs", "old_log_probs", "ref_log_probs"):
        fields[name] = 0.3 * fields[name] - 5.7
    outputs = [[token for turn in row for token in turn.output_ids] for row in rows]
    return RolloutBatch(
        prompts=Ragged.from_rows([row[0].prompt_ids if row else [0] for row in rows], torch.int64),
        responses=Ragged.from_rows(outputs, torch.int64),
        group=group,
        prompt_group=group,
        forest=build_forest(rows, merge_cost=0),
        batch_size=[],
        **fields,
    )


def by_turn(rows, batch):
    """A micro-batch whose sequences are single turns, and whose rows are the conversations."""
    turns = [turn for row in rows for turn in row]
    prompts, outputs = (torch.tensor([token for turn in turns for token in turn[part]]) for part in (0, 1))
    pack = pack_rows(prompts, [len(turn.prompt_ids) for turn in turns], outputs, [len(turn.output_ids) for turn in turns])
    pack = dataclasses.replace(pack, row=batch.response_row(), row_lengths=batch.responses.lengths)
    return MicroBatch(pack, **{name: getattr(micro_batch(batch, range(len(rows))), name) for name in FIELDS})


FIELDS = ("old_log_probs", "ref_log_probs", "advantages", "old_values", "returns", "kept", "weights", "sampled_log_probs")


def counts_of(batch):
    return GlobalCounts(float(batch.responses.lengths.sum()), float(batch.num_rows))


def cut(batch, budget):
    names = [str(row) for row in range(batch.num_rows)]
    (bins,) = cut_ranks([batch.row_tokens()], [names], dataclasses.replace(BUDGET, max_tokens=budget))
    return MiniBatch(batch, bins, counts_of(batch))


def gradients_of(model):
    found = {name: whole_of(weight.grad).clone() for name, weight in named_weights(model) if weight.grad is not None}
    model.zero_grad()
    return found


def assert_same(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    rounding = 2**-21 * torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm() + rounding, name


@pytest.fixture
def policy(untied_folder, one_rank):
    return policy_for(untied_folder, one_rank, 1)


@pytest.fixture(scope="module")
def talks():
    rows, group = conversations()
    return rows, batch_of(rows, group)


def naive_gradients(policy, rows, batch, **objective):
    """The loss over conversations, from log-probs of single turns."""
    naive = by_turn(rows, batch)
    loss, metrics = Objective(naive, counts_of(batch), policy.actor, **objective).loss(*policy.model(naive.pack, HEAT, True))
    loss.backward()
    return gradients_of(policy.model), metrics


def assert_same_metrics(found, expected):
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize(
    ("mode", "agg"),
    [
        ("vanilla", "token-mean"),
        ("vanilla", "seq-mean-token-mean"),
        ("gspo", "seq-mean-token-mean"),
        ("sequence", "seq-mean-token-sum"),
    ],
)
def test_gradients_are_those_of_single_turns_with_losses_over_conversations(policy, talks, mode, agg, on_policy, budget):
    rows, batch = talks
    # Old log-probs so near those of the policy that most ratios are inside their clip and some are not.
    now = compute_log_probs(policy.model, batch, [range(len(rows))], HEAT, False, CPU).log_probs
    old = None if on_policy else now + 0.5 * (batch.old_log_probs + 5.7)
    batch = dataclasses.replace(batch, old_log_probs=old)
    policy.actor = replaced(ACTOR, {"loss_agg_mode": agg, "policy_loss": PolicyLoss(loss_mode=mode)})
    expected, metrics = naive_gradients(policy, rows, batch)
    if mode == "vanilla" and not on_policy:
        assert 0 < metrics["actor/pg_clipfrac"] < 0.5
    mini = cut(batch, budget)
    assert (len(mini.micro_batches) > 1) == (budget == 60)
    assert any(isinstance(own, InParts) for own in mini.micro_batches) == (budget < 60)
    found = policy.trained.forward_backward(mini, policy.loss_at(HEAT))
    assert_same(gradients_of(policy.model), expected)
    assert_same_metrics(found, metrics)


@pytest.mark.parametrize("budget", [60, 20])
def test_bypass_mode_weighs_conversations_as_single_turns(policy, talks, budget):
    rows, batch = talks
    now = compute_log_probs(policy.model, batch, [range(len(rows))], HEAT, False, CPU).log_probs
    sampled = now + 0.1 * (batch.rollout_log_probs + 5.7)
    batch = dataclasses.replace(batch, old_log_probs=sampled, rollout_log_probs=sampled)
    policy.actor, policy.bypass = ACTOR, PRESETS["bypass_ppo_clip_geo_rs"]
    try:
        expected, metrics = naive_gradients(policy, rows, batch, bypass=policy.bypass)
        found = policy.trained.forward_backward(cut(batch, budget), policy.loss_at(HEAT))
    finally:
        policy.bypass = None
    assert_same(gradients_of(policy.model), expected)
    assert_same_metrics(found, metrics)


def test_log_probs_entropies_and_statistics_are_those_of_single_turns(policy, talks):
    rows, batch = talks
    naive, statistics = by_turn(rows, batch), TokenStatistics({name: load_statistic(at) for name, at in SQUARES.items()})
    log_probs, entropy = pack_log_probs(policy.model, naive.pack, HEAT, True, statistics=statistics)
    for budget in BUDGETS:
        found = compute_log_probs(policy.model, batch, cut(batch, budget).micro_batches, HEAT, True, CPU, SQUARES)
        torch.testing.assert_close(found.log_probs, log_probs, rtol=0, atol=5e-6)
        torch.testing.assert_close(found.entropy, entropy, rtol=0, atol=5e-6)
        torch.testing.assert_close(found.statistics, statistics.values, rtol=0, atol=5e-6)


@pytest.mark.parametrize("budget", BUDGETS)
def test_an_on_policy_update_returns_the_log_probs_of_all_turns(untied_folder, one_rank, talks, budget):
    rows, batch = talks
    policy = policy_for(untied_folder, one_rank, 1)
    log_probs, _ = pack_log_probs(policy.model, by_turn(rows, batch).pack, HEAT, False)
    found = policy.update_on_policy(cut(dataclasses.replace(batch, old_log_probs=None), budget), HEAT)
    torch.testing.assert_close(found.log_probs, log_probs, rtol=0, atol=5e-6)


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_critic_learns_the_values_of_all_turns(untied_folder, tmp_path, one_rank, talks, budget):
    rows, batch = talks
    critic = critic_for(with_value_head(untied_folder, tmp_path / "valued"), one_rank)
    batch, mini = dataclasses.replace(batch, ref_log_probs=None), cut(batch, budget)
    naive = by_turn(rows, batch)
    with torch.no_grad():
        expected = critic.model(naive.pack)
    torch.testing.assert_close(critic.values(batch, mini.micro_batches), expected, rtol=0, atol=5e-6)
    loss, metrics = critic.loss(naive, counts_of(batch))
    loss.backward()
    gradients = gradients_of(critic.model)
    found = critic.trained.forward_backward(mini, critic.loss)
    assert_same(gradients_of(critic.model), gradients)
    assert_same_metrics(found, metrics)


def test_two_ranks_add_up_to_the_gradient_of_one(policy, talks):
    rows, batch = talks
    policy.actor = ACTOR
    expected, _ = naive_gradients(policy, rows, batch)
    tokens = batch.row_tokens()
    shares = rows_per_rank(tokens, range(len(rows)), 2, True)
    budget = dataclasses.replace(BUDGET, max_tokens=max(tokens.row_lengths()))
    bins = cut_ranks([tokens.select(share) for share in shares], [list(map(str, share)) for share in shares], budget)
    assert len(bins[0]) == len(bins[1]) > 1
    for share, micro_batches in zip(shares, bins, strict=True):
        micros = [micro_batch(batch.select(share), own) for own in micro_batches]
        policy.accumulate(micros, counts_of(batch), HEAT)
    assert_same(gradients_of(policy.model), expected)


OPTIONS = {
    "recomputed": ELEMENTWISE,
    "offloaded": {**ELEMENTWISE, "offload": (0, 2)},
    "checkpointed and offloaded": {**ELEMENTWISE, **FULL, "offload": (0, 2)},
    "selective": {**ELEMENTWISE, **SELECTIVE},
    "adapters": {**ELEMENTWISE, **LORA},
    "tiled MLP": {**ELEMENTWISE, **TILED},
    "eager": {**ELEMENTWISE, "attn_implementation": "eager"},
}


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_rows_in_parts_have_the_gradients_of_one_forward_with_every_option(untied_folder, one_rank, talks, options, on_policy):
    _, batch = talks
    batch = dataclasses.replace(batch, old_log_probs=None) if on_policy else batch
    policy = build(untied_folder, one_rank, **OPTIONS[options])
    policy.actor, found = ACTOR, []
    for budget in (10_000, 9):
        policy.trained.forward_backward(cut(batch, budget), policy.loss_at(HEAT))
        found.append(gradients_of(policy.model))
    assert_same(*found)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_teacher_says_the_same_of_rows_in_parts(policy, talks, ahead):
    _, batch = talks
    count, draw = int(batch.responses.lengths.sum()), torch.Generator().manual_seed(2)
    weight, factors = torch.randn(256, 6, generator=draw), torch.randn(count, generator=draw)
    # Samples that agree up to a token are one place of the forest, and the teacher's states there are the same.
    states = torch.randn(len(batch.forest.tokens), 6, generator=draw)[batch.forest.place]
    # In place of old log-probs, each token gets its number.
    batch = dataclasses.replace(batch, old_log_probs=torch.arange(count).float())
    found = []
    for budget in (10_000, 9, 3):
        divergences = torch.full((count,), torch.nan)

        def loss(micro, counts, prefix_kv, divergences=divergences):
            places = micro.old_log_probs.long()
            teaching = Teaching(Divergence("reverse_kl"), Head(weight, None, HEAT, 0, 0), states[places])

            def compute(pack, kv, gradient, taught):
                return policy.model(pack, HEAT, False, gradient, kv, teaching=taught)

            def gradient(rows, log_probs, entropy):
                return torch.zeros_like(log_probs), None, factors[places][rows]

            _, _, own = micro.outputs(policy.model, compute, prefix_kv, gradient if ahead else None, teaching)
            divergences[places] = own.detach()
            return (own * factors[places]).sum(), {}

        policy.trained.forward_backward(cut(batch, budget), loss)
        found.append((divergences, gradients_of(policy.model)))
    for divergences, gradients in found[1:]:
        torch.testing.assert_close(divergences, found[0][0], rtol=1e-5, atol=1e-6)
        assert_same(gradients, found[0][1])


@pytest.mark.parametrize("kind", ["mistral", "gemma4_text", "gemma4"])
def test_sliding_windows_go_on_from_open_nodes(tmp_path, one_rank, talks, kind):
    # The last layers of gemma4 read the keys of earlier ones, also those of open nodes.
    rows, batch = talks
    policy = policy_for(tiny_folder(tmp_path / kind, kind, sliding_window=4), one_rank, 1)
    expected, _ = naive_gradients(policy, rows, batch)
    policy.trained.forward_backward(cut(batch, 9), policy.loss_at(HEAT))
    assert_same(gradients_of(policy.model), expected)


def test_a_row_in_parts_needs_fewer_bytes_than_in_one_forward(tmp_path, one_rank):
    # Keys and values are small beside the other activations, as in models of ordinary shape.
    shape = TinyShape(hidden_size=256, intermediate_size=1024, num_layers=4, num_heads=4, num_kv_heads=1, tie_embeddings=False)
    folder, outputs = make_tiny_model(tmp_path / "wide", shape, seed=1), list(range(60))
    rows = [[Turn([5] * 400, outputs), Turn([5] * 400 + outputs + [7] * 40, outputs)]]
    batch, peaks = batch_of(rows, torch.zeros(1, dtype=torch.int64)), []
    policy = policy_for(folder, one_rank, 1)
    for budget in (10_000, 100):
        mini = cut(batch, budget)
        with ByteTracker() as tracker:
            tracker.mark("params", policy.model.parameters())
            policy.trained.forward_backward(mini, policy.loss_at(HEAT))
        peaks.append(tracker.most(DEVICE)["activations"])
    assert peaks[1] < 0.5 * peaks[0]


def test_a_row_over_the_budget_is_refused_where_its_parts_cannot_be_computed(policy, talks):
    _, batch = talks
    tokens = batch.row_tokens()
    longest = max(tokens.row_lengths())
    problem = rf"^key=20: .* has {longest} tokens, .* Raise it to at least {longest}"
    mini = cut(batch, 20)
    policy.model.supports_prefix_kv = False
    with pytest.raises(ConfigError, match=problem):
        policy.trained.forward_backward(mini, policy.loss_at(HEAT))


def test_an_update_in_backward_refuses_a_row_in_parts(untied_folder, one_rank, talks):
    actor = replaced(ACTOR, {"optim": replaced(ACTOR.optim, {"in_backward": True})})
    policy = policy_for(untied_folder, one_rank, 1, actor=actor)
    _, batch = talks
    (mini,) = [dataclasses.replace(cut(batch, 10_000), micro_batches=[InParts(range(batch.num_rows), 20, "too long")])]
    with pytest.raises(ConfigError, match="in_backward=true"):
        policy.update([mini], HEAT)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_conversation_that_is_too_large_for_the_device_is_computed_in_parts(untied_folder, one_rank, talks, number):
    _, batch = talks
    clean, policy = (policy_for(untied_folder, one_rank, 1) for _ in range(2))
    everything = [list(range(batch.num_rows))]
    log_probs = clean.compute_log_probs(batch, everything, HEAT, False).log_probs
    longest = max(batch.row_tokens().row_lengths())
    mini = cut(batch, longest)
    with oom_retry(CPU, True) as record, out_of_memory(policy.model, number):
        found = policy.compute_log_probs(batch, mini.micro_batches, HEAT, False)
    assert (record.retries, record.cap < longest) == (1, True)
    torch.testing.assert_close(found.log_probs, log_probs, rtol=0, atol=5e-6)
    expected = clean.update([cut(batch, 10_000)], HEAT)
    with oom_retry(CPU, True) as record, out_of_memory(policy.model, number, in_backward=True):
        again = policy.update([mini], HEAT)
    assert record.retries == 1
    assert any(isinstance(own, InParts) for own in mini.micro_batches)
    assert again == {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in expected.items()}


def test_a_row_in_parts_is_cut_into_smaller_parts_until_they_would_be_tiny(untied_folder, one_rank, talks):
    _, batch = talks
    policy, mini = policy_for(untied_folder, one_rank, 1), cut(batch, 22)
    assert all(isinstance(own, InParts) for own in mini.micro_batches)
    with oom_retry(CPU, True) as record, out_of_memory(policy.model, 0):
        policy.trained.forward_backward(mini, policy.loss_at(HEAT))
    assert (record.cap, {own.budget for own in mini.micro_batches if isinstance(own, InParts)}) == (16, {16})
    error = pytest.raises(torch.OutOfMemoryError)
    with oom_retry(CPU, True), out_of_memory(policy.model, 0), error:
        policy.trained.forward_backward(mini, policy.loss_at(HEAT))


def test_prompts_that_begin_alike_have_the_gradients_of_prompts_alone(policy):
    draw = random.Random(3)
    system, policy.actor = ids(draw, 70, 70), ACTOR
    prompts = [prompt for prompt in [system + ids(draw, 2, 9) for _ in range(3)] for _ in range(3)]
    outputs = [ids(draw, 1, 6) for _ in prompts]
    parts = prompt_rows(prompts), Ragged.from_rows(outputs, torch.int64), torch.arange(9) // 3
    shared, alone = (rollout_batch(*parts, replaced(ACTOR, {"use_prefix_grouper": on})) for on in (True, False))
    assert (shared.forest is None, alone.forest) == (False, None)
    found = []
    longest = max(shared.row_tokens().row_lengths())
    # Under the least budget a group is cut, and its parts reuse the keys and values of its prompt.
    assert any(reading for _, reading in spans(cut(shared, longest).micro_batches, shared.row_tokens()))
    for batch, budget in ((alone, 100), (shared, longest), (shared, 100), (shared, 10_000)):
        count, generator = batch.responses.flat.numel(), torch.Generator().manual_seed(0)
        for name in ("advantages", "old_log_probs", "ref_log_probs"):
            setattr(batch, name, torch.randn(count, generator=generator) * 0.3 - (0 if name == "advantages" else 5.7))
        policy.trained.forward_backward(cut(batch, budget), policy.loss_at(HEAT))
        found.append(gradients_of(policy.model))
    for gradients in found[1:]:
        assert_same(gradients, found[0])
