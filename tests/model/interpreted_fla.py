"""``python -m tests.model.interpreted_fla FILE``: run the kernels of flash-linear-attention by Triton's interpreter, on a CPU.

FILE has packs: groups, sizes of heads, most elements of temporary tensors, and inputs. Outputs and gradients are written back.
The interpreter must be on (TRITON_INTERPRET=1) before the kernels are defined, so this runs in a process of its own. It takes
fp32 alone, because the interpreter computes wrongly in bfloat16.
"""

import builtins
import sys
from functools import partial

import torch
from triton.runtime.autotuner import Autotuner

from verl_memopt.model import delta_rule
from verl_memopt.model.delta_kernels import KernelRule
from verl_memopt.model.delta_rule import DeltaShape, gated_delta_rule
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.model.state_chunks import state_chunks


class _Number(int):
    """A number of a loop. Compiled, it has a method that the interpreter's numbers lack."""

    def to(self, dtype):
        return self


def _numbers(*borders):
    return map(_Number, builtins.range(*(int(border) for border in borders)))


def interpreted():
    """Gives fla's kernel, changed so that the interpreter runs it: there is nothing to tune, and loops count in ``_Number``."""
    Autotuner._bench = lambda self, *arguments, **named: [1.0, 1.0, 1.0]
    from fla.ops.common import chunk_delta_h
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    chunk_delta_h.range = _numbers
    return chunk_gated_delta_rule


def main(path):
    kernel, found = interpreted(), {}
    for name, (groups, heads, elements, tensors) in torch.load(path).items():
        delta_rule.ELEMENTS["cpu"] = elements
        shape = DeltaShape(*heads, by_kernels=partial(KernelRule, kernel))
        chunks = state_chunks(PrefixLayout.of(groups), None, shape.sizes(torch.device("cpu")))
        *inputs, weights = tensors
        inputs = [tensor.requires_grad_() for tensor in inputs]
        out = gated_delta_rule(*inputs[:3], tuple(inputs[3:]), chunks, shape)[0]
        found[name] = [out.detach(), *torch.autograd.grad(out, inputs, weights)]
    torch.save(found, path)


if __name__ == "__main__":
    main(sys.argv[1])
