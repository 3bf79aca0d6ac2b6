"""The base class of models over packed rows. It computes the states that predict the response tokens, and a head reads them.

The head of ``PolicyModel`` computes log-probs, and the head of ``ValueModel`` computes values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from verl_memopt.errors import ConfigError
from verl_memopt.memory.chunked_logprob_torch import TokenGradient, head_log_probs
from verl_memopt.memory.embedding_gradient import TrainedEmbedding, gathered_for_forward, is_plain
from verl_memopt.memory.logit_tiles import Head, LogitGrads, TokenStatistics
from verl_memopt.memory.precision_torch import CastUnits
from verl_memopt.memory.resharding_torch import reshard_units
from verl_memopt.memory.sequence_parallel_torch import SequenceGroup, combine_ranks
from verl_memopt.memory.shared_weights_torch import GatheredWeights
from verl_memopt.memory.streamed_params_torch import StreamedParams
from verl_memopt.memory.teaching import AnyTeaching
from verl_memopt.model.attention import KERNELS, REGISTERED, Attend, AttentionArgs
from verl_memopt.model.block_options import LAYER_INPUTS, BlockOptions, is_llama_like
from verl_memopt.model.captured_block import CapturedBlocks
from verl_memopt.model.decoder import Decoder, mixtures
from verl_memopt.model.families import POLICY_KEY, logit_shape, refused
from verl_memopt.model.packing import Pack
from verl_memopt.model.prefix_kv import Prefix, PrefixKV, PrefixRecorder
from verl_memopt.model.prefix_layout import PrefixLayout


class PackedModel(nn.Module):
    """A Hugging Face causal LM over packed rows. Subclasses have the head and the ``forward``.

    :class:`Decoder` replaces a decoder of the Llama family and takes over its submodules. Other decoders stay those of
    transformers.

    Attributes:
        lm: The transformers model whose decoder computes the states.
        supports_prefix_kv: Whether answers can use the prefix KV of an earlier forward.
        stays_on_host: Whether its shards always rest on the host.
        streams: Whether each pass copies the blocks from the host. Only a frozen model can do this.
        stream: Copies the blocks, once they are allocated. None = the model does not stream.
        sequence: The ranks that share the tokens of a micro-batch. None = each rank has its own micro-batches.
        rows: The rows of the weights that this rank updates, if each of several ranks has all weights. None = FSDP2 shards the
            weights, or there is one rank.
        casts: Casts the parameters to the compute dtype, on one device. None = they rest in that dtype, or FSDP2 casts them.
        graphs: The CUDA graphs of its blocks. None = no block is captured.
        masters: Dtype of the master weights.
        compute: Dtype in which the model computes.
    """

    supports_prefix_kv = False
    stays_on_host = False
    streams = False
    stream: StreamedParams | None = None
    sequence: SequenceGroup | None = None
    rows: GatheredWeights | None = None
    casts: CastUnits | None = None
    graphs: CapturedBlocks | None = None
    masters = compute = torch.float32

    def __init__(self, lm: PreTrainedModel, blocks: Sequence[BlockOptions] | None = None, key: str = POLICY_KEY) -> None:
        """Take over a model. ``blocks`` are the memory options of each block (Llama family only). None = the defaults.

        Raises:
            ConfigError: The model has no list of decoder blocks.
        """
        super().__init__()
        if not isinstance(getattr(lm.get_decoder(), "layers", None), nn.ModuleList):
            reason = f"do not keep their decoder blocks in a list named layers ({type(lm.get_decoder()).__name__})"
            raise refused(lm.config, str(lm.config.name_or_path), reason, key)
        # Replace the embedding before the decoder takes over the submodules.
        embedding = lm.get_input_embeddings()
        if is_plain(embedding):
            lm.set_input_embeddings(TrainedEmbedding(embedding))
        further = getattr(lm.get_decoder(), LAYER_INPUTS[0], None)
        if further is not None and is_plain(further):
            setattr(lm.get_decoder(), LAYER_INPUTS[0], TrainedEmbedding(further))
        if is_llama_like(lm):
            options = [BlockOptions()] * len(lm.model.layers) if blocks is None else blocks
            lm.model = Decoder(lm.model, options, KERNELS[lm.config._attn_implementation])
        else:
            assert blocks is None, f"{type(lm).__name__} computes its blocks itself"
        self.lm = lm

    @property
    def head(self) -> Any:
        raise NotImplementedError

    @property
    def tied(self) -> bool:
        return self.head.weight is self.embedding_weight

    @property
    def embedding_weight(self) -> Tensor:
        # [V, h].
        embedding: Any = self.lm.get_input_embeddings()
        return embedding.weight

    @property
    def decoder(self) -> nn.Module:
        return self.lm.get_decoder()

    @property
    def computes_experts(self) -> bool:
        """Whether some blocks have experts that this package computes, which can replay and record them."""
        return bool(mixtures(self.blocks()))

    def blocks(self) -> list[nn.Module]:
        layers: Any = self.decoder.layers
        return list(layers)

    def read(self, pack: Pack, head: Callable[[Pack, Tensor | None], tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
        """Return tensors [R, ...], one value or state per response token of the pack, on every rank that shares the pack.

        Without sequence parallelism ``head`` gets the pack and None. With it ``head`` gets this rank's share of the pack, and the
        places of the share's response tokens among all of them, int64 [r]. It returns tensors [U, ...], one value per target of
        the pack that it gets, or None. None stays None.
        """
        if self.sequence is None:
            return tuple(None if values is None else pack.of_entries(values) for values in head(pack, None))
        (share, places), count, group = pack.share(self.sequence), pack.row.shape[0], self.sequence
        return tuple(
            None if values is None else combine_ranks(share.of_entries(values), places, count, group)
            for values in head(share, places)
        )

    def predicting_states(self, pack: Pack, prefix: PrefixKV | None) -> Tensor:
        """Return normed states [U, h] that predict the targets. ``prefix`` is the prefix KV for a pack of ``pack_suffixes``."""
        decoder = self.decoder
        if not isinstance(decoder, Decoder):
            return states_of_pack(decoder, pack).index_select(0, pack.predicts)
        # Without pruning all states are computed, so use the places in ``pack.predicts``.
        needed = pack.last_block if decoder.prunes else None
        layouts = pack.layout, None if needed is None else needed.layout
        hidden = decoder(pack.input_ids, pack.position_ids, *layouts, prefix, routes=pack.routes)
        if prefix is not None:
            # The prompt's last token predicts the first token of each answer, and is not in this pack.
            hidden = prefix.prepend_state(hidden)
        return decoder.normed_rows(hidden, pack.predicts if needed is None else needed.predicts)

    def unpacked_states(self, row: Pack) -> Tensor:
        """Return the normed states [R, h] that predict the targets of a single row, by eager attention, for comparisons."""
        assert row.num_rows == 1, row.num_rows
        decoder = self.decoder
        if not isinstance(decoder, Decoder):
            return _own_output(decoder, row).last_hidden_state[0, row.predicts]
        positions = torch.arange(row.input_ids.shape[1], device=row.input_ids.device)[None]
        hidden = decoder(row.input_ids, positions, row.layout, attend=KERNELS[REGISTERED["eager"]])
        return decoder.normed_rows(hidden, row.predicts)

    def recorded(self, prompt: Pack, recorder: PrefixRecorder) -> tuple[Tensor, ...]:
        """Return the states [s, h] of a prompt that ``prompt.predicts`` names, then the outputs of the recorder.

        The result is a flat tuple, so that FSDP2 finds the tensors from which backward will start. ``prompt`` is a pack of
        ``pack_prompt`` or ``pack_path``.
        """
        decoder = self.decoder
        needed = prompt.last_block.layout if decoder.prunes and prompt.last_block is not None else None
        hidden = decoder(prompt.input_ids, prompt.position_ids, prompt.layout, needed, recorder, routes=prompt.routes)
        # Copy the rows, because a view would keep the states of the whole prompt alive as long as the prefix KV.
        at = prompt.predicts if needed is None or prompt.last_block is None else prompt.last_block.predicts
        return hidden.index_select(0, at), *recorder.outputs()

    def end_pass(self) -> None:
        reshard_units(self)
        if self.stream is not None:
            self.stream.release()
        if self.rows is not None:
            self.rows.rest()
        if self.casts is not None:
            self.casts.rest()

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext() if self.rows is None else self.rows.computing()

    def end_backward(self) -> None:
        if self.rows is not None:
            self.rows.end_backward()

    def compute_prefix(self, prompt: Pack) -> PrefixKV:
        recorder: Prefix = PrefixRecorder()
        state, *outputs = self(prompt, prefix_kv=recorder)
        return PrefixKV(state, outputs, branches=prompt.layout.branches)

    def open_prefix(self, prompt: Pack, outer: PrefixKV | None) -> PrefixKV:
        """Compute the prefix KV of tokens that follow those of ``outer``, without a graph. See :meth:`close_prefix`."""
        with torch.no_grad():
            state, *outputs = self(prompt, prefix_kv=PrefixRecorder(outer))
        return PrefixKV(state, outputs, outer, torch.is_grad_enabled(), prompt.layout.branches)

    def close_prefix(self, prompt: Pack, prefix: PrefixKV, context: AbstractContextManager[None]) -> None:
        """Run the forward of :meth:`open_prefix` again, in a context, and then its backward.

        So open tokens keep their keys, their values and the gradients of these, but no activations.
        """
        with context:
            again = self(prompt, prefix_kv=PrefixRecorder(prefix.outer))
        prefix.backward(again)


# Decoders of other architectures: the modules of transformers, which call the kernels of this package.
#
# The layout of a pack reaches attention through the keyword arguments of transformers' decoders. The kernels are registered
# without a mask function, so no [T, T] mask is built, and fake tensors need the same bytes as real ones.


def states_of_pack(decoder: nn.Module, pack: Pack) -> Tensor:
    split = pack.layout.split
    positions = pack.position_ids if split is None else pack.position_ids[:, split.own]
    output: Any = decoder(input_ids=pack.input_ids, position_ids=positions, use_cache=False, prefix_layout=pack.layout)
    return output.last_hidden_state[0]


def logits_of_row(lm: nn.Module, pack: Pack) -> Tensor:
    """Return the logits [T, V] of a pack of one row, by transformers' own forward and eager attention."""
    return _own_output(lm, pack).logits[0]


