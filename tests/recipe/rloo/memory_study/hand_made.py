"""Results written by hand, with round numbers, for what reads results."""

import dataclasses

from recipe.rloo.memory_study.cells import TRUNCATED, Cell, CellResult, Failure, UpdateRecord, main_arms

MIB, GIB = 2**20, 2**30


def record(arm, live, reserved=None, phase="backward", update=0, **changes):
    """Return a record of an arm with a peak of ``live`` bytes."""
    prompt = 1024 if arm.prompt == TRUNCATED else 3015
    values = UpdateRecord(
        update=update,
        phase=phase,
        rows=arm.k,
        prompt_len=prompt,
        response_len=100,
        total_tokens=arm.k * (prompt + 100),
        dropped_tokens=arm.k * (3015 - prompt),
        vocab=151_669,
        dtype="float32",
        ids_sha256=f"{arm.k:02}{arm.prompt}",
        allocated_enter=live // 4,
        allocated_peak=live,
        allocated_exit=live // 8,
        reserved_peak=reserved,
        loss=0.5,
        grad_norm=2.0,
        seconds=1.0,
        measured_by="byte tracker" if reserved is None else "simulated allocator",
    )
    return dataclasses.replace(values, **changes)


def completed(arm, live, reserved=None, repeat=0, limit=None, records=()):
    """Return the result of an arm that completed: a forward that takes half, and a backward."""
    device = "cpu" if reserved is None else "fake"
    both = (record(arm, live // 2, None if reserved is None else reserved // 2, "forward"), record(arm, live, reserved))
    return CellResult(
        Cell(arm, repeat, 0, device, limit), "completed", tuple(records) or both, None, 1.0, 2.0, MIB, {"torch": "2"}
    )


def out_of_memory(arm, limit=32 * GIB):
    """Return the result of an arm that ran out of memory in the backward."""
    failure = Failure("OutOfMemory", "no room", "backward", 14 * GIB, 24 * GIB, "[8, 3115, 151669] float32", 24 * GIB)
    return CellResult(Cell(arm, 0, 0, "fake", limit), "oom", (), failure, 1.0, 2.0, MIB, {"torch": "2"})


def published(expansion="token", prompt="full", k=2, coupled=True):
    """Return an arm of the published trainer."""
    (arm,) = (arm for arm in main_arms([k]) if (arm.expansion, arm.prompt) == (expansion, prompt))
    return dataclasses.replace(arm, name=f"{arm.name}_coupled", micro_batch=k) if coupled else arm
