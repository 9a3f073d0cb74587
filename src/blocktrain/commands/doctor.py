"""blocktrain doctor"""

import os
import platform
import shutil
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch

from blocktrain.config import cache_folder
from blocktrain.console import PLAIN, Out
from blocktrain.errors import BadInput
from blocktrain.learning import device
from blocktrain.learning.fetch import known

GEMM_SIDE = 1024
CONNECT_TIMEOUT = 3.0


def doctor(*, url: str | None = None, output: Out = PLAIN) -> None:
    """What this machine can do: torch, device, memory, GEMM speed, reachability.

    Parameters
    ----------
    url: str
        A coordinator or any other address to try to reach.
    """
    cache = cache_folder()
    place = next(each for each in (cache, *cache.parents) if each.exists())
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "torch": str(torch.__version__),
        "device": str(device.choose()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": psutil.virtual_memory().total / 2**30,
        "memory_free_gib": psutil.virtual_memory().available / 2**30,
        "disk_free_gib": shutil.disk_usage(place).free / 2**30,
        "gemm_fp32_gflops": gemm_speed(torch.float32),
        "gemm_bf16_gflops": gemm_speed(torch.bfloat16),
        "cache": str(cache),
        "corpora_cached": [each.name for each in known() if each.cached],
    }
    if url:
        found["reaches"] = reaches(url)
    output.result(found, "This machine")


def gemm_speed(kind: torch.dtype) -> float:
    """GFLOP/s of a matrix product on the chosen device, best of a few within a second."""
    where = device.choose()
    left, right = (torch.randn(GEMM_SIDE, GEMM_SIDE, device=where).to(kind) for _ in range(2))
    best, until = float("inf"), time.perf_counter() + 1
    while time.perf_counter() < until:
        began = time.perf_counter()
        float((left @ right)[0, 0])  # reading a number waits for the device
        best = min(best, time.perf_counter() - began)
    return 2 * GEMM_SIDE**3 / best / 1e9


def reaches(url: str) -> str:
    """Whether a TCP connection to the address opens, and how fast."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    if not parts.hostname:
        raise BadInput(f"'{url}' names no host; write it as http://HOST:PORT.")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    began = time.perf_counter()
    try:
        socket.create_connection((parts.hostname, port), CONNECT_TIMEOUT).close()
    except OSError as error:
        return f"{parts.hostname}:{port}: no ({error.strerror or error})"
    return f"{parts.hostname}:{port}: yes, {1000 * (time.perf_counter() - began):.0f} ms"
