"""The interface of all rollout engines, and how an engine is chosen by name."""

from __future__ import annotations

import hashlib
import json
import logging
import pkgutil
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from verl_memopt.config import schema
from verl_memopt.distributed.device import device_rng_state, set_device_rng_state
from verl_memopt.errors import ConfigError, RolloutError
from verl_memopt.memory.weight_buckets_torch import Weights
from verl_memopt.run.interrupts import never

logger = logging.getLogger(__name__)

KEY = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Generation:
    """The responses to the prompts of one call, one entry per row."""

    response_ids: list[list[int]]
    """Token ids of each row, at most ``max_tokens``, including the end-of-sequence token if it was generated."""
    log_probs: list[list[float]] | None
    """fp32 log-probs of those tokens. None = not requested."""
    finish_reasons: list[str]
    """stop = an end-of-sequence token, stop token or stop text ended the row; length = ``max_tokens`` was reached."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed, because their keys and values were in the prefix cache."""
    routes: list[tuple[Tensor, Tensor]] | None = None
    """The experts of each row's tokens, uint8 or int16 [tokens, layers, k] on the host: of the prompt, and of all response tokens
    but the last. Rows with one prompt have the same tensor, that of the first of them. None = not requested."""


def routes_of_rows(prompt_ids: list[list[int]], routes: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return what :class:`Generation` has, from the experts of all tokens of each row but the last."""
    firsts: dict[tuple[int, ...], Tensor] = {}
    # Copies, because a part would be sent with the whole.
    pairs = ((tuple(ids), own[: len(ids)], own[len(ids) :].clone()) for ids, own in zip(prompt_ids, routes, strict=True))
    return [(firsts[ids] if ids in firsts else firsts.setdefault(ids, own.clone()), rest) for ids, own, rest in pairs]


@dataclass(frozen=True)
class Output:
    """The response to one request."""

    response_ids: list[int]
    """Token ids, at most ``max_tokens``, including the end-of-sequence token if it was generated."""
    log_probs: list[float] | None
    """fp32 log-probs of those tokens. None = not requested."""
    finish_reason: str
    """As in :class:`Generation`."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were in the prefix cache."""
    routes: Tensor | None = None
    """The experts of all tokens but the last, as in :class:`Generation`."""


class Requests(Protocol):
    """Requests that an engine serves while others are added, for conversations of several turns."""

    def add(self, number: int, prompt_ids: list[int], seed: int, sampling: SamplingSettings) -> None:
        """Begin a request. ``number`` is the caller's; no request under way has it.

        Raises:
            RolloutError: The prompt is empty, or leaves no room for ``max_tokens``.
        """

    def step(self) -> dict[int, Output]:
        """Generate further tokens for the requests under way, and return the requests that are complete.

        An engine that cannot serve requests one by one completes all requests under way.

        Raises:
            Stopped: ``stopped`` of :meth:`RolloutEngine.serving` returned True.
        """

    @property
    def under_way(self) -> int:
        """Number of requests that are not complete."""

    @property
    def leads(self) -> bool:
        """True on the rank that adds requests. Other ranks of the same engine call :meth:`follow` instead."""

    def follow(self) -> None:
        """Make the steps of the leading rank until its context ends."""


Finished = Callable[[int, list[int]], None]
"""Called with the number of a complete row and its response."""


def ignore_row(row: int, response_ids: list[int]) -> None:
    """Ignore a complete row: the caller reads the rows only after all of them are complete."""


@dataclass(frozen=True)
class WeightComparison:
    """Names of an engine's weights, by the result of a comparison with the policy's weights."""

    equal: list[str]
    """Weights that are equal in every bit."""
    different: list[str]
    """Weights that differ in at least one element."""
    unknown: list[str]
    """Weights that the engine stores in another form, so that they cannot be compared."""


NO_ADAPTERS: Mapping[str, torch.Tensor] = {}


class RolloutEngine(Protocol):
    """Generates responses with its own copy of the weights, which the trainer loads into it."""

    def generate(
        self,
        prompt_ids: list[list[int]],
        seeds: list[int],
        sampling: SamplingSettings,
        stopped: Callable[[], bool] = never,
        finished: Finished = ignore_row,
    ) -> Generation:
        """Return one response per row. A response depends only on the prompt and the seed of its row, and on the weights.

        Args:
            prompt_ids: Token ids of each row.
            seeds: One seed per row.
            sampling: How tokens are drawn.
            stopped: Called between engine steps. Once it returns True, all rows are abandoned.
            finished: Called with the number and the tokens of a complete row while other rows are still generated. An engine may
                call it for some rows only.

        Raises:
            RolloutError: The engine is asleep, or its weights are incomplete.
            Stopped: ``stopped`` returned True.
        """

    def serving(self, stopped: Callable[[], bool] = never) -> AbstractContextManager[Requests]:
        """Serve requests that arrive one by one. At the end of the context, requests under way are abandoned.

        A response depends only on the prompt, seed and sampling settings of its request, and on the weights.

        Raises:
            RolloutError: The engine is asleep, or its weights are incomplete.
        """

    def load_weights(self, weights: Weights) -> None:
        """Replace all weights in place, and clear the prefix cache.

        Args:
            weights: Hugging Face names with tensors of any dtype, either whole or as row ranges in any order. The engine has
                copied a tensor before it asks for the next one. The second name of tied weights may be left out.

        Raises:
            RolloutError: A name is unknown or missing, or a shape differs. The engine then refuses to generate until a load
                succeeds.
        """

    def share_weights(self) -> dict[str, torch.Tensor]:
        """Return the engine's own weights under their Hugging Face names, for a trainer that computes with them and changes them.

        Afterwards the weights stay on the device while the engine sleeps, and the trainer calls :meth:`weights_changed` instead
        of :meth:`load_weights`. The second name of tied weights is left out.

        Raises:
            RolloutError: The engine stores a weight in another form. The message says why.
        """

    def weights_changed(self, weights: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor] = NO_ADAPTERS) -> None:
        """Note that the trainer has changed the shared weights, and clear the prefix cache. No weight is copied.

        ``adapters``: LoRA adapters under their names in the peft format. The engine copies them and generates with them.

        Raises:
            RolloutError: The memory of a weight has moved in engine or trainer, so that they no longer share it. The message
                names the weight.
        """

    def compare_weights(self, weights: Weights) -> WeightComparison:
        """Compare the engine's weights with other weights, after a cast to the engine's dtype. This reads the whole stream."""

    def sleep(self) -> None:
        """Free the device memory of weights and KV cache.

        Raises:
            RolloutError: This engine cannot sleep.
        """

    def wake_up(self, part: str) -> None:
        """Allocate memory for a part: first ``weights`` (they must then be loaded), and then ``kv_cache``."""

    def resident_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that the engine holds now, as ("rollout weights", tensor) and ("kv", tensor)."""

    def shutdown(self) -> None:
        """Free all memory of the engine. The caller's default process group is kept."""


