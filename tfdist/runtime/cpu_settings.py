"""TensorFlow's settings on CPUs: memory that is kept between steps, oneDNN, and threads."""

from __future__ import annotations

import os
from pathlib import Path

from tfdist.runtime.resource_limits import cores, memory, read_text

# TensorFlow reads both when it starts the devices of a process.
KEEP_MEMORY = "TF_CPU_ALLOCATOR_USE_BFC"
LIMIT = "TF_CPU_BFC_MEM_LIMIT_IN_MB"
DEFAULT_LIMIT = 64 << 10  # TensorFlow's own, in MiB
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
# Features of an x86 CPU of which TensorFlow uses oneDNN where it has one (`DefaultOneDnnPolicy` in
# TensorFlow's util/port.cc).
_FEATURES = {"avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"}


def keep_memory() -> None:
    """Let TensorFlow keep the memory of tensors on CPUs on which it does not use oneDNN.

    With oneDNN it does so by itself. Without it the C library returns each tensor of more than 32
    MiB to the system: in each step the next one causes a page fault for every 4 KiB, which takes
    longer than to compute it. A choice of the user stays.

    Raises:
        ValueError: If the user's limit of this memory is no number, of which TensorFlow makes 0.
    """
    if uses_onednn() is False and KEEP_MEMORY not in os.environ:
        # Regions of the allocator, which are powers of two, count whole. The system bounds what
        # is used of them.
        most = 4 * ((memory()[1] or 0) >> 20)
        limit = os.environ.setdefault(LIMIT, str(max(DEFAULT_LIMIT, most)))
        if not limit.isdecimal() or not int(limit):
            raise ValueError(
                f"{LIMIT}: expected a number of MiB from 1 on, received {limit!r}. Correct or "
                "remove this environment variable."
            )
        os.environ[KEEP_MEMORY] = "1"


def operations_at_once() -> int:
    """Return how many operations TensorFlow runs at once if its configuration does not say."""
    value = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    return int(value) if value.isdigit() and int(value) else len(cores())


def uses_onednn(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Return whether TensorFlow uses oneDNN on this CPU; None if that is unknown.

    Args:
        cpuinfo: File in which Linux describes the CPUs.
    """
    if ONEDNN in os.environ:
        return os.environ[ONEDNN].strip().lower() in ("1", "true")
    lines = (line for line in read_text(cpuinfo).splitlines() if line.startswith("flags"))
    flags = set(next(lines, "").split())
    return bool(flags & _FEATURES) if flags else None
