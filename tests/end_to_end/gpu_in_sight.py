"""Runs a module as ``python -m`` does, on a machine that seems to have a GPU which nobody may touch.

``python -m tests.end_to_end.gpu_in_sight MODULE [argument ...]``: torch.cuda says that a device is there, as it does where a
driver answers, and everything that would start CUDA on it, read it or change it raises. So does memory that is to be pinned,
which needs CUDA too.
"""

import functools
import inspect
import runpy
import sys

import torch

SEEN = {"is_available": True, "device_count": 1, "is_initialized": False, "_device_count_nvml": 1}
"""What may be asked without starting CUDA, and what a machine with one GPU answers."""
QUEUED = {
    "_is_compiled",
    "_lazy_call",
    "manual_seed",
    "manual_seed_all",
    "seed_all",
    "_is_in_bad_fork",
    "_set_sync_debug_mode",
    "is_tf32_supported",
}
"""What only notes something for the moment when CUDA starts."""


TOUCHED = []
"""What was touched, kept because somebody may catch the error."""


def refuse(what):
    TOUCHED.append(what)
    raise RuntimeError(f"{what} on a run whose trainer.device is cpu")


def forbidden(what):
    return lambda *args, **kwargs: refuse(what)


def pinning_refused(make):
    @functools.wraps(make)
    def made(*args, pin_memory=False, **kwargs):
        if pin_memory:
            refuse(f"torch.{make.__name__}(pin_memory=True)")
        return make(*args, **kwargs)

    return made


def put_in_sight():
    """Let torch see a GPU, and forbid every use of it."""
    for name, value in vars(torch.cuda).items():
        ours = inspect.isfunction(value) and value.__module__.startswith("torch.cuda")
        if name in SEEN:
            setattr(torch.cuda, name, lambda answer=SEEN[name]: answer)
        elif ours and name not in QUEUED:
            setattr(torch.cuda, name, forbidden(f"torch.cuda.{name}"))
    for name in ("Stream", "Event", "CUDAGraph"):
        getattr(torch.cuda, name).__new__ = forbidden(f"torch.cuda.{name}")
    torch.Tensor.pin_memory, torch.Tensor.cuda = forbidden("Tensor.pin_memory"), forbidden("Tensor.cuda")
    for name in ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like", "rand", "randn", "empty_strided"):
        setattr(torch, name, pinning_refused(getattr(torch, name)))


if __name__ == "__main__":
    del sys.argv[0]
    put_in_sight()
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        if TOUCHED:
            sys.exit(f"touched: {', '.join(TOUCHED)}")
