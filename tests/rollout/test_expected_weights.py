from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.rollout.tools import model_of, weights_of
from verl_memopt.distributed.weight_slices import WeightSlice
from verl_memopt.errors import RolloutError
from verl_memopt.rollout.weight_checks import ExpectedWeights, meta_model


def expected_of(folder: Path) -> ExpectedWeights:
    return ExpectedWeights.of(meta_model(str(folder), False))


def test_the_meta_model_expects_what_the_real_one_holds_and_takes_no_memory(untied_folder: Path) -> None:
    model = model_of(untied_folder)
    assert expected_of(untied_folder).shapes == {name: value.shape for name, value in model.named_parameters()}
    assert all(parameter.is_meta for parameter in meta_model(str(untied_folder), False).parameters())


def test_a_tied_head_may_come_or_stay_away_but_an_untied_one_must_come(tied_folder: Path, untied_folder: Path) -> None:
    tied = dict(weights_of(model_of(tied_folder)))
    both = [*tied.items(), ("lm_head.weight", tied["model.embed_tokens.weight"])]
    names = [part.name for part in expected_of(tied_folder).checked(iter(both))]
    assert names == list(tied)
    untied = dict(weights_of(model_of(untied_folder)))
    del untied["lm_head.weight"]
    with pytest.raises(RolloutError, match=r"1 weights are missing: lm_head\.weight"):
        list(expected_of(untied_folder).checked(iter(untied.items())))


def test_unknown_repeated_and_misshapen_weights_are_named(tied_folder: Path) -> None:
    expected = expected_of(tied_folder)
    norm = ("model.norm.weight", torch.ones(64))
    for bad, message in [
        ([("model.nrm.weight", torch.ones(64))], r"model\.nrm\.weight is not a weight"),
        ([norm, norm], r"model\.norm\.weight was sent twice"),
        ([("model.norm.weight", torch.ones(32))], r"model\.norm\.weight has shape \(32,\).*expects \(64,\)"),
    ]:
        with pytest.raises(RolloutError, match=message):
            list(expected.checked(iter(bad)))


def test_weights_are_asked_for_one_by_one(tied_folder: Path) -> None:
    asked = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights_of(model_of(tied_folder)):
            asked.append(name)
            yield name, tensor

    checked = expected_of(tied_folder).checked(stream())
    for count in range(1, 4):
        assert next(checked).name == asked[-1]
        assert len(asked) == count


def rows(start: int, stop: int, of: int = 64) -> WeightSlice:
    return WeightSlice("model.norm.weight", torch.Size([of]), start, torch.ones(stop - start))


def test_rows_may_come_in_any_order_but_each_once_and_all_of_them() -> None:
    expected = ExpectedWeights({"model.norm.weight": torch.Size([64])}, frozenset())
    assert len(list(expected.checked(iter([rows(40, 64), rows(0, 40)])))) == 2
    for bad, message in [
        ([rows(0, 40), rows(39, 64)], "was sent twice"),
        ([rows(0, 40), rows(41, 64)], "1 weights are missing"),
        ([rows(0, 40, of=65)], r"has shape \(65,\), the engine expects \(64,\)"),
    ]:
        with pytest.raises(RolloutError, match=message):
            list(expected.checked(iter(bad)))
