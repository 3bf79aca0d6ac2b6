"""Updates over random forests of token runs, on one rank and on two, against each sequence alone in float64.

The reference is a model of a few lines that knows no packs, trees, micro-batches or ranks.
"""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.memory import activation_cases as act
from tests.memory.activation_cases import ELEMENTWISE, EVERY_2, FULL, LORA, SELECTIVE, TILED
from tests.model.forests import Forest, random_forest
from tests.ranks import run_ranks
from tests.tensors import local_of, whole_of
from tests.worker.test_policy import CPU
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import PolicyLoss, TrainedFsdp
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.distributed.device import training_mesh
from verl_memopt.memory.pass_order import InParts
from verl_memopt.model import forest as tree
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import named_weights
from verl_memopt.trainer.micro_batching import Budget, cut_ranks, rows_per_rank
from verl_memopt.worker.policy import Policy
from verl_memopt.worker.trained_model import MiniBatch

HEAT, SHAPE = 0.9, TinyShape(num_heads=4, num_kv_heads=2, tie_embeddings=False)

# The reference.


def naive_log_probs(weights, config, ids, windows):
    """The log-probs of all tokens of one sequence but the first, float64, by the textbook formulas of Qwen3.

    ``windows``: of each block, how many tokens a token sees with itself. None = all.
    """
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    tokens, half = len(ids) - 1, size // 2
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * 10_000 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * weights[f"{name}.weight"]

    def turned(x):
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    x = weights["model.embed_tokens.weight"][ids[:-1]]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"

        def product(x, name, at=at):
            return x @ weights[f"{at}.{name}.weight"].T

        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (
            product(y, f"self_attn.{n}_proj").view(tokens, -1, size).repeat_interleave(1 if n == "q" else heads // kv_heads, 1)
            for n in "qkv"
        )
        q, k = turned(norm(q, f"{at}.self_attn.q_norm")), turned(norm(k, f"{at}.self_attn.k_norm"))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        if windows[layer] is not None:
            hidden |= torch.ones(tokens, tokens, dtype=torch.bool).tril(-windows[layer])
        shares = scores.masked_fill(hidden, -math.inf).softmax(-1)
        x = x + product(torch.einsum("hqk,khd->qhd", shares, v).flatten(1), "self_attn.o_proj")
        y = norm(x, f"{at}.post_attention_layernorm")
        gated = torch.nn.functional.silu(product(y, "mlp.gate_proj")) * product(y, "mlp.up_proj")
        x = x + product(gated, "mlp.down_proj")
    logits = norm(x, "model.norm") @ weights["lm_head.weight"].T / HEAT
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def naive_entries(weights, config, forest, windows):
    """The log-prob of each sampled token of each row, from sequences that share nothing."""
    found, tokens = [], forest.tokens
    for row in forest.rows:
        left, known = sorted(row, key=lambda place: -len(forest.path(place))), {}
        for place in left:
            if place not in known:
                path = forest.path(place)
                values = naive_log_probs(weights, config, tokens[path], windows)
                known |= {at: value for at, value in zip(path[1:], values, strict=True) if at in row and at not in known}
        found += [known[place] for place in row]
    return torch.stack(found)


def naive_loss(kind, log_probs, old, advantages, rows, count):
    """The loss of the mini-batch, from textbook formulas. ``rows`` are the rows of the tokens."""

    def clipped(ratio, advantage):
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)

    if kind == "on-policy":
        return -(advantages * (log_probs - log_probs.detach()).exp()).sum() / len(rows)
    if kind == "ppo":
        return clipped((log_probs - old).exp(), advantages).sum() / len(rows)
    own = [rows == row for row in range(count) if (rows == row).any()]
    return sum(clipped((log_probs[at] - old[at]).mean().exp(), advantages[at][0]) for at in own) / count


KINDS = {
    "on-policy": PolicyLoss(),
    "ppo": PolicyLoss(),
    # All tokens of a row have one ratio, so rows in several passes are first computed without gradients.
    "gspo": PolicyLoss(loss_mode="gspo"),
}


WINDOWS = (None, None), (3, None), (1, 5), (None, 2), (4, 4)
"""Windows of the two blocks. Over all seeds, each pair meets each knob."""


