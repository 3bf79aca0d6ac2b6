import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.ranks import run_ranks
from tests.rollout.tools import model_of, weights_of
from verl_memopt.errors import RolloutError
from verl_memopt.memory.weight_buckets_torch import WeightSlice, joined
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.rollout.engine_weights import BitComparison, ExpectedWeights, meta_model, one_by_one
from verl_memopt.rollout.vllm_process import STEPS_PER_AGREEMENT, agreed


def expected_of(folder):
    return ExpectedWeights.of(meta_model(str(folder), False))


def test_the_meta_model_expects_what_the_real_one_holds_and_takes_no_memory(untied_folder):
    model = model_of(untied_folder)
    assert expected_of(untied_folder).shapes == {name: value.shape for name, value in model.named_parameters()}
    assert all(parameter.is_meta for parameter in meta_model(str(untied_folder), False).parameters())


def test_a_tied_head_may_come_or_stay_away_but_an_untied_one_must_come(tied_folder, untied_folder):
    tied = dict(weights_of(model_of(tied_folder)))
    both = [*tied.items(), ("lm_head.weight", tied["model.embed_tokens.weight"])]
    names = [part.name for part in expected_of(tied_folder).checked(iter(both))]
    assert names == list(tied)
    untied = dict(weights_of(model_of(untied_folder)))
    del untied["lm_head.weight"]
    with pytest.raises(RolloutError, match=r"1 weights are missing: lm_head\.weight"):
        list(expected_of(untied_folder).checked(iter(untied.items())))


def test_unknown_repeated_and_misshapen_weights_are_named(tied_folder):
    expected = expected_of(tied_folder)
    norm = ("model.norm.weight", torch.ones(64))
    for bad, message in [
        ([("model.nrm.weight", torch.ones(64))], r"model\.nrm\.weight is not a weight"),
        ([norm, norm], r"model\.norm\.weight was sent twice"),
        ([("model.norm.weight", torch.ones(32))], r"model\.norm\.weight has shape \(32,\).*expects \(64,\)"),
    ]:
        with pytest.raises(RolloutError, match=message):
            list(expected.checked(iter(bad)))


def test_weights_are_asked_for_one_by_one(tied_folder):
    asked = []

    def stream():
        for name, tensor in weights_of(model_of(tied_folder)):
            asked.append(name)
            yield name, tensor

    checked = expected_of(tied_folder).checked(stream())
    for count in range(1, 4):
        assert next(checked).name == asked[-1]
        assert len(asked) == count


def test_experts_reach_an_engine_one_by_one_whichever_rows_arrive(tmp_path):
    folder = make_tiny_model(tmp_path / "model", TinyShape(model_type="qwen3_moe", num_experts=5, num_layers=1))
    model = model_of(folder)
    slices = [
        WeightSlice(name, weight.shape, start, weight[start : start + 2])
        for name, weight in weights_of(model)
        for start in range(0, len(weight), 2)
    ]
    found = dict(joined(one_by_one(expected_of(folder).checked(reversed(slices))), torch.float32))
    stored = load_file(folder / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)


def rows(start, stop, of=64):
    return WeightSlice("model.norm.weight", torch.Size([of]), start, torch.ones(stop - start))


def test_rows_may_come_in_any_order_but_each_once_and_all_of_them():
    expected = ExpectedWeights({"model.norm.weight": torch.Size([64])}, frozenset())
    assert len(list(expected.checked(iter([rows(40, 64), rows(0, 40)])))) == 2
    for bad, message in [
        ([rows(0, 40), rows(39, 64)], "was sent twice"),
        ([rows(0, 40), rows(41, 64)], "1 weights are missing"),
        ([rows(0, 40, of=65)], r"has shape \(65,\), the engine expects \(64,\)"),
    ]:
        with pytest.raises(RolloutError, match=message):
            list(expected.checked(iter(bad)))


def compared(*pairs):
    bits = BitComparison()
    for name, own, other in pairs:
        bits.add(name, own, other)
    result = bits.result(["b", "a", "b"])
    return result.equal, result.different, result.unknown


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_bit_makes_a_difference(dtype):
    own = torch.randn(4, 3, dtype=dtype)
    other = own.clone()
    assert compared(("w", own, other)) == (["w"], [], ["a", "b"])
    other[2, 1] = torch.nextafter(other[2, 1], torch.tensor(100.0, dtype=dtype))
    assert compared(("w", own, other)) == ([], ["w"], ["a", "b"])


def test_nan_equals_itself_and_zero_does_not_equal_minus_zero():
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert compared(("nan", nan, nan.clone()), ("zero", zero, -zero)) == (["nan"], ["zero"], ["a", "b"])


def test_the_other_side_is_cast_first():
    other = torch.randn(5)
    assert compared(("w", other.bfloat16(), other))[0] == ["w"]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_weight_is_equal_only_where_every_slice_is(wrong):
    slices = [("w", torch.ones(2), torch.full((2,), 2.0 if place == wrong else 1.0)) for place in range(3)]
    assert compared(*slices)[1] == ["w"]


def test_a_part_of_a_wider_tensor_can_be_compared():
    wide = torch.randn(4, 6)
    assert compared(("w", wide[:, 2:4], wide[:, 2:4].clone()))[0] == ["w"]


def steps_until_stopped(rank):
    """Gives the engine steps that a rank takes, of which rank 1 alone wants to stop from its third question on."""
    questions = []

    def stopped():
        questions.append(rank)
        return rank == 1 and len(questions) >= 3

    any_stopped, steps = agreed(stopped, dist.group.WORLD), 0
    while not any_stopped():
        steps += 1
        assert steps < 10 * STEPS_PER_AGREEMENT
    return steps, len(questions)


def test_all_ranks_stop_after_the_same_step_when_one_of_them_wants_to():
    assert run_ranks(steps_until_stopped, 2) == [(3 * STEPS_PER_AGREEMENT - 1, 3)] * 2
