"""The bytes of one model on one device, for ``peaks.py``: at rest, and at the peak of each pass.

The bytes of decoder blocks and of logits come from the knobs' formulas. Every figure is an upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from verl_memopt.config.schema import ActorRolloutRef, PolicyLoss, TrainedFsdp
from verl_memopt.memory.chunked_logprob import FREE_TILE, TAUGHT_COLUMNS, Taught, logit_bytes
from verl_memopt.memory.fused import TILE_ELEMENTS
from verl_memopt.memory.grad_offload import matrix_params, tile_params
from verl_memopt.memory.host_buffers import CHUNK_BYTES, GIB
from verl_memopt.memory.lora import adapter_params, base_rests_as_computed, expert_adapter_params
from verl_memopt.memory.optimizer_state_dtype_torch import MOST_BLOCK, block_size
from verl_memopt.memory.precision import width
from verl_memopt.memory.quantized_frozen import DECODED_AT_ONCE, MXFP4
from verl_memopt.memory.recompute_elementwise import PRODUCT_ROWS
from verl_memopt.memory.token_packing import bucket_of
from verl_memopt.model.sizes import ModelSize
from verl_memopt.observe.phase import MIB
from verl_memopt.plan.formulas import Pass, Shapes

SUM_BYTES = 4 * 2**22
"""Largest piece in bytes of a gradient sum on the host that is copied back to the device: ``PIECE`` of ``grad_offload_torch``."""

PACKED_TOKEN, PACKED_RESPONSE = 160, 96
"""Upper bounds in bytes: per token of a packed micro-batch its ids, positions and indices; per response token also its log-probs,
advantages and similar values."""


Kinds = Mapping[str, float]
"""Kind of bytes -> bytes at one moment."""


@dataclass(frozen=True)
class _Windows:
    """Kind -> bytes at three moments of an update that can be its peak: at the head, at a block, at the end of a backward."""

    kept: float
    """Bytes that all blocks keep."""
    states: float
    """Bytes that all blocks keep, and those of the states that the head reads."""
    head: dict[str, float]
    block: dict[str, float]
    end: dict[str, float]


@dataclass(frozen=True)
class Held:
    """One model of a run. ``roles`` has its sharding and knobs in the places of the actor's sharding and the policy's knobs."""

    part: str
    roles: ActorRolloutRef
    size: ModelSize
    ranks: int
    device: str
    trained: bool = False
    has_logits: bool = True
    reads_head: bool = True
    """Its own passes read its head. False = they end at the states."""
    top_k: int | None = None
    """Its own passes find the k most probable tokens by a whole copy of its head, which exists after the blocks."""
    taught: Taught | None = None
    """What its update learns from a teacher besides."""
    quantization: str = "none"
    packs_experts: bool = False
    """Its experts rest in the bytes of MXFP4, although the model is not quantised."""
    whole: bool = False
    """Each rank holds all weights, because its engine computes with them too."""
    replicas: int = 1
    """Number of groups of ``ranks`` devices. Each group holds the whole model (HSDP)."""

    @cached_property
    def fsdp(self) -> TrainedFsdp:
        return self.roles.actor.fsdp_config

    @property
    def params_count(self) -> int:
        # A critic has a value head, a vector and a bias, instead of the LM head.
        head = 0 if self.has_logits else self.size.hidden + 1 - (0 if self.size.tied else self.size.vocab * self.size.hidden)
        return self.size.params + head

    @cached_property
    def at_rest(self) -> Shapes:
        return Shapes.of(self.size, self.roles, Pass(1, 1, 1, 1), self.device)

    @cached_property
    def adapters(self) -> int:
        return adapter_params(self.at_rest) if self.roles.model.lora_rank else 0

    @cached_property
    def params(self) -> float:
        return self.base + self.adapters * self.at_rest.master_bytes / (1 if self.whole else self.ranks)

    @cached_property
    def base(self) -> float:
        shapes = self.at_rest
        per_param = shapes.compute_bytes if self._base_rests_as_computed else shapes.master_bytes
        saved = shapes.quantized_params * per_param - shapes.packed_bytes(self.quantization) if self.is_quantized else 0
        kind = self.experts_format
        if kind is not None and kind != self.quantization:
            before = self.size.expert_bytes(self.quantization) if self.is_quantized else self.size.expert_params * per_param
            saved += before - self.size.expert_bytes(kind)
        return (self.params_count * per_param - saved) / (1 if self.whole else self.ranks)

    @property
    def is_quantized(self) -> bool:
        return self.quantization != "none"

    @property
    def experts_format(self) -> str | None:
        """The format in which experts rest as bytes. None = they are whole, or there are none."""
        if self.size.mixture is None or not self.size.has_own_blocks:
            return None
        if self.packs_experts or (self.is_quantized and self.size.mxfp4):
            return MXFP4
        return self.quantization if self.is_quantized else None

    @property
    def decoded(self) -> int:
        """Most weights that are decoded at once: those of a linear layer or of an expert, or on a GPU those of a few experts."""
        mixture, hidden = self.size.mixture, self.size.hidden
        layer = hidden * self.size.widest if self.is_quantized else 0
        if self.experts_format is None or mixture is None:
            return layer
        one = 2 * mixture.width * hidden
        return max(layer, min(max(DECODED_AT_ONCE, one), mixture.experts * one) if self.device == "cuda" else one)

    @property
    def decode_scratch(self) -> float:
        # Upper bound of the temporary bytes of a product with decoded weights: these, the positions of their codes and their
        # scales. On a GPU the product with some experts is copied to those with the others.
        b, mixture, copied = self.at_rest.compute_bytes, self.size.mixture, 0
        if self.device == "cuda" and self.experts_format is not None and mixture is not None:
            copied = PRODUCT_ROWS["cuda"] * max(2 * mixture.width, self.size.hidden)
        return (2.25 + b) * self.decoded + b * copied

    @property
    def whole_experts(self) -> float:
        """Bytes of a block's experts for an engine or a file, decoded or with adapters merged in.

        Gates and ups are freed behind downs. One expert is merged in fp32.
        """
        mixture, kind = self.size.mixture, self.experts_format
        if mixture is None or not (kind or self._expert_adapters):
            return 0
        shapes, one = self.at_rest, 3 * mixture.width * self.size.hidden
        rests = shapes.compute_bytes if self._base_rests_as_computed else shapes.master_bytes
        per_param: float = rests if kind is None else max(shapes.compute_bytes, shapes.master_bytes)
        if kind == MXFP4 and not self._expert_adapters:
            per_param = 2
        merging = 4 * 4 * 2 * mixture.width * self.size.hidden if self._expert_adapters else 0
        return per_param * mixture.experts * one / (1 if self.whole else self.ranks) + self.decode_scratch + merging

    @property
    def _base_rests_as_computed(self) -> bool:
        return self.trained and base_rests_as_computed(self.roles.model.lora_rank, self.fsdp, self._alone or self.whole)

    @property
    def _alone(self) -> bool:
        # Whether the run has a single device. With replicas, FSDP2 gathers copies even of weights that are whole on each device.
        return self.ranks * self.replicas == 1

    @property
    def learning(self) -> float:
        return (self.adapters or self.params_count) / self.ranks if self.trained else 0

    @cached_property
    def moments(self) -> float:
        if not self.trained:
            return 0
        size, dtype = self.size, self.roles.actor.optim.state_dtype
        if not self.at_rest.state_bytes:
            return 0
        # Each tensor has a step counter, and its state starts at a multiple of 64 bytes.
        tensors: float = 64 * 5 * (14 if self.adapters else 12) * (size.layers + 1)
        per_param = self.at_rest.state_bytes
        if dtype in MOST_BLOCK:
            # These keep fp32 moments: rows that do not divide into blocks, adapters of layers, and vectors such as biases.
            rows = () if self.adapters else (size.hidden, size.mlp, size.heads * size.head_dim)
            per_param = _in_blocks(dtype, rows) + self.at_rest.remainder_bytes
            tensors += 8 * size.layers * (2 * size.hidden + 2 * size.head_dim + 3 * size.heads * size.head_dim)
            tensors -= self._saved_at_experts(dtype)
        return per_param * self.learning + tensors

    def _saved_at_experts(self, state_dtype: str) -> float:
        # Rows of adapters of experts are those of one expert, which are long enough for blocks.
        of_experts, rank, mixture = self._expert_adapters, self.roles.model.lora_rank, self.size.mixture
        if not of_experts or mixture is None:
            return 0
        rows = (rank * self.size.hidden, rank * mixture.width, rank * 2 * mixture.width)
        return (8 - _in_blocks(state_dtype, rows)) * of_experts / self.ranks

    @cached_property
    def _expert_adapters(self) -> int:
        return expert_adapter_params(self.at_rest) if self.adapters else 0

    @property
    def leaves(self) -> bool:
        return bool(self.fsdp.param_offload) or self.fsdp.offload_policy

    @cached_property
    def resting(self) -> dict[str, float]:
        off = self.fsdp.optimizer_offload or self.fsdp.offload_policy
        return {"params": 0 if self.leaves else self.params, "optimizer": 0 if off else self.moments}

    @property
    def on_host(self) -> dict[str, float]:
        off = self.fsdp.optimizer_offload or self.fsdp.offload_policy
        off_grads = self.fsdp.grad_offload or self.fsdp.offload_policy
        grads = self.at_rest.gradient_bytes * self.learning if off_grads else 0
        return {"params": self.params if self.leaves else 0, "optimizer": self.moments if off else 0, "grads": grads}

    @cached_property
    def is_cast(self) -> bool:
        """Whether each unit is gathered or cast to compute: with several ranks, two dtypes, or weights on the host."""
        two_dtypes = self.at_rest.master_bytes != self.at_rest.compute_bytes and not self._base_rests_as_computed
        return not self.whole and (not self._alone or two_dtypes or self.fsdp.offload_policy)

    @property
    def _captured(self) -> bool:
        # As far as the settings say, what why_not_captured() of model/captured_block.py returns.
        model, plain = self.roles.model, not self.adapters and not self.is_quantized
        alone = self._alone and not self.whole and not self.fsdp.offload_policy
        keeps_inputs = model.checkpointing in ("full", "every_n") and model.recompute_elementwise
        plain = plain and not self.size.post_norms and model.block_tile_tokens is None
        plain = plain and self.size.mixture is None and not self.size.linear_layers and not self.size.gated
        return self.trained and self.fsdp.cuda_graphs and alone and plain and keeps_inputs

    def graphs(self, tokens: int) -> dict[str, float]:
        """Bytes that blocks hold between passes if they run as CUDA graphs over micro-batches of up to ``tokens`` tokens."""
        if not self._captured:
            return {}
        work = Pass(bucket_of(tokens), 1, 1, 1)
        return {"graphs": Shapes.of(self.size, self.roles, work, self.device).graph_bytes}

    @property
    def _learning_of_block(self) -> float:
        # Parameters of a block whose gradients count. Beside adapters a block holds less than this bound, but not the gradients
        # of experts, which are frozen.
        size = self.size
        others = size.block_params - (size.expert_params / max(size.mixture_layers, 1) if self.adapters else 0)
        own = self.adapters / size.layers
        return own if self.adapters == self._expert_adapters > 0 else max(others, own)

    @property
    def _in_units(self) -> bool:
        # Whether one device casts unit by unit, without FSDP2 (memory/precision_torch.py).
        return self.is_cast and self._alone and not self.fsdp.offload_policy

    @cached_property
    def _matrices(self) -> tuple[int, int]:
        """(Elements of the embedding and head matrices in the root unit, elements of the largest that is a separate unit)."""
        matrix, has_value_head = self.size.vocab * self.size.hidden, not self.has_logits
        tied, further = self.size.tied and not has_value_head, self.size.root_params
        if self.fsdp.own_units and not tied:
            return further, matrix
        return matrix * (1 if tied or has_value_head else 2) + further, 0

    def forward(self, work: Pass) -> dict[str, float]:
        """Kind -> bytes at the peak of a pass without gradients, with the parameters."""
        s, b = Shapes.of(self.size, self.roles, work, self.device), self.at_rest.compute_bytes
        h, query, key = s.hidden, s.heads * s.head_dim, s.kv_heads * s.head_dim
        if work.forest is not None and self.roles.model.recompute_elementwise:
            opened = self._open_bytes(s, work.forest.summed)
            return self._without_gradients(work, s, s.forward_bytes + opened, b * work.responses * h + opened)
        # Gate, up and their product; with adapters also an adapter's output, and its sum with the layer's output. A norm computes
        # in fp32.
        wide = 5 if self.roles.model.lora_rank else 3
        norm = 12 * work.tokens * max(h, query)
        if self.roles.model.recompute_elementwise:
            norm = 0 if s.compiles else min(norm, 12 * TILE_ELEMENTS[self.device])
        attention = b * work.tokens * (3 * h + (2 + wide) * query // 2 + 4 * key + 2 * s.head_dim)
        if s.flash:
            # Two states, the product, rotated queries and keys, and the output. Answers that share a prompt also have separate
            # queries or a second output, and two outputs are merged.
            answers = min(work.responses, work.tokens) if self.roles.actor.use_prefix_grouper else 0
            attention = b * work.tokens * (2 * h + (3 + wide) * query // 2 + 3 * key + 2 * s.head_dim) + 2 * b * answers * query
            attention += 4 * b * work.tokens * key * s.slides  # copies of keys and values
        elif self.device == "cuda":
            # For the key heads of one call: rotated queries and keys, keys and values repeated for query heads, and the output.
            query_elements = query // (s.kv_heads * s.key_copies)
            turned = s.efficient_heads() * (4 * query_elements + s.head_dim)
            attention = b * work.tokens * (2 * h + 2 * query + 2 * key + 2 * s.head_dim + s.sequence_ranks * turned)
        # Gates, and copies of both parts of a product; or the output before its sinks are merged.
        attention += b * work.tokens * query * (2 * self.size.gated + self.size.sinks)
        attention += s.window_forward_bytes
        attention = max(attention + (norm if self.size.qk_norm else 0), 2 * b * work.tokens * h + norm)
        # The MLP's peak also has the state before the block, and rotary tables.
        mlp = b * work.tokens * (4 * h + wide * s.mlp + 2 * s.head_dim)
        if self.size.post_norms:  # the output of attention or MLP beside its norm
            attention, mlp = attention + b * work.tokens * h, mlp + b * work.tokens * h
        if s.mixture is not None and self.roles.model.recompute_elementwise:
            # Beside an MLP its output and the norm of that wait for the experts.
            mlp = max(mlp * s.mixture.beside, s.mixture_forward_bytes(s.mixture) + 2 * b * work.tokens * h * s.mixture.beside)
        linear = s.linear_forward_bytes if s.linear_layers else 0
        block, prefixes = max(mlp, attention, linear), self._prefixes(work, b)
        return self._without_gradients(work, s, block + prefixes, b * (work.tokens + 3 * work.responses) * h + prefixes)

    def _without_gradients(self, work: Pass, s: Shapes, block: float, states: float) -> dict[str, float]:
        block += self.decode_scratch
        # Of a sharded model the copy of the head is there from the start.
        copied = self._copied_head
        at_head = {"activations": states, "logits": self._logits(s, update=False), "params": copied if self._alone else 0}
        moments = self._gathered(block, at_head)
        if self.fsdp.streams:
            moments = [sum_kinds(moment, {"params": params}) for moment, params in zip(moments, self._streamed, strict=True)]
        params = (0 if self._alone else copied) + (0 if self.fsdp.streams else self.params)
        return sum_kinds(largest(moments), {"activations": self._packed(work), "params": params})

    @property
    def _streamed(self) -> tuple[float, float]:
        # (bytes of streamed parameters at a block, bytes of them at the head): two blocks, or the head's matrix, and the final
        # norm.
        per_param, hidden, vocab = self.at_rest.master_bytes, self.size.hidden, self.size.vocab
        matrices = vocab * hidden * (1 if self.size.tied or not self.has_logits else 2)
        blocks = per_param * hidden + 2 * (self.params - per_param * matrices) / self.size.layers
        # Two blocks stay beside a copy of the head (_copied_head), which is no unit that takes the place of one.
        return blocks, per_param * (hidden + vocab * hidden) if self.top_k is None else blocks

    @property
    def _copied_head(self) -> float:
        copied = self.top_k is not None and (self.is_cast or self.fsdp.streams or not self._alone)
        return self.at_rest.compute_bytes * self.size.vocab * self.size.hidden if copied else 0

    def _gathered(self, block: float, head: Kinds) -> list[Kinds]:
        if not self.is_cast:
            return [{"activations": block}, head]
        (root, own), unit, stay, first = self._gathered_matrices, self._unit, self._stay, self._first_stays
        # A head that stays gathered also exists during the blocks of the next micro-batch.
        stays = own if stay and self.has_logits else 0
        if not self._alone:
            blocks = {"activations": block, "gathered parameters": stay + first + root + stays + 2 * unit}
            blocks["collective buffers"] = max(2 * unit, root)
            at_head = stay + first + root + (own if self.reads_head else 0)
            return [blocks, {**head, "gathered parameters": at_head, "collective buffers": max(root, own)}]
        blocks = {"activations": block, "gathered parameters": max(stay, unit) + first + root + stays}
        at_head = stay + root + (first + own if self.has_logits else own) * self.reads_head
        states = {"activations": head["activations"], "collective buffers": self._passing}
        return [blocks, {**head, "gathered parameters": at_head}, {**states, "gathered parameters": at_head}]

    @property
    def _gathered_matrices(self) -> tuple[float, float]:
        root, own = self._matrices
        return self.at_rest.compute_bytes * root, self.at_rest.compute_bytes * own

    @property
    def _stay(self) -> float:
        return self.size.layers * self._unit if self.fsdp.reshard_after_forward is False else 0

    @property
    def _first_stays(self) -> float:
        return self._gathered_matrices[1] if self._stay else 0

    @property
    def _passing(self) -> float:
        # Temporary bytes of a matrix from the host while it is cast into the gathered matrix. On one rank other casts need none.
        per_param = self.at_rest.compute_bytes + self.at_rest.master_bytes
        return per_param * self.size.vocab * self.size.hidden if self.fsdp.offload_policy else 0

    @cached_property
    def _unit(self) -> float:
        if self._captured:
            return 0  # blocks are copied to the place that graphs() counts
        return self.at_rest.compute_bytes * (self.size.block_params + self.adapters / self.size.layers)

    def _prefixes(self, work: Pass, per_element: int) -> float:
        if not work.prefix:
            return 0
        size, key = self.size, self.size.kv_heads * self.size.head_dim
        keys = work.prefix * size.pair_elements + (work.prefix + work.tokens) * 2 * (key + size.head_dim)
        # A block with a state keeps it in place of keys and values; in an update it has a gradient too.
        pairs = size.linear_layers * self.at_rest.pair_bytes * (2 if per_element > self.at_rest.compute_bytes else 1)
        return per_element * keys + pairs

    def _open_bytes(self, s: Shapes, summed: int = 0) -> float:
        # Bytes of an open path: keys, values and rotary tables, the states that are read later, and sums of their gradients.
        assert s.forest is not None
        pairs, tables, forest = self.size.pair_elements, 2 * s.head_dim, s.forest
        kept = s.compute_bytes * (forest.held * (pairs + tables) + forest.states * s.hidden)
        # Blocks with a state keep one for each open node, and its gradient.
        kept += s.linear_layers * s.pair_bytes * s.segments * (2 if summed else 1)
        share = summed / forest.held if forest.held else 0
        return kept + max(s.compute_bytes, 4) * share * (forest.held * pairs + forest.states * s.hidden)

    def _logits(self, s: Shapes, update: bool) -> float:
        model = self.roles.model
        chunk = min(s.responses, model.logprob_chunk_tokens or s.responses)
        if self.top_k is not None and not update:
            tile, narrow = min(s.vocab, model.logprob_vocab_tile or FREE_TILE), 0 if s.compute_bytes == 4 else s.compute_bytes
            kept, passing = s.responses * (8 * self.top_k + 4), 12 * min(tile, TAUGHT_COLUMNS) + 64 * self.top_k
            return kept + chunk * ((4 + narrow) * tile + passing)
        if not self.reads_head:
            return 0
        if not self.has_logits:
            return 16 * s.responses + 8 * s.hidden
        entropy = self.roles.actor.entropy_coeff != 0 or self.roles.actor.calculate_entropy
        taught = self.taught if update else None
        return logit_bytes(s, update, taught) + (4 * chunk * min(s.vocab, 4096) if entropy else 0)

    def _packed(self, work: Pass) -> float:
        packed, mixture = PACKED_TOKEN * work.all_tokens + PACKED_RESPONSE * work.responses, self.size.mixture
        if mixture is None or not self.trained or self.roles.actor.router_replay.mode == "disabled":
            return packed
        # A record of experts while it is taken: what each layer chose, and the whole.
        return packed + 2 * work.tokens * self.size.layers * mixture.top_k * (1 if mixture.experts <= 256 else 2)

    def update(self, work: Pass, exact_ratio: bool) -> dict[str, float]:
        """Kind -> bytes at the peak of an update, with parameters and gradients, without optimizer moments.

        ``exact_ratio``: the update gets old log-probs, so a loss over sequences computes its gradient in the backward.
        """
        s = Shapes.of(self.size, self._with_kept(work), work, self.device)
        if not exact_ratio:  # the update may be strictly on-policy, and then a row of logits spans the whole vocabulary
            s = replace(s, settings=replace(s.settings, actor=replace(s.settings.actor, policy_loss=PolicyLoss())))
        if work.forest is not None and work.forest.opens:
            return sum_kinds(self.forward(work), {"grads": 0 if self.fsdp.offload_policy else s.gradient_bytes * self.learning})
        windows = self._update_windows(s, work)
        grads = 0 if self.fsdp.offload_policy else s.gradient_bytes * self.learning
        if self.roles.actor.optim.in_backward and not self.adapters and (self._in_units or not self.is_cast):
            grads = min(grads, s.gradient_bytes * 2 * max(s.vocab * s.hidden, s.block_params))
        if self.fsdp.grad_offload:
            # FSDP2 reduces embedding and head together if they are not separate units.
            at_once = ((self.is_cast and not self._in_units) or self.whole) and tile_params(s, self.ranks) is None
            matrices = max(*self._matrices, s.vocab * s.hidden) if at_once else matrix_params(s, self.ranks)
            passing = s.block_params + max(s.block_params, matrices)
            grads = min(grads, s.gradient_bytes * passing / self.ranks + SUM_BYTES)
        held = {"params": 0 if self.fsdp.offload_policy else self.params, "activations": self._packed(work)}
        head, top, *later = windows
        whole = {"grads": grads}
        if not work.alone:
            return sum_kinds(largest([*windows]), held, whole)
        # In a backward, gradients grow block by block while the blocks' kept tensors are freed. So the peak is at one of the two
        # ends: at the last block, where the backward starts, or at the first block.
        matrix = 0 if self.adapters else s.gradient_bytes * matrix_params(s, self.ranks) / self.ranks
        ends_late = self._in_units and not self.fsdp.grad_offload
        if ends_late:  # a head that is not a separate unit gets its gradient at the end of backward, with the embedding
            matrix = s.gradient_bytes * (self._matrices[1] if self.has_logits else 0)
        first = dict(top) | {
            "activations": top["activations"] - (s.kept_of(s.layers - 1) if s.settings.model.in_flight is None else 0)
        }
        # Upper bounds: a block's gradients exist when its backward ends. Of a known forest without gathered units they are exact.
        block, bound = s.gradient_bytes * self._learning_of_block / self.ranks, s.forest is None or self.is_cast
        begun = [
            sum_kinds(head, {"grads": min(grads, matrix)}),
            sum_kinds(top, {"grads": min(grads, matrix + (2 - ends_late if bound else 0) * block)}),
        ]
        last = s.gradient_bytes * max(self._matrices) if ends_late else 0
        end, step = later
        unfinished = [
            sum_kinds(first, {"grads": grads - last - (0 if bound else block)}),
            sum_kinds(end, {"grads": grads - last}),
        ]
        return sum_kinds(largest([*begun, *unfinished, sum_kinds(step, whole)]), held)

    def _with_kept(self, work: Pass) -> ActorRolloutRef:
        # Return settings for which the formulas are upper bounds. Tensors below the offload's minimum size stay on the device.
        model = self.roles.model
        offloads = model.enable_activation_offload
        x = work.tokens * self.size.hidden * self.at_rest.compute_bytes
        if offloads and x < model.activation_offload_min_bytes:
            model = replace(model, enable_activation_offload=False)
        if model.checkpointing in ("selective", "every_n"):
            # Every block, or every block that is not checkpointed, keeps more than its input.
            model = replace(model, enable_gradient_checkpointing=False)
        return replace(self.roles, model=model)

    def offloaded(self, work: Pass) -> float:
        s = Shapes.of(self.size, self._with_kept(work), work, self.device)
        stays = int(self.roles.model.activation_offload_device_gb * GIB / s.kept_bytes) * s.kept_bytes
        leaves = s.saved_bytes + self._prefixes(work, s.compute_bytes) + self._low_bytes(s) - stays
        return max(-(-leaves // CHUNK_BYTES), 0) * CHUNK_BYTES

    def _update_windows(self, s: Shapes, work: Pass) -> list[Kinds]:
        kept, prefixes, lows = s.kept_on_device(s.layers, 1), self._prefixes(work, s.compute_bytes + 4), self._low_bytes(s)
        before = prefixes
        if s.forest is not None:
            kept -= s.unread_bytes
            # A backward adds to the sums of all tokens that are open.
            before, prefixes = self._open_bytes(s, s.forest.summed), self._open_bytes(s, s.forest.held)
        states = kept + s.states_bytes + before
        windows = _Windows(
            kept,
            states,
            head={"activations": states + lows, "logits": self._logits(s, update=True)},
            block={"activations": self._block_bytes(s, work) + self.decode_scratch + prefixes + lows},
            end={"activations": 2 * s.input_bytes + prefixes},
        )
        # With gradient_sync=last, unsharded gradients are summed over the micro-batches, and reduced after the last one.
        summed = self.fsdp.gradient_sync == "last" and not work.alone
        scratch: Kinds = {"optimizer scratch": self._step_scratch}
        if self._in_units:
            windows = self._cast_in_units(s, windows)
            # Nothing is cast when the last whole gradients are added.
            scratch = largest([scratch, {"whole gradients": s.compute_bytes * max(self._matrices)}])
        elif self.is_cast and self._alone:
            windows = self._cast_by_one(s, windows, summed)
        elif self.is_cast:
            windows = self._gathered_by_ranks(s, windows, summed)
        elif self.whole:
            windows = self._reduced_by_ranks(s, windows, summed)
        return [windows.head, windows.block, windows.end, scratch]

    def _cast_in_units(self, s: Shapes, windows: _Windows) -> _Windows:
        b, (root, own) = s.compute_bytes, self._matrices
        tile = tile_params(self.at_rest, self.ranks)
        # A gradient in tiles is never whole. The root's is, to the end of a backward.
        root_gradient, matrix_gradient = (root, max(root, own)) if tile is None else (0, tile)
        if self.adapters:  # the root and the matrices of blocks are frozen
            root_gradient = matrix_gradient = 0
        head_unit = own if self.has_logits else 0
        head = windows.head | {
            "gathered parameters": b * (root + head_unit) + self._first_stays + self._stay,
            "whole gradients": b * (matrix_gradient if self.has_logits else 0),
        }
        block = windows.block | {
            "gathered parameters": b * root + self._first_stays + max(self._stay, self._unit),
            "whole gradients": b * (root_gradient + (self.adapters / self.size.layers or s.block_params)),
        }
        end = windows.end | {"gathered parameters": b * root, "whole gradients": b * matrix_gradient}
        return replace(windows, head=head, block=block, end=end)

    def _cast_by_one(self, s: Shapes, windows: _Windows, summed: bool) -> _Windows:
        # Add the copies that FSDP2 makes on a single rank. The buffers of one reduction stay until the next reduction.
        b, (root, own), trained = s.compute_bytes, self._matrices, not self.adapters
        root_size, _, matrix_size, tile = self._whole_gradients
        grads, reduce = (b, 4) if trained else (0, 0)
        stay, first = self._stay, self._first_stays
        # An unsharded gradient occupies the memory of the gradient that it becomes, so only the difference counts.
        whole = max((4 - s.master_bytes) * self.learning, 0) if summed else 0
        head_alone = own if self.has_logits and tile is None else 0
        before = reduce * max(head_alone, s.block_params)

        head = dict(largest([windows.head, {"activations": windows.states, "collective buffers": self._passing}]))
        head |= {"gathered parameters": b * (root + own) + first + stay, "whole gradients": grads * matrix_size + whole}
        head |= {} if tile is None else self._reduction(tile)

        gathered = {"gathered parameters": b * root + first + max(stay, self._unit)}
        reduction = {
            "activations": windows.kept + windows.end["activations"],
            "collective buffers": before + 2 * reduce * s.block_params,
        }
        block = {**largest([windows.block | {"collective buffers": before}, reduction]), **gathered}
        block["whole gradients"] = grads * (root_size + s.block_params) + whole
        if head_alone and trained:  # it is reduced while all blocks' kept tensors exist
            at_head = {"activations": windows.states, "collective buffers": 2 * reduce * own, **gathered}
            block = dict(largest([block, at_head | {"whole gradients": grads * own + whole}]))

        end = windows.end | {"gathered parameters": b * (root + own), "whole gradients": grads * matrix_size + whole}
        end["collective buffers"] = 2 * reduce * matrix_size
        return replace(windows, head=head, block=block, end=end)

    def _gathered_by_ranks(self, s: Shapes, windows: _Windows, summed: bool) -> _Windows:
        b, (root, own), unit = s.compute_bytes, self._matrices, self._unit
        root_size, _, matrix_size, tile = self._whole_gradients
        grads, stay, first = 0 if self.adapters else b, self._stay, self._first_stays
        whole = 4 * self.learning * self.ranks if summed else 0
        head = windows.head | {
            "gathered parameters": b * (root + own) + first + (stay or 2 * unit),
            "collective buffers": b * max(root, own) + (0 if tile is None else sum(self._reduction(tile).values())),
            "whole gradients": grads * matrix_size + whole,
        }
        if self.adapters:
            gathered, buffers, gradients = max(stay, 2 * unit), 2 * unit, whole
        else:
            # These numbers are from runs of FSDP2 on fake tensors. The input of the head's reduction is still alive here.
            gathered, gradients = max(stay, unit), grads * (root_size + s.block_params) + whole
            buffers = 4.5 * s.block_params + 4 * (own if tile is None else 0)
        block = windows.block | {"gathered parameters": b * root + first + gathered, "collective buffers": buffers}
        end = windows.end | {"gathered parameters": b * (root + own) + 2 * unit, "whole gradients": grads * matrix_size + whole}
        end |= {"collective buffers": 0} if self.adapters else self._reduction(matrix_size)
        return replace(windows, head=head, block=block | {"whole gradients": gradients}, end=end)

    def _reduced_by_ranks(self, s: Shapes, windows: _Windows, summed: bool) -> _Windows:
        root_size, head_size, matrix_size, tile = self._whole_gradients
        size, per_block = s.compute_bytes, float(s.block_params)
        # Adapters have the dtype of the master weights, and exist only in blocks.
        if self.adapters:
            size, per_block, root_size, head_size, matrix_size = s.master_bytes, self.adapters / s.layers, 0, 0, 0
        whole = size * self.learning * self.ranks if summed else size * root_size
        # The root unit's gradients stay unsharded until the end of a backward.
        head = windows.head | {"whole gradients": whole + size * head_size} | ({} if tile is None else self._reduction(tile))
        at_head = {"activations": windows.states, **self._reduction(head_size), "whole gradients": whole + size * head_size}
        block = windows.block | self._reduction(per_block) | {"whole gradients": whole + size * per_block}
        end = windows.end | self._reduction(matrix_size) | {"whole gradients": whole + size * head_size}
        return replace(windows, head=dict(largest([head, at_head])), block=block, end=end)

    @property
    def _whole_gradients(self) -> tuple[int, int, int, int | None]:
        """Elements of unsharded gradients: (root unit until the backward ends, head, last reduction, tile of the vocabulary).

        The fourth is None if the gradients of the embedding and the head are not tiled.
        """
        root, own = self._matrices
        tile = None if self.adapters else tile_params(self.at_rest, self.ranks)
        return (root, own, max(root, own), None) if tile is None else (0, tile, tile, tile)

    def _low_bytes(self, s: Shapes) -> float:
        # Bytes that adapters of layers keep: the low-rank input of each, and with selective checkpointing their outputs.
        model = self.roles.model
        if self.adapters == self._expert_adapters:
            return 0
        kept = 7 * model.lora_rank * (1 if s.settings.model.checkpointing else s.layers)
        if model.checkpointing == "selective":
            kept += s.layers * (2 * s.hidden + (s.heads + 2 * s.kv_heads) * s.head_dim + 2 * s.mlp)
        return s.tokens * s.compute_bytes * kept

    def _block_bytes(self, s: Shapes, work: Pass) -> float:
        # Activations at a block's backward. The larger of two cases counts: all answers share prompts, or none does. And with
        # fewer responses in a micro-batch, a pruned block skips more tokens.
        least = max(work.tokens - work.responses, 0) if self.size.prunes else 0
        most = max(work.tokens - 1, 0) if least else 0
        cases = [replace(s, suffix_tokens=answers, skipped=left) for answers in (0, work.responses) for left in (least, most)]
        if s.forest is not None:
            cases = [s]
        block = max(case.activation_bytes for case in cases)
        model, wide = s.settings.model, 2 * max(s.mlp, s.heads * s.head_dim)
        adapted = work.tokens * s.compute_bytes * wide if self.adapters > self._expert_adapters else 0
        if model.recompute_elementwise and s.flash and model.block_tile_tokens is None:
            # Adapters add to the wide tensors of the MLP, and flash attention holds nothing at that time.
            # The gradient of a checkpointed block's output stays until its backward ends. Where weights are trained, the bound of
            # their gradients covers it.
            incoming = s.input_bytes if self.adapters and model.checkpointing == "full" else 0
            return max(block + incoming, s.kept_on_device(s.layers - 1) + s.mlp_bytes(work.tokens) + adapted)
        return block + adapted

    def _reduction(self, params: float) -> dict[str, float]:
        return {"collective buffers": 4 * params * (1 + 1 / self.ranks)}

    @property
    def in_buckets(self) -> bool:
        optim = self.roles.actor.optim
        if optim.num_moments < 2:
            return True
        own_dtype = optim.state_dtype not in (None, self.fsdp.model_dtype)
        by_fsdp = self.fsdp.optimizer_offload or self.fsdp.split_master_weights or self.fsdp.grad_offload
        return by_fsdp or optim.stochastic_rounding or optim.in_backward or own_dtype

    @property
    def _step_scratch(self) -> float:
        optim, s = self.roles.actor.optim, self.at_rest
        if optim.optimizer_impl != "torch.optim" or optim.override_optimizer_config:
            return 4 * self.learning
        if not self.in_buckets:
            return 0
        moment_scratch = 4 * optim.num_moments if optim.moment_bytes(width(self.fsdp.model_dtype)) != 4 else 0
        copies = 8 if moment_scratch or s.master_bytes != 4 else 0
        # Weights in half precision are compared before and after the step: two copies, and a mask of the differences.
        copies += 5 if s.compute_bytes == 2 and not self.adapters else 0
        passing = s.state_bytes if self.fsdp.optimizer_offload else 0
        passing += s.gradient_bytes if self.fsdp.grad_offload else 0
        return min(3 * optim.bucket_megabytes * MIB, (moment_scratch + copies + passing) * self.learning)


def _in_blocks(state_dtype: str, rows: Sequence[int]) -> float:
    # Bytes of both moments of a parameter with such rows: in blocks if all divide into blocks, else fp32.
    blocks = [block_size(row, MOST_BLOCK[state_dtype]) for row in rows]
    smallest = min((block or 0 for block in blocks), default=0)
    return 2 * ((1 if state_dtype == "int8" else 0.5) + 4 / smallest) if smallest else 8


def sum_kinds(*parts: Kinds) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for kind, num_bytes in part.items():
            total[kind] = total.get(kind, 0) + num_bytes
    return total


def largest(windows: Sequence[Kinds]) -> Kinds:
    return max(windows, key=lambda window: sum(window.values()))
