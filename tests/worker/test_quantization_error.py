import pytest

from tests.ranks import run_ranks
from tests.tensors import local_of
from tests.worker.test_policy import CPU
from verl_memopt.config.schema import Fsdp, Model
from verl_memopt.distributed.device import training_mesh
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.worker.roles import quantization_error


def quantised(folder, mesh, kind, dtype="fp32"):
    settings, fsdp = Model(path=str(folder)), Fsdp(dtype=dtype)
    policy = build_policy(settings, fsdp, folder, mesh, CPU, ModelUse(quantization=kind))
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
