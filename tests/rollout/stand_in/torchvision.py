"""Stands in for torchvision where it is not installed: vLLM imports it for a model whose text part alone is used here."""

import sys
from types import ModuleType

__version__ = "0.28.0"
__path__ = []


class _Part(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Part(name, (), {})


for _name in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _full = f"{__name__}.{_name}"
    sys.modules[_full] = _Module(_full)
    sys.modules[_full].__path__ = []
    _parent, _, _own = _full.rpartition(".")
    setattr(sys.modules[_parent], _own, sys.modules[_full])
