"""An update computes each token with the experts of a record, in every layout of a pack, and with every knob of a block."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.memory import activation_cases as act
from tests.memory.batching.test_shared_prompt import counts_of, grouped, sharing
from tests.model.test_experts import OWN, PLAIN, SHAPE, TILES
from tests.ranks import run_ranks
from tests.tensors import whole_of
from tests.worker.test_conversations import batch_of, conversations, cut
from verl_memopt.distributed.device import training_mesh
from verl_memopt.model.tiny import make_tiny_model
from verl_memopt.model.weights import named_weights
from verl_memopt.worker.policy import REPLAY_DIFFERS, REPLAYED
from verl_memopt.worker.trained_model import micro_batches_of

BATCH = sharing(grouped(40, [9, 5, 1, 12, 3, 7], groups=2))
PARTS = [[0, 1], [2, 3], [4, 5], [*range(6, 12)]]
ALONE = sharing(BATCH, shared=False)
FOREST = batch_of(conversations()[0], torch.arange(9) // 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("mixture") / "model", SHAPE, seed=3)


def scores(policy, batch, parts):
    return policy.compute_log_probs(batch, parts, 0.9, False)


def update(policy, batch, parts, reuse=False):
    """Gives the metrics, and every whole gradient by name."""
    metrics = policy.accumulate(micro_batches_of(batch, parts, reuse), counts_of(batch), 0.9)
    found = {name: whole_of(weight.grad).clone() for name, weight in named_weights(policy.model) if weight.requires_grad}
    policy.trained.optimizer.zero_grad()
    return metrics, found


def with_data(batch):
    """Adds what the loss reads."""
    generator = torch.Generator().manual_seed(1)
    for name in ("old_log_probs", "ref_log_probs", "advantages"):
        setattr(batch, name, torch.randn(int(batch.responses.lengths.sum()), generator=generator))
    return batch


CASES = {
    "whole": (BATCH, [[*range(12)]], False),
    "carried prompts": (BATCH, PARTS, True),
    "rows alone": (ALONE, [[0, 1, 2], [*range(3, 12)]], False),
    "forest": (with_data(FOREST), [[*range(9)]], False),
    "parts": (FOREST, cut(FOREST, 20).micro_batches, True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "options",
    [
        OWN,
        {**OWN, **TILES, "recompute": True},
        {**OWN, "recompute": True, "gradient_checkpointing_mode": "selective"},
        {**OWN, "recompute": True, "offload": (1, 2)},
        {**PLAIN, **TILES},
        {**OWN, "block_tile_tokens": 16},
    ],
    ids=["recomputed", "tiled, checkpointed", "selective", "offloaded", "plain", "blocks over tiles"],
)
def test_the_replay_of_its_own_choice_changes_no_bit(folder, one_rank, options, case):
    policy = act.build(folder, one_rank, **options)
    if CASES[case][2] and not policy.model.supports_prefix_kv:
        pytest.skip("these blocks keep no prefix")
    assert_replay_changes_no_bit(policy, *CASES[case])


BESIDE = replace(SHAPE, model_type="gemma4_text", experts_beside=True)


@pytest.mark.parametrize("shape", [replace(SHAPE, model_type="glm4_moe"), BESIDE], ids=["glm4_moe", "gemma4_text"])
@pytest.mark.parametrize("options", [OWN, {**OWN, **TILES, "recompute": True}, PLAIN], ids=["recomputed", "tiled", "plain"])
def test_the_replay_of_the_own_choice_of_other_families_changes_no_bit(tmp_path, one_rank, shape, options):
    folder = make_tiny_model(tmp_path / "model", shape, seed=3)
    for case in CASES.values():
        policy = act.build(folder, one_rank, **options)
        if not case[2] or policy.model.supports_prefix_kv:
            assert_replay_changes_no_bit(policy, *case)


def assert_replay_changes_no_bit(policy, batch, parts, reuse):
    policy.model.supports_prefix_kv = reuse
    expected, (metrics, gradients) = scores(policy, batch, parts), update(policy, batch, parts, reuse)
    recorded = scores(policy, batch.for_record(), parts)
    assert torch.equal(recorded.log_probs, expected.log_probs)
    replayed = batch.replaying(recorded.record)
    assert torch.equal(scores(policy, replayed, parts).log_probs, expected.log_probs)
    again, found = update(policy, replayed, parts, reuse)
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
    assert again.pop(REPLAY_DIFFERS) == 0
    assert again.pop(REPLAYED) > 0
    assert again == metrics


@contextmanager
def forced(model, experts):
    """Makes transformers' routers choose these experts, [T, L, k]. Their probabilities are those of its weights."""

    def force(layer):
        def choose(router, _, output):
            logits, (own,) = output[0], [experts[:, layer].long()]
            found = logits.sigmoid() if hasattr(router, "e_score_correction_bias") else logits.softmax(-1, dtype=torch.float)
            chosen = found.gather(1, own)
            return logits, chosen / chosen.sum(-1, keepdim=True), own

        return choose

    mixtures = [(layer, block.mlp.gate) for layer, block in enumerate(model.model.layers) if hasattr(block.mlp, "gate")]
    hooks = [gate.register_forward_hook(force(layer)) for layer, gate in mixtures]
    yield
    for hook in hooks:
        hook.remove()


