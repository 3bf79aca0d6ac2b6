import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import run_ranks
from tests.tensors import local_of, whole_of
from tests.workers.test_policy import CPU, batch
from verl_memopt.config.schema import Fsdp, Model, WrapPolicy
from verl_memopt.data.batch import RolloutBatch
from verl_memopt.data.ragged import Ragged
from verl_memopt.distributed.process_group import training_mesh
from verl_memopt.errors import ConfigError
from verl_memopt.models.build import named_weights
from verl_memopt.models.tiny import TinyShape, make_tiny_model
from verl_memopt.workers.scorer import build_policy, compute_log_probs, materialize, micro_batch, quantization_error

HEAT = 0.7


def built(folder, mesh, dtype="fp32"):
    policy_model = build_policy(Model(path=str(folder)), Fsdp(dtype=dtype), folder, mesh, CPU, "key", False, False)
    materialize(policy_model, folder, CPU)
    return policy_model


@pytest.fixture
def model(tiny_folder, one_rank):
    return built(tiny_folder, one_rank)


@torch.no_grad()
def naive(folder, whole):
    """Gives log-probs and entropies [R] from whole logits of one row at a time, in transformers."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder).eval()
    parts = []
    for prompt, response in zip(whole.prompts.rows(), whole.responses.rows(), strict=True):
        logits = lm(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / HEAT
        log_p = logits.log_softmax(-1)[: len(response)]
        parts.append((log_p.gather(-1, response[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)))
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def test_the_model_holds_the_folders_weights(model, tiny_folder):
    expected = load_file(tiny_folder / "model.safetensors")
    found = {name: whole_of(parameter) for name, parameter in named_weights(model)}
    assert found.keys() == expected.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_scores_are_those_of_whole_logits(model, tiny_folder):
    whole = batch(rows=6)
    found = compute_log_probs(model, whole, [[0, 3], [5, 1], [2, 4]], HEAT, True, CPU)
    log_probs, entropy = naive(tiny_folder, whole)
    torch.testing.assert_close(found.log_probs, log_probs, rtol=0, atol=2e-6)
    torch.testing.assert_close(found.entropy, entropy, rtol=0, atol=4e-6)
    assert (found.log_probs.dtype, found.log_probs.requires_grad) == (torch.float32, False)


def test_how_rows_are_cut_does_not_show(model):
    whole = batch(rows=6)
    one, many = (compute_log_probs(model, whole, rows, HEAT, False, CPU) for rows in ([range(6)], [[4], [], [2, 0], [1, 5], [3]]))
    torch.testing.assert_close(one.log_probs, many.log_probs, rtol=0, atol=2e-6)
    assert one.entropy is None


def test_rows_without_a_response_have_nothing_to_score(model):
    none = Ragged.from_rows([[], []], torch.int64)
    empty = RolloutBatch(
        prompts=Ragged.from_rows([[5, 6], [7]], torch.int64), responses=none, group=torch.zeros(2), batch_size=[]
    )
    found = compute_log_probs(model, empty, [[0], [1]], HEAT, True, CPU)
    assert found.log_probs.shape == found.entropy.shape == (0,)


def test_scoring_frees_what_it_gathered(tiny_folder, one_rank):
    model = built(tiny_folder, one_rank, "bfloat16")
    compute_log_probs(model, batch(rows=2), [[0, 1]], HEAT, False, CPU)
    assert all(isinstance(parameter, torch.distributed.tensor.DTensor) for parameter in model.parameters())


def test_a_micro_batch_holds_the_fields_of_its_rows_in_order():
    whole = batch(rows=4)
    micro = micro_batch(whole, [3, 1])
    sizes = whole.responses.sizes()
    assert micro.pack.row_lengths.tolist() == [sizes[3], sizes[1]]
    for name in ("old_log_probs", "ref_log_probs", "advantages"):
        rows = getattr(whole, name).split(sizes)
        assert torch.equal(getattr(micro, name), torch.cat([rows[3], rows[1]]))


def test_a_micro_batch_moves_with_what_it_has():
    whole = batch(rows=2)
    whole.ref_log_probs = None
    moved = micro_batch(whole, [0, 1]).to(torch.device("meta"))
    assert moved.ref_log_probs is None
    fields = [getattr(moved.pack, field.name) for field in dataclasses.fields(moved.pack)]
    assert {tensor.device.type for tensor in [*fields, moved.old_log_probs] if isinstance(tensor, torch.Tensor)} == {"meta"}


def quantised(folder, mesh, kind, dtype="fp32"):
    settings, fsdp = Model(path=str(folder)), Fsdp(dtype=dtype)
    policy = build_policy(settings, fsdp, folder, mesh, CPU, "actor_rollout_ref.ref", False, False, quantization=kind)
    policy.requires_grad_(False)
    materialize(policy, folder, CPU)
    return policy


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.01), ("nf4", 0.15)])
def test_a_quantised_references_error_is_small_and_measured_against_its_own_weights(untied_folder, one_rank, kind, bound):
    policy = quantised(untied_folder, one_rank, kind)
    mean, largest = quantization_error(policy, untied_folder, CPU, 1.0)
    assert 0 < mean <= largest <= bound


@pytest.mark.parametrize(("kind", "code_bits", "group"), [("int8", 8, 128), ("nf4", 4, 64)])
def test_a_quantised_reference_holds_codes_and_scales(tmp_path, one_rank, kind, code_bits, group):
    shape = TinyShape(hidden_size=128, intermediate_size=256, num_heads=4, num_kv_heads=4)
    folder = make_tiny_model(tmp_path / "model", shape)
    policy = quantised(folder, one_rank, kind)
    held = sum(local_of(p).untyped_storage().nbytes() for name, p in policy.named_parameters() if name.endswith("qweight"))
    # per block: q, k, v, o 128 x 128; gate, up 256 x 128; down 128 x 256
    weights = 2 * (4 * 128 * 128 + 3 * 128 * 256)
    assert held == weights * code_bits // 8 + 4 * weights // group


def two_rank_quantised(rank, folder):
    policy = quantised(folder, training_mesh("cpu", 2, -1), "nf4")
    return quantization_error(policy, folder, CPU, 1.0)


def test_a_quantised_reference_is_the_same_on_two_ranks(untied_folder, one_rank):
    alone = quantization_error(quantised(untied_folder, one_rank, "nf4"), untied_folder, CPU, 1.0)
    for answer in run_ranks(two_rank_quantised, 2, untied_folder):
        assert answer == pytest.approx(alone, rel=1e-4)


def test_a_unit_inside_a_block_is_refused_where_a_block_reads_its_weights_itself(tiny_folder, one_rank):
    def build(**model):
        fsdp = Fsdp(wrap_policy=WrapPolicy(["Qwen3MLP"]))
        return build_policy(Model(path=str(tiny_folder), **model), fsdp, tiny_folder, one_rank, CPU, "critic", False, False)

    expected = r"critic.fsdp_config.wrap_policy.*\['Qwen3MLP'\]: Qwen3MLP lies inside .*DecoderLayer.*set both to false"
    for one in ("recompute_elementwise", "prune_last_block"):
        with pytest.raises(ConfigError, match=expected):
            build(**{one: False})
    build(recompute_elementwise=False, prune_last_block=False)
