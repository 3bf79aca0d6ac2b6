"""vLLM's allocator of memory that can sleep, without vLLM: its library and its Python files from a folder.

``benchmarks/gpu/cumem.sh`` takes them from a wheel; ``VERL_MEMOPT_CUMEM`` names the folder. Stand-ins replace what these
files import from the rest of vLLM: a logger, the platform, and the CUDA runtime's copy.
"""

import importlib.util
import logging
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from tests.gpu import machine

VARIABLE = "VERL_MEMOPT_CUMEM"
NAME = "vllm.device_allocator.cumem"


def folder():
    """Return the folder that holds the files, or None."""
    named = machine.environment(VARIABLE)
    return None if named is None else Path(named)


@contextmanager
def allocator_from(place):
    """Return the allocator of the files in ``place``, whose module is vLLM's to everyone in the body."""
    with patch.dict(sys.modules, _stand_ins(place)):
        # The order in which they import each other.
        _load("vllm.cumem_allocator", next(iter(sorted(place.glob("cumem_allocator*")))))
        for name in ("device_allocator", "device_allocator.alloc_conf", "device_allocator.cumem"):
            file = place / (name.replace(".", "/") + ("/__init__.py" if name == "device_allocator" else ".py"))
            if file.exists():
                _load(f"vllm.{name}", file)
        module = sys.modules[NAME]
        assert module.cumem_available, f"{place}: its library could not be loaded"
        allocator = module.CuMemAllocator.get_instance()
        try:
            yield allocator
        finally:
            if hasattr(allocator, "release_pools"):
                allocator.release_pools()
            module.CuMemAllocator.instance = None


def _load(name, file):
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(file.parent)] if file.stem == "__init__" else None
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    parent, _, last = name.rpartition(".")
    setattr(sys.modules[parent], last, module)


class _Platform:
    def is_rocm(self):
        return False

    def is_cuda_alike(self):
        return True

    def is_xpu(self):
        return False


class _Runtime:
    """The calls of the CUDA runtime that the allocator makes."""

    def cudaMemcpy(self, target, source, num_bytes):  # noqa: N802
        machine.copy_bytes(target, source, num_bytes)


def _loaded_library(name):
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next((line.split()[-1] for line in lines if line.rsplit("/", 1)[-1].startswith((f"{name}.", f"{name}-"))), None)


def _stand_ins(place):
    values = {
        "vllm": {"__path__": [str(place)]},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.utils": {"__path__": [], "is_pin_memory_available": machine.on_gpu},
        "vllm.utils.system_utils": {"find_loaded_library": _loaded_library},
        "vllm.utils.torch_utils": {"PIN_MEMORY": machine.on_gpu()},
        "vllm.utils.platform_utils": {"is_pin_memory_available": machine.on_gpu},
        "vllm.distributed": {"__path__": []},
        "vllm.distributed.device_communicators": {"__path__": []},
        "vllm.distributed.device_communicators.cuda_wrapper": {"CudaRTLibrary": _Runtime},
    }
    made = {}
    for name, attributes in values.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(attributes)
        # find_spec of what is not there must not reach a real vLLM.
        made[name].__spec__ = None
    return made
