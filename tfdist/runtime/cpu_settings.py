"""TensorFlow's settings on CPUs: memory that is kept for the next step, and oneDNN."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tfdist.runtime.resource_limits import memory, read_text

# TensorFlow reads both when it starts the devices of a process.
KEEP_MEMORY = "TF_CPU_ALLOCATOR_USE_BFC"
LIMIT = "TF_CPU_BFC_MEM_LIMIT_IN_MB"  # in MiB; TensorFlow's default is 64 GiB
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
# Features of an x86 CPU of which TensorFlow uses oneDNN where it has one (`DefaultOneDnnPolicy` in
# TensorFlow's util/port.cc).
_FEATURES = {"avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"}


def keep_memory() -> None:
    """Let TensorFlow keep the memory of tensors on this machine's CPUs, unless the user chose.

    TensorFlow does so where it uses oneDNN, which it does on some CPUs only. Elsewhere the C
    library returns each tensor of more than 32 MiB to the system: in each step the next one causes
    a page fault for every 4 KiB, which takes longer than to compute it.
    """
    _, capacity = memory()
    if sys.platform == "linux" and capacity is not None and KEEP_MEMORY not in os.environ:
        os.environ[KEEP_MEMORY] = "1"
        os.environ.setdefault(LIMIT, str(capacity >> 20))


def leaves_out_onednn(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether TensorFlow does not use oneDNN on this CPU by default.

    The answer is False if the user has chosen, or if the features of the CPU are unknown.

    Args:
        cpuinfo: File in which Linux describes the CPUs.
    """
    lines = (line for line in read_text(cpuinfo).splitlines() if line.startswith("flags"))
    flags = set(next(lines, "").split())
    return ONEDNN not in os.environ and bool(flags) and not flags & _FEATURES
