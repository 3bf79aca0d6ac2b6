"""The model of every pass: packed tokens in, log-probs (and entropies) of the response tokens out, without whole logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from verl_memopt.errors import ConfigError
from verl_memopt.memory.logits.chunked_logprob import SumPiSquared, TokenGradient, head_log_probs
from verl_memopt.memory.parameters.embedding_gradient import TrainedEmbedding, is_plain
from verl_memopt.memory.parameters.native_offload import allocate_on_host
from verl_memopt.memory.parameters.resharding import gathered_for_forward
from verl_memopt.models.architecture import refused
from verl_memopt.models.attention import KERNELS, REGISTERED
from verl_memopt.models.decoder import BlockOptions, Decoder, of_llama_family
from verl_memopt.models.pack import Pack
from verl_memopt.models.transformers_decoder import logits_of_row, states_of_pack
from verl_memopt.ops.prefix_kv import Prefix, PrefixKV, PrefixRecorder


class LogProbHead(nn.Module):
    """The LM head. Its forward returns log-probs instead of logits.

    The product runs inside this module's forward, so FSDP2 gathers a head that is a sharding unit of its own.
    """

    def __init__(self, linear: nn.Linear, chunk_tokens: int, compiled: bool, vocab_tile: int) -> None:
        """Take over the weight and bias of a linear head.

        Args:
            linear: The head.
            chunk_tokens: Response tokens per chunk, 0 = all.
            compiled: Compile the functions of a chunk.
            vocab_tile: Vocabulary entries per tile of a chunk, 0 = where they are free.
        """
        super().__init__()
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
        sum_pi_squared: SumPiSquared | None = None,
    ) -> Any:
        """Return log-probs and entropies, fp32 [R] each, the latter or None.

        Args:
            hidden: [R, h].
            targets: int64 [R]; None returns the logits [..., V], for transformers.
            temperature: Temperature of the log-probs.
            with_entropy: Compute entropies too.
            token_gradient: Gives the gradients of log-probs and entropies before backward.
            sum_pi_squared: Is filled with the sums of squared probabilities, in a pass without gradients.
        """
        if targets is None:
            return linear(hidden, self.weight, self.bias)
        gathered_for_forward(self, again_in_backward=token_gradient is None)
        return head_log_probs(
            hidden,
            self.weight,
            self.bias,
            targets,
            temperature,
            self.chunk_tokens,
            with_entropy,
            self.compiled,
            self.vocab_tile,
            token_gradient=token_gradient,
            in_place=True,
            sum_pi_squared=sum_pi_squared,
        )


class PolicyModel(nn.Module):
    """A Hugging Face causal LM whose forward returns the log-probs of a pack's response tokens.

    :class:`Decoder` computes a decoder of the Llama family and takes over its submodules. Transformers computes any other.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        chunk_tokens: int,
        compiled: bool,
        vocab_tile: int = 0,
        blocks: Sequence[BlockOptions] | None = None,
        supports_prefix_kv: bool = False,
    ) -> None:
        """Take over a model.

        Args:
            lm: Any causal LM with a decoder and a linear head.
            chunk_tokens: Response tokens per chunk of the head, 0 = all.
            compiled: Compile the per-chunk functions.
            vocab_tile: Vocabulary entries per tile of a chunk, 0 = where they are free.
            blocks: What each block does to hold less memory, only in the Llama family; None for nothing.
            supports_prefix_kv: Answers may use the prefix KV of an earlier forward.

        Raises:
            ConfigError: The model has no list of decoder blocks, or its head is no plain linear layer.
        """
        super().__init__()
        head, source = lm.get_output_embeddings(), str(lm.config.name_or_path)
        if not isinstance(getattr(lm.get_decoder(), "layers", None), nn.ModuleList):
            raise refused(
                lm.config, source, f"do not keep their decoder blocks in a list named layers ({type(lm.get_decoder()).__name__})"
            )
        if not isinstance(head, nn.Linear):
            raise refused(lm.config, source, f"have a head of class {type(head).__name__}, not a linear layer")
        lm.set_output_embeddings(LogProbHead(head, chunk_tokens, compiled, vocab_tile))
        embedding = lm.get_input_embeddings()
        if is_plain(embedding):
            lm.set_input_embeddings(TrainedEmbedding(embedding))
        if of_llama_family(lm):
            options = [BlockOptions()] * len(lm.model.layers) if blocks is None else blocks
            lm.model = Decoder(lm.model, options, KERNELS[lm.config._attn_implementation])
        else:
            assert blocks is None, f"{type(lm).__name__} computes its blocks itself"
        self.lm = lm
        self.supports_prefix_kv = supports_prefix_kv

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one tensor."""
        return self.lm.get_output_embeddings().weight is self.embedding_weight

    @property
    def embedding_weight(self) -> Tensor:
        """Weight of the token embedding, [V, H]."""
        embedding: Any = self.lm.get_input_embeddings()
        return embedding.weight

    @property
    def decoder(self) -> nn.Module:
        """The embedding, the blocks and the final norm."""
        return self.lm.get_decoder()

    def blocks(self) -> list[nn.Module]:
        """Return the decoder blocks in order."""
        layers: Any = self.decoder.layers
        return list(layers)

    def forward(
        self,
        pack: Pack,
        temperature: float,
        with_entropy: bool,
        token_gradient: TokenGradient | None = None,
        prefix_kv: Prefix | None = None,
        unpacked: bool = False,
        sum_pi_squared: SumPiSquared | None = None,
    ) -> Any:
        """Return log-probs fp32 [R] of ``pack.targets``, and their entropies fp32 [R] if requested.

        Args:
            pack: The tokens of a micro-batch, and its targets.
            temperature: Temperature of the log-probs.
            with_entropy: Compute entropies too.
            token_gradient: Gives the gradient of each log-prob before backward, so the head computes its own in forward.
            prefix_kv: The prefix KV for a pack of ``pack_suffixes``; or a recorder for one of ``pack_prompt``, which returns the
                state of the last token [1, h] and ``PrefixRecorder.outputs`` instead.
            unpacked: Compute a pack of one row with eager attention and whole logits, for comparisons.
            sum_pi_squared: As in :class:`LogProbHead`.
        """
        if unpacked:
            return self._unpacked(pack, temperature)
        if isinstance(prefix_kv, PrefixRecorder):
            return self._recorded(pack, prefix_kv)
        states = self._predicting_states(pack, prefix_kv)
        head = self.lm.get_output_embeddings()
        return head(states, pack.targets, temperature, with_entropy, token_gradient, sum_pi_squared)

    def _predicting_states(self, pack: Pack, prefix: PrefixKV | None) -> Tensor:
        """Return the normed states [R, h] that predict the pack's targets."""
        decoder = self.decoder
        if not isinstance(decoder, Decoder):
            return states_of_pack(decoder, pack).index_select(0, pack.predicts)
        needed = pack.last_block if decoder.prunes else None
        hidden = decoder(pack.input_ids, pack.position_ids, pack.layout, None if needed is None else needed.layout, prefix)
        if prefix is not None:
            hidden = prefix.prepend_state(hidden)
        return decoder.normed_rows(hidden, pack.predicts if needed is None else needed.predicts)

    def _recorded(self, prompt: Pack, recorder: PrefixRecorder) -> tuple[Tensor, ...]:
        """Return the state [1, h] of a prompt's last token, then the outputs of the recorder.

        The result is a flat tuple, so FSDP2 sees the tensors from which backward will start.
        """
        decoder = self.decoder
        needed = prompt.last_block.layout if decoder.prunes and prompt.last_block is not None else None
        hidden = decoder(prompt.input_ids, prompt.position_ids, prompt.layout, needed, recorder)
        return hidden[-1:].clone(), *recorder.outputs()

    def _unpacked(self, row: Pack, temperature: float) -> tuple[Tensor, None]:
        """Return the log-probs of a row alone, in eager attention and from whole logits."""
        assert row.num_rows == 1, row.num_rows
        decoder = self.decoder
        if isinstance(decoder, Decoder):
            positions = torch.arange(row.input_ids.shape[1], device=row.input_ids.device)[None]
            hidden = decoder(row.input_ids, positions, row.layout, attend=KERNELS[REGISTERED["eager"]])
            logits = self.lm.get_output_embeddings()(decoder.normed_rows(hidden, row.predicts))
        else:
            logits = logits_of_row(self.lm, row)[row.predicts]
        return (logits.float() / temperature).log_softmax(-1).gather(-1, row.targets[:, None])[:, 0], None

    def compute_prefix(self, prompt: Pack) -> PrefixKV:
        """Compute the prefix KV of a prompt, for the answers in later micro-batches."""
        state, *outputs = self(prompt, 1.0, False, None, PrefixRecorder())
        return PrefixKV(state, outputs)


def allocate(policy: PolicyModel, device: torch.device, on_host: bool = False) -> None:
    """Allocate the parameters of a model, uninitialised. Tied parameters stay one tensor.

    Args:
        policy: A model without storage.
        device: The device to compute on.
        on_host: Put the shards on the host.
    """
    tied = policy.tied
    if on_host:
        allocate_on_host(policy, device)
    else:
        policy.to_empty(device=device)
    if tied:
        policy.lm.get_output_embeddings().weight = policy.lm.get_input_embeddings().weight


DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
}


def dtype_of(name: str, key: str) -> torch.dtype:
    """Return the torch dtype for a setting's spelling.

    Args:
        name: The spelling.
        key: The setting, to name in errors.

    Raises:
        ConfigError: The dtype is unknown.
    """
    if name not in DTYPES:
        raise ConfigError(f"{key}={name}: unknown dtype. Use one of {', '.join(DTYPES)}.")
    return DTYPES[name]
