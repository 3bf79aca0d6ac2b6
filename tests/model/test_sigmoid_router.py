"""The router of GLM-4.5: sigmoids, groups, and a correction that is fp32 in any model and that nothing trains."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.memory import activation_cases as act
from tests.memory.recomputed import EPS, drawn, gradients, plain_norm, relative
from tests.model.test_experts import CHOSEN, HIDDEN, ROUNDING, TOKENS, by_layers, shared_expert, weights
from tests.ranks import run_ranks
from tests.worker.test_worker import AR, place, plan_of
from verl_memopt.config.schema import CriticModel
from verl_memopt.distributed.device import training_mesh
from verl_memopt.errors import ConfigError
from verl_memopt.memory.recompute_elementwise_torch import RMSNorm
from verl_memopt.memory.tiled_mlp_torch import Traits
from verl_memopt.memory.weight_buckets_torch import joined
from verl_memopt.model.assembly import build_critic, materialize_critic
from verl_memopt.model.experts import Mixture, mixed
from verl_memopt.model.families import CORRECTION
from verl_memopt.model.mixture_kind import MixtureKind, SigmoidRouter
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import named_weights
from verl_memopt.worker.worker import Worker

SHIFT = torch.tensor([0.3, 0.0, -0.2, 0.1, 0.25, -0.4], dtype=torch.float64)


def routed(router, logits):
    """Gives the experts of one token, and their weights."""
    scores = logits.sigmoid()
    shifted = (scores + router.correction).detach()
    groups = shifted.chunk(router.groups)
    worth = [float(group.sort().values[-2:].sum()) for group in groups]
    allowed = sorted(range(router.groups), key=lambda group: -worth[group])[: router.top_groups]
    experts = [expert for expert in range(len(scores)) if expert // len(groups[0]) in allowed]
    chosen = sorted(experts, key=lambda expert: -float(shifted[expert]))[: router.top_k]
    found = scores[chosen]
    return chosen, (found / found.sum() if router.renormalizes else found) * router.factor


def naive(x, router, tensors):
    gate, gate_up, down = tensors
    outs = []
    for row in x:
        chosen, shares = routed(router, gate @ row)
        parts = []
        for share, expert in zip(shares, chosen, strict=True):
            first, second = (gate_up[expert] @ row).chunk(2)
            parts.append(share * (down[expert] @ (silu(first) * second)))
        outs.append(sum(parts))
    return torch.stack(outs)


@pytest.mark.parametrize("tiles", [None, 1, 4])
@pytest.mark.parametrize(
    "router",
    [
        SigmoidRouter(CHOSEN, True, 1.0, 1, 1, SHIFT),
        SigmoidRouter(CHOSEN, False, 2.5, 1, 1, SHIFT),
        SigmoidRouter(CHOSEN, True, 1.5, 2, 1, SHIFT),
        SigmoidRouter(CHOSEN, True, 1.0, 3, 2, SHIFT),
    ],
    ids=["plain", "factor", "one group of two", "two groups of three"],
)
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(router, tiles):
    residual, x, norm, tensors = drawn(TOKENS, HIDDEN, seed=5), drawn(TOKENS, HIDDEN, seed=6), drawn(HIDDEN, seed=7), weights()
    learned, z = (residual, x, norm, *tensors), residual + x
    expected = z + naive(plain_norm(z, norm), router, tensors)
    # Backward overwrites x.
    found = mixed(residual * 1.0, x * 1.0, (RMSNorm(EPS), norm), Mixture(MixtureKind(router), tensors), tiles).squeeze(0)
    pairs = zip([found, *gradients((found,), learned)], [expected, *gradients((expected,), learned)], strict=True)
    assert all(relative(one, other) <= ROUNDING for one, other in pairs)


@pytest.mark.parametrize("tiles", [None, 1, 4])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_shared_expert_without_a_gate_adds_its_output(tiles, adapted):
    router, tensors, x = SigmoidRouter(CHOSEN, True, 1.0, 1, 1, SHIFT), weights(), drawn(TOKENS, HIDDEN, seed=6)
    shared = shared_expert(adapted)[:12]
    learned = x, *tensors, *(tensor for tensor in shared if tensor is not None)
    expected = naive(x, router, tensors) + by_layers(x, shared)
    mixture = Mixture(MixtureKind(router), (*tensors, *shared), (Traits(1.5 if adapted else 0.0, None),) * 3)
    found = mixed(None, x * 1.0, None, mixture, tiles).squeeze(0)
    pairs = zip([found, *gradients((found,), learned)], [expected, *gradients((expected,), learned)], strict=True)
    assert all(relative(one, other) <= ROUNDING for one, other in pairs)


# The correction, in a model of any dtype.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Gives a folder in bfloat16 with a correction in fp32 that is no number of bfloat16, and with layers for drafting."""
    at = make_tiny_model(tmp_path_factory.mktemp("glm") / "fp32", TinyShape("glm4_moe", num_layers=3), seed=3)
    model = AutoModelForCausalLM.from_pretrained(at, dtype=torch.bfloat16)
    out = at.parent / "bfloat16"
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(at).save_pretrained(out)
    stored = load_file(out / "model.safetensors")
    drafting = {
        "model.layers.3.eh_proj.weight": torch.randn(4, 8), "model.layers.3.mlp.experts.0.up_proj.weight": torch.randn(2, 2),
    }  # fmt: skip
    save_file(stored | drafting, out / "model.safetensors", {"format": "pt"})
    return out


