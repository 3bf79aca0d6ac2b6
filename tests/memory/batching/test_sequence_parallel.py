import dataclasses

import pytest
import torch

from tests.critics import critic_batch, critic_for, with_value_head
from tests.memory import activation_cases as act
from tests.model import architectures
from tests.ranks import run_ranks
from tests.tensors import whole_of
from tests.worker.test_conversations import batch_of, conversations
from tests.worker.test_policy import ACTOR, WHOLE, batch, micro_batches, shares
from verl_memopt.algorithms.records import PolicyLoss
from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import ActorRolloutRef, Model, TrainedFsdp
from verl_memopt.distributed.device import training_mesh
from verl_memopt.errors import ConfigError
from verl_memopt.memory.activation_offload_torch import ActivationOffload
from verl_memopt.memory.lora_torch import initialize_adapters
from verl_memopt.memory.sequence_parallel import key_copies
from verl_memopt.memory.tiled_mlp import TiledMlp
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.observe.byte_tracker import DEVICE
from verl_memopt.plan.formulas import Shapes
from verl_memopt.worker.policy import Policy

CPU = torch.device("cpu")
SHAPE = TinyShape(num_heads=4, num_kv_heads=2, num_layers=2, tie_embeddings=False)
"""Two ranks divide the key heads, four ranks repeat them."""
MIDDLE = 40
"""Tokens of a micro-batch: two or three rows."""
TILED = {"tiled_mlp": TiledMlp(True, 3)}
ELEMENTWISE, PLAIN = {"recompute_elementwise": True}, {"recompute_elementwise": False, "prune_last_block": False}
ON_POLICY = dataclasses.replace(ACTOR, use_kl_loss=False, entropy_coeff=0.0)
GSPO = replaced(ACTOR, {"policy_loss": PolicyLoss(loss_mode="gspo"), "loss_agg_mode": "seq-mean-token-mean"})

CASES = {
    "eager attention": {**PLAIN, "attn_implementation": "eager"},
    "plain checkpoints, offloaded": {**PLAIN, "recompute": True, "offload": True, "shared": True},
    "checkpoints": {**ELEMENTWISE, "recompute": True, "actor": GSPO},
    "LoRA, tiled MLP, whole logits": {**ELEMENTWISE, **TILED, "lora_rank": 4, "logprob_chunk_tokens": 0, "shared": True},
    "on-policy": {**ELEMENTWISE, "actor": ON_POLICY, "on_policy": True, "shared": True, "budget": WHOLE},
    "conversations": {**ELEMENTWISE, "talks": True, "budget": 90},
    "gemma2": {"attn_implementation": "auto"},
    "shared prompts, mistral": {**ELEMENTWISE, "shared": True, "budget": WHOLE},
    "shared prompts, gemma3_text": {**ELEMENTWISE, "recompute": True, "shared": True, "budget": WHOLE},
    "shared prompts, gpt_oss": {**ELEMENTWISE, "shared": True, "budget": WHOLE},
    "shared prompts, gemma4_text": {**ELEMENTWISE, "recompute": True, "shared": True, "budget": WHOLE},
    "three key heads": PLAIN,
}
"""Options of :func:`gradients`. Two ranks repeat three key heads.
gemma2 is no model of ours: transformers computes it, with windows and capped scores."""
MORE = {
    "plain": PLAIN,
    "pruned": {"recompute_elementwise": False},
    "recomputed norms": ELEMENTWISE,
    "recomputed norms, eager": {**ELEMENTWISE, "attn_implementation": "eager", "shared": True},
    "selective checkpoints": {**ELEMENTWISE, "recompute": True, "gradient_checkpointing_mode": "selective"},
    "LoRA": {**ELEMENTWISE, "lora_rank": 4},
    "shared prompts": {**ELEMENTWISE, "shared": True, "budget": WHOLE},
    "mistral": {**ELEMENTWISE, "prune_last_block": False},
    "conversations, on-policy": {**ELEMENTWISE, "talks": True, "actor": ON_POLICY, "on_policy": True, "budget": WHOLE},
    "conversations, eager": {**PLAIN, "talks": True, "attn_implementation": "eager"},
    "conversations, mistral": {**ELEMENTWISE, "talks": True, "prune_last_block": False},
}


