"""The model of every pass: packed tokens in, log-probs (and entropy) of the response tokens out; no logits in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from verl_memopt.errors import ConfigError
from verl_memopt.memory.logits.chunked_logprob import TokenGradient, head_log_probs
from verl_memopt.memory.parameters.embedding_gradient import TrainedEmbedding, is_plain
from verl_memopt.memory.parameters.native_offload import allocate_on_host
from verl_memopt.memory.parameters.resharding import gathered_for_forward
from verl_memopt.models.architecture import refused
from verl_memopt.models.attention import KERNELS, REGISTERED
from verl_memopt.models.decoder import BlockOptions, Decoder, of_llama_family
from verl_memopt.models.pack import Pack
from verl_memopt.models.transformers_decoder import logits_of_row, states_of_pack
from verl_memopt.ops.carried_prompt import CarriedPrompt, Recorder


class LogProbHead(nn.Module):
    """The LM head, whose forward gives log-probs instead of logits.

    The product runs inside this module's forward, so that a head sharded as a unit of its own is gathered for it.
    """

    def __init__(self, linear: nn.Linear, chunk_tokens: int, compiled: bool, vocab_tile: int) -> None:
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
    ) -> Any:
        """Gives log-probs and entropies fp32 [R] of hidden [R, h]; without targets the logits [..., V], as transformers asks."""
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
        )


class PolicyModel(nn.Module):
    """A Hugging Face causal LM whose forward scores the response tokens of a pack.

    A decoder of the Llama family is computed by :class:`Decoder`, which takes over its submodules; any other by transformers.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        chunk_tokens: int,
        compiled: bool,
        vocab_tile: int = 0,
        blocks: Sequence[BlockOptions] | None = None,
        carries: bool = False,
    ) -> None:
        """Take over a model.

        Args:
            lm: any causal LM with a decoder and a linear head.
            chunk_tokens: response tokens per chunk of the head, 0 = all.
            compiled: compile the per-chunk functions.
            vocab_tile: vocabulary entries per tile of a chunk, 0 = where they are free.
            blocks: what each block does to hold less memory, in the Llama family alone; None for nothing.
            carries: answers may read a prefix whose keys and values another forward has computed.

        Raises:
            ConfigError: for a model without a list of decoder blocks, or whose head is no plain linear layer.
        """
        super().__init__()
        head, source = lm.get_output_embeddings(), lm.config.name_or_path
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
        self.carries = carries

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one tensor."""
        return self.lm.get_output_embeddings().weight is self.lm.get_input_embeddings().weight

    @property
    def decoder(self) -> nn.Module:
        """The embedding, the blocks and the final norm."""
        return self.lm.get_decoder()

    def blocks(self) -> list[nn.Module]:
        """Return the decoder blocks in order."""
        return list(self.decoder.layers)

    def forward(
        self,
        pack: Pack,
        temperature: float,
        with_entropy: bool,
        token_gradient: TokenGradient | None = None,
        prefix_kv: CarriedPrompt | Recorder | None = None,
        unpacked: bool = False,
    ) -> Any:
        """Return log-probs fp32 [R] of ``pack.targets``, and their entropies fp32 [R] when asked.

        Args:
            pack: the tokens of a micro-batch, and what is asked of them.
            temperature: of the log-probs.
            with_entropy: entropies are asked for.
            token_gradient: what backward will bring for each log-prob, so that the head need not wait for it.
            prefix_kv: the prefix of ``pack_branches``, or what records that of ``pack_prompt``: then its last token's state
                [1, h] and ``outputs`` are returned.
            unpacked: for a pack of one row, in eager attention, logits and all; for comparisons.
        """
        if unpacked:
            return self._unpacked(pack, temperature)
        if isinstance(prefix_kv, Recorder):
            return self._recorded(pack, prefix_kv)
        states = self._predicting_states(pack, prefix_kv)
        return self.lm.get_output_embeddings()(states, pack.targets, temperature, with_entropy, token_gradient)

    def _predicting_states(self, pack: Pack, prefix: CarriedPrompt | None) -> Tensor:
        """Return the normed states [R, h] that predict the pack's targets."""
        decoder = self.decoder
        if not isinstance(decoder, Decoder):
            return states_of_pack(decoder, pack).index_select(0, pack.predicts)
        needed = pack.read if decoder.prunes else None
        hidden = decoder(pack.input_ids, pack.position_ids, pack.trees, None if needed is None else needed.trees, prefix)
        if prefix is not None:
            hidden = prefix.before_states(hidden)
        return decoder.normed_rows(hidden, pack.predicts if needed is None else needed.predicts)

    def _recorded(self, prompt: Pack, recorder: Recorder) -> tuple[Tensor, ...]:
        """Return the state [1, h] of a prompt's last token, then what was recorded of its blocks.

        Flat, so that FSDP2 sees the tensors from which backward will start.
        """
        decoder = self.decoder
        needed = prompt.read.trees if decoder.prunes and prompt.read is not None else None
        hidden = decoder(prompt.input_ids, prompt.position_ids, prompt.trees, needed, recorder)
        return hidden[-1:].clone(), *recorder.outputs()

    def _unpacked(self, row: Pack, temperature: float) -> tuple[Tensor, None]:
        """Return the log-probs of a row alone, in eager attention and from whole logits."""
        assert row.num_rows == 1, row.num_rows
        decoder = self.decoder
        if isinstance(decoder, Decoder):
            positions = torch.arange(row.input_ids.shape[1], device=row.input_ids.device)[None]
            hidden = decoder(row.input_ids, positions, row.trees, attend=KERNELS[REGISTERED["eager"]])
            logits = self.lm.get_output_embeddings()(decoder.normed_rows(hidden, row.predicts))
        else:
            logits = logits_of_row(self.lm, row)[row.predicts]
        return (logits.float() / temperature).log_softmax(-1).gather(-1, row.targets[:, None])[:, 0], None

    def carry(self, prompt: Pack) -> CarriedPrompt:
        """Computes a prompt whose answers are in micro-batches to come."""
        state, *outputs = self(prompt, 1.0, False, None, Recorder())
        return CarriedPrompt(state, outputs)


def allocate(policy: PolicyModel, device: torch.device, on_host: bool = False) -> None:
    """Gives a model without storage its storage on the device, or its shards on the host; uninitialised.

    One tied tensor stays one.
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
    """Gives the torch dtype of a setting's spelling. Errors: ConfigError naming the key."""
    if name not in DTYPES:
        raise ConfigError(f"{key}={name}: unknown dtype. Use one of {', '.join(DTYPES)}.")
    return DTYPES[name]
