"""The weights of an engine: which it expects, where it stores each row, and whether they equal the policy's weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from verl_memopt.errors import RolloutError
from verl_memopt.memory.weight_buckets_torch import Weights, WeightSlice, as_slice, joined, num_rows
from verl_memopt.model.weights import BUFFERS, is_stack, store_scalars, stored_parts
from verl_memopt.rollout.engine import KEY, RolloutEngine, SamplingSettings, WeightComparison


@dataclass(frozen=True)
class ExpectedWeights:
    """Names and shapes of the weights that a model needs."""

    shapes: dict[str, torch.Size]
    """Shape of each parameter by its Hugging Face name. Tied parameters appear under their first name."""
    ignored: frozenset[str]
    """Further names of tied parameters, and constant buffers: allowed but not needed."""

    @classmethod
    def of(cls, model: nn.Module) -> ExpectedWeights:
        """Take names and shapes from a transformers model, which may be on the meta device."""
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        return cls(shapes, frozenset(model.state_dict(keep_vars=True)) - frozenset(shapes))

    def checked(self, weights: Weights) -> Iterator[WeightSlice]:
        """Yield the weights as slices, without ignored names.

        Raises:
            RolloutError: A name is unknown, has another shape, or repeats rows; or, at the end, a weight is missing.
        """
        received: dict[str, list[tuple[int, int]]] = {name: [] for name in self.shapes}
        for part in map(as_slice, weights):
            if part.name in self.ignored:
                continue
            self._check(part, received)
            received[part.name].append((part.start, part.stop))
            yield part
        missing = [
            name for name, rows in received.items() if sum(stop - start for start, stop in rows) < num_rows(self.shapes[name])
        ]
        if missing:
            examples = ", ".join(missing[:5])
            raise RolloutError(f"weight sync: {len(missing)} weights are missing: {examples}. Send every parameter of the model.")

    def _check(self, part: WeightSlice, received: dict[str, list[tuple[int, int]]]) -> None:
        name = part.name
        if name not in self.shapes:
            raise RolloutError(
                f"weight sync: {name} is not a weight of the engine's model. Trainer and engine must hold the same model."
            )
        expected = self.shapes[name]
        if part.shape != expected:
            raise RolloutError(f"weight sync: {name} has shape {tuple(part.shape)}, the engine expects {tuple(expected)}.")
        # Slices arrive in any order, so each is compared with the rows that came before it.
        if any(part.start < stop and start < part.stop for start, stop in received[name]):
            raise RolloutError(f"weight sync: {name} was sent twice. Trainer and engine must hold the same model.")


def one_by_one(parts: Iterable[WeightSlice]) -> Iterator[WeightSlice]:
    """Yield slices with the experts of a block apart, as checkpoints have them. So no tensor of all experts is put together."""
    for part in parts:
        if not is_stack(part.name):
            yield part
            continue
        for name, tensor in stored_parts(part.name, part.tensor, part.start):
            yield WeightSlice(name, tensor.shape, 0, tensor)


def meta_model(folder: str, trust_remote_code: bool) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    store_scalars(model, BUFFERS)
    return model


# Compares the weights of an engine with those of the policy, slice by slice and bit by bit.


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes per element -> the integer dtype of its bits. As floats, NaN would differ from itself, and 0 would equal -0."""


class BitComparison:
    """Collects the results of slices. A weight is equal if all its slices are equal."""

    def __init__(self) -> None:
        self._is_equal: dict[str, bool] = {}

    def add(self, name: str, own: Tensor, other: Tensor) -> None:
        """Compare a slice. ``own`` is what the engine stores, and ``other`` what it should store, in any dtype."""
        is_equal = torch.equal(_bits(own), _bits(other.to(own.dtype)))
        self._is_equal[name] = is_equal and self._is_equal.get(name, True)

    def result(self, unknown: Iterable[str]) -> WeightComparison:
        different = [name for name, is_equal in self._is_equal.items() if not is_equal]
        return WeightComparison([name for name, is_equal in self._is_equal.items() if is_equal], different, sorted(set(unknown)))


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().contiguous()
    return plain.view(INTEGERS[plain.itemsize])


# If engine and trainer share a weight, its memory must not move. Otherwise one of them would continue with the old memory.