def shared_batch():
    """Gives a batch whose groups of four rows have one prompt and compute it once."""
    whole = batch()
    whole.prompts = whole.prompts.select([row - row % 4 for row in range(whole.num_rows)])
    whole.prompt_group = whole.group.clone()
    return whole


def gradients(
    folder,
    mesh,
    ranks=1,
    actor=ACTOR,
    budget=MIDDLE,
    recompute=False,
    offload=False,
    shared=False,
    talks=False,
    on_policy=False,
    **model,
):
    """Gives metrics, log-probs and whole gradients of a mini-batch, on ranks that share the tokens of each micro-batch."""
    settings = Model(path=str(folder), **{"attn_implementation": "sdpa", "logprob_chunk_tokens": 8, **model})
    fsdp = TrainedFsdp(dtype="fp32", ulysses_sequence_parallel_size=ranks)
    policy_model = build_policy(settings, fsdp, folder, mesh, CPU, ModelUse(recompute=recompute, trained=True))
    materialize(policy_model, folder, CPU)
    initialize_adapters(policy_model, 1)
    moved = ActivationOffload(policy_model, CPU, 0, 2) if offload else None
    policy = Policy(policy_model, actor, 10, ranks, CPU, moved)
    whole = batch_of(*conversations()) if talks else shared_batch() if shared else batch()
    if on_policy:
        whole.old_log_probs = None
    (mini,) = shares(whole, 1, budget)
    mini.micro_batches.append([])  # one token, too few for each rank to have one
    log_probs = policy.compute_log_probs(whole, mini.micro_batches, 0.9, True)
    metrics = policy.accumulate(micro_batches(mini), mini.counts, 0.9)
    return {
        "log_probs": log_probs.log_probs,
        "entropy": log_probs.entropy,
        **{name: value.detach().clone() for name, value in metrics.items()},
        **{name: whole_of(p.grad).clone() for name, p in policy_model.named_parameters() if p.grad is not None},
    }


def critic_gradients(folder, mesh, ranks=1):
    """Gives values and whole gradients of a critic."""
    critic = critic_for(folder, mesh, ranks, fsdp={"ulysses_sequence_parallel_size": ranks})
    (mini,) = shares(critic_batch(shared=True), 1, MIDDLE)
    values = critic.values(mini.batch, mini.micro_batches)
    metrics = critic.trained.accumulate(micro_batches(mini), mini.counts, critic.loss)
    found = {name: whole_of(p.grad).clone() for name, p in critic.model.named_parameters() if p.grad is not None}
    return {"values": values, **metrics, **found}


def every_case(mesh, ranks, folders, cases):
    options = {**CASES, **MORE}
    found = {name: gradients(folders.get(name.split(", ")[-1], folders["qwen3"]), mesh, ranks, **options[name]) for name in cases}
    return found | {"critic": critic_gradients(folders["critic"], mesh, ranks)}


