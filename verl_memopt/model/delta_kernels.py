"""The gated delta rule by the kernels of flash-linear-attention (package fla-core), on a GPU in bfloat16.

A call computes chunks of one round (``state_chunks.py``), which may be as long as the call. They begin with the states that the
round before handed on, so a tree is a call or several for each round. The convolution and the gates stay torch's own operators.
Forward keeps what :class:`verl_memopt.model.delta_rule.Rule` keeps: the inputs, and the states before each call. What the kernels
themselves keep is computed again in backward, and lives as long as one call.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import silu, softplus

from verl_memopt.distributed.device import capability_of, is_gpu, name_of
from verl_memopt.errors import ConfigError
from verl_memopt.model.delta_rule import DeltaShape, Rule, gated_delta_rule
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.model.state_chunks import TAIL, Call, StateChunks, state_chunks

OLDEST = "0.6.0"
"""The first version of fla-core without known wrong results for these layers."""

HOPPER, WRONG_ON_HOPPER = 9, ("3.4", "3.7.1")
"""Compute capability of Hopper, and the versions of Triton, the last one excluded, that compile a wrong kernel for it."""

LARGEST_HEAD = 256

BOUND = 2**-5
"""How far results of the kernels may be from those of torch's operators, relative to their norms. By rounding alone they are
about 2**-8 apart, because kernels round states, and what they compute inside a chunk, to bfloat16."""

UNINSTALL = ".venv/bin/pip uninstall fla-core flash-linear-attention"
WAY_OUT = f"Or uninstall it ({UNINSTALL}): torch's own operators compute these layers."
PLAIN = "linear layers: torch's own operators, because %s"

KernelOfRule: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
"""``chunk_gated_delta_rule`` of fla: (q and k [1, t, Hk, Dk], v [1, t, Hv, Dv], g and beta [1, t, Hv], and by name the states
[n, Hv, Dk, Dv] of n sequences) -> outputs [1, t, Hv, Dv] and the states after each sequence."""

logger = logging.getLogger(__name__)


class KernelRule:
    """The rule over the chunks of a pack, by a kernel. A drop-in for :class:`verl_memopt.model.delta_rule.Rule`."""

    def __init__(self, kernel: KernelOfRule, chunks: StateChunks, shape: DeltaShape, tensors: Sequence[Tensor]) -> None:
        self.kernel, self.chunks, self.shape = kernel, chunks, shape
        self.plain = Rule(chunks, shape, tensors)
        self.calls = chunks.calls(shape.most_tokens(tensors[0].device))

    def forward(self, keeps: bool) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return the outputs, the last inputs and states of the results, and the states before each call if it ``keeps`` them."""
        plain, chunks, shape = self.plain, self.chunks, self.shape
        out = plain.qkv.new_empty(chunks.tokens, shape.values)
        results = plain.qkv.new_empty(len(chunks.results_of), *shape.state, dtype=plain.wide)
        border, following, kept = plain.first_border(), list[Tensor](), list[Tensor]()
        for call in self.calls:
            kept += [border] if keeps else []
            part = call.part
            mixed = plain.convolved(self._inputs(call))
            value, after = self._computed(call, *self._arguments(call, mixed, border))
            del mixed
            out.index_copy_(0, call.tokens, value.to(out.dtype))
            following.append(plain.by_key_head(after.index_select(0, part.passed)))
            if len(part.found):
                results.index_copy_(0, part.results, after.index_select(0, part.found).to(results.dtype))
            if part.last:
                border, following = torch.cat(following), []
        return out, plain.inputs(chunks.tails), results, kept

    def backward(
        self, borders: Sequence[Tensor], grad: Tensor | None, grad_tails: Tensor | None, grad_states: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the eight tensors. ``borders`` are the states before each call."""
        plain = self.plain
        grads = plain.no_gradients(grad_tails)
        for call, before in zip(reversed(self.calls), reversed(borders), strict=True):
            part, conv = call.part, self._inputs(call)
            mixed = plain.convolved(conv)
            arguments = [tensor.requires_grad_() for tensor in self._arguments(call, mixed, before)]
            with torch.enable_grad():
                value, after = self._computed(call, *arguments)
            grad_value = torch.zeros_like(value) if grad is None else grad.index_select(0, call.tokens).to(value.dtype)
            grad_after = torch.zeros_like(after)
            if len(part.passed):
                grad_after.index_copy_(0, part.passed, grads.border[part.border].flatten(1, 2).to(after.dtype))
            if grad_states is not None and len(part.found):
                grad_after.index_add_(0, part.found, grad_states.index_select(0, part.results).to(after.dtype))
            own = torch.autograd.grad((value, after), arguments, (grad_value, grad_after))
            del value, after, grad_value, grad_after, arguments
            activated, b, a, a_log, dt_bias, states = own
            grads.b.index_copy_(0, call.tokens, b)
            grads.a.index_copy_(0, call.tokens, a)
            grads.a_log += a_log
            grads.dt_bias += dt_bias
            if part.last:
                grads.reading = states.new_zeros(part.before, *before.shape[1:], dtype=plain.wide)
            grads.reading.index_add_(0, part.read, plain.by_key_head(states))
            if part.first:
                grads.border = grads.reading
            whole = torch.zeros_like(mixed)
            whole[0].index_copy_(0, call.own - TAIL, activated.to(plain.wide))
            into = plain.convolution_gradient(conv, mixed, whole, grads)[0]
            places = self.chunks.tail_places[part.chunks].flatten()
            grads.tails.index_add_(0, places, into.index_select(0, call.tails))
            grads.qkv.index_copy_(0, call.tokens, into.index_select(0, call.own).to(grads.qkv.dtype))
        return plain.collected(grads)

    def _inputs(self, call: Call) -> Tensor:
        # [1, t + 3 n, channels]. Between two chunks the convolution of these rows has outputs that nothing reads.
        return self.plain.inputs(call.rows[None]).to(self.plain.wide)

    def _arguments(self, call: Call, mixed: Tensor, border: Tensor) -> tuple[Tensor, ...]:
        # Copies, because backward takes their gradients.
        plain, dtype = self.plain, self.plain.qkv.dtype
        return (
            silu(mixed[0].index_select(0, call.own - TAIL)).to(dtype),
            plain.b.index_select(0, call.tokens),
            plain.a.index_select(0, call.tokens),
            plain.a_log.to(plain.wide, copy=True),
            plain.dt_bias.to(plain.wide, copy=True),
            border.index_select(0, call.part.read).flatten(1, 2),
        )

    def _computed(
        self, call: Call, activated: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        # The outputs [t, Hv x Dv], and the state after each chunk [n, Hv, Dk, Dv].
        shape = self.shape
        q, k, v = activated.split(self.plain.split, 1)
        q, k = (tensor.reshape(1, -1, shape.key_heads, shape.key_dim) for tensor in (q, k))
        v = v.reshape(1, -1, shape.value_heads, shape.value_dim)
        decays = -a_log.exp() * softplus(a.to(self.plain.wide) + dt_bias)
        out, after = self.kernel(
            q,
            k,
            v,
            decays[None],
            b.sigmoid()[None],
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=call.cu_seqlens,
            chunk_indices=call.pieces,
        )
        return out[0].flatten(1), after


@cache
def with_kernels(shape: DeltaShape, name: str, device: torch.device, dtype: torch.dtype, section: str) -> DeltaShape:
    """Return the shape with the kernels that compute its layers on a device, if there are any. The log says which, or why none.

    Args:
        shape: The heads, without kernels.
        name: ``model.attn_implementation``. With ``eager`` there are none.
        device: The device of the model.
        dtype: The dtype in which it computes.
        section: The section of the settings, for error messages.

    Raises:
        ConfigError: The installed versions are known to give wrong results on this device. Or they give others than torch's own
            operators here.
    """
    key = f"{section}.attn_implementation={name}"
    reason = f"of {key}" if name == "eager" else _not_for(shape, device, dtype) or _fla_problem()
    if reason is not None:
        logger.info(PLAIN, reason)
        return shape
    fla, triton = (importlib.import_module(package).__version__ for package in ("fla", "triton"))
    wrong = known_wrong(fla, triton, capability_of(device))
    if wrong is not None:
        raise ConfigError(f"{key}: {wrong} {WAY_OUT}")
    faster, versions = replace(shape, by_kernels=partial(KernelRule, _kernel())), f"fla-core {fla} with Triton {triton}"
    try:
        difference = largest_difference(faster, device, dtype)
    except torch.OutOfMemoryError:  # says nothing about the kernels
        raise
    # Compilers and drivers raise errors of many kinds.
    except Exception as error:  # noqa: BLE001
        logger.warning(PLAIN, f"the kernels of {versions} do not run ({_first_line(error)})")
        return shape
    refuse_beyond_rounding(difference, f"{key}: {versions}", device)
    logger.info("linear layers: kernels of %s, at most %.1e from torch's own operators", versions, difference)
    return faster


def refuse_beyond_rounding(difference: float, subject: str, device: torch.device) -> None:
    """Raise if a difference of :func:`largest_difference` is NaN or too large. ``subject`` names the setting and the versions."""
    if not difference <= BOUND:
        raise ConfigError(
            f"{subject} computes the linear layers of this model wrongly on {name_of(device)}: results differ by "
            f"{difference:.2g} of their norm from those of torch's own operators, and rounding explains at most {BOUND:.2g}. "
            f"Install another version of fla-core or Triton. {WAY_OUT}"
        )


def fla_is_installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def known_wrong(fla: str, triton: str, capability: tuple[int, int]) -> str | None:
    """Return what is known to be wrong with versions of fla-core and Triton on a compute capability, and what to install.

    None = nothing is known. On Blackwell, fla-core itself avoids the kernels that Triton before 3.8 compiles wrongly.
    """
    if Version(fla) < Version(OLDEST):
        return f"fla-core {fla} is known to give wrong gradients. Install fla-core>={OLDEST}."
    first, fixed = WRONG_ON_HOPPER
    if capability[0] == HOPPER and Version(first) <= Version(triton) < Version(fixed):
        return (
            f"on Hopper, fla-core {fla} with Triton {triton} is known to give wrong gradients of gates and decays. Install a "
            f"torch with Triton {fixed} or newer."
        )
    return None


def _not_for(shape: DeltaShape, device: torch.device, dtype: torch.dtype) -> str | None:
    if not is_gpu(device):
        return "the kernels of flash-linear-attention need a GPU"
    if dtype != torch.bfloat16:
        return f"the kernels of flash-linear-attention are used in bfloat16, and not in {dtype}"
    if max(shape.key_dim, shape.value_dim) > LARGEST_HEAD:
        return f"the kernels of flash-linear-attention take heads of at most {LARGEST_HEAD}"
    return None


def _fla_problem() -> str | None:
    if not fla_is_installed():
        return "fla-core is not installed"
    try:
        _kernel()
    # A package for another torch or Triton may raise anything when it is imported.
    except Exception as error:  # noqa: BLE001
        return f"fla-core cannot be imported ({_first_line(error)})"
    return None


def _kernel() -> KernelOfRule:
    # Imported here, because the package is optional.
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    found: KernelOfRule = chunk_gated_delta_rule
    return found


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def largest_difference(shape: DeltaShape, device: torch.device, dtype: torch.dtype) -> float:
    """Return how far outputs and gradients by the shape's kernels are from those of torch's own operators.

    Both compute a prompt with two answers and a row, of random tensors. The difference of two tensors is relative to the norm.
    NaN if a result is not finite.
    """
    layout = PrefixLayout.of(((70, (3, 130)), (65, ()))).map(lambda tensor: tensor.to(device))
    found, expected = (_results(each, layout, device, dtype) for each in (shape, replace(shape, by_kernels=None)))
    errors = [(one - other).norm() / other.norm() for one, other in zip(found, expected, strict=True)]
    return float(torch.stack(errors).max())


def _results(shape: DeltaShape, layout: PrefixLayout, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    # A generator of its own, so that the numbers of a run do not depend on this.
    generator = torch.Generator(device).manual_seed(0)
    tokens, channels, heads = len(layout.stops), 2 * shape.keys + shape.values, shape.value_heads
    sizes: Any = (tokens, channels), (tokens, heads), (tokens, heads), (channels, 1, TAIL + 1), (heads,), (heads,)
    values = [torch.randn(size, generator=generator, device=device) for size in sizes]
    values[4].copy_(torch.linspace(-7, 2, heads))  # some heads forget within few tokens, and others remember all
    qkv, b, a, *weights = inputs = [tensor.to(dtype).requires_grad_() for tensor in values]
    chunks = state_chunks(layout, None, shape.sizes(device))
    with torch.enable_grad():
        out = gated_delta_rule(qkv, b, a, (weights[0], weights[1], weights[2]), chunks, shape)[0]
    grad = torch.randn(out.shape, generator=generator, device=device).to(dtype)
    # Gradients of A_log and dt_bias are sums over tokens that nearly cancel. Torch makes them from those of the tokens.
    return [tensor.detach().double() for tensor in (out, *torch.autograd.grad(out, inputs, grad)[:4])]
