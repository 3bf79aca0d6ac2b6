import dataclasses

import pytest
import torch
from transformers import AutoModelForTokenClassification

from tests.critics import CPU, CRITIC, critic_batch, critic_for, naive_values, with_value_head
from tests.ranks import run_ranks
from tests.tensors import local_of, row_of_each_token, whole_of
from tests.worker.test_policy import SMALL, WHOLE, NothingWaits, shares
from verl_memopt.algorithms.rows import row_means
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.distributed.device import training_mesh
from verl_memopt.memory.activation_offload_torch import ActivationOffload
from verl_memopt.memory.lora_torch import adapters, initialize_adapters
from verl_memopt.memory.precision import MixedPrecision
from verl_memopt.memory.tiled_mlp import TiledMlp
from verl_memopt.model.value_model import CRITIC_KEY, stored_head
from verl_memopt.model.weights import named_weights
from verl_memopt.worker.roles import fill_masters
from verl_memopt.worker.trained_model import micro_batch

METRICS = ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm")


@pytest.fixture(scope="module")
def folder(untied_folder, tmp_path_factory):
    return with_value_head(untied_folder, tmp_path_factory.mktemp("valued"))


def micros(mini):
    return [micro_batch(mini.batch, rows) for rows in mini.micro_batches]


def gradients_of(critic):
    return {name: whole_of(p.grad).clone() for name, p in named_weights(critic.model) if p.grad is not None}


def values_and_step(folder, mesh, rank=0, world_size=1, budget=WHOLE, shared=False, **options):
    """Gives this rank's values, its metrics of one step, and the whole gradients and weights of that step."""
    critic = critic_for(folder, mesh, world_size, **options)
    if critic.settings.model.enable_activation_offload:
        critic.trained.offload = ActivationOffload(critic.model, CPU, 0, 2)
    mini = shares(critic_batch(shared=shared), world_size, budget)[rank]
    values = critic.values(mini.batch, mini.micro_batches)
    critic.trained.accumulate(micros(mini), mini.counts, critic.loss)
    gradients = gradients_of(critic)
    critic.trained.optimizer.zero_grad()
    metrics = critic.update([mini])
    weights = {name: whole_of(parameter).detach().clone() for name, parameter in named_weights(critic.model)}
    return values, metrics, gradients, weights


def assert_same(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=tolerance)
    assert_same_step(found, expected, tolerance)


