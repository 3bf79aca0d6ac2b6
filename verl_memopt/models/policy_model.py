"""The model of every pass: packed tokens in, log-probs (and entropy) of the response tokens out; no logits in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PretrainedConfig, PreTrainedModel

from verl_memopt.errors import ConfigError
from verl_memopt.memory.carried_prompt import CarriedPrompt, Recorder
from verl_memopt.memory.chunked_logprob import TokenGradient, head_log_probs
from verl_memopt.memory.embedding_gradient import TrainedEmbedding, is_plain
from verl_memopt.memory.native_offload import allocate_on_host
from verl_memopt.memory.resharding import gathered_for_forward
from verl_memopt.models.architecture import refused
from verl_memopt.models.pack import Pack


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

    lm: any causal LM with a decoder and a linear head. chunk_tokens: response tokens per chunk of the head, 0 = all.
    compiled: compile the per-chunk functions. vocab_tile: vocabulary entries per tile of a chunk, 0 = where they are free.
    """

    def __init__(self, lm: PreTrainedModel, chunk_tokens: int, compiled: bool, vocab_tile: int = 0) -> None:
        """Errors: ConfigError for a model without a list of decoder blocks, or whose head is no plain linear layer."""
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
        self.lm = lm
        self.final_norm: Callable[[Tensor], Tensor] | None = None
        """[R, h] -> [R, h], where the decoder leaves its last norm to this model; set by ``recompute_elementwise``."""
        self.prunes = False
        """Whether the last block gives what is read alone; set by ``prune_last_block``."""
        self.carries = False
        """Whether answers may read a prompt that another forward has computed."""

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one tensor."""
        return self.lm.get_output_embeddings().weight is self.lm.get_input_embeddings().weight

    def blocks(self) -> list[nn.Module]:
        """Gives the decoder blocks in order."""
        return list(self.lm.get_decoder().layers)

    def forward(
        self,
        pack: Pack,
        temperature: float,
        with_entropy: bool,
        token_gradient: TokenGradient | None = None,
        carried: CarriedPrompt | Recorder | None = None,
        unpacked: bool = False,
    ) -> Any:
        """Gives log-probs fp32 [R] of ``pack.targets``, and their entropies fp32 [R] when asked.

        unpacked: for a pack of one row, by transformers' own forward and attention, logits and all; for comparisons.

        token_gradient: what backward will bring for each of them, so that the head need not wait for it. carried: the prompt of
        ``pack_branches``, or what records that of ``pack_prompt``: then its last token's state [1, h] and ``outputs`` are given.
        """
        if unpacked:
            return self._unpacked(pack, temperature)
        read = pack.read if self.prunes else None
        output: Any = self.lm.get_decoder()(
            input_ids=pack.input_ids,
            position_ids=pack.position_ids,
            use_cache=False,
            pack_trees=pack.trees,
            read_trees=None if read is None else read.trees,
            carried=carried,
        )
        hidden = output.last_hidden_state[0]
        if isinstance(carried, Recorder):
            # Flat, so that FSDP2 sees the tensors from which backward will start.
            return hidden[-1:].clone(), *carried.outputs()
        if carried is not None:
            hidden = carried.before_states(hidden)
        hidden = hidden.index_select(0, pack.predicts if read is None else read.predicts)
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        return self.lm.get_output_embeddings()(hidden, pack.targets, temperature, with_entropy, token_gradient)

    def _unpacked(self, pack: Pack, temperature: float) -> tuple[Tensor, None]:
        assert pack.num_rows == 1, pack.num_rows
        with own_attention(self.lm):
            logits = self.lm(input_ids=pack.input_ids, use_cache=False).logits[0, pack.predicts]
        return (logits.float() / temperature).log_softmax(-1).gather(-1, pack.targets[:, None])[:, 0], None

    def carry(self, prompt: Pack) -> CarriedPrompt:
        """Computes a prompt whose answers are in micro-batches to come."""
        state, *outputs = self(prompt, 1.0, False, None, Recorder())
        return CarriedPrompt(state, outputs)


@contextmanager
def own_attention(lm: nn.Module) -> Iterator[None]:
    """Lets a model compute with transformers' eager attention inside the body."""
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
