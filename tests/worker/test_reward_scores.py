"""The reward model's pass against transformers' classifiers, and what must change nothing in it."""

import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.ranks import run_ranks
from tests.worker.test_worker import AR, plan_of
from verl_memopt.config.schema import Actor, Fsdp, MixedPrecision, Model, ScoringModel
from verl_memopt.data.batch import Ragged, rollout_batch
from verl_memopt.distributed.device import training_mesh
from verl_memopt.errors import ConfigError
from verl_memopt.model.assembly import build_reward_model, materialize_critic
from verl_memopt.model.packing_check import REWARD_KEY
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.worker.policy import compute_scores

PROMPTS = [[40, 41, 42], [40, 41, 42], [50], [50], [60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71]]
RESPONSES = [[5, 6, 7, 8], [9], [], [7, 7], [11, 12, 13]]
GROUPS = [0, 0, 1, 1, 2]
CLASSES = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}


def classifier(folder, tiny_folder, kind="sequence", seed=3, labels=1):
    """Write a classifier on the tiny model's decoder, with a random head."""
    config = AutoConfig.from_pretrained(tiny_folder)
    config.num_labels, config.pad_token_id = labels, 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLASSES[kind].from_pretrained(tiny_folder, config=config, dtype=torch.float32)
        torch.nn.init.normal_(model.score.weight, std=0.2)
        if model.score.bias is not None:
            torch.nn.init.normal_(model.score.bias)
    model.save_pretrained(folder)
    for path in (*tiny_folder.glob("*token*"), *tiny_folder.glob("*.jinja")):
        shutil.copy(path, folder)
    return folder, model.eval()


def conversations(shared, rows=None):
    rows = range(len(PROMPTS)) if rows is None else rows
    return rollout_batch(
        prompts=Ragged.from_rows([PROMPTS[row] for row in rows], torch.int64),
        responses=Ragged.from_rows([[*RESPONSES[row], 0] for row in rows], torch.int64),
        group=torch.tensor([GROUPS[row] for row in rows]),
        actor=Actor(use_prefix_grouper=shared),
    )


