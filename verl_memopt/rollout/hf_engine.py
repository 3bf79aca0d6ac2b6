"""Generation by transformers: slow and simple, with the same results as vLLM, for machines and tests without vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from verl_memopt.config import schema
from verl_memopt.distributed.device import empty_cache, is_gpu
from verl_memopt.errors import ConfigError, Stopped
from verl_memopt.memory.host_buffers import host_buffer
from verl_memopt.memory.lora_torch import copy_adapters, stored_adapters
from verl_memopt.memory.quantized_frozen import MXFP4
from verl_memopt.memory.quantized_frozen_torch import pack_experts, packed_experts, quantize_blocks
from verl_memopt.memory.weight_buckets_torch import Weights, WeightSlice
from verl_memopt.model.attention import plain_attention
from verl_memopt.model.delta_kernels import UNINSTALL, fla_is_installed
from verl_memopt.model.engine_experts import compute_as_ours
from verl_memopt.model.families import STATE_LAYER, is_mxfp4, layer_types, num_experts
from verl_memopt.model.packed_model import dtype_of
from verl_memopt.model.router_replay import number_dtype
from verl_memopt.model.weights import BUFFERS, rebuild_buffers, store_scalars
from verl_memopt.observe.byte_tracker import scope
from verl_memopt.rollout.engine import (
    KEEP_WEIGHTS,
    KEY,
    NO_ADAPTERS,
    EnginePlace,
    EngineState,
    Finished,
    Generation,
    Output,
    Requests,
    SamplingSettings,
    WeightComparison,
    check_rows,
    ignore_row,
    max_model_len,
    random_state_kept,
    routes_of_rows,
    sleep_level,
)
from verl_memopt.rollout.engine_weights import BitComparison, ExpectedWeights, SharedPlaces
from verl_memopt.run.interrupts import never

MODES = ("processed_logprobs", "raw_logprobs")
PAD = 0
"""Token id that pads shorter prompts on the left, where it is masked, and finished responses on the right. It is never read."""


class HfEngine:
    """A rollout engine (:class:`verl_memopt.rollout.engine.RolloutEngine`) that uses ``generate`` of transformers.

    Its KV cache exists only while it generates.

    Raises:
        ConfigError: Tensor parallelism, an unknown logprobs_mode, or arguments for another engine.
    """

    def __init__(self, rollout: schema.Rollout, place: EnginePlace) -> None:
        _check_settings(rollout, place)
        self._place = place
        self._chunk = rollout.max_num_seqs
        self.longest = max_model_len(rollout)
        self._processed = rollout.logprobs_mode == "processed_logprobs"
        self._dtype = dtype_of(rollout.dtype, f"{KEY}.dtype")
        with random_state_kept(place.device):
            self._model = _build(rollout.load_format, self._dtype, place)
        self._expected = ExpectedWeights.of(self._model)
        self._bytes = {id(tensor): tensor.untyped_storage().nbytes() for tensor in self._model.parameters()}
        self._keeps_weights = sleep_level(rollout) == KEEP_WEIGHTS
        self._kept: list[torch.Tensor] = []
        self._shared: SharedPlaces | None = None
        self._recording: RouteRecord | None = None
        self._state = EngineState(whole=rollout.load_format != "dummy")

    def generate(
        self,
        prompt_ids: list[list[int]],
        seeds: list[int],
        sampling: SamplingSettings,
        stopped: Callable[[], bool] = never,
        finished: Finished = ignore_row,
    ) -> Generation:
        self._state.check_ready()
        check_rows(prompt_ids, seeds, sampling.max_tokens, self.longest)
        ids: list[list[int]] = []
        log_probs: list[list[float]] = []
        reasons: list[str] = []
        routes: list[Tensor] = []
        for start in range(0, len(prompt_ids), self._chunk):
            rows = slice(start, start + self._chunk)
            with self._record(sampling.routes) as record:
                chunk_ids, chunk_log_probs, ended = self._generate_chunk(prompt_ids[rows], seeds[rows], sampling, stopped)
            if record is not None:
                routes += record.of_rows(prompt_ids[rows], chunk_ids)
            # Transformers returns all rows of a chunk at once, so only now any of them is complete.
            for number, row in enumerate(chunk_ids, len(ids)):
                finished(number, row)
            ids += chunk_ids
            log_probs += chunk_log_probs
            reasons += ["stop" if has_stopped else "length" for has_stopped in ended]
        found = routes_of_rows(prompt_ids, routes) if sampling.routes else None
        return Generation(ids, log_probs if sampling.log_probs else None, reasons, routes=found)

    @contextmanager
    def _record(self, wanted: bool) -> Iterator[RouteRecord | None]:
        if not wanted:
            yield None
            return
        model: Any = self._model
        layers = model.get_decoder().layers
        record = self._recording = RouteRecord(len(layers), number_dtype(num_experts(model.config)))
        # Gemma 4 has its experts beside the MLP.
        owners = ((place, block.mlp if hasattr(block.mlp, "experts") else block) for place, block in enumerate(layers))
        mixtures = [(place, owner.experts) for place, owner in owners if hasattr(owner, "experts")]
        # Each family passes the numbers of the experts behind the states.
        hooks = [experts.register_forward_pre_hook(record.hook(place)) for place, experts in mixtures]
        try:
            yield record
        finally:
            self._recording = None
            for hook in hooks:
                hook.remove()

    @contextmanager
    def serving(self, stopped: Callable[[], bool] = never) -> Iterator[Requests]:
        self._state.check_ready()
        yield _HfRequests(self, stopped)

    def load_weights(self, weights: Weights) -> None:
        with self._state.loading(), torch.no_grad():
            for own, part in self._pairs(weights):
                own.copy_(part.tensor)

    def share_weights(self) -> dict[str, torch.Tensor]:
        parameters = dict(self._model.named_parameters())
        weights = {name: parameters[name].detach() for name in self._expected.shapes}
        self._shared = SharedPlaces(self._model, weights)
        return weights

    def weights_changed(self, weights: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor] = NO_ADAPTERS) -> None:
        assert self._shared is not None, "the weights are not shared"
        with self._state.loading():
            self._shared.check(self._model, weights)
            if adapters:
                with scope(kind="rollout weights"):
                    copy_adapters(adapters, self._model, self._place.lora_scale)

    def compare_weights(self, weights: Weights) -> WeightComparison:
        bits = BitComparison()
        for own, part in self._pairs(weights):
            bits.add(part.name, own, part.tensor)
        return bits.result([])

    def _pairs(self, weights: Weights) -> Iterator[tuple[torch.Tensor, WeightSlice]]:
        parameters = dict(self._model.named_parameters())
        for part in self._expected.checked(weights):
            own = parameters[part.name]
            yield own if part.whole else own[part.start : part.stop], part

    def sleep(self) -> None:
        if self._state.is_awake("weights") and self._shared is None:
            # At sleep level 1 the weights are kept on the host. At level 2 the next sync loads them again.
            if self._keeps_weights:
                self._kept = self._on_host()
            for parameter in self._model.parameters():
                # Empty the storage and keep the tensor. So all views of the weights stay valid, and have memory again after the
                # wake-up.
                parameter.untyped_storage().resize_(0)
        self._state.slept(self._keeps_weights, self._shared is not None)
        empty_cache(self._place.device)

    def wake_up(self, part: str) -> None:
        if not self._state.waking(part) or part != "weights":
            return
        with scope(kind="rollout weights"):
            for parameter in self._model.parameters():
                # Values are undefined until they are restored below or loaded by the next sync.
                parameter.untyped_storage().resize_(self._bytes[id(parameter)])
        for parameter, host_copy in zip(self._model.parameters(), self._kept, strict=self._keeps_weights):
            parameter.copy_(host_copy)
        self._kept = []

    def _on_host(self) -> list[torch.Tensor]:
        parameters = list(self._model.parameters())
        sizes = [parameter.numel() * parameter.itemsize for parameter in parameters]
        # One buffer for all parameters, because page-locking is slow.
        parts = host_buffer(sum(sizes), self._place.device, "rollout weights").split(sizes)
        pairs = zip(parts, parameters, strict=True)
        return [part.view(like.dtype).view(like.shape).copy_(like) for part, like in pairs]

    def resident_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._state.is_awake("weights"):
            own = self._model.parameters() if self._shared is None else stored_adapters(self._model).values()
            for tensor in (*own, *self._model.buffers()):
                yield "rollout weights", tensor

    def shutdown(self) -> None:
        if self._state.close():
            del self._model
            empty_cache(self._place.device)

    @torch.no_grad()
    def _generate_chunk(
        self, prompts: list[list[int]], seeds: list[int], sampling: SamplingSettings, stopped: Callable[[], bool]
    ) -> tuple[list[list[int]], list[list[float]], list[bool]]:
        """Return response ids, log-probs (empty lists if not requested), and whether each row reached a stop."""
        ids, mask = left_padded(prompts, self._place.device)
        # generate() would draw all rows from one random generator. So the sampler adds noise from one generator per row, and
        # generate() takes the largest score, which is then the sample.
        sampler = RowSampler(sampling, seeds, mask, self._processed, self._place.known_ids)
        stops = [*([] if sampling.ignore_eos else self._place.eos_token_ids), *sampling.stop_token_ids]
        texts = StopTexts(sampling.stop, self._tokenizer if sampling.stop else None, ids.shape[1])

        def check_stop(input_ids: Tensor, scores: Tensor) -> Tensor:
            if stopped():  # between two tokens
                raise Stopped
            return scores

        generate: Any = self._model.generate  # typed by transformers for its own classes only
        output = generate(
            ids,
            attention_mask=mask,
            past_key_values=self._shared_prefill(prompts, ids, mask),
            logits_processor=[sampler, check_stop],
            stopping_criteria=[texts] if sampling.stop else None,
            do_sample=False,
            max_new_tokens=sampling.max_tokens,
            eos_token_id=stops or None,
            pad_token_id=PAD,
        )
        rows = [row[: texts.ends.get(number)] for number, row in enumerate(output[:, ids.shape[1] :].tolist())]
        responses = [until_stop(row, set(stops)) for row in rows]
        ended = [row[-1] in stops or number in texts.ends for number, row in enumerate(responses)]
        if not sampling.log_probs:
            return responses, [[] for _ in responses], ended
        table = torch.stack(sampler.log_probs, dim=1).tolist()
        return responses, [row[: len(response)] for row, response in zip(table, responses, strict=True)], ended

    def _shared_prefill(self, prompts: list[list[int]], ids: Tensor, mask: Tensor) -> Any:
        """Return the KV cache of all prompt tokens but the last, with each different prompt computed once.

        None = the prompts all differ, or one has a single token.
        """
        numbers: dict[tuple[int, ...], int] = {}
        rows = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
        if len(numbers) == len(prompts) or min(map(len, prompts)) == 1:
            return None
        if self._recording is not None:
            self._recording.shared = rows
        first = [rows.index(number) for number in range(len(numbers))]
        generate: Any = self._model.generate
        options = {"do_sample": False, "max_new_tokens": 1, "pad_token_id": PAD, "return_dict_in_generate": True}
        cache = generate(ids[first, :-1], attention_mask=mask[first, :-1], **options).past_key_values
        # Not batch_select_indices, which layers of linear attention do not have.
        cache.reorder_cache(torch.tensor(rows, device=ids.device))
        return cache

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        folder, remote = self._place.tokenizer_folder, self._place.trust_remote_code
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=remote)


class _HfRequests:
    """Requests of :meth:`HfEngine.serving`. A step completes all requests that have arrived, together."""

    def __init__(self, engine: HfEngine, stopped: Callable[[], bool]) -> None:
        self._engine, self._stopped = engine, stopped
        self._waiting: dict[int, tuple[list[int], int, SamplingSettings]] = {}

    def add(self, number: int, prompt_ids: list[int], seed: int, sampling: SamplingSettings) -> None:
        check_rows([prompt_ids], [seed], sampling.max_tokens, self._engine.longest)
        self._waiting[number] = prompt_ids, seed, sampling

    def step(self) -> dict[int, Output]:
        if self._stopped():
            raise Stopped
        complete: dict[int, Output] = {}
        # Requests with equal settings are generated in one call. The largest number of tokens may differ from turn to turn.
        for sampling in dict.fromkeys(sampling for _, _, sampling in self._waiting.values()):
            rows = {number: row for number, row in self._waiting.items() if row[2] == sampling}
            made = self._engine.generate(
                [row[0] for row in rows.values()], [row[1] for row in rows.values()], sampling, self._stopped
            )
            for place, number in enumerate(rows):
                log_probs = None if made.log_probs is None else made.log_probs[place]
                routes = None if made.routes is None else torch.cat(made.routes[place])
                complete[number] = Output(made.response_ids[place], log_probs, made.finish_reasons[place], routes=routes)
        self._waiting.clear()
        return complete

    @property
    def under_way(self) -> int:
        return len(self._waiting)

    @property
    def leads(self) -> bool:
        return True

    def follow(self) -> None:
        raise AssertionError("this engine has one rank")


class RouteRecord:
    """The experts that transformers' routers choose while they generate for rows that are padded on the left."""

    def __init__(self, layers: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._calls: list[list[Tensor]] = [[] for _ in range(layers)]  # [rows x tokens, k] of each forward
        self.shared: list[int] | None = None
        """If different prompts without their last token were computed before, the row of that forward for each row."""

    def hook(self, layer: int) -> Callable[..., None]:
        def keep(_: Any, arguments: tuple[Tensor, ...]) -> None:
            self._calls[layer].append(arguments[1].to(self._dtype).cpu())

        return keep

    def of_rows(self, prompts: list[list[int]], responses: list[list[int]]) -> list[Tensor]:
        """Return the experts of each row, [prompt and response tokens - 1, layers, k]."""
        found = {layer: self._whole(calls, len(prompts)) for layer, calls in enumerate(self._calls) if calls}
        zeros = torch.zeros_like(next(iter(found.values())))
        # [rows, all tokens, layers, k]. The last token of a response is never read.
        whole = torch.stack([found.get(layer, zeros) for layer in range(len(self._calls))], dim=2)
        width = max(map(len, prompts))
        pairs = zip(whole, prompts, responses, strict=True)
        return [row[width - len(prompt) : width + len(response) - 1].clone() for row, prompt, response in pairs]

    def _whole(self, calls: list[Tensor], rows: int) -> Tensor:
        begun: list[Tensor] = []
        if self.shared is not None:
            begun, calls = [calls[0].unflatten(0, (max(self.shared) + 1, -1))[self.shared]], calls[1:]
        return torch.cat([*begun, *(call.unflatten(0, (rows, -1)) for call in calls)], dim=1)


class StopTexts:
    """Ends a row with the token that completes one of the stop texts. Transformers calls it as a stopping criterion.

    ``prompt_width`` is the number of prompt tokens in front of each response. ``ends`` maps the number of an ended row to the
    number of its response tokens.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any, prompt_width: int) -> None:
        self._texts, self._tokenizer, self._width = texts, tokenizer, prompt_width
        self.ends: dict[int, int] = {}

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        answers = input_ids[:, self._width :].tolist()
        for row, text in enumerate(self._tokenizer.batch_decode(answers, skip_special_tokens=True)):
            if row not in self.ends and any(stop in text for stop in self._texts):
                self.ends[row] = len(answers[row])
        return torch.tensor([row in self.ends for row in range(len(answers))], device=input_ids.device)


def left_padded(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts as one tensor [rows, width] with padding on the left, and its mask: 1 for a token, 0 for padding."""
    width = max(map(len, prompts))
    ids = [[PAD] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def until_stop(tokens: list[int], stops: set[int]) -> list[int]:
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in stops), tokens)


