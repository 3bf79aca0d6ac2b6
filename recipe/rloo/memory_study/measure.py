"""Measures an arm: the bytes of each phase at the study's shapes, and loss and gradient norm of the same program in fp32.

A fake GPU has no values, and the baseline does not fit on a CPU. So every arm runs a second time, with real fp32 tensors, the
same vocabulary, the same number of rows, and a short prompt. Loss and gradient norm of every record come from that run. In it all
programs sum over the whole vocabulary at once, so that they round alike.
"""

from __future__ import annotations

import dataclasses
import gc
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipe.rloo.memory_study.arms import LEGACY, Arm
from recipe.rloo.memory_study.fake_device import fake_device
from recipe.rloo.memory_study.fake_guard import call_in_fake_process
from recipe.rloo.memory_study.legacy import LegacyTrainer, Options, Values, build_model
from recipe.rloo.memory_study.meters import DeviceMeter, FakeMeter, Meter, Phase, TrackerMeter, merged
from recipe.rloo.memory_study.records import OutOfMemory, UpdateRecord
from recipe.rloo.memory_study.shapes import Shapes, StudyBatch, make_batch, make_model, shortened
from recipe.rloo.memory_study.timeline import TimelineTracker
from recipe.rloo.memory_study.updates import OWN_UPDATES, RESPONSE_ONLY, MendedTrainer, OwnTrainer, own_policy, own_settings
from verl_memopt.distributed.device import cap_device_memory, local_device
from verl_memopt.errors import ConfigError

CPU, FAKE, CUDA = "cpu", "fake", "cuda"
THIS = "recipe.rloo.memory_study.measure"
STEADY_EPOCHS = 2
"""Epochs of the updates that save. The first creates the optimizer state; the second and all later ones hold the same bytes."""


@dataclasses.dataclass(frozen=True)
class Ran:
    """What one run of a program gave.

    Attributes:
        phases: One for each update and name.
        source: One of the values of ``UpdateRecord.measured_by``.
        values: Loss and gradient norm of the first epoch, where the tensors had values.
    """

    phases: list[Phase]
    source: str
    values: Values


