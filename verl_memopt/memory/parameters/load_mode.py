"""How weights come from their files: streamed shard by shard, or left in the mapped file until the device asks for them.

Saves: either way no rank holds more of a model than its shard, on the device, and on the host nothing of its own: a file is
    mapped, and each tensor's part of it is copied straight to where it belongs. ``mmap`` also saves the b_w * N / W bytes
    of host buffer in which a reference with ``param_offload`` rests: the file is its place, and the system may drop its
    pages when memory is short. A rank's slice of a mapped tensor keeps the address range of all of it, and no memory.
Costs: ``mmap``: pages that were dropped are read from disk again, and copies to the device cannot come from page-locked memory.
Pairs with: ``ref.fsdp_config.param_offload``, which it needs, and a ``ref.fsdp_config.model_dtype`` that is the file's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from verl_memopt.memory.knob import Claim, Knob, Refusal
from verl_memopt.observe.byte_tracker import HOST, declare_host, mark, scope

KIND = "mapped file"


@contextmanager
def mapping() -> Iterator[None]:
    """Label tensors created inside as parts of a mapped file, which are of the host and no memory of the process."""
    with scope(KIND, HOST):
        yield


def mapped(part: Tensor) -> Tensor:
    """Label a tensor that stays as a part of a mapped file, and return it."""
    declare_host(part.untyped_storage())
    mark(KIND, [part], HOST)
    return part


KNOB = Knob(
    name="load_mode",
    keys=("actor_rollout_ref.model.load_mode",),
    on=("actor_rollout_ref.model.load_mode=mmap",),
    off=("actor_rollout_ref.model.load_mode=stream",),
    claims=(Claim("update_actor", "host buffers", lambda _, after: after.reference_bytes),),
    refuses=(
        Refusal(
            "actor_rollout_ref.ref.fsdp_config.param_offload=false",
            "a mapped file is where a reference rests: set it to true, or load_mode=stream",
        ),
    ),
)
