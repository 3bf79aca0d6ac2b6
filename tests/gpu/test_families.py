"""Layers that carry a state, and experts, on a GPU, beside loops over tokens in fp64 on a CPU."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.gpu import machine
from tests.model import test_delta_rule as states
from tests.model import test_expert_lora as adapted
from tests.model import test_experts as mixtures
from tests.model.forests import agent
from verl_memopt.memory.quantized_frozen_torch import PackedExperts, Packing
from verl_memopt.memory.tiled_mlp_torch import Traits
from verl_memopt.model.delta_kernels import BOUND, with_kernels
from verl_memopt.model.delta_rule import DeltaShape, gated_delta_rule
from verl_memopt.model.experts import Mixture, mixed
from verl_memopt.model.mixture_kind import MixtureKind, Router
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.model.state_chunks import state_chunks

GROUPS = ((130, (3, 64, 1, 65)), (2, (1, 2, 70)), (200, ()))

NEAR = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Most difference of outputs and gradients, relative to their norms."""


def near(found, exact, dtype):
    for one, other in zip(found, exact, strict=True):
        assert one.dtype in (dtype, torch.float32)
        assert (one.cpu().double() - other).norm() <= NEAR[dtype] * other.norm()


@pytest.mark.rehearsed
@pytest.mark.parametrize("dtype", NEAR, ids=["fp32", "bf16"])
def test_the_gated_delta_rule_gives_the_exact_outputs_and_gradients(dtype):
    layout = PrefixLayout.of(GROUPS)
    given = [tensor.detach().to(dtype) for tensor in states.inputs(len(layout.stops))]
    exact = [tensor.double().requires_grad_() for tensor in given]
    own = [tensor.to(machine.device()).requires_grad_() for tensor in given]
    weights = torch.randn(len(layout.stops), states.SHAPE.values, generator=torch.Generator().manual_seed(1))
    out, total, done = states.rule(layout.map(lambda tensor: tensor.to(machine.device())), own), 0, set()
    expected = torch.empty(out.shape, dtype=torch.float64)
    for path in states.paths(layout):
        alone = states.by_token(*(tensor[path] for tensor in exact[:3]), *exact[3:])
        expected[path] = alone.detach()
        new = [place for place, token in enumerate(path.tolist()) if token not in done]
        done |= set(path.tolist())
        total = total + (alone[new] * weights[path[new]]).sum()
    near([out], [expected], dtype)
    (out * weights.to(out)).sum().backward()
    near([tensor.grad for tensor in own], torch.autograd.grad(total, exact), dtype)


@pytest.mark.parametrize("heads", [(16, 16), (16, 32)], ids=["0.8B", "9B"])
def test_kernels_of_flash_linear_attention_give_the_exact_outputs_and_gradients_of_a_tree(heads):
    dtype, plain = torch.bfloat16, DeltaShape(*heads, 128, 128)
    shape = with_kernels(plain, "auto", machine.device(), dtype, "model")
    if shape.by_kernels is None:
        pytest.skip("kernels of flash-linear-attention: they need a GPU and the package fla-core")
    layout = agent(turns=4, answers=3, context=100, answer=40).pack().layout
    tokens, channels = len(layout.stops), 2 * plain.keys + plain.values
    sizes = (tokens, channels), *[(tokens, heads[1])] * 2, (channels, 1, 4), *[(heads[1],)] * 2, (tokens, plain.values)
    generator = torch.Generator().manual_seed(0)
    given, found = [torch.randn(size, generator=generator) for size in sizes], []
    given[4].copy_(torch.linspace(-7, 2, heads[1]))
    given = [tensor.to(dtype) for tensor in given]
    own = layout.map(lambda tensor: tensor.to(machine.device()))
    for each, tensors in ((shape, given), (plain, [tensor.double() for tensor in given])):
        *tensors, weights = (tensor.to(machine.device()) for tensor in tensors)
        tensors = [tensor.requires_grad_() for tensor in tensors]
        chunks = state_chunks(own, None, each.sizes(machine.device()))
        out = gated_delta_rule(*tensors[:3], tuple(tensors[3:]), chunks, each)[0]
        found.append([out.detach(), *torch.autograd.grad(out, tensors, weights)[:4]])
    for one, other in zip(*found, strict=True):
        assert (one.double() - other).norm() <= BOUND * other.norm()


