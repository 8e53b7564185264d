"""On PYTHONPATH, makes our packages believe that this is macOS, and removes what Python, libc and torch lack there."""

import builtins
import ctypes
import os
import resource
import sys
from types import ModuleType

OURS = ("loraserve", "loraserve_adapters", "loraserve_kernels")

_import, _setrlimit, _cdll = builtins.__import__, resource.setrlimit, ctypes.CDLL


class SysOnMacOs(ModuleType):
    platform = "darwin"

    def __getattr__(self, name):
        return getattr(sys, name)


_sys_on_macos = SysOnMacOs("sys")


def import_(name, globals=None, locals=None, fromlist=(), level=0):
    """Other packages still see Linux: they are not under test."""
    imported_by = (globals or {}).get("__package__") or ""
    if name == "sys" and imported_by.partition(".")[0] in OURS:
        return _sys_on_macos
    return _import(name, globals, locals, fromlist, level)


def setrlimit(which, limits):
    """As if more address space were in use than any limit that an upload could have."""
    if which == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    _setrlimit(which, limits)


class CDLL(_cdll):
    def __getattr__(self, name):
        if name in ("prctl", "mallopt", "malloc_trim"):
            raise AttributeError(name)
        return super().__getattr__(name)


class WithoutOneDnn:
    """Torch as built for macOS, as soon as its C part is loaded."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch.backends" and "torch._C" in sys.modules:
            sys.modules["torch._C"]._has_mkldnn = False


del os.fdatasync, os.sched_getaffinity, os.sched_setaffinity, os.posix_fadvise, os.posix_fallocate
builtins.__import__, resource.setrlimit, ctypes.CDLL = import_, setrlimit, CDLL
sys.meta_path.insert(0, WithoutOneDnn)