def of_a_rank(rank, ranks, folders, cases):
    found = every_case(training_mesh("cpu", ranks, -1), ranks, folders, cases)
    return {case: {name: tensor.numpy() for name, tensor in values.items()} for case, values in found.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    at = tmp_path_factory.mktemp("models")
    folders = {"qwen3": make_tiny_model(at / "qwen3", SHAPE, seed=3)}
    heads = dataclasses.replace(SHAPE, num_heads=6, num_kv_heads=3)
    folders["three key heads"] = make_tiny_model(at / "three", heads, seed=4)
    folders["critic"] = with_value_head(folders["qwen3"], at / "critic")
    return folders | {
        kind: architectures.tiny_folder(at / kind, kind, sliding_window=4)
        for kind in ("gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "mistral")
    }


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, list(CASES)),
        pytest.param(2, list(MORE), marks=pytest.mark.slow),
        # Six query heads do not divide over four ranks.
        pytest.param(4, [name for name in (*CASES, *MORE) if name != "three key heads"], marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_tokens_compute_the_gradients_of_one_rank(folders, one_rank, ranks, cases):
    expected = every_case(one_rank, 1, folders, cases)
    for answer in run_ranks(of_a_rank, ranks, ranks, folders, cases):
        assert answer.keys() == expected.keys()
        for case, values in expected.items():
            assert answer[case].keys() == values.keys(), case
            for name, value in values.items():
                difference = (torch.from_numpy(answer[case][name]) - value).norm()
                assert difference <= 2e-6 * value.norm(), (case, name, float(difference / value.norm()))


def test_query_heads_that_do_not_divide_over_the_ranks_are_refused_with_the_sizes_that_work(folders):
    fsdp = TrainedFsdp(dtype="fp32", ulysses_sequence_parallel_size=3)
    with act.fake_ranks(3) as mesh, pytest.raises(ConfigError, match=r"size=3: the model's 4 query heads .* Set 1 or 2 or 4\."):
        build_policy(Model(path=str(folders["qwen3"])), fsdp, folders["qwen3"], mesh, CPU)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "copies"),
    [(8, 4, 2, 1), (8, 2, 4, 2), (14, 2, 2, 1), (6, 2, 3, 3), (12, 4, 6, 3), (4, 4, 4, 1)],
)
def test_key_heads_are_repeated_no_more_often_than_they_must(heads, kv_heads, ranks, copies):
    assert key_copies(heads, kv_heads, ranks) == copies


@pytest.mark.parametrize("options", [{**ELEMENTWISE, "recompute": False}, {**PLAIN, "recompute": True}], ids=str)
def test_activations_of_a_rank_are_those_of_the_formula(wide, options):
    found = {ranks: activations(wide, ranks, **options) for ranks in (2, 4)}
    for ranks, (measured, formula) in found.items():
        assert act.close(measured, formula), (ranks, measured, formula)
    assert found[4][0] < 0.6 * found[2][0]


WIDE = TinyShape(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=4, num_heads=8, num_kv_heads=2, head_dim=16,
    tie_embeddings=False,
)  # fmt: skip
RESPONSE = 1024
"""Enough for a block's activations to be more than anything else."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("wide") / "model", WIDE, seed=5)


def activations(folder, ranks, recompute, **model):
    """Gives the activations at the peak of a step on the first of four ranks, and what the formula says of them."""
    asked = {"attn_implementation": "sdpa", "logprob_chunk_tokens": 64, "prune_last_block": False, **model}
    settings = Model(path=str(folder), enable_gradient_checkpointing=recompute, **asked)
    fsdp = TrainedFsdp(dtype="fp32", ulysses_sequence_parallel_size=ranks)
    with act.fake_ranks(4) as mesh:
        policy_model = build_policy(settings, fsdp, folder, mesh, CPU, ModelUse(recompute=recompute, trained=True))
        materialize(policy_model, folder, CPU)
        mini = act.mini_batch(micro_batches=1, response=RESPONSE)
        tracker = act.tracked_step(Policy(policy_model, act.ACTOR, 10, 4, CPU), act.micros(mini), mini.counts, 1)
    share = act.ROWS * RESPONSE // ranks
    shapes = Shapes(
        settings=ActorRolloutRef(model=settings, actor=replaced(act.ACTOR, {"fsdp_config": fsdp})), layers=WIDE.num_layers,
        hidden=WIDE.hidden_size, mlp=WIDE.intermediate_size, heads=WIDE.num_heads, kv_heads=WIDE.num_kv_heads,
        head_dim=WIDE.head_dim, vocab=WIDE.vocab_size, params=0, block_params=0, tied=False, tokens=share, responses=share,
        segments=act.ROWS,
    )  # fmt: skip
    return tracker.peaks[DEVICE].kinds["activations"], shapes.activation_bytes