def stored_corrections(folder):
    found = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name.endswith(CORRECTION)}
    assert len(found) == 2
    assert all(tensor.dtype == torch.float32 and not torch.equal(tensor, tensor.bfloat16().float()) for tensor in found.values())
    return found


def corrections(model):
    return {name: weight for name, weight in named_weights(model) if name.endswith(CORRECTION)}


def assert_exact(model, folder):
    found, expected = corrections(model), stored_corrections(folder)
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == torch.float32 and torch.equal(found[name], expected[name]) for name in found)


FSDPS = {
    "bfloat16": {"masters": "bf16", "dtype": "bf16"},
    "cast": {"masters": "fp32", "dtype": "bf16"},
    "fp32": {},
    "offload_policy": {"masters": "fp32", "dtype": "bf16", "fsdp": {"offload_policy": True}},
}


@pytest.mark.parametrize("options", FSDPS.values(), ids=FSDPS)
def test_a_step_keeps_the_correction_in_fp32_and_as_it_was(folder, one_rank, options):
    policy = act.build(folder, one_rank, recompute_elementwise=True, **options)
    assert_exact(policy.model, folder)
    policy.update([act.mini_batch(micro_batches=1)], 0.9)
    assert_exact(policy.model, folder)


def on_ranks(rank, folder, options):
    policy = act.build(folder, training_mesh("cpu", 2, -1), 2, recompute_elementwise=True, **options)
    policy.update([act.mini_batch(rank, 2, 1)], 0.9)
    assert_exact(policy.model, folder)
    return True


@pytest.mark.parametrize("options", [FSDPS["bfloat16"], FSDPS["cast"], FSDPS["offload_policy"]], ids=str)
def test_ranks_that_shard_a_model_each_have_the_whole_correction(folder, options):
    assert run_ranks(on_ranks, 2, folder, options) == [True, True]


def test_a_critic_reads_the_correction_of_its_folder(folder, one_rank):
    section = CriticModel(path=str(folder), trust_remote_code=False)
    critic = build_critic(section, folder, one_rank, act.CPU)
    assert not materialize_critic(critic, folder, act.CPU)
    assert_exact(critic, folder)


def test_weights_for_an_engine_or_a_file_in_half_precision_have_the_correction_in_fp32():
    name, values = f"model.layers.1.mlp.gate.{CORRECTION}", torch.tensor([1.0 + 2**-20])
    sent = dict(joined([(name, values), ("model.norm.weight", values)], torch.bfloat16))
    assert torch.equal(sent[name], values)
    assert sent["model.norm.weight"].dtype == torch.bfloat16


def save(rank, folder, out):
    more = {f"{AR}.actor.fsdp_config.model_dtype": "bf16"}
    worker = Worker(dataclasses.replace(plan_of(folder, more), engine_folder=None, has_more=True), place(rank, 2))
    worker.save_model(str(out))


def test_two_ranks_save_every_byte_of_a_folder_with_layers_for_drafting_and_transformers_loads_it(folder, tmp_path):
    run_ranks(save, 2, folder, tmp_path / "out")
    before, after = (load_file(at / "model.safetensors") for at in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert_exact(theirs, folder)
    assert AutoConfig.from_pretrained(tmp_path / "out").num_nextn_predict_layers == 1


def test_a_layer_for_drafting_that_the_config_does_not_name_is_an_error(folder, tmp_path, one_rank):
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match=r"tensors of experts are missing, such as model\.layers\.3\.mlp\.experts\.0"):
        act.build(copy, one_rank)