@pytest.mark.rehearsed
@pytest.mark.parametrize("kind", [MixtureKind(Router(mixtures.CHOSEN, True)), mixtures.OSS], ids=["qwen3_moe", "gpt_oss"])
def test_experts_give_the_exact_outputs_and_gradients(kind):
    # In fp32 only: rounded logits of the router can choose other experts.
    dtype, is_oss = torch.float32, kind is mixtures.OSS
    given = [tensor.detach().to(dtype) for tensor in (mixtures.oss_weights() if is_oss else mixtures.weights())]
    x = torch.randn(300, given[0].shape[1], generator=torch.Generator().manual_seed(2)).to(dtype)
    exact = [tensor.double().requires_grad_() for tensor in (x, *given)]
    own = [tensor.to(machine.device()).requires_grad_() for tensor in (x, *given)]
    by_token = mixtures.oss_by_token if is_oss else partial(mixtures.by_token, router=kind.router)
    expected = by_token(exact[0], tensors=exact[1:])
    found = mixed(None, own[0], None, Mixture(kind, tuple(own[1:])), None)[0]
    near([found], [expected.detach()], dtype)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (found * weights.to(found)).sum().backward()
    near([tensor.grad for tensor in own], torch.autograd.grad((expected * weights).sum(), exact), dtype)


@pytest.mark.rehearsed
def test_a_shared_expert_gives_the_exact_outputs_and_gradients():
    kind, shared = MixtureKind(Router(mixtures.CHOSEN, True)), mixtures.shared_expert(adapted=False)
    given = [tensor.detach().float() for tensor in (*mixtures.weights(), *filter(lambda one: one is not None, shared))]
    x = torch.randn(300, given[0].shape[1], generator=torch.Generator().manual_seed(2))
    exact = [tensor.double().requires_grad_() for tensor in (x, *given)]
    own = [tensor.to(machine.device()).requires_grad_() for tensor in (x, *given)]
    rest = iter(exact[4:])
    layers = [None if tensor is None else next(rest) for tensor in shared]
    expected = mixtures.by_token(exact[0], kind.router, exact[1:4]) + mixtures.by_layers(exact[0], layers)
    rest = iter(own[4:])
    tensors = *own[1:4], *(None if tensor is None else next(rest) for tensor in shared)
    found = mixed(None, own[0], None, Mixture(kind, tensors, (Traits(0.0, None),) * 4), 2)[0]
    near([found], [expected.detach()], torch.float32)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (found * weights.to(found)).sum().backward()
    near([tensor.grad for tensor in own], torch.autograd.grad((expected * weights).sum(), exact), torch.float32)


@pytest.mark.rehearsed
@pytest.mark.parametrize("dtype", NEAR, ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_adapters_over_experts_in_bytes_give_the_exact_outputs_and_gradients(form, dtype):
    width, kind = 16, MixtureKind(Router(mixtures.CHOSEN, True))
    gate, *whole = (tensor.detach() for tensor in mixtures.weights(width=width))
    packings = [Packing(form, weight.shape[2]) for weight in whole]
    records = tuple(
        PackedExperts(packing, weight.shape[1], False, dtype) for packing, weight in zip(packings, whole, strict=True)
    )
    packed = [torch.stack([packing.quantize(one) for one in weight]) for packing, weight in zip(packings, whole, strict=True)]
    decoded = [record.weights(stored, range(len(stored)), torch.float64) for record, stored in zip(records, packed, strict=True)]
    given = [tensor.detach().to(dtype) for tensor in (gate, *adapted.factors(width=width, rank=8))]
    # Tokens for which rounded logits choose the same experts.
    x = torch.randn(900, gate.shape[1], generator=torch.Generator().manual_seed(2)).to(dtype)
    logits = (x.double() @ given[0].double().t()).sort(1, descending=True).values
    x = x[logits[:, mixtures.CHOSEN - 1] - logits[:, mixtures.CHOSEN] > 0.1]
    exact = [tensor.double().requires_grad_() for tensor in (x, *given)]
    own = [tensor.to(machine.device()).requires_grad_() for tensor in (x, *given)]
    merged = [
        adapted.added(weight, *exact[2 + 2 * place : 4 + 2 * place], adapted.SCALES[place], False)
        for place, weight in enumerate(decoded)
    ]
    expected = mixtures.by_token(exact[0], kind.router, [exact[1], *merged])
    tensors = own[1], *(stored.to(machine.device()) for stored in packed), *own[2:]
    found = mixed(None, own[0], None, Mixture(replace(kind, packed=records), tensors, scales=adapted.SCALES), None)[0]
    near([found], [expected.detach()], dtype)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (found * weights.to(found)).sum().backward()
    near([tensor.grad for tensor in own], torch.autograd.grad((expected * weights).sum(), exact), dtype)