@dataclasses.dataclass
class Case:
    """A forest with random advantages, a loss, and what its log-probs and gradients are."""

    seed: int
    forest: Forest
    kind: str
    old: torch.Tensor
    advantages: torch.Tensor
    log_probs: torch.Tensor
    gradients: dict
    windows: tuple

    def batch(self):
        forest = self.forest
        first = [forest.path(row[0])[:-1] if row else [0] for row in forest.rows]
        return RolloutBatch(
            prompts=Ragged.from_rows([forest.tokens[path] for path in first], torch.int64),
            responses=Ragged.from_rows([forest.tokens[list(row)] for row in forest.rows], torch.int64),
            group=torch.arange(len(forest.rows)),
            prompt_group=torch.arange(len(forest.rows)),
            forest=tree.Forest(
                tokens=forest.tokens,
                sizes=torch.tensor(forest.sizes),
                parent=torch.tensor(forest.parents),
                place=torch.tensor(forest.places),
                batch_size=[],
            ),
            old_log_probs=None if self.kind == "on-policy" else self.old.float(),
            advantages=self.advantages.float(),
            batch_size=[],
        )

    @property
    def counts(self):
        return GlobalCounts(float(len(self.old)), float(len(self.forest.rows)))


def naive_case(folder, seed):
    config = json.loads((folder / "config.json").read_text())
    weights = {name: weight.double().requires_grad_() for name, weight in load_file(folder / "model.safetensors").items()}
    forest, generator = random_forest(seed), torch.Generator().manual_seed(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    rows = torch.tensor([row for row, places in enumerate(forest.rows) for _ in places])
    windows = WINDOWS[seed % len(WINDOWS)]
    log_probs = naive_entries(weights, config, forest, windows)
    # Ratios of about 0.6, 0.95, 1.05 and 1.6, so that rounding moves none over its clip.
    moved = torch.tensor([-0.5, -0.05, 0.05, 0.5])[torch.randint(4, (len(rows),), generator=generator)]
    moved[rows == rows[0]] = 0.05  # not all rows are clipped
    advantages = torch.randn(len(rows), generator=generator)
    if kind == "gspo":
        moved, advantages = (values[[int((rows == row).nonzero()[0]) for row in rows]] for values in (moved, advantages))
    old, advantages = (log_probs.detach() - moved).float().double(), advantages.double()
    if kind != "on-policy":
        # A difference of two equal rows would be as inexact as their ratios.
        first = {places: row for row, places in reversed(list(enumerate(forest.rows)))}
        ends = np.cumsum([0, *map(len, forest.rows)]).tolist()
        for row, places in enumerate(forest.rows):
            signs = advantages[ends[first[places]] : ends[first[places] + 1]].sign()
            advantages[ends[row] : ends[row + 1]] = advantages[ends[row] : ends[row + 1]].abs() * signs
    loss = naive_loss(kind, log_probs, old, advantages, rows, len(forest.rows))
    gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    gradients = {name: gradient.float() for name, gradient in gradients.items()}
    return Case(seed, forest, kind, old, advantages, log_probs.detach(), gradients, windows)


# The updates.


PLAIN = {"prune_last_block": False}
OWN = {**ELEMENTWISE, **FULL}
KNOBS = {
    "recomputed values": ELEMENTWISE,
    "checkpoints": OWN,
    "none": PLAIN,
    "selective checkpoints": {**ELEMENTWISE, **SELECTIVE},
    "every second block": {**ELEMENTWISE, **EVERY_2},
    "pruned": {},
    "checkpoints, offloaded": {**OWN, "offload": (1, 2)},
    "offloaded": {**ELEMENTWISE, "offload": (1, 2)},
    "LoRA": {**OWN, **LORA},
    "tiled MLP": {**OWN, **TILED},
    "tiles": {**OWN, "block_tile_tokens": 7},
    "tiles and LoRA": {**OWN, **LORA, "block_tile_tokens": 16},
    "eager": {**ELEMENTWISE, "attn_implementation": "eager"},
    "whole logits": {**ELEMENTWISE, "logprob_chunk_tokens": 0},
    "vocabulary tiles": {**ELEMENTWISE, "logprob_chunk_tokens": 5, "logprob_vocab_tile": 96},
    "gradients on the host": {**OWN, "fsdp": {"grad_offload": True}},
    "gradients and activations on the host": {**OWN, "offload": (1, 2), "fsdp": {"grad_offload": True}},
    "weights on the host": {**ELEMENTWISE, "fsdp": {"offload_policy": True}},
    "gathered weights": {**ELEMENTWISE, "fsdp": {"reshard_after_forward": False, "gradient_sync": "last"}},
    "reduced in the last pass": {**OWN, "fsdp": {"gradient_sync": "last"}},
    "own units": {**ELEMENTWISE, "fsdp": {"own_units": True}},
    "copies of the weights": {**ELEMENTWISE, "fsdp": {"fsdp_size": 1}},
    "sequence parallelism": {**ELEMENTWISE, "fsdp": {"ulysses_sequence_parallel_size": 2}},
    "sequence parallelism, checkpoints": {**OWN, "fsdp": {"ulysses_sequence_parallel_size": 2}},
}
"""Options of :func:`tests.memory.activation_cases.build`."""


def policy_of(folder, world_size, knobs):
    knobs = {**knobs, "fsdp": dict(knobs.get("fsdp", {}))}
    if world_size == 1:
        knobs["fsdp"].pop("ulysses_sequence_parallel_size", None)
    mesh = training_mesh("cpu", world_size, knobs["fsdp"].get("fsdp_size", -1))
    plain = act.build(folder, mesh, world_size, **knobs)
    fsdp = replaced(TrainedFsdp(dtype="fp32"), knobs["fsdp"])
    actor = replaced(plain.actor, {"fsdp_config": fsdp, "loss_agg_mode": "token-mean"})
    return Policy(plain.model, actor, 10, world_size, CPU, plain.trained.offload)


def budget_of(tokens, can_cut, number):
    """One micro-batch; several; rows in a few parts; nodes in pieces of 3 tokens."""
    longest = max(tokens.row_lengths())
    return [10_000, longest, max(longest // 2, 1), 3][number % (4 if can_cut else 2)]


def gradients_of(policy):
    offloaded = policy.trained.offloaded
    for parameter in [] if offloaded is None else [weight for weight in policy.model.parameters() if weight.requires_grad]:
        parameter.grad = torch.zeros_like(parameter)
        local_of(parameter.grad).copy_(offloaded._places[id(parameter)])
    found = {name: whole_of(weight.grad).clone() for name, weight in named_weights(policy.model) if weight.grad is not None}
    policy.trained.optimizer.zero_grad()
    policy.model.zero_grad()
    return found


def expected_gradients(policy, case):
    """The gradients of the trained weights. Adapters start with B = 0, so A has none, and B that of the weight times A."""
    found = {}
    for name, weight in named_weights(policy.model):
        if not weight.requires_grad:
            continue
        base, _, adapter = name.rpartition(".lora_")
        if adapter == "A":
            found[name] = torch.zeros(weight.shape)
        elif adapter == "B":
            other = whole_of(dict(named_weights(policy.model))[f"{base}.lora_A"])
            scale = LORA["lora_alpha"] / LORA["lora_rank"]
            found[name] = scale * case.gradients[f"{base}.weight"].double() @ other.detach().T.double()
        else:
            found[name] = case.gradients[name]
    return found


def worst_error(found, expected):
    """The largest error of a gradient, relative to its norm. Where it nearly vanishes, the rounding of all gradients counts."""
    assert found.keys() == expected.keys()
    rounding = 2**-22 * torch.stack([gradient.double().norm() for gradient in expected.values()]).norm()
    errors = [
        float(((found[name].double() - gradient.double()).norm() - rounding).clamp(min=0) / gradient.double().norm())
        for name, gradient in expected.items()
        if gradient.any()
    ]
    vanishing = [found[name].double().norm() for name, gradient in expected.items() if not gradient.any()]
    assert all(norm <= rounding for norm in vanishing), vanishing
    return max(errors)


def computed_by(forest, rows):
    """How many different tokens some rows need, counted by their paths."""
    return len(dataclasses.replace(forest, rows=tuple(forest.rows[row] for row in rows)).computed())


@dataclasses.dataclass
class Found:
    """What a rank found in a case."""

    knobs: str
    error: float
    """The worst one of the gradients."""
    off: float
    """The worst one of the log-probs."""
    counted: int | None
    """Tokens that the log-prob pass computed. None = other ranks computed some of them."""
    needed: int
    """Different tokens that the rows of each micro-batch need, at least one."""
    passes: int
    in_parts: bool


def found_in(policy, case, knobs, number, ranks, rank):
    for block, window in zip(policy.model.decoder.layers, case.windows, strict=True):
        block.self_attn.window = window
    batch, can_cut = case.batch(), policy.model.supports_prefix_kv
    tokens, groups = batch.row_tokens(), 1 if policy.model.sequence is not None else ranks
    budget = Budget(True, budget_of(tokens, can_cut, number), None, "key")
    shares = rows_per_rank(tokens, range(batch.num_rows), groups, True)
    cut = cut_ranks([tokens.select(share) for share in shares], [list(map(str, share)) for share in shares], budget)
    own, micro_batches = shares[rank % groups], cut[rank % groups]
    mini = MiniBatch(batch.select(own), micro_batches, case.counts)
    mean = "seq-mean-token-mean" if case.kind == "gspo" else "token-mean"
    policy.actor = replaced(policy.actor, {"policy_loss": KINDS[case.kind], "loss_agg_mode": mean})
    sizes = []
    handle = policy.model.decoder.embed_tokens.register_forward_hook(lambda _, given, __: sizes.append(given[0].numel()))
    log_probs = policy.compute_log_probs(mini.batch, mini.micro_batches, HEAT, False).log_probs
    handle.remove()
    ends = np.cumsum([0, *map(len, case.forest.rows)])
    at = [entry for row in own for entry in range(ends[row], ends[row + 1])]
    off = float((log_probs.double() - case.log_probs[at]).abs().max()) if at else 0.0
    needed = [(isinstance(rows, InParts), computed_by(case.forest, [own[row] for row in rows])) for rows in mini.micro_batches]
    policy.trained.forward_backward(mini, policy.loss_at(HEAT))
    error = worst_error(gradients_of(policy), expected_gradients(policy, case))
    return Found(
        knobs,
        error,
        off,
        None if policy.model.sequence is not None else sum(sizes),
        sum(tokens if is_cut else max(tokens, 1) for is_cut, tokens in needed),
        len(sizes),
        any(is_cut for is_cut, _ in needed),
    )


def found_in_all(rank, folder, ranks, seeds):
    """Gives what a rank found for each seed. The knobs change with the seed, and the budget after all knobs."""
    found = {}
    for place, (name, knobs) in enumerate(KNOBS.items()):
        chosen = [seed for seed in seeds if seed % len(KNOBS) == place]
        policy = policy_of(folder / "model", ranks, knobs) if chosen else None
        for seed in chosen:
            case = torch.load(folder / f"{seed}.pt", weights_only=False)
            found[seed] = found_in(policy, case, name, seed // len(KNOBS), ranks, rank)
    return found


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Makes the references of some seeds, in a folder with the model, and gives the folder."""
    folder = tmp_path_factory.mktemp("forests")
    make_tiny_model(folder / "model", SHAPE, seed=2)

    def made(seeds):
        for seed in seeds:
            if not (folder / f"{seed}.pt").exists():
                torch.save(naive_case(folder / "model", seed), folder / f"{seed}.pt")
        return folder

    return made


def assert_all_exact(found, ranks):
    for seed, own in found.items():
        assert own.error <= 2e-6, (seed, own)
        assert own.off <= 5e-6, (seed, own)
        if own.counted is None:
            continue
        # On several ranks a pass in parts may have a placeholder where another rank computes tokens.
        most = own.needed + (own.passes if own.in_parts and ranks > 1 else 0)
        assert own.needed <= own.counted <= most, (seed, own)


SOME = (5, 11, 22, 26, 45, 48, 57, 67, 73, 80, 87, 90)
"""Seeds with twelve knobs, every loss and every budget."""
EVERY = range(200)


@pytest.mark.parametrize("seeds", [SOME, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["some", "every"])
def test_forests_on_one_rank_have_the_gradients_of_their_sequences_alone(cases, one_rank, seeds):
    found = found_in_all(0, cases(seeds), 1, seeds)
    assert_all_exact(found, 1)
    assert sum(own.in_parts for own in found.values()) >= len(seeds) // 4


@pytest.mark.parametrize("seeds", [SOME, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["some", "every"])
def test_forests_on_two_ranks_have_the_gradients_of_their_sequences_alone(cases, seeds):
    answers = run_ranks(found_in_all, 2, cases(seeds), 2, seeds, timeout=900)
    for found in answers:
        assert found.keys() == set(seeds)
        assert_all_exact(found, 2)
    assert sum(own.in_parts for own in answers[0].values()) >= len(seeds) // 4
    assert all(own.in_parts == answers[1][seed].in_parts for seed, own in answers[0].items())
