"""A small program in the place of the study's arms: real tensors on a CPU, counted by the byte tracker.

An embedding and a head score random ids. The legacy update keeps all logits, the others those of the response. Names of arms make
it fail in a chosen way.
"""

import dataclasses
import hashlib
import os
import signal
import time

import torch

from recipe.rloo.memory_study.cells import BYTE_TRACKER, FULL, LEGACY, Arm, Cell, OutOfMemory, UpdateRecord
from verl_memopt.errors import ConfigError
from verl_memopt.observe.byte_tracker import ByteTracker, DeviceLimitError

VOCAB, HIDDEN, PROMPT, CUT, RESPONSE = 512, 4, 24, 8, 4
TOKEN = Arm("token_full_legacy", "token", FULL, LEGACY, 2, 2)
STRING = dataclasses.replace(TOKEN, name="string_full_legacy", expansion="string")
SAVING = dataclasses.replace(TOKEN, name="token_full_response_only", update="response_only")


def cell(arm=TOKEN, repeat=0, limit_bytes=None, **changes):
    """Return a cell of an arm, with other values for some of the arm's fields."""
    return Cell(dataclasses.replace(arm, **changes), repeat, 0, "cpu", limit_bytes)


def measure_cell(cell):
    """Return the records of one update: a forward and a backward."""
    how_to_end(cell.arm.name)
    length = PROMPT if cell.arm.prompt == FULL else CUT
    prompt = torch.randint(VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(cell.seed))[:, :length]
    answers = torch.randint(VOCAB, (cell.arm.k, RESPONSE), generator=torch.Generator().manual_seed(cell.seed + 1))
    ids = torch.cat([prompt.expand(cell.arm.k, -1), answers], 1)
    if cell.arm.name.startswith("other_ids"):
        ids[0, 0] = (ids[0, 0] + 1) % VOCAB
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(VOCAB, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB)
    with ByteTracker(limit_bytes=cell.limit_bytes) as tracker:
        tracker.mark("params", [*embedding.parameters(), *head.parameters()])
        try:
            return list(update(cell, ids, length, embedding, head, tracker))
        except DeviceLimitError as error:
            raise OutOfMemory(tracker.phase, error.asked_bytes, error.num_bytes - error.asked_bytes, error.op) from error


def update(cell, ids, length, embedding, head, tracker):
    """Compute the update, micro-batch by micro-batch, and yield its two records."""
    loss = torch.zeros(())
    figures = {}
    for rows in ids.split(cell.arm.micro_batch):
        for phase in ("forward", "backward"):
            enter, begun = tracker.total(), time.monotonic()
            tracker.enter(phase)
            if phase == "forward":
                hidden = embedding(rows)
                kept = head(hidden)[:, length - 1 : -1] if cell.arm.update == LEGACY else head(hidden[:, length - 1 : -1])
                scores = kept.log_softmax(-1).gather(2, rows[:, length:, None]).sum()
                part = -scores / cell.arm.k * (1.5 if cell.arm.name.startswith("other_loss") else 1)
            else:
                part.backward()
                loss += part.detach()
                del hidden, kept, scores, part
            figures[phase] = (enter, tracker.peaks["device"].bytes, tracker.total(), time.monotonic() - begun)
    norm = torch.stack([weight.grad.norm() for weight in (embedding.weight, head.weight)]).norm()
    for phase, (enter, peak, leave, seconds) in figures.items():
        yield UpdateRecord(
            update=0,
            phase=phase,
            rows=len(ids),
            prompt_len=length,
            response_len=RESPONSE,
            total_tokens=ids.numel(),
            dropped_tokens=len(ids) * (PROMPT - length),
            vocab=VOCAB,
            dtype="float32",
            ids_sha256=hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
            allocated_enter=enter,
            allocated_peak=peak,
            allocated_exit=leave,
            reserved_peak=None,
            loss=float(loss),
            grad_norm=float(norm),
            seconds=seconds,
            measured_by=BYTE_TRACKER,
            timeline=((0.0, enter, None), (seconds / 2, peak, None), (seconds, leave, None)),
        )


def how_to_end(name):
    """Fail as the name of an arm says."""
    if name == "raises":
        raise ValueError("something is wrong")
    if name == "refuses":
        raise ConfigError("k=3: no. Use another.")
    if name == "hangs":
        time.sleep(600)
    if name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