def _check_settings(rollout: schema.Rollout, place: EnginePlace) -> None:
    if place.tensor_parallel_size > 1:
        raise ConfigError(
            f"{KEY}.tensor_model_parallel_size={place.tensor_parallel_size}: the hf engine runs on one device. "
            f"Set it to 1, or use {KEY}.name=vllm."
        )
    if rollout.engine_kwargs.vllm:
        raise ConfigError(f"{KEY}.engine_kwargs.vllm: it has no effect with {KEY}.name=hf. Remove it, or use {KEY}.name=vllm.")
    if rollout.logprobs_mode not in MODES:
        raise ConfigError(
            f"{KEY}.logprobs_mode={rollout.logprobs_mode}: the hf engine supports {' and '.join(MODES)}. Use one of them."
        )


def _build(load_format: str, dtype: torch.dtype, place: EnginePlace) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    source, remote = place.model_folder, place.trust_remote_code
    config = AutoConfig.from_pretrained(source, trust_remote_code=remote)
    if STATE_LAYER in layer_types(config.get_text_config()) and not is_gpu(place.device) and fla_is_installed():
        raise ConfigError(
            f"{KEY}.name=hf: fla-core is installed, so transformers computes the linear layers of {config.model_type} by its "
            f"kernels, which need a GPU. Uninstall it ({UNINSTALL}), or use {KEY}.name=vllm."
        )
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": remote, "attn_implementation": plain_attention(config)}
    if load_format == "dummy":
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **options)
            store_scalars(model, BUFFERS)
            blocks = list(model.get_decoder().layers)
            if place.quantization != "none":
                quantize_blocks(blocks, place.quantization)
            stored = MXFP4 if place.lora_rank and is_mxfp4(config) else place.quantization
            if stored != "none":
                pack_experts(blocks, stored)
        model.to_empty(device=place.device)
        # to_empty() gives every parameter memory of its own, so tied weights must be tied again.
        model.tie_weights()
        rebuild_buffers(model, place.device)
    else:
        model = AutoModelForCausalLM.from_pretrained(source, **options)
        store_scalars(model, BUFFERS)
        model.to(place.device)  # type: ignore[arg-type]
        for parameter in model.parameters():  # unlike a mapped file, memory of its own can be freed and allocated again
            parameter.data = parameter.data.clone()
    if place.adapts_experts or packed_experts(model):
        for block in model.get_decoder().layers:
            compute_as_ours(block)
    # The generation settings in a model folder (temperature, top_k) would change the scores in spite of the run's settings.
    model.generation_config = GenerationConfig()
    return model.requires_grad_(False).eval()


