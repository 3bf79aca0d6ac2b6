"""``python -m tests.memory.activations.interpreted FILE``: run kernels by Triton's interpreter.

The interpreter must be on (TRITON_INTERPRET=1) before kernels are defined, so this runs in a process of its own. FILE has calls.
They are written back as the kernels left them, and with them what :func:`whole` gives.
"""

import sys

import torch
from torch import nn

from tests.model.attention_cases import flat_inputs, gpu_operators_on_a_cpu, rotary_of
from verl_memopt.memory import fused, kernels
from verl_memopt.memory.chunked_logprob_torch import head_log_probs
from verl_memopt.memory.fused import fused_statements
from verl_memopt.memory.logit_tiles import Head
from verl_memopt.memory.recompute_elementwise_torch import RMSNorm, recomputed_norm
from verl_memopt.memory.tiled_mlp_torch import recomputed_mlp
from verl_memopt.model.attention_fused import flash_attention
from verl_memopt.model.prefix_layout import PrefixLayout

MOST_COLUMNS = {"wide": 16}


def whole(compiled):
    """Gives values and gradients of attention, an MLP and a head, through everything that a kernel may take the place of."""
    layout, heads, kv = PrefixLayout.of(((5, (3, 4)),)), 4, 2
    inputs, found = flat_inputs(layout, heads, kv), []
    tokens = sum(layout.trees)
    for normed in (True, False):
        for together in (True, False):
            rotary = rotary_of(tokens, normed=normed)
            joined = torch.cat(inputs, 1).requires_grad_()
            parts = (joined * 1).split([heads, kv, kv], 1)
            given = parts if together else [part.clone() for part in parts]
            with gpu_operators_on_a_cpu():
                out = flash_attention(*given, layout, 0.3, None, rotary)
                asked = [joined, *(norm for norm in rotary.norms if norm is not None)]
                found += [out.detach(), *torch.autograd.grad(out.square().sum(), asked)]
    generator = torch.Generator().manual_seed(3)
    residual, x, hidden = (torch.randn(tokens, 24, generator=generator).requires_grad_() for _ in range(3))
    weight = torch.randn(24, generator=generator).requires_grad_()
    layers = [nn.Linear(*sizes, bias=False) for sizes in ((24, 36), (24, 36), (36, 24))]
    for layer in layers:
        nn.init.normal_(layer.weight, generator=generator)
    out = recomputed_mlp(residual * 1, x * 1, RMSNorm(1e-6), weight, layers)
    found += [out.detach(), *torch.autograd.grad(out.square().sum(), [residual, x, weight, *(layer.weight for layer in layers)])]
    normal = recomputed_norm(hidden, weight, 1e-6)
    targets, matrix = (
        torch.randint(0, 90, (tokens,), generator=generator),
        torch.randn(90, 24, generator=generator).requires_grad_(),
    )
    for tile in (0, 37):
        head = Head(matrix, None, temperature=0.7, chunk_tokens=5, vocab_tile=tile, with_entropy=True, compiled=compiled)
        log_probs, entropy = head_log_probs(head, normal, targets)
        loss = (log_probs + 0.3 * entropy).sum()
        found += [log_probs.detach(), entropy.detach(), *torch.autograd.grad(loss, [hidden, weight, matrix], retain_graph=True)]
    return found


def main(path):
    given = torch.load(path, weights_only=False)
    for (kind, *_), (statement, tensors, others) in given.items():
        kernels.MOST_COLUMNS = MOST_COLUMNS.get(kind, 8192)
        kernel = kernels.KERNELS[statement]
        assert kernel.fits(tensors, others), statement
        kernel.launch(*tensors, *others)
    compiled = []

    def uncompiled(function, tensors, others):
        compiled.append(function.__name__)
        return function(*tensors, *others)

    fused.compiled_for_width = uncompiled
    with fused_statements(True):
        given["whole",] = whole(compiled=True)
    given["used",] = [name.__name__ for name, kernel in kernels.KERNELS.items() if any(kernel._works.values())]
    given["compiled",] = compiled
    torch.save(given, path)


if __name__ == "__main__":
    main(sys.argv[1])
