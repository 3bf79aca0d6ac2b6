"""The weights that a model expects. Checks a stream of weights name by name."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verl_memopt.errors import RolloutError
from verl_memopt.memory.weight_buckets_torch import Weights, WeightSlice, as_slice, num_rows
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
        """Return the names and shapes of a transformers model, which may be on the meta device."""
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        return cls(shapes, frozenset(model.state_dict(keep_vars=True)) - frozenset(shapes))

    def checked(self, weights: Weights) -> Iterator[WeightSlice]:
        """Yield the same stream as slices, without ignored names.

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
        if any(part.start < stop and start < part.stop for start, stop in received[name]):
            raise RolloutError(f"weight sync: {name} was sent twice. Trainer and engine must hold the same model.")


def meta_model(folder: str, trust_remote_code: bool) -> nn.Module:
    """Return a transformers model of the folder's config.json with names and shapes but no memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


# Compares the weights of an engine with those of the policy, slice by slice and bit by bit.


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the dtype that shows its bits. As floats, NaN would differ from itself and 0 equal -0."""


class BitComparison:
    """Collects the results of slices. A weight is equal where all its slices are."""

    def __init__(self) -> None:
        """Start without any weight."""
        self._is_equal: dict[str, bool] = {}

    def add(self, name: str, own: Tensor, other: Tensor) -> None:
        """Compare a slice.

        ``own`` is as the engine stores it, ``other`` as it should be, in any dtype.
        """
        is_equal = torch.equal(_bits(own), _bits(other.to(own.dtype)))
        self._is_equal[name] = is_equal and self._is_equal.get(name, True)

    def result(self, unknown: Iterable[str]) -> WeightComparison:
        """Return what was found."""
        different = [name for name, is_equal in self._is_equal.items() if not is_equal]
        return WeightComparison([name for name, is_equal in self._is_equal.items() if is_equal], different, sorted(set(unknown)))


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().contiguous()
    return plain.view(INTEGERS[plain.itemsize])


# What engine and trainer share must lie where it lay when they began to share it.


class SharedPlaces:
    """Where the weights lie that an engine shares with the trainer."""

    def __init__(self, model: nn.Module, views: Mapping[str, Tensor]) -> None:
        """Note the addresses of the engine's own parameters, and of the ``views`` of them that the trainer computes with."""
        self._parameters = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        self._views = {name: view.data_ptr() for name, view in views.items()}

    def check(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Check that neither the engine's parameters nor the trainer's weights have moved.

        Raises:
            RolloutError: Some have. The message names the first ones.
        """
        parameters = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        mine = {name: weight.data_ptr() for name, weight in weights.items()}
        for whose, before, now in (("engine", self._parameters, parameters), ("trainer", self._views, mine)):
            moved = [name for name in before if now.get(name) != before[name]]
            if moved:
                raise RolloutError(
                    f"shared weights: {len(moved)} weights of the {whose} have moved, such as {', '.join(moved[:MOST_NAMED])}. "
                    f"The engine would answer with other weights than those that are trained. Set {KEY}.share_weights=false."
                )


# The checks of ``debug.mode=sync_check``: an engine's weights are the policy's, and its prefix cache holds nothing older.


LONGEST_PROBE = 1024
"""Tokens of the probe at most. It must fill a block of the cache: 16 tokens on a GPU, 128 on a CPU."""
NUM_IDS = 97
"""Token ids of the probe are below it, so every vocabulary has them."""
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
    """Checks an engine after each weight sync.

    A probe is a prompt that the engine has answered under the old weights. After a sync none of its tokens may come from the
    cache. Answering it twice puts it there again, for the next check.
    """

    def __init__(self, max_model_len: int) -> None:
        """Make the probe."""
        length = min(max_model_len - 1, LONGEST_PROBE)
        self.probe = [place % NUM_IDS for place in range(length)]
        self._is_synced = False
        self._has_logged = False
        self._has_logged_cache = False

    def check_weights(self, engine: RolloutEngine, weights: Weights) -> None:
        """Check the engine's weights just after a sync.

        Raises:
            RolloutError: A weight differs from the policy's.
        """
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
        """Check the prefix cache before the first rollout after a sync.

        Raises:
            RolloutError: Tokens of the probe come from the cache.
        """
        if not self._is_synced:
            return
        self._is_synced = False
        stale = engine.generate([self.probe], [0], PROBE_SAMPLING).cached_tokens
        if stale:
            raise RolloutError(
                f"debug.mode=sync_check: after a weight sync the engine took {stale} tokens of a prompt from its prefix cache, "
                "which older weights have computed. The cache must be reset with every sync."
            )
        # A second call shows whether the cache works at all. Without it, a cache that keeps nothing would always pass.
        cached = engine.generate([self.probe], [0], PROBE_SAMPLING).cached_tokens
        if not self._has_logged_cache:
            self._has_logged_cache = True
            logger.info(
                "sync check: the probe of the prefix cache has %d tokens, and %d of them are kept between two calls%s",
                len(self.probe), cached, "" if cached else ", so nothing can go stale",
            )  # fmt: skip