@dataclass(frozen=True)
class EnginePlace:
    """The process and device of an engine, and its model."""

    rank: int
    """Rank of this process."""
    world_size: int
    """Number of processes. They build their engines together."""
    local_rank: int
    """Rank of this process on its machine, which selects its device."""
    tensor_parallel_size: int
    """Neighbouring ranks that share one engine. Each calls every method with the same arguments."""
    device: torch.device
    """The device of the engine."""
    model_folder: str
    """Folder with config.json. Its weights are read only with load_format=auto."""
    tokenizer_folder: str
    """Folder of the tokenizer."""
    trust_remote_code: bool
    """Allow the model's folder to run its own code."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a response."""
    known_ids: int | None = None
    """Number of ids that are tokens of the tokenizer. The embedding may have further rows, whose ids are never drawn. None = it
    has no further rows."""
    device_limit_bytes: int | None = None
    """Device memory that this process may use. None = the whole device. ``gpu_memory_utilization`` is a share of this limit."""
    lora_rank: int = 0
    """LoRA rank of the adapters that the engine uses with shared weights. 0 = no adapters."""
    lora_scale: float = 0
    """Factor by which the output of the adapters is multiplied."""
    adapts_experts: bool = False
    """Whether experts have such adapters too."""
    quantization: str = "none"
    """Storage format of the linear layers of a base model that the engine shares with the trainer."""
    records_routes: bool = False
    """Whether the engine can be asked for the experts of each token."""
    cache_bytes: int | None = None
    """Size of the KV cache with ``kv_cache_memory_gb=auto``. None = the settings give the size."""


ENGINES = {"vllm": "verl_memopt.rollout.vllm_engine:VllmEngine", "hf": "verl_memopt.rollout.hf_engine:HfEngine"}
"""Name -> engine class. It is imported when it is chosen, and is called with the rollout settings and an :class:`EnginePlace`."""


def build_engine(rollout: schema.Rollout, place: EnginePlace) -> RolloutEngine:
    """Start the engine that ``rollout.name`` selects. With ``load_format=dummy`` it has no weights yet.

    Raises:
        ConfigError: The name is unknown, the engine is not installed, the number of workers is not a multiple of the engine's
            size, or the engine refuses a setting.
    """
    if rollout.name not in ENGINES:
        raise ConfigError(f"{KEY}.name={rollout.name}: unknown rollout engine. Use one of {', '.join(ENGINES)}.")
    if place.world_size % place.tensor_parallel_size:
        raise ConfigError(
            f"{KEY}.tensor_model_parallel_size={place.tensor_parallel_size}: {place.world_size} workers do not divide into "
            "engines of that size. Use a divisor of the number of workers."
        )
    engine: RolloutEngine = pkgutil.resolve_name(ENGINES[rollout.name])(rollout, place)
    return engine


