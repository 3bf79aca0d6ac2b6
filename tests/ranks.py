"""Runs a function in several processes joined by gloo, and gives what each returned."""

import gc
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.multiprocessing as mp

from verl_memopt.distributed.device import join_process_group, leave_process_group

PRELOADED = [
    *("tests.ranks", "torch.distributed.checkpoint", "torch.distributed.fsdp", "verl_memopt.worker.worker"),
    *("verl_memopt.rollout.hf_engine", "transformers.models.qwen3.modeling_qwen3", "tests.memory.limits.test_recutting_ranks"),
]
"""Imported once, by the process that every rank is a fork of. It computes nothing, so it has no threads. The last one imports
nearly all that the functions of other test files need.
"""

multiprocessing.set_forkserver_preload(PRELOADED)


def run_ranks(function, world_size, *args, timeout=120):
    """Return [function(rank, *args) of each rank]. An exception in any rank fails the caller with that rank's traceback."""
    with TemporaryDirectory() as folder:
        context = mp.start_processes(
            _run, (world_size, folder, function, args), nprocs=world_size, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + timeout
        while not context.join(timeout=1):  # gives False whenever only some have ended
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{function.__name__} took more than {timeout} s")
        answers = [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]
    for rank, (ok, value) in enumerate(answers):
        assert ok, f"rank {rank}:\n{value}"
    return [value for _, value in answers]


def _meeting(rank, file):
    """Gives the port of rank 0, and there the socket that listens on it. So no other process can take the port in between."""
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        file.with_suffix(".new").write_text(str(port))
        file.with_suffix(".new").rename(file)
        return port, listener.detach()
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, "rank 0 has no port"
        time.sleep(0.01)
    return int(file.read_text()), None


def _run(rank, world_size, folder, function, args):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    gc.freeze()  # what was imported outlives the rank
    port, listener = _meeting(rank, Path(folder) / "port")
    join_process_group(torch.device("cpu"), rank, world_size, "127.0.0.1", port, 60, listener)
    try:
        answer = (True, function(rank, *args))
    except Exception:  # noqa: BLE001 - whatever a rank raises is told to the caller
        answer = (False, traceback.format_exc())
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(answer))
    leave_process_group()
    # Threads of torch's that are still there when the interpreter takes itself down can abort a process that has done its work.
    os._exit(0)