def _own_output(module: nn.Module, pack: Pack) -> Any:
    with own_attention(module):
        return module(input_ids=pack.input_ids, use_cache=False)


@contextmanager
def own_attention(lm: nn.Module) -> Iterator[None]:
    # Use transformers' eager attention inside the body. Submodules may have their own configs, so change and restore them all.
    configs = {
        id(config): config for module in lm.modules() if isinstance(config := getattr(module, "config", None), PretrainedConfig)
    }
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config in configs.values():
            config._attn_implementation = "eager"
        yield
    finally:
        for config, attention in before:
            config._attn_implementation = attention


def _registered(attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    # Wrap a kernel into the signature that transformers expects.
    def packed(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        prefix_layout: PrefixLayout | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        assert prefix_layout is not None, "attention over a pack needs the pack's layout"
        assert softcap is None or attend is KERNELS[REGISTERED["eager"]], "only eager attention can cap its scores"
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        # Transformers puts heads before tokens.
        q, k, v = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
        return attend(q, k, v, AttentionArgs(prefix_layout, scale, sliding_window, None, softcap, s_aux))[None], None

    return packed


def register_kernels() -> None:
    # Call it before a model that uses a kernel is built.
    for name, attend in KERNELS.items():
        AttentionInterface.register(name, _registered(attend))


# The policy computes log-probs (and entropies) of the response tokens without the logits of all tokens at once.


class LogProbHead(nn.Module):
    """The LM head. Its forward returns log-probs instead of logits.

    The matrix product runs inside this module's forward, so that FSDP2 gathers the weight if the head is a separate unit.
    """

    def __init__(
        self,
        linear: nn.Linear,
        chunk_tokens: int,
        compiled: bool,
        vocab_tile: int,
        shape: tuple[float, float | None] = (1.0, None),
    ) -> None:
        """Take over the weight and bias of a linear head.

        ``chunk_tokens`` is the number of response tokens per chunk, 0 = all. ``vocab_tile`` is the number of vocabulary entries
        per tile of a chunk, 0 = use tiles only if they cost nothing. ``shape`` is the result of
        :func:`verl_memopt.model.families.logit_shape`.
        """
        super().__init__()
        self.scale, self.cap = shape
        self.weight = linear.weight
        self.bias = linear.bias
        self.chunk_tokens = chunk_tokens
        self.compiled = compiled
        self.vocab_tile = vocab_tile

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        token_gradient: TokenGradient | None = None,
        statistics: TokenStatistics | None = None,
        teaching: AnyTeaching | None = None,
    ) -> Any:
        """Return log-probs and entropies (or None) of hidden states [R, h], fp32 [R] each.

        With ``teaching``, which covers the R tokens, the divergences from the teacher follow, fp32 [R].

        Without ``targets`` it returns the matrix product [..., V], which transformers itself scales and caps. ``statistics`` is
        filled in a pass without gradients. The other arguments are as in :meth:`PolicyModel.forward`.
        """
        if targets is None:
            return linear(hidden, self.weight, self.bias)
        # If this forward computes the head's gradient, backward does not read the weight, so FSDP2 need not gather it again.
        gathered_for_forward(self, again_in_backward=token_gradient is None)
        chunk, tile = self.chunk_tokens, self.vocab_tile
        # The head works with unscaled logits. So a factor of the logits becomes a divisor of the temperature and of the cap.
        cap = None if self.cap is None else self.cap / self.scale
        head = Head(self.weight, self.bias, temperature / self.scale, chunk, tile, with_entropy, self.compiled, cap=cap)
        return head_log_probs(head, hidden, targets, token_gradient, True, statistics, teaching)


class PolicyModel(PackedModel):
    def __init__(
        self,
        lm: PreTrainedModel,
        chunk_tokens: int,
        compiled: bool,
        vocab_tile: int = 0,
        blocks: Sequence[BlockOptions] | None = None,
    ) -> None:
        """Arguments are as in :class:`LogProbHead` and :class:`PackedModel`.

        Raises:
            ConfigError: The model has no list of decoder blocks, or its head is not a linear layer.
        """
        super().__init__(lm, blocks)
        head = lm.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            reason = f"have a head of class {type(head).__name__}, not a linear layer"
            raise refused(lm.config, str(lm.config.name_or_path), reason)
        # Set it in the Hugging Face model, so that names, tied weights and transformers' own forward use it.
        lm.set_output_embeddings(LogProbHead(head, chunk_tokens, compiled, vocab_tile, logit_shape(lm.config)))

    @property
    def head(self) -> Any:
        return self.lm.get_output_embeddings()

    def forward(
        self,
        pack: Pack,
        temperature: float = 1.0,
        with_entropy: bool = False,
        token_gradient: TokenGradient | None = None,
        prefix_kv: Prefix | None = None,
        unpacked: bool = False,
        statistics: TokenStatistics | None = None,
        states_only: bool = False,
        teaching: AnyTeaching | None = None,
    ) -> Any:
        """Return log-probs fp32 [R] of the response tokens of a pack, and their entropies fp32 [R] if requested.

        With ``teaching`` the divergences from the teacher follow, fp32 [R].

        Args:
            pack: The tokens and targets of a micro-batch.
            temperature: The logits are divided by it.
            with_entropy: Compute entropies too.
            token_gradient: Returns the gradients of the log-probs of some of the R response tokens before backward, so that the
                head can compute its own gradient in this forward.
            prefix_kv: The prefix KV for a pack of ``pack_suffixes``. For a pack of ``pack_prompt`` it is a recorder, and the
                result is that of :meth:`PackedModel.recorded`.
            unpacked: Compute a pack of one row with eager attention and all logits at once, for comparisons.
            statistics: As in :class:`LogProbHead`.
            states_only: Leave the head out, and return the normed states [R, h] that predict the response tokens.
            teaching: What a teacher says of the R response tokens, in the order of the pack. If several of them share a target,
                what it says of the first of them counts.
        """
        if states_only:
            return self._response_states(pack, prefix_kv)
        if unpacked:
            return self._unpacked(pack, temperature)
        if isinstance(prefix_kv, PrefixRecorder):
            return self.recorded(pack, prefix_kv)

        def head(own: Pack, places: Tensor | None) -> tuple[Tensor | None, ...]:
            states, gradient = self.predicting_states(own, prefix_kv), _at_places(token_gradient, own, places)
            taught = None if teaching is None else teaching.at(_response_of_target(own, places))
            found = self.head(states, own.targets, temperature, with_entropy, gradient, statistics, taught)
            return *found, *(() if statistics is None else statistics.values.values())

        # All ranks of a sequence group get the values of all targets, and compute the same loss.
        found, outputs = self.read(pack, head), 2 if teaching is None else 3
        if statistics is not None:
            values = zip(statistics.values, found[outputs:], strict=True)
            statistics.values = {name: value for name, value in values if value is not None}
        return found[:outputs]

    def _response_states(self, pack: Pack, prefix_kv: Prefix | None) -> Tensor:
        assert not isinstance(prefix_kv, PrefixRecorder), "a recorder gets the states of a prompt, not of response tokens"
        (states,) = self.read(pack, lambda own, _: (self.predicting_states(own, prefix_kv),))
        assert states is not None
        return states

    def _unpacked(self, row: Pack, temperature: float) -> tuple[Tensor, None]:
        if isinstance(self.decoder, Decoder):
            logits = self.head(self.unpacked_states(row)) * self.head.scale
            if self.head.cap is not None:
                logits = (logits / self.head.cap).tanh() * self.head.cap
        else:
            logits = logits_of_row(self.lm, row)[row.predicts]
        return (logits.float() / temperature).log_softmax(-1).gather(-1, row.targets[:, None])[:, 0], None


def _at_places(token_gradient: TokenGradient | None, pack: Pack, places: Tensor | None) -> TokenGradient | None:
    # Turn a function of response tokens into one of the targets of a pack. ``places``, int64 [r], are the response tokens of the
    # pack among all. None = it has all.
    if token_gradient is None:
        return None
    if pack.entry is None or pack.entry_on_host is None:
        return token_gradient if places is None else lambda rows, *values: token_gradient(places[rows], *values)
    entries = pack.entry.argsort(stable=True)
    targets = pack.entry[entries]
    ends = np.searchsorted(np.sort(pack.entry_on_host), np.arange(pack.targets.shape[0] + 1)).tolist()

    def summed(rows: slice, log_probs: Tensor, entropy: Tensor | None) -> LogitGrads:
        # A chunk of targets has neighbouring entries, after these are sorted by target.
        chunk = slice(ends[rows.start], ends[rows.stop])
        at, own = targets[chunk] - rows.start, entries[chunk] if places is None else places[entries[chunk]]
        grads, zeros = token_gradient(own, log_probs[at], None if entropy is None else entropy[at]), torch.zeros_like(log_probs)
        first, *others = (None if grad is None else zeros.index_add(0, at, grad) for grad in grads)
        assert first is not None
        return first, others[0], *others[1:]

    return summed


def _response_of_target(pack: Pack, places: Tensor | None) -> Any:
    # The place of a response token of each target of a pack, int64 [U], among those of all ranks. ``places`` is as above.
    if pack.entry is None:
        return slice(None) if places is None else places
    count = pack.entry.shape[0]
    # The first of several.
    first = torch.full_like(pack.targets, count).scatter_reduce(
        0, pack.entry, torch.arange(count, device=pack.entry.device), "amin"
    )
    return first if places is None else places[first]


DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def dtype_of(name: str, key: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"{key}={name}: unknown dtype. Use one of {', '.join(DTYPES)}.")
    return DTYPES[name]