def max_model_len(rollout: schema.Rollout) -> int:
    """Return the longest sequence in tokens: the setting, or prompt plus response if it is not set."""
    if rollout.max_model_len is not None:
        return rollout.max_model_len
    assert rollout.prompt_length is not None, "rollout.prompt_length is linked before an engine is built"
    assert rollout.response_length is not None, "rollout.response_length is linked before an engine is built"
    return rollout.prompt_length + rollout.response_length


def check_rows(prompt_ids: list[list[int]], seeds: list[int], max_tokens: int, longest: int) -> None:
    """Check that the engine can generate a response to every prompt.

    ``longest``: tokens of the longest sequence that the engine supports.

    Raises:
        RolloutError: A prompt is empty or leaves no room for ``max_tokens``. The message names the row.
    """
    assert len(prompt_ids) == len(seeds), f"{len(prompt_ids)} prompts, {len(seeds)} seeds"
    for row, ids in enumerate(prompt_ids):
        if not ids:
            raise RolloutError(f"rollout engine: the prompt of row {row} is empty. It needs at least one token.")
        if len(ids) + max_tokens > longest:
            raise RolloutError(
                f"rollout engine: row {row} has {len(ids)} prompt tokens and may grow by {max_tokens}, but a sequence has at "
                f"most {longest}. Raise {KEY}.max_model_len, or lower the prompt or response length."
            )


# Sampling settings of training and validation, and one seed per row.


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn."""

    temperature: float
    """Divides the logits before the draw. Has no effect if ``do_sample`` is false."""
    top_k: int
    """Draw from the k most likely tokens; -1 = off."""
    top_p: float
    """Draw from the smallest set of most likely tokens whose probabilities add up to this; 1 = off."""
    repetition_penalty: float
    """Above 1, tokens of the prompt and of the response so far become less likely; 1 = off."""
    do_sample: bool
    """False = always the most likely token."""
    max_tokens: int
    """Largest number of generated tokens."""
    ignore_eos: bool
    """Generate ``max_tokens`` tokens, and do not stop at an end-of-sequence token."""
    log_probs: bool
    """Return the log-prob of each generated token."""
    min_p: float = 0.0
    """Drop tokens whose probability is below this fraction of the largest probability, before top_k and top_p; 0 = off."""
    stop: tuple[str, ...] = ()
    """Stop texts. A response ends with the token that completes one of them."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, whatever ``ignore_eos`` says."""
    routes: bool = False
    """Return the experts that compute each token. The engine must be built with ``records_routes``."""


def train_sampling(rollout: schema.Rollout) -> SamplingSettings:
    """Return the sampling settings of training responses.

    Raises:
        ConfigError: Sampling is on, and the temperature is not positive.
    """
    return _sampling(rollout, rollout, KEY, rollout.calculate_log_probs)


def validation_sampling(rollout: schema.Rollout) -> SamplingSettings:
    """Return the sampling settings of validation: ``val_kwargs``, with the length limit and repetition penalty of training.

    Raises:
        ConfigError: Sampling is on, and the temperature is not positive.
    """
    return _sampling(rollout, rollout.val_kwargs, f"{KEY}.val_kwargs", log_probs=False)


def _sampling(rollout: schema.Rollout, drawn: schema.Rollout | schema.ValKwargs, key: str, log_probs: bool) -> SamplingSettings:
    assert rollout.response_length is not None, "rollout.response_length is linked before an engine is built"
    if drawn.do_sample and drawn.temperature <= 0:
        raise ConfigError(
            f"{key}.temperature={drawn.temperature}: sampling needs a temperature above 0. "
            f"Raise it, or set {key}.do_sample=false to always take the most likely token."
        )
    return SamplingSettings(
        temperature=drawn.temperature,
        top_k=drawn.top_k,
        top_p=drawn.top_p,
        repetition_penalty=rollout.repetition_penalty,
        do_sample=bool(drawn.do_sample),
        max_tokens=rollout.response_length,
        ignore_eos=rollout.ignore_eos,
        log_probs=log_probs,
        min_p=drawn.min_p,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
    )