class SharedPlaces:
    def __init__(self, model: nn.Module, views: Mapping[str, Tensor]) -> None:
        self._parameters = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        self._views = {name: view.data_ptr() for name, view in views.items()}

    def check(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Check that neither the engine's parameters nor the trainer's weights have moved since they began to share memory.

        Raises:
            RolloutError: Some have moved. The message names the first of them.
        """
        parameters = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        mine = {name: weight.data_ptr() for name, weight in weights.items()}
        for whose, before, now in (("engine", self._parameters, parameters), ("trainer", self._views, mine)):
            moved = [name for name in before if now.get(name) != before[name]]
            if moved:
                raise RolloutError(
                    f"shared weights: {len(moved)} weights of the {whose} have moved, such as {', '.join(moved[:MOST_NAMED])}. "
                    f"The engine would generate with other weights than those that are trained. Set {KEY}.share_weights=false."
                )


# The checks of ``debug.mode=sync_check``: an engine's weights equal the policy's, and its prefix cache has no keys and values of
# older weights.


LONGEST_PROBE = 1024
"""Largest number of tokens in the probe. It must fill a block of the cache: 16 tokens on a GPU, 128 on a CPU."""
NUM_IDS = 97
"""Token ids of the probe are below this number, so every vocabulary has them."""
MOST_NAMED = 3
PROBE_SAMPLING = SamplingSettings(
    temperature=1.0,
    top_k=-1,
    top_p=1.0,
    repetition_penalty=1.0,
    do_sample=False,
    max_tokens=1,
    ignore_eos=True,
    log_probs=False,
)

logger = logging.getLogger(__name__)


class SyncCheck:
    """Checks an engine after each weight sync. Each method raises RolloutError when its check fails.

    The probe of the prefix cache is a prompt to which the engine has generated a response with the old weights. After a sync none
    of its tokens may come from the cache. The check generates twice, so the probe is in the cache again for the next check.
    """

    def __init__(self, max_model_len: int) -> None:
        length = min(max_model_len - 1, LONGEST_PROBE)
        self.probe = [place % NUM_IDS for place in range(length)]
        self._is_synced = False
        self._has_logged = False
        self._has_logged_cache = False

    def check_weights(self, engine: RolloutEngine, weights: Weights) -> None:
        compared = engine.compare_weights(weights)
        self._is_synced = True
        if compared.different:
            names = ", ".join(compared.different[:MOST_NAMED])
            raise RolloutError(
                f"debug.mode=sync_check: after a weight sync {len(compared.different)} of the engine's weights differ from the "
                f"policy's, such as {names}. The sync wrote them to a wrong place, or another part has written over them."
            )
        if not self._has_logged:
            self._has_logged = True
            logger.info(
                "sync check: %d of the engine's weights equal the policy's in every bit, %d are stored in a form that cannot be "
                "compared", len(compared.equal), len(compared.unknown),
            )  # fmt: skip

    def check_cache(self, engine: RolloutEngine) -> None:
        if not self._is_synced:
            return
        self._is_synced = False
        stale = engine.generate([self.probe], [0], PROBE_SAMPLING).cached_tokens
        if stale:
            raise RolloutError(
                f"debug.mode=sync_check: after a weight sync the engine took {stale} tokens of a prompt from its prefix cache, "
                "which older weights have computed. The cache must be reset with every sync."
            )
        # A second call shows whether the cache works at all, because a cache that keeps nothing passes the check above.
        cached = engine.generate([self.probe], [0], PROBE_SAMPLING).cached_tokens
        if not self._has_logged_cache:
            self._has_logged_cache = True
            logger.info(
                "sync check: the probe of the prefix cache has %d tokens, and %d of them are kept between two calls%s",
                len(self.probe), cached, "" if cached else ", so nothing can go stale",
            )  # fmt: skip


# Where an engine stores each row of each Hugging Face tensor. The engine's own loader shows this.
#
# The loader runs once with tensors without memory. It narrows each tensor to the part of this rank, and copies this part into
# fused and padded parameters. The copy is recorded, but not made. Afterwards any range of rows can be copied to its place. No
# whole tensor is needed, even if tensors are fused, or split over tensor-parallel ranks.


Loader = Callable[[Iterator[tuple[str, Tensor]]], Any]
"""Copies (name, whole tensor) pairs into the engine's parameters."""


@dataclass(frozen=True)
class _StoredBox:
    """A box of a weight, and the view of the engine's parameter that stores it.

    ``starts`` is the first index of the box in each dimension, () for a scalar.
    """

    target: Tensor
    starts: tuple[int, ...]

    def pairs(self, part: WeightSlice) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.starts:
            yield self.target, part.tensor
            return
        first = self.starts[0]
        low, high = max(first, part.start), min(first + self.target.shape[0], part.stop)
        if low < high:
            source = part.tensor[low - part.start : high - part.start]
            for dim in range(1, len(self.starts)):
                source = source.narrow(dim, self.starts[dim], self.target.shape[dim])
            yield self.target[low - first : high - first], source


class WeightMap:
    """Where the engine's parameters store each weight. Create it with :meth:`of`.

    The map holds views of the parameters, whose memory must not move. A weight without a place is given to the loader as a whole
    tensor, in ``dtype``.
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], places: dict[str, list[_StoredBox]], load: Loader, dtype: torch.dtype
    ) -> None:
        self._shapes, self._places, self._load, self._dtype = shapes, places, load, dtype

    @classmethod
    def of(cls, shapes: Mapping[str, torch.Size], load: Loader, dtype: torch.dtype) -> WeightMap:
        """Learn the places of tensors with these shapes from one pass of the loader over tensors without memory.

        A tensor that the loader transforms, and does not simply copy, gets no place.
        """
        probes = {name: torch.empty(shape, dtype=_stored_in(name, dtype), device="meta") for name, shape in shapes.items()}
        places = {}
        for name, probe in probes.items():
            with torch.no_grad(), _Copies(probe) as copies:
                load(iter([(name, probe)]))
            if copies.places is not None:
                places[name] = _merged(copies.places)
        return cls(shapes, places, load, dtype)

    @torch.no_grad()
    def write(self, weights: Iterator[WeightSlice]) -> None:
        for name, tensor in joined(self._write_mapped(weights), self._dtype):
            self._load(iter([(name, tensor)]))

    def views(self) -> dict[str, Tensor]:
        """Return a view of each weight that the engine's parameters store in one piece, in the weight's own shape."""
        return {
            name: target
            for name, places in self._places.items()
            for target in (place.target for place in places)
            # A weight that is stored in several pieces, or in another dtype, has no view that the trainer could use.
            if len(places) == 1 and target.shape == self._shapes[name] and target.dtype == _stored_in(name, self._dtype)
        }

    def cast_vectors(self) -> dict[str, Tensor]:
        """Return a new tensor for each vector that the engine casts to another dtype, such as the decay of linear attention.

        Unlike a matrix, a vector costs next to nothing if engine and trainer have one each.
        """
        return {
            name: target.new_empty(target.shape, dtype=self._dtype)
            for name, places in self._places.items()
            for target in (place.target for place in places)
            if len(places) == 1 and target.shape == self._shapes[name] and target.ndim == 1 and target.dtype != self._dtype
        }

    @torch.no_grad()
    def compare(self, weights: Iterator[WeightSlice]) -> WeightComparison:
        bits, unknown = BitComparison(), set()
        for part in weights:
            if part.name not in self._places:
                unknown.add(part.name)
            for stored, source in self._pairs(part):
                bits.add(part.name, stored, source)
        return bits.result(unknown)

    def _write_mapped(self, weights: Iterator[WeightSlice]) -> Iterator[WeightSlice]:
        """Copy slices that have a place, and yield the others."""
        for part in weights:
            if part.name not in self._places:
                yield part
            for stored, source in self._pairs(part):
                stored.copy_(source)

    def _pairs(self, part: WeightSlice) -> Iterator[tuple[Tensor, Tensor]]:
        for place in self._places.get(part.name, ()):
            yield from place.pairs(part)


def _merged(places: list[_StoredBox]) -> list[_StoredBox]:
    # Join boxes of rows that follow one another both in the weight and in the engine's parameter. A loader may copy a weight in
    # parts, for instance queries, keys and values.
    merged = places[:1]
    for place in places[1:]:
        last = merged[-1]
        if _follows(last, place):
            rows = last.target.shape[0] + place.target.shape[0]
            whole = last.target.as_strided((rows, *last.target.shape[1:]), last.target.stride())
            merged[-1] = _StoredBox(whole, last.starts)
        else:
            merged.append(place)
    return merged


def _follows(last: _StoredBox, place: _StoredBox) -> bool:
    one, other = last.target, place.target
    if not last.starts or one.shape[1:] != other.shape[1:] or one.stride() != other.stride():
        return False
    next_rows = (last.starts[0] + one.shape[0], *last.starts[1:])
    beside = one.storage_offset() + one.shape[0] * one.stride(0) == other.storage_offset()
    return place.starts == next_rows and beside and one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _stored_in(name: str, dtype: torch.dtype) -> torch.dtype:
    # The trainer's base model stores its quantised layers as bytes, so the engine does too.
    return torch.uint8 if name.endswith("qweight") else dtype


class _Copies(TorchDispatchMode):
    """Records the copies of boxes of ``probe``. ``places`` becomes None once the loader has used ``probe`` in any other way."""

    def __init__(self, probe: Tensor) -> None:
        super().__init__()
        self.places: list[_StoredBox] | None = []
        self._probe = probe
        self._storage = probe.untyped_storage()._cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        # Only copies of meta tensors are recorded. All other ops of the loader run unchanged.
        if func is not torch.ops.aten.copy_.default or args[1].device.type != "meta":
            return func(*args, **(kwargs or {}))
        target, source = args[0], args[1]
        if self.places is not None:
            starts = self._starts(source)
            same = starts is not None and source.shape == target.shape
            self.places = [*self.places, _StoredBox(target.detach(), starts or ())] if same else None
        return target

    def _starts(self, source: Tensor) -> tuple[int, ...] | None:
        """Return the first index in each dimension if ``source`` is a box of the probe, else None."""
        if source.untyped_storage()._cdata != self._storage or source.ndim != self._probe.ndim:
            return None
        pairs = zip(source.stride(), self._probe.stride(), source.shape, strict=True)
        # A view with other strides is transposed, expanded or reshaped, and so is not a box.
        if any(own != whole and size != 1 for own, whole, size in pairs):
            return None
        starts, offset = [], source.storage_offset()
        for stride in self._probe.stride():
            starts.append(offset // max(stride, 1))
            offset %= max(stride, 1)
        return tuple(starts)