def measure_arm(arm: Arm, shapes: Shapes, device: str, limit_bytes: int | None, seed: int) -> list[UpdateRecord]:
    """Return a record for each phase of each update of an arm. An update is one optimizer step; an arm takes ``epochs`` of them.

    Args:
        arm: The program.
        shapes: The sizes.
        device: ``cpu`` = real tensors, counted by the byte tracker. ``fake`` = a fake GPU with a simulated allocator; this
            project's own updates run on the CPU there too, and their records say so. ``cuda`` = a GPU.
        limit_bytes: Largest number of bytes of the device. None = no limit.
        seed: Seed of model, document, answers and rewards.

    Raises:
        OutOfMemory: The limit was passed.
        ConfigError: ``device`` is unknown.
    """
    if device not in (CPU, FAKE, CUDA):
        raise ConfigError(f"device={device}: unknown. Use {CPU}, {FAKE} or {CUDA}.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch), shapes, seed)
        steps = shapes if arm.update == LEGACY else dataclasses.replace(shapes, epochs=min(shapes.epochs, STEADY_EPOCHS))
        ran = run_arm(arm, steps, device, limit_bytes, seed, folder, Options(arm.micro_batch))
        real = CUDA if device == CUDA else CPU
        short = dataclasses.replace(shortened(shapes), epochs=1)
        # What sums as the published program does is up to 5e-6 from its own gradient in float64, so it has its values from there.
        dtype = torch.float32 if arm.update in OWN_UPDATES else torch.float64
        options = Options(arm.micro_batch, autocast=False, for_values=True, dtype=dtype)
        values = run_arm(arm, short, real, None, seed, folder, options).values
        batch = _batch(arm, shapes, folder, seed)
        prompt = short.truncated if batch.dropped else short.prompt
        where = f"{str(dtype).removeprefix('torch.')}, real tensors, prompt of {prompt}, answers of {short.response}"
        return [_record(phase, ran.source, arm, batch, shapes, values, where) for phase in ran.phases]


def _record(
    phase: Phase, source: str, arm: Arm, batch: StudyBatch, shapes: Shapes, values: Values, values_from: str
) -> UpdateRecord:
    return UpdateRecord(
        update=phase.update,
        phase=phase.name,
        rows=batch.rows,
        prompt_len=batch.prompt_len,
        response_len=batch.response_len,
        total_tokens=batch.total_tokens,
        dropped_tokens=batch.dropped,
        vocab=shapes.model.vocab_size,
        dtype="float32" if arm.update in OWN_UPDATES else "float32, autocast bfloat16",
        ids_sha256=batch.ids_sha256(),
        allocated_enter=phase.enter,
        allocated_peak=phase.peak,
        allocated_exit=phase.exit,
        reserved_peak=phase.reserved_peak,
        loss=values.loss if phase.update == 0 else None,
        grad_norm=values.grad_norm if phase.update == 0 else None,
        seconds=phase.seconds,
        measured_by=source,
        values_from=values_from,
        timeline=phase.timeline,
    )


def run_arm(
    arm: Arm, shapes: Shapes, device: str, limit_bytes: int | None, seed: int, folder: Path, options: Options, rounds: int = 1
) -> Ran:
    """Run an arm once and return its phases and values.

    Args:
        arm: The program.
        shapes: The sizes.
        device: As :func:`measure_arm`.
        limit_bytes: Largest number of bytes of the device. None = no limit.
        seed: Seed of the batch.
        folder: Folder of the model.
        options: Micro-batch, precision, and whether loss and gradient are read.
        rounds: Rounds of generation of the published update, as :class:`LegacyTrainer` takes them.

    Raises:
        OutOfMemory: The limit was passed.
    """
    batch = _batch(arm, shapes, folder, seed)
    if device == FAKE and arm.update not in OWN_UPDATES:
        answer = call_in_fake_process(f"{THIS}:run_on_fake_gpu", arm, batch, shapes, limit_bytes, folder, options, rounds)
        if isinstance(answer, dict):
            raise OutOfMemory(**answer)
        return answer
    if device == CUDA:
        gpu = local_device("cuda", 0)
        cap_device_memory(gpu, limit_bytes)
        return _run(arm, batch, shapes, folder, options, DeviceMeter(gpu), rounds)
    with TimelineTracker(limit_bytes=limit_bytes, default_kind="params") as tracker:
        return _run(arm, batch, shapes, folder, options, TrackerMeter(tracker), rounds)


def run_on_fake_gpu(
    arm: Arm, batch: StudyBatch, shapes: Shapes, limit_bytes: int | None, folder: Path, options: Options, rounds: int
) -> Ran | dict[str, Any]:
    """Run an arm in a process that has the guard. Out of memory is returned as its figures, because an error is not pickled."""
    try:
        with fake_device(limit_bytes) as allocator:
            return _run(arm, batch, shapes, folder, options, FakeMeter(allocator), rounds)
    except OutOfMemory as error:
        names = ("phase", "requested_bytes", "held_bytes", "shape", "peak_bytes")
        return {name: getattr(error, name) for name in names}


def _run(arm: Arm, batch: StudyBatch, shapes: Shapes, folder: Path, options: Options, meter: Meter, rounds: int) -> Ran:
    with ExitStack() as stack:
        with meter.phase("init"):
            train = _program(arm, shapes, folder, options, meter, stack, rounds)
        gc.collect()
        values = train(batch)
        phases = [phase for phase in merged(meter.phases) if phase.name != "init"]
    return Ran(phases, meter.source, values)


def _program(
    arm: Arm, shapes: Shapes, folder: Path, options: Options, meter: Meter, stack: ExitStack, rounds: int
) -> Callable[[StudyBatch], Values]:
    """Build the models of an arm on the meter's device and return its training step."""
    if arm.update in OWN_UPDATES:
        settings = own_settings(arm, shapes, folder)
        policy = stack.enter_context(own_policy(settings, shapes.epochs, meter.device))
        return OwnTrainer(policy, settings, shapes, arm, options, meter).train
    fake = isinstance(meter, FakeMeter)
    models: list[nn.Module] = [build_model(folder, meter.device, fake, options.dtype) for _ in range(2)]
    for model in models:
        meter.count_model(model)
    if arm.update == LEGACY:
        return LegacyTrainer(models[0], models[1], shapes, options, meter, rounds).train
    return MendedTrainer(models[0], models[1], shapes, options, meter, arm.update == RESPONSE_ONLY).train


def _batch(arm: Arm, shapes: Shapes, folder: Path, seed: int) -> StudyBatch:
    from transformers import AutoTokenizer

    return make_batch(arm, shapes, AutoTokenizer.from_pretrained(folder), seed)
