"""Choose where each arm runs: real tensors where they fit, fake tensors on a fake GPU for the rest, or a real GPU."""

from __future__ import annotations

from collections.abc import Callable

from recipe.rloo.memory_study.arms import WHOLE_RUN, Arm
from recipe.rloo.memory_study.formula import predicted_bytes

AUTO, CPU, FAKE, CUDA = "auto", "cpu", "fake", "cuda"
DEVICES = (AUTO, CPU, FAKE, CUDA)

MIB = 2**20
ROW_BYTES = {
    "no_retention": 2_800 * MIB,
    "response_only": 320 * MIB,
    "chunked": 90 * MIB,
    "shared_prompt": 20 * MIB,
    "shared_prompt_checkpointing": 20 * MIB,
    "whole_run": 20 * MIB,
}
"""Bytes of a row of one forward at the published shapes, for each update that saves. It only decides where an arm runs."""
MOST_CPU_BYTES = 20 * 2**30
"""Arms that need more than this are simulated."""
QUICK_CPU_BYTES = 2**30
"""The same for ``--quick``, so that it does not take long."""


def needed_bytes(arm: Arm, prompt: int, response: int, vocab: int) -> int:
    """Return about how many bytes an arm takes at its peak."""
    if arm.update in ROW_BYTES:
        return arm.micro_batch * ROW_BYTES[arm.update]
    return predicted_bytes(arm.micro_batch, prompt, response, vocab)


def device_chooser(asked: str, has_gpu: bool, cpu_bytes: int, shape: tuple[int, int, int]) -> Callable[[Arm], str]:
    """Return the function that names an arm's device.

    Without a GPU, ``auto`` simulates every arm with the published update, so that full and truncated prompts are measured in the
    same way, and takes real tensors for the others where they fit.

    Args:
        asked: One of DEVICES.
        has_gpu: Whether this machine has a GPU.
        cpu_bytes: Largest need of an arm that runs with real tensors on a CPU.
        shape: Tokens of a prompt, tokens of a response, size of the vocabulary.
    """

    def device(arm: Arm) -> str:
        if asked == FAKE and arm.update == WHOLE_RUN:
            # A worker samples and reads values.
            return CPU
        if asked != AUTO:
            return asked
        if has_gpu:
            return CUDA
        return CPU if arm.update in ROW_BYTES and needed_bytes(arm, *shape) <= cpu_bytes else FAKE

    return device