def assert_same_step(found, expected, tolerance=1e-5):
    for name in METRICS:
        assert found[1][name] == pytest.approx(expected[1][name], rel=tolerance, abs=1e-7), name
    assert found[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        assert (found[2][name] - gradient).norm() <= 2 * tolerance * gradient.norm() + 1e-8, name


# Values and the update against plain torch.


def naive_loss(predictions, whole, mode):
    old, returns, lengths = whole.old_values, whole.returns, whole.responses.lengths
    clipped = old + (predictions - old).clamp(-CRITIC.cliprange_value, CRITIC.cliprange_value)
    losses = 0.5 * torch.maximum((predictions - returns) ** 2, (clipped - returns) ** 2)
    if mode == "token-mean":
        return losses.mean()
    return row_means(losses, row_of_each_token(lengths, len(returns)), lengths).mean()


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_an_update_is_torchs_adamw_on_the_clipped_loss_of_transformers_values(folder, one_rank, mode):
    # With a small eps the first steps of Adam are signs of gradients, so that a rounding near 0 is a step the other way.
    optim = dataclasses.replace(CRITIC.optim, override_optimizer_config={"eps": 1e-2})
    theirs, whole = AutoModelForTokenClassification.from_pretrained(folder).eval(), critic_batch()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=optim.lr, weight_decay=optim.weight_decay, eps=1e-2)
    losses = []
    for _ in range(2):
        predictions = naive_values(theirs, whole)
        loss = naive_loss(predictions, whole, mode)
        losses.append(loss.item())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    critic = critic_for(folder, one_rank, loss_agg_mode=mode, optim=optim)
    mini = shares(whole, 1, SMALL)[0]
    metrics = critic.update([mini, mini])
    assert metrics["critic/vf_loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert norm > 1.0, "the gradient is clipped in this test"
    expected = dict(theirs.named_parameters())
    for name, parameter in named_weights(critic.model):
        assert (whole_of(parameter) - expected[name]).abs().max() <= 1e-6, name


def test_the_share_of_clipped_tokens_and_the_mean_prediction_are_reported(folder, one_rank):
    whole = critic_batch()
    critic = critic_for(folder, one_rank)
    predictions = critic.values(whole, [range(16)])
    clipped = whole.old_values + (predictions - whole.old_values).clamp(-0.2, 0.2)
    expected = ((clipped - whole.returns).abs() > (predictions - whole.returns).abs()).float().mean()
    metrics = critic.update([shares(whole, 1, SMALL)[0]])
    assert 0.1 < expected < 0.9
    assert metrics["critic/vf_clipfrac"] == pytest.approx(float(expected), rel=1e-6)
    assert metrics["critic/vpred_mean"] == pytest.approx(float(predictions.mean()), rel=1e-5)
    assert metrics["critic/lr"] == pytest.approx(1e-2)
    assert metrics["critic/skipped_updates"] == 0.0
    assert not [name for name in metrics if name.startswith("actor/")]


def test_rows_without_a_response_have_no_values(folder, one_rank):
    none = Ragged.from_rows([[], []], torch.int64)
    prompts = Ragged.from_rows([[5, 6], [7]], torch.int64)
    empty = RolloutBatch(prompts=prompts, responses=none, group=torch.zeros(2), batch_size=[])
    assert critic_for(folder, one_rank).values(empty, [[0], [1]]).shape == (0,)


def test_a_head_of_zeros_learns_and_its_first_gradient_reaches_only_the_head(untied_folder, one_rank):
    """With w = 0 the gradient of the states is 0: the first step moves the head alone, and the second everything."""
    critic, mini = critic_for(untied_folder, one_rank), shares(critic_batch(), 1, WHOLE)[0]
    critic.trained.accumulate(micros(mini), mini.counts, critic.loss)
    assert {name for name, gradient in gradients_of(critic).items() if gradient.any()} == {"score.weight", "score.bias"}
    critic.trained.optimizer.zero_grad()
    critic.update([mini])
    assert critic.values(mini.batch, mini.micro_batches).any()
    critic.trained.accumulate(micros(mini), mini.counts, critic.loss)
    assert all(gradient.any() for gradient in gradients_of(critic).values())


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(folder, one_rank):
    critic, bad = critic_for(folder, one_rank), critic_batch()
    before = {name: whole_of(parameter).detach().clone() for name, parameter in named_weights(critic.model)}
    bad.returns[3] = float("nan")
    metrics = critic.update([shares(bad, 1, SMALL)[0]])
    assert metrics["critic/skipped_updates"] == 1.0
    assert all(torch.equal(whole_of(parameter), before[name]) for name, parameter in named_weights(critic.model))
    assert critic.trained.schedule.last_epoch == 0


# How it is computed does not show.

KNOBS = {
    "small micro-batches": {"budget": SMALL},
    "checkpointing": {"model": {"enable_gradient_checkpointing": True}},
    "selective checkpointing": {"model": {"enable_gradient_checkpointing": True, "gradient_checkpointing_mode": "selective"}},
    "whole last block": {"model": {"prune_last_block": False}},
    "nothing recomputed": {"model": {"recompute_elementwise": False}},
    "nothing recomputed, whole last block": {"model": {"recompute_elementwise": False, "prune_last_block": False}},
    "eager attention": {"model": {"attn_implementation": "eager"}},
    "activations on the host": {"model": {"enable_activation_offload": True}, "budget": SMALL},
    "moments on the host": {"fsdp": {"optimizer_offload": True}},
    "FSDP2's own offload": {"fsdp": {"offload_policy": True}, "budget": SMALL},
    "tiles of the MLP": {"model": {"tiled_mlp": TiledMlp(enabled=True, num_shards=3)}},
}


@pytest.fixture(scope="module")
def plain_steps():
    return {}


@pytest.fixture
def plain(folder, one_rank, plain_steps):
    """Returns the step without a knob, of own or of shared prompts; each is taken once."""

    def step(shared):
        if shared not in plain_steps:
            plain_steps[shared] = values_and_step(folder, one_rank, shared=shared)
        return plain_steps[shared]

    return step


OWN_PROMPTS = ("small micro-batches", "eager attention", "whole last block", "FSDP2's own offload")


@pytest.mark.parametrize(("knob", "shared"), [*((knob, True) for knob in KNOBS), *((knob, False) for knob in OWN_PROMPTS)])
def test_no_knob_changes_values_loss_or_gradients(folder, one_rank, plain, knob, shared):
    assert_same(values_and_step(folder, one_rank, shared=shared, **KNOBS[knob]), plain(shared))


def test_a_shared_prompt_is_computed_once_and_gives_the_numbers_of_own_prompts(folder, one_rank):
    shared, own = critic_batch(shared=True), critic_batch(shared=True)
    own.prompt_group = None
    assert shared.row_tokens().cost(range(16)) < own.row_tokens().cost(range(16))
    found = []
    for whole in (shared, own):
        critic, mini = critic_for(folder, one_rank), shares(whole, 1, WHOLE)[0]
        values = critic.values(mini.batch, mini.micro_batches)
        critic.trained.accumulate(micros(mini), mini.counts, critic.loss)
        found.append((values, gradients_of(critic)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-5)
    for name, gradient in found[1][1].items():
        assert (found[0][1][name] - gradient).norm() <= 2e-5 * gradient.norm(), name


def test_answers_in_several_micro_batches_read_one_prefix_kv(folder, one_rank):
    """Groups of four answers, shorter than their prompt, in two micro-batches each: the prompt is computed once for both."""
    whole = critic_batch(shared=True)
    whole.prompts = Ragged.from_rows([torch.arange(3, 43)] * 4 + [torch.arange(60, 100)] * 12, torch.int64)
    whole.group = torch.tensor([0] * 4 + [1] * 12)
    whole.prompt_group = whole.group.clone()
    cut = [[0, 1], [2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    (mini,) = shares(whole, 1, WHOLE)
    found = []
    for micro_batches in ([list(range(16))], cut):
        critic = critic_for(folder, one_rank)
        prefixes, compute = [], critic.model.compute_prefix
        critic.model.compute_prefix = lambda prompt, prefixes=prefixes, compute=compute: (
            prefixes.append(prompt) or compute(prompt)
        )
        values = critic.values(whole, micro_batches)
        metrics = critic.update([dataclasses.replace(mini, micro_batches=micro_batches)])
        found.append((values, metrics, len(prefixes)))
    (values, metrics, none), (cut_values, cut_metrics, prefixes) = found
    assert (none, prefixes) == (0, 4), "two prompts, in the values pass and in the update"
    torch.testing.assert_close(cut_values, values, rtol=0, atol=1e-5)
    for name in METRICS:
        assert cut_metrics[name] == pytest.approx(metrics[name], rel=1e-5), name


def test_a_head_beside_split_masters_stays_whole_and_learns_the_same(folder, one_rank):
    (mini,), found = shares(critic_batch(), 1, WHOLE), []
    for fsdp in ({}, {"split_master_weights": True}, {"split_master_weights": True, "grad_offload": True}):
        whole = dataclasses.replace(CRITIC.optim, clip_grad=None)
        critic = critic_for(folder, one_rank, optim=whole, fsdp={"dtype": "bfloat16", **fsdp})
        fill_masters(critic.trained, folder, stored_head(folder, CRITIC_KEY))
        values = critic.values(mini.batch, mini.micro_batches)
        critic.update([mini])
        found.append((values, critic.model.score.weight.detach(), critic.model.score.bias.detach()))
    for other in found[1:]:
        assert all(torch.equal(whole_of(one), each) for one, each in zip(found[0], other, strict=True))


def test_a_head_beside_gradients_of_fewer_digits_has_all_of_its_own(folder, one_rank):
    reduced = MixedPrecision(reduce_dtype="bfloat16")
    fsdp = {"dtype": "bfloat16", "split_master_weights": True, "mixed_precision": reduced}
    critic, (mini,) = critic_for(folder, one_rank, fsdp=fsdp), shares(critic_batch(), 1, SMALL)
    critic.trained.accumulate(micros(mini), mini.counts, critic.loss)
    assert {p.grad.dtype for p in critic.model.score.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in critic.model.lm.parameters()} == {torch.bfloat16}
    assert critic.update([mini])["critic/skipped_updates"] == 0.0


def two_rank_steps(rank, folder):
    found = {}
    for key, size, options in (("fsdp", -1, {}), ("hsdp", 1, {}), ("every", -1, {"fsdp": {"reshard_after_forward": False}})):
        mesh = training_mesh("cpu", 2, size)
        values, metrics, gradients, _ = values_and_step(folder, mesh, rank, 2, SMALL, shared=True, **options)
        found[key] = values.numpy(), metrics, {name: tensor.numpy() for name, tensor in gradients.items()}
    return found


OPTIMIZERS = {
    "moments on the host": ({}, {"optimizer_offload": True}),
    "FSDP2's own offload": ({}, {"offload_policy": True}),
    "in backward": ({"in_backward": True, "clip_grad": None}, {}),
    "own units": ({}, {"own_units": True, "reshard_after_forward": True}),
    "8-bit moments": ({"state_dtype": "int8"}, {}),
    "8-bit moments in backward on the host": (
        {"state_dtype": "int8", "in_backward": True, "clip_grad": None}, {"optimizer_offload": True},
    ),
    "stochastic rounding": ({"stochastic_rounding": True}, {"model_dtype": "bfloat16"}),
}  # fmt: skip
ROUNDING = {"8-bit moments": 2e-3, "8-bit moments in backward on the host": 2e-3, "stochastic rounding": 2**-7}
"""How far a weight may be from one rank's where blocks of moments or random draws differ: bfloat16 is rounded by 2^-7 near 1."""


def two_updates(folder, mesh, rank, world_size, optim, fsdp):
    """Gives the metrics of two optimizer steps, the share of parameters that the rank holds of the head, and the weights."""
    # A step is lr * g / (|g| + eps) at first. With this eps a gradient near 0 that is rounded otherwise moves a weight by a tenth
    # of the rounding; with 1e-2, gradients that are not clipped moved weights by more than 2e-6 on some processors.
    smooth = dataclasses.replace(CRITIC.optim, override_optimizer_config={"eps": 1e-1}, **optim)
    critic = critic_for(folder, mesh, world_size, optim=smooth, fsdp=fsdp)
    mini = shares(critic_batch(), world_size, WHOLE)[rank]
    metrics = critic.update([mini, mini])
    held = sum(local_of(parameter).numel() for parameter in critic.model.score.parameters())
    weights = {name: whole_of(p).detach().clone().float().numpy() for name, p in named_weights(critic.model)}
    return metrics, held, weights


def every_optimizer(rank, folder):
    mesh = training_mesh("cpu", 2, -1)
    return {name: two_updates(folder, mesh, rank, 2, *options) for name, options in OPTIMIZERS.items()}


def on_rank(rank, folder):
    return two_rank_steps(rank, folder), every_optimizer(rank, folder)


@pytest.fixture(scope="module")
def of_two_ranks(folder):
    """The steps and the optimizers of two ranks: for each a list of what the ranks found."""
    return list(zip(*run_ranks(on_rank, 2, folder), strict=True))


def test_two_ranks_take_the_step_of_one(plain, of_two_ranks):
    expected, (answers, _) = plain(True), of_two_ranks
    for key in answers[0]:
        both = [answer[key] for answer in answers]
        metrics = {name: sum(each[1][name] for each in both) for name in METRICS[:3]}
        metrics["critic/grad_norm"] = both[0][1]["critic/grad_norm"]
        gradients = {name: torch.from_numpy(array) for name, array in both[0][2].items()}
        assert_same_step((None, metrics, gradients), expected)
        assert sum(each[0].size for each in both) == len(expected[0])


def test_every_optimizer_updates_a_head_of_which_one_of_two_ranks_holds_nothing(folder, one_rank, of_two_ranks):
    _, answers = of_two_ranks
    for name, (optim, fsdp) in OPTIMIZERS.items():
        both = [answer[name] for answer in answers]
        assert [held for _, held, _ in both] == [65, 0], name
        metrics, _, weights = two_updates(folder, one_rank, 0, 1, optim, fsdp)
        assert both[0][0]["critic/grad_norm"] == pytest.approx(
            metrics["critic/grad_norm"], rel=1e-2 if name in ROUNDING else 1e-5
        )
        assert both[0][0]["critic/skipped_updates"] == 0.0
        for parameter, values in weights.items():
            difference = abs(both[0][2][parameter] - values).max()
            assert difference <= ROUNDING.get(name, 2e-6), (name, parameter, difference)
            assert (both[0][2][parameter] == both[1][2][parameter]).all(), (name, parameter)


# LoRA.


def test_adapters_and_the_head_are_trained_and_nothing_else(folder, one_rank):
    critic = critic_for(folder, one_rank, model={"lora_rank": 4})
    assert len(adapters(critic.model)) == 2 * 7
    initialize_adapters(critic.model, 0)
    expected = critic_for(folder, one_rank).values(critic_batch(), [range(16)])
    assert torch.equal(critic.values(critic_batch(), [range(16)]), expected)
    (mini,) = shares(critic_batch(), 1, SMALL)
    critic.trained.accumulate(micros(mini), mini.counts, critic.loss)
    endings = {name.rsplit(".", 1)[-1] if "lora" in name else name for name in gradients_of(critic)}
    assert endings == {"lora_A", "lora_B", "score.weight", "score.bias"}


# What a GPU's host would wait for, and what a plan of memory needs.


def test_the_host_waits_for_nothing_between_the_micro_batches_of_a_step(folder, one_rank):
    critic, (mini,) = critic_for(folder, one_rank), shares(critic_batch(), 1, SMALL)
    micro = micros(mini)
    with NothingWaits():
        metrics = critic.trained.take_step(critic.trained.accumulate(micro, mini.counts, critic.loss))
    assert float(metrics["critic/grad_norm"]) > 0