def row_seed(seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """Return the seed of one row, 63 bits. It depends only on the four arguments, and not on the machine or the batch."""
    packed = struct.pack("<4q", seed, step, prompt_index, sample_index)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


# A file by which the driver gets complete responses while other responses are still generated.


class FinishedRows:
    """A file that carries complete rows from the process that generates to the process that scores.

    The file only saves time. Rows may be missing in it, because :meth:`RolloutEngine.generate` returns all rows at the end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_read = 0
        self._writable = True

    def write(self, row: int, response_ids: list[int]) -> None:
        """Append a row. After a disk error, which is logged once, rewards wait for the end of the rollout."""
        if not self._writable:
            return
        try:
            with self.path.open("ab", buffering=0) as file:
                file.write(f"{json.dumps([row, response_ids])}\n".encode())
        except OSError as error:
            self._writable = False
            logger.warning("%s: cannot be written (%s); rewards wait for the end of the rollout", self.path, error.strerror)

    def read(self) -> dict[int, list[int]]:
        """Return the rows written since the last call: row number -> response. An incomplete last line is left for later."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._num_read)
                lines = file.read()
        except FileNotFoundError:
            return {}
        whole = lines[: lines.rfind(b"\n") + 1]
        # Read only up to the last newline, because the writer may be in the middle of a line.
        self._num_read += len(whole)
        rows: dict[int, list[int]] = {}
        for line in whole.splitlines():
            with suppress(ValueError):  # the disk was full for a moment: the line is cut short, and the next is joined to it
                rows |= [json.loads(line)]
        return rows


# The state of an engine: which of its parts hold memory, and whether its weights are complete.


PARTS = ("weights", "kv_cache")


class EngineState:
    """Refuses calls that the engine cannot serve in its present state, and names the call that must come first.

    ``awake -> sleep -> asleep -> wake_up(weights) -> load_weights -> wake_up(kv_cache) -> awake``

    Args:
        whole: Whether the weights were read from a folder, so that the engine can generate before the first load.
    """

    def __init__(self, whole: bool) -> None:
        self._awake, self._whole, self._closed = set(PARTS), whole, False

    def check_ready(self) -> None:
        """Raise a RolloutError if the engine cannot generate: shut down, asleep, or without complete weights."""
        self._check_open()
        if self._awake != set(PARTS):
            asleep = " and ".join(part for part in PARTS if part not in self._awake)
            raise RolloutError(f"rollout engine: {asleep} asleep. Call wake_up for each part before generating.")
        if not self._whole:
            raise RolloutError(
                "rollout engine: its weights are incomplete. Load the trainer's weights before generating, or set "
                f"{KEY}.load_format=auto to read them from the model folder."
            )

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Mark the weights as incomplete until the body, which loads them, ends without an error."""
        self._check_open()
        if "weights" not in self._awake:
            raise RolloutError('rollout engine: its weights are asleep. Call wake_up("weights") before loading.')
        self._whole = False
        yield
        self._whole = True

    def slept(self, keeps_weights: bool = False, shares_weights: bool = False) -> None:
        """Record a sleep. A sleeping engine may be put to sleep again.

        Args:
            keeps_weights: The weights are kept on the host, so they are complete as soon as they wake.
            shares_weights: The weights stay awake, because the trainer computes with them.
        """
        self._check_open()
        self._awake &= {"weights"} if shares_weights else set()
        self._whole = self._whole and (keeps_weights or shares_weights)

    def waking(self, part: str) -> bool:
        """Record that a part wakes. Return False if it was awake before.

        Raises:
            RolloutError: The part is unknown, or the KV cache is woken before the weights.
        """
        self._check_open()
        if part not in PARTS:
            raise RolloutError(f"rollout engine: wake_up({part!r}) is unknown. Use one of {', '.join(PARTS)}.")
        if part == "kv_cache" and "weights" not in self._awake:
            raise RolloutError('rollout engine: wake_up("kv_cache") before the weights. Call wake_up("weights") first.')
        was_asleep = part not in self._awake
        self._awake.add(part)
        return was_asleep

    def stays_asleep(self, part: str) -> None:
        """Undo :meth:`waking`, after the part could not be woken."""
        self._awake.discard(part)

    def close(self) -> bool:
        """Record the shutdown. Return False if the engine was shut down before."""
        was_open, self._closed = not self._closed, True
        return was_open

    def is_awake(self, part: str) -> bool:
        """Return whether a part holds memory now."""
        return part in self._awake

    @property
    def asleep(self) -> bool:
        """True if no part is awake."""
        return not self._awake

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutError("rollout engine: it was shut down. Build a new one.")


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the random generators of torch, its device, Python and numpy at the end.

    An engine seeds these generators and draws from them. Otherwise training would depend on the length of the rollouts.
    """
    import numpy as np

    states = torch.get_rng_state(), device_rng_state(device), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            set_device_rng_state(device, states[1])
        random.setstate(states[2])
        np.random.set_state(states[3])


KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2
"""Sleep levels, with vLLM's numbers."""


def sleep_level(rollout: schema.Rollout) -> int:
    """Return the engine's sleep level: the setting, or else 2, because the next weight sync loads every weight anyway."""
    return DROP_WEIGHTS if rollout.sleep_level is None else rollout.sleep_level