# The sampler: draws one token per row from its logits, by the same rules in the same order as vLLM's sampler.


FIXED_POINT = 2.0**48
"""Probability 1 as an integer. The sum over a vocabulary fits in 63 bits."""


class RowSampler:
    """Draws the next token of each row with the row's own generator, so that rows do not influence each other.

    Transformers calls it as a logits processor with ``input_ids`` [rows, tokens so far] and ``scores`` [rows, vocab]. It returns
    scores whose largest entry is the drawn token.

    Args:
        sampling: How tokens are drawn.
        seeds: One per row.
        prompt_mask: [rows, prompt width], 1 for a token, 0 for left padding.
        processed: Record log-probs of the logits after penalty and temperature, and not of the model's own logits. Both are
            log-probs of the whole distribution, before top-k, top-p and min-p remove tokens from it.
        known_ids: Only ids below this number are drawn. None = all ids.
    """

    def __init__(
        self, sampling: SamplingSettings, seeds: list[int], prompt_mask: Tensor, processed: bool, known_ids: int | None = None
    ) -> None:
        self._sampling, self._prompt_mask, self._processed, self._known = sampling, prompt_mask, processed, known_ids
        device = prompt_mask.device
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds] if sampling.do_sample else []
        self.log_probs: list[Tensor] = []
        """One [rows] fp32 tensor for each generated token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [rows, vocab] whose largest entry is the drawn token. ``input_ids``: prompt and response so far."""
        raw = scores.float()
        whole = penalized(raw, self._present_tokens(input_ids, raw.shape[-1]), self._sampling.repetition_penalty)
        if self._sampling.do_sample:
            whole = whole / self._sampling.temperature
        logits = whole if self._known is None else without_unknown(whole, self._known)
        if self._sampling.do_sample:
            likely = at_least(logits, self._sampling.min_p)
            logits = filtered(likely, self._sampling.top_k, self._sampling.top_p)
        noisy = logits + self._noise(logits) if self._sampling.do_sample else logits
        drawn = noisy.argmax(dim=-1, keepdim=True)
        if self._sampling.log_probs:
            recorded = whole if self._processed else raw
            self.log_probs.append(recorded.log_softmax(dim=-1).gather(-1, drawn)[:, 0])
        return noisy

    def _present_tokens(self, input_ids: Tensor, vocab: int) -> Tensor | None:
        if self._sampling.repetition_penalty == 1.0:
            return None
        mask = torch.ones_like(input_ids)
        # Padding must not count as a token of the prompt.
        mask[:, : self._prompt_mask.shape[1]] = self._prompt_mask
        counts = torch.zeros(input_ids.shape[0], vocab, device=input_ids.device, dtype=mask.dtype)
        return counts.scatter_add_(1, input_ids, mask) > 0

    def _noise(self, logits: Tensor) -> Tensor:
        """Return Gumbel noise [rows, vocab]: the largest entry of logits plus noise is a sample of the softmax."""
        noise = torch.empty_like(logits)
        for row, generator in enumerate(self._generators):
            noise[row].exponential_(generator=generator)
        return -noise.log()


