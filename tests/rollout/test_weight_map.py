"""An engine's fused, padded and split parameters, filled in row ranges."""

import pytest
import torch

from verl_memopt.memory.weight_buckets_torch import WeightSlice
from verl_memopt.rollout.engine_weights import WeightMap

SHAPES = {"q": (8, 6), "k": (4, 6), "down": (6, 8), "vocab": (10, 6), "norm": (6,), "one": (1,), "scale": ()}


class FusedModel:
    """Holds what one of ``ranks`` tensor-parallel ranks does, loaded as inference engines load."""

    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks
        self.calls = []
        self.parameters = {
            "qk": torch.zeros(12 // ranks, 6),
            "down": torch.zeros(6, 8 // ranks),
            "vocab": torch.full((8, 6), 7.0),
            "norm": torch.zeros(6),
            "one": torch.zeros(1),
            "scale": torch.zeros(()),
            "halved": torch.zeros(3),
        }

    def load_weights(self, weights):
        for name, tensor in weights:
            self.calls.append(name)
            getattr(self, f"load_{name}", self.load_plain)(name, tensor)

    def own(self, tensor, dim):
        size = tensor.shape[dim] // self.ranks
        return tensor.narrow(dim, self.rank * size, size)

    def load_plain(self, name, tensor):
        assert self.parameters[name].shape == tensor.shape
        self.parameters[name].data.copy_(tensor)

    def load_q(self, name, tensor):
        self.parameters["qk"].data.narrow(0, 0, 8 // self.ranks).copy_(self.own(tensor, 0))

    def load_k(self, name, tensor):
        self.parameters["qk"].data.narrow(0, 8 // self.ranks, 4 // self.ranks).copy_(self.own(tensor, 0))

    def load_down(self, name, tensor):
        self.parameters["down"].data.copy_(self.own(tensor, 1))

    def load_vocab(self, name, tensor):
        # Padded to a multiple of 16 rows; the last rank has fewer of them.
        rows = tensor[self.rank * 8 : (self.rank + 1) * 8] if self.ranks == 2 else tensor[:8]
        self.parameters["vocab"][: rows.shape[0]].data.copy_(rows)
        self.parameters["vocab"][rows.shape[0] :].data.fill_(0)

    def load_halved(self, name, tensor):
        self.parameters["halved"].copy_(tensor / 2)


def tensors():
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def sliced(whole, rows):
    """Row ranges of each tensor, the last first."""
    for name, tensor in whole.items():
        starts = range(0, tensor.shape[0], rows) if tensor.ndim else [0]
        for start in reversed(starts):
            yield WeightSlice(name, tensor.shape, start, tensor[start : start + rows] if tensor.ndim else tensor)


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_row_ranges_land_where_the_loader_puts_the_whole_tensors(rows, rank, ranks):
    whole = tensors()
    loaded, written = FusedModel(rank, ranks), FusedModel(rank, ranks)
    loaded.load_weights(iter(whole.items()))
    places = WeightMap.of({name: tensor.shape for name, tensor in whole.items()}, written.load_weights, torch.float32)
    calls = len(written.calls)
    places.write(sliced(whole, rows))
    assert len(written.calls) == calls
    assert all(torch.equal(written.parameters[name], loaded.parameters[name]) for name in loaded.parameters)


def test_learning_the_places_changes_no_weight_but_the_padding():
    model = FusedModel(1, 2)
    WeightMap.of({name: torch.Size(shape) for name, shape in SHAPES.items()}, model.load_weights, torch.float32)
    assert all((model.parameters[name] == 0).all() for name in ("qk", "down", "norm", "one"))
    assert (model.parameters["vocab"][:2] == 7).all()
    assert (model.parameters["vocab"][2:] == 0).all()


def test_a_tensor_that_is_not_plainly_copied_reaches_the_loader_whole():
    model, tensor = FusedModel(0, 1), torch.randn(3)
    places = WeightMap.of({"halved": tensor.shape}, model.load_weights, torch.float32)
    places.write(sliced({"halved": tensor}, 1))
    assert torch.equal(model.parameters["halved"], tensor / 2)


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_what_was_written_is_found_equal_and_one_changed_element_is_named(rows, rank, ranks):
    whole, model = tensors(), FusedModel(rank, ranks)
    places = WeightMap.of({name: tensor.shape for name, tensor in whole.items()}, model.load_weights, torch.float32)
    places.write(sliced(whole, rows))
    found = places.compare(sliced(whole, rows))
    assert (set(found.equal), found.different, found.unknown) == (set(SHAPES), [], [])
    model.parameters["qk"][-1, -1] += 1  # the last row of this rank's share of k
    changed = places.compare(sliced(whole, rows))
    assert (set(changed.equal), changed.different) == (set(SHAPES) - {"k"}, ["k"])


def test_a_weight_that_is_copied_in_parts_to_neighbouring_rows_has_one_view():
    fused, apart, moved = torch.zeros(9, 6), torch.zeros(9, 6), torch.zeros(9, 6)

    def load(weights):
        for name, tensor in weights:
            target = {"fused": fused, "apart": apart, "moved": moved}[name]
            for first, last, at in {
                "fused": [(0, 2, 1), (2, 5, 3)],
                "apart": [(0, 2, 1), (2, 5, 4)],
                "moved": [(2, 4, 1), (0, 2, 3)],
            }[name]:
                target[at : at + last - first].copy_(tensor[first:last])

    shapes = {"fused": torch.Size((5, 6)), "apart": torch.Size((5, 6)), "moved": torch.Size((4, 6))}
    places = WeightMap.of(shapes, load, torch.float32)
    views = places.views()
    assert views.keys() == {"fused"}
    assert views["fused"].data_ptr() == fused[1:].data_ptr()
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    places.write(sliced(whole, 3))
    assert torch.equal(fused[1:6], whole["fused"])
    assert torch.equal(torch.cat([apart[1:3], apart[4:7]]), whole["apart"])
    assert torch.equal(torch.cat([moved[3:5], moved[1:3]]), whole["moved"])


def test_a_vector_that_the_engine_casts_gets_a_tensor_of_its_own():
    stored = {"vector": torch.zeros(4), "matrix": torch.zeros(4, 2), "same": torch.zeros(4, dtype=torch.bfloat16)}

    def load(weights):
        for name, tensor in weights:
            stored[name].copy_(tensor)

    places = WeightMap.of({name: tensor.shape for name, tensor in stored.items()}, load, torch.bfloat16)
    ((name, vector),) = places.cast_vectors().items()
    assert (name, vector.dtype, vector.shape, places.views().keys()) == ("vector", torch.bfloat16, (4,), {"same"})


def test_a_tensor_without_a_place_cannot_be_compared():
    model, tensor = FusedModel(0, 1), torch.randn(3)
    places = WeightMap.of({"halved": tensor.shape}, model.load_weights, torch.float32)
    found = places.compare(sliced({"halved": tensor}, 1))
    assert (found.equal, found.different, found.unknown) == ([], [], ["halved"])
