"""What a machine has to run models with, found out without asking a framework."""

from __future__ import annotations

import platform
import sys
from importlib.util import find_spec
from pathlib import Path

ACCELERATOR_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd", "/dev/nvhost-gpu")
"""Devices of NVIDIA's and AMD's drivers, and of Windows in a Linux subsystem."""


def has_accelerator() -> bool:
    """Whether the machine seems to have a GPU. If in doubt, yes."""
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    if sys.platform == "win32":
        return True
    return any(Path(path).exists() for path in ACCELERATOR_FILES)


def has_gpu_memory() -> bool:
    """Whether the machine seems to have a GPU with memory of its own: a Mac's GPU shares that of the processor."""
    return sys.platform != "darwin" and has_accelerator()


def has_llamacpp() -> bool:
    """Whether llama.cpp's library is installed."""
    return find_spec("xllamacpp") is not None