def penalized(logits: Tensor, present: Tensor | None, penalty: float) -> Tensor:
    """Divide the positive logits of present tokens by ``penalty``, and multiply the negative ones by it.

    ``logits`` and ``present`` are [rows, vocab]. ``present`` marks the tokens that the row already has. None = no penalty.
    """
    if present is None:
        return logits
    return torch.where(present, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def at_least(logits: Tensor, min_p: float) -> Tensor:
    """Set logits [rows, vocab] to minus infinity where the probability is below ``min_p`` times the row's largest."""
    if min_p == 0:
        return logits
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(dim=-1, keepdim=True), float("-inf"))


def without_unknown(logits: Tensor, known_ids: int) -> Tensor:
    return logits.index_fill(-1, torch.arange(known_ids, logits.shape[-1], device=logits.device), float("-inf"))


def filtered(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set logits [rows, vocab] outside the top-k, and then outside the nucleus, to minus infinity.

    Ties with the k-th token are kept. The most likely token always stays.
    """
    minus_infinity = float("-inf")
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, minus_infinity)
    if top_p < 1.0:
        ascending, order = logits.sort(dim=-1)
        # The sum uses integers, because a float cumsum has no deterministic kernel on a GPU.
        shares = (ascending.softmax(dim=-1).double() * FIXED_POINT).long()
        outside = shares.cumsum(dim=-1) <= (1 - top_p) * FIXED_POINT
        # Ascending order: the last column is the most likely token.
        outside[:, -1] = False
        logits = logits.masked_fill(outside.gather(-1, order.argsort(dim=-1)), minus_infinity)
    return logits