def logits(model):
    """Score each conversation alone, as transformers does."""
    with torch.no_grad():
        rows = [torch.tensor([[*prompt, *response]]) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
        return torch.stack([model(row).logits.reshape(-1)[-1] for row in rows])


SETTINGS = ScoringModel(fsdp_config=Fsdp(dtype="fp32"))


@pytest.fixture
def worker_of(made):
    def build(folder, settings=SETTINGS, more=None):
        return made(more, reward_model=settings, reward_folder=str(folder))

    return build


def scored(worker, batch, micro_batches):
    return worker.call("reward", False, "reward_scores", batch, micro_batches).value


@pytest.mark.parametrize("kind", CLASSES)
def test_scores_are_the_logits_of_transformers_classifiers(worker_of, tiny_folder, tmp_path, kind):
    folder, model = classifier(tmp_path / "rm", tiny_folder, kind)
    worker = worker_of(folder)
    expected = logits(model)
    assert expected.std() > 0.1
    for shared in (True, False):
        found = scored(worker, conversations(shared), [[0, 1, 2, 3, 4]])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_each_further_model_has_its_own_weights(made, tiny_folder, tmp_path):
    (first, one), (second, other) = (classifier(tmp_path / str(seed), tiny_folder, seed=seed) for seed in (3, 4))
    worker = made(None, reward_model=SETTINGS, reward_folder=str(first), further_reward_folders=(str(second),))
    for place, model in ((0, one), (1, other)):
        found = worker.call("reward", False, "reward_scores", conversations(True), [[0, 1, 2, 3, 4]], place).value
        torch.testing.assert_close(found, logits(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "cut", [[[0], [1], [2], [3], [4]], [[0, 1], [2, 3, 4]], [[4, 0], [3, 1, 2]]], ids=["rows", "groups", "mixed"]
)
def test_scores_do_not_depend_on_the_micro_batches(worker_of, tiny_folder, tmp_path, cut):
    folder, model = classifier(tmp_path / "rm", tiny_folder)
    found = scored(worker_of(folder), conversations(True), cut)
    torch.testing.assert_close(found, logits(model), rtol=0, atol=1e-5)


def test_the_knobs_of_the_policys_model_change_no_score(worker_of, tiny_folder, tmp_path):
    folder, model = classifier(tmp_path / "rm", tiny_folder)
    knobs = {f"{AR}.model.prune_last_block": False, f"{AR}.model.recompute_elementwise": False}
    tiled = {f"{AR}.model.tiled_mlp.enabled": True, f"{AR}.model.tiled_mlp.num_shards": 3, f"{AR}.model.lora_rank": 2}
    for more in (knobs, tiled):
        worker = worker_of(folder, SETTINGS, more)
        found = scored(worker, conversations(True), [[0, 1], [2, 3], [4]])
        torch.testing.assert_close(found, logits(model), rtol=0, atol=1e-5)
        worker.close()


def test_the_model_is_frozen_and_has_no_adapters(worker_of, tiny_folder, tmp_path):
    folder, _ = classifier(tmp_path / "rm", tiny_folder)
    model = worker_of(folder, SETTINGS, {f"{AR}.model.lora_rank": 2}).reward_model
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any("lora" in name for name, _ in model.named_parameters())


def params_of_phases(worker):
    """Returns the scores, and the bytes of parameters on the device at the peak of three phases, counted one by one."""
    batch = conversations(True)
    old = worker.call("old_log_prob", True, "old_log_probs", batch, [[0, 1, 2, 3, 4]], False)
    reward = worker.call("reward", True, "reward_scores", batch, [[0, 1, 2, 3, 4]])
    again = worker.call("old_log_prob", True, "old_log_probs", batch, [[0, 1, 2, 3, 4]], False)
    return reward.value, [reply.memory.kind_peaks["params"] for reply in (old, reward, again)]


def test_an_offloaded_model_holds_no_device_byte_outside_its_own_phase(worker_of, tiny_folder, tmp_path):
    folder, model = classifier(tmp_path / "rm", tiny_folder)
    here = worker_of(folder)
    size = sum(parameter.nbytes for parameter in here.reward_model.parameters())
    expected, (beside, own, _) = params_of_phases(here)
    here.close()
    assert (beside, own) == (beside, beside)
    away = worker_of(folder, ScoringModel(fsdp_config=Fsdp(dtype="fp32", param_offload=True)))
    for _ in range(2):
        found, bytes_of_phases = params_of_phases(away)
        assert bytes_of_phases == [beside - size, beside, beside - size]
        assert torch.equal(found, expected)
    torch.testing.assert_close(expected, logits(model), rtol=0, atol=1e-5)


def test_a_knob_that_does_not_act_in_a_reward_model_is_named_by_its_own_key(tiny_folder, tmp_path, one_rank):
    folder, _ = classifier(tmp_path / "rm", tiny_folder)
    settings, policy = ScoringModel(override_config={"hidden_act": "gelu"}), Model(block_tile_tokens=64)
    with pytest.raises(ConfigError, match=f"^{AR}.model.block_tile_tokens: .* Set {AR}.model.block_tile_tokens=null"):
        build_reward_model(settings, policy, folder, one_rank, torch.device("cpu"))


SHARDINGS = [
    {},
    {"reshard_after_forward": False},
    {"fsdp_size": 1},
    {"own_units": False},
    {"offload_policy": True},
    {"mixed_precision": MixedPrecision(reduce_dtype="bfloat16")},
]
"""Settings of ``fsdp_config`` that change no score."""


def two_ranks(rank, folder, tiny_folder):
    """Returns the scores of this rank's rows, sharded in each way: three of five rows, the last of them a copy."""
    plan, scores = plan_of(tiny_folder), []
    for more in SHARDINGS:
        settings = ScoringModel(fsdp_config=Fsdp(dtype="fp32", **more))
        mesh = training_mesh("cpu", 2, settings.fsdp_config.fsdp_size)
        model = build_reward_model(settings, plan.settings.model, folder, mesh, torch.device("cpu"))
        model.requires_grad_(False)
        assert materialize_critic(model, folder, torch.device("cpu"), REWARD_KEY)
        batch = conversations(True, [[0, 1, 4], [2, 3, 0]][rank])
        scores.append(compute_scores(model, batch, [[0, 1], [2]], torch.device("cpu")).tolist())
    return scores


def test_two_ranks_give_the_scores_of_one_however_the_model_is_sharded(tiny_folder, tmp_path):
    folder, model = classifier(tmp_path / "rm", tiny_folder)
    expected = logits(model)[[0, 1, 4, 2, 3, 0]]
    for one, other in zip(*run_ranks(two_ranks, 2, folder, tiny_folder), strict=True):
        torch.testing.assert_close(torch.tensor([*one, *other]), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (ScoringModel(fsdp_config=Fsdp(dtype="fp32"), quantization="int8"), 0.02),
        (ScoringModel(fsdp_config=Fsdp(dtype="fp32"), quantization="nf4"), 0.3),
        (ScoringModel(fsdp_config=Fsdp(dtype="bfloat16", model_dtype="bfloat16")), 0.1),
    ],
    ids=["int8", "nf4", "bfloat16"],
)
def test_fewer_bits_cost_some_exactness_and_take_less_memory(worker_of, tiny_folder, tmp_path, settings, error):
    folder, model = classifier(tmp_path / "rm", tiny_folder)
    worker = worker_of(folder, settings)
    found = scored(worker, conversations(True), [[0, 1, 2, 3, 4]])
    differences = (found - logits(model)).abs()
    assert 0 < differences.max() < error
    held = sum(parameter.nbytes for parameter in worker.reward_model.parameters())
    assert held < 0.7 * sum(parameter.nbytes for parameter in model.parameters())


def test_experts_of_a_reward_model_are_quantised_too(worker_of, tmp_path):
    policy = make_tiny_model(tmp_path / "policy", TinyShape("qwen3_moe", hidden_size=128, num_experts=16, expert_size=128))
    folder, model = classifier(tmp_path / "rm", policy)
    worker = worker_of(folder, ScoringModel(fsdp_config=Fsdp(dtype="fp32"), quantization="int8"))
    found = scored(worker, conversations(True), [[0, 1, 2, 3, 4]])
    assert 0 < (found - logits(model)).abs().max() < 0.05
    held = sum(parameter.nbytes for parameter in worker.reward_model.parameters())
    assert held < 0.4 * sum(parameter.nbytes for parameter in model.parameters())


def test_a_conversation_without_its_end_is_a_mistake():
    batch = rollout_batch(Ragged.from_rows([[1]], torch.int64), Ragged.from_rows([[]], torch.int64), torch.tensor([0]), Actor())
    with pytest.raises(AssertionError, match="one token more"):
        compute_scores(None, batch, [[0]], torch.device("cpu"))