def drawn_experts(tokens, seed=0):
    """Gives experts that no router has chosen, [T, L, k]."""
    drawn = torch.rand(tokens, SHAPE.num_layers, SHAPE.num_experts, generator=torch.Generator().manual_seed(seed))
    return drawn.topk(SHAPE.experts_per_token).indices.to(torch.uint8)


def by_transformers(folder, batch, places, experts):
    """Gives the log-probs, and the gradients of their weighted sum, row by row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found, weights = [], batch.advantages.split(batch.responses.sizes())
    for row, ((own,), prompt, answer) in enumerate(zip(places, batch.prompts.rows(), batch.responses.rows(), strict=True)):
        with forced(model, experts[own]):
            logits = model(torch.cat([prompt, answer[:-1]])[None]).logits[0, len(prompt) - 1 :]
        log_probs = (logits / 0.9).log_softmax(-1).gather(1, answer[:, None])[:, 0]
        (log_probs * weights[row]).sum().backward()
        found.append(log_probs.detach())
    return torch.cat(found), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_other_experts_give_the_values_of_transformers_forced_to_them(tmp_path, one_rank, kind):
    folder = make_tiny_model(tmp_path / "model", replace(SHAPE, model_type=kind), seed=3)
    policy = act.build(folder, one_rank, **OWN)
    places = BATCH.record_places([[size] for size in BATCH.responses.sizes()])
    experts = drawn_experts(1 + max(int(own.max()) for (own,) in places))
    log_probs, gradients = by_transformers(folder, BATCH, places, experts)
    replayed = BATCH.replaying([(own, experts[own]) for (own,) in places])
    torch.testing.assert_close(scores(policy, replayed, PARTS).log_probs, log_probs, rtol=0, atol=2e-6)
    # On-policy the gradient of the loss is that of the log-probs times the negative advantages, over the number of tokens.
    replayed.old_log_probs = None
    metrics, found = update(policy, replayed, PARTS, True)
    tokens = float(BATCH.responses.lengths.sum())
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], -gradient / tokens, rtol=0, atol=1e-6 + 2e-5 * gradient.abs().max() / tokens)
    assert all(found[name].any() for name in found if name.endswith("gate.weight"))
    assert 0.5 < metrics[REPLAY_DIFFERS] / metrics[REPLAYED] <= 1
    for other in (experts.roll(1, 0), experts.roll(1, 1)):  # of another token, or of another layer
        wrong = scores(policy, BATCH.replaying([(own, other[own]) for (own,) in places]), PARTS)
        assert (wrong.log_probs - log_probs).abs().max() > 1e-3


def test_layers_without_experts_replay_nothing(tmp_path, one_rank):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    mixed = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
    config = Qwen3MoeConfig(vocab_size=320, num_hidden_layers=3, initializer_range=0.2, **sizes, **mixed)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    policy = act.build(tmp_path, one_rank, **OWN)
    expected = scores(policy, BATCH, PARTS).log_probs
    recorded = scores(policy, BATCH.for_record(), PARTS)
    replayed = BATCH.replaying(recorded.record)
    assert replayed.routes.shape[1:] == (3, 2)
    assert not replayed.routes[:, 0].any()
    assert torch.equal(scores(policy, replayed, PARTS).log_probs, expected)


def test_a_turn_replays_the_experts_of_its_own_path(folder, one_rank):
    rows, _ = conversations()
    places = FOREST.record_places([[len(turn.output_ids) for turn in turns] for turns in rows])
    for turns, own in zip(rows, places, strict=True):
        for turn, tokens in zip(turns, own, strict=True):
            ids = [*turn.prompt_ids, *turn.output_ids][:-1]
            assert FOREST.forest.tokens[tokens].tolist() == ids


def on_ranks(rank, folder):
    rows = [[*range(6)], [*range(6, 12)]][rank]
    policy, own = act.build(folder, training_mesh("cpu", 2, -1), 2, **OWN, recompute=True), BATCH.for_record().select(rows)
    record = [(places.numpy(), experts.numpy()) for places, experts in scores(policy, own, [[0, 1, 2], [3, 4, 5]]).record]
    micros = micro_batches_of(_drawn().select(rows), [[0, 1], [2, 3, 4, 5]], False)
    policy.accumulate(micros, counts_of(BATCH), 0.9)
    return record, {name: whole_of(weight.grad).numpy() for name, weight in named_weights(policy.model)}


def _drawn():
    count = BATCH.for_record().routes[-1] + 1
    return BATCH.replaying([(torch.arange(count), drawn_experts(count))])


def test_ranks_record_their_rows_and_replay_as_one(folder, one_rank):
    policy = act.build(folder, one_rank, **OWN)
    expected = BATCH.replaying(scores(policy, BATCH.for_record(), [[*range(12)]]).record)
    _, gradients = update(policy, _drawn(), [[*range(12)]])
    answers = run_ranks(on_ranks, 2, folder)
    parts = [tuple(map(torch.from_numpy, part)) for record, _ in answers for part in record]
    found = BATCH.replaying(parts)
    assert torch.equal(found.routes, expected.routes)
    assert torch.equal(found.prompt_routes.stored.flat, expected.prompt_routes.stored.flat)
    for _, own in answers:
        assert act.largest_difference(map(torch.from_numpy, own.values()), gradients.values()) <= 4e-6
