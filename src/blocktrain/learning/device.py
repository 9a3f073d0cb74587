"""What this machine computes with: device, precision, threads, allocator."""

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Literal

import torch

from blocktrain.errors import BadConfig

Precision = Literal["auto", "float32", "bf16"]
wished: Precision = "auto"  # by `training_in`

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's names for mallopt


def choose(name: str = "auto") -> torch.device:
    """`auto` is CUDA, else MPS, else CPU; any torch device name is taken as it is."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise BadConfig(f"Device '{name}' does not work here; try --device cpu.") from None
    return device


def precision(device: torch.device) -> AbstractContextManager[Any]:
    """bf16 autocast where the device is good at it."""
    if trains_in(device) == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


@contextlib.contextmanager
def training_in(name: Precision) -> Iterator[None]:
    """Trains in this precision for a while, whatever the device is good at: runs that are compared
    must not differ by the machine they were made on."""
    global wished
    before, wished = wished, name
    try:
        yield
    finally:
        wished = before


def trains_in(device: torch.device) -> str:
    """The name of that precision."""
    if wished != "auto":
        return wished
    good = (
        device.type == "mps"
        or (device.type == "cuda" and torch.cuda.is_bf16_supported())
        or (device.type == "cpu" and cpu_has_bf16())
    )
    return "bf16" if good else "float32"


@cache
def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16: about twice as fast as fp32. Others are 30 times slower."""
    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch
        return False
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Computes with so many CPU threads for a while. Last bits of results depend on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Lets glibc reuse large freed tensors instead of giving each back to the kernel.

    Every fresh tensor costs page faults otherwise. No effect on other systems.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(M_MMAP_THRESHOLD, 2**30)
            libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
