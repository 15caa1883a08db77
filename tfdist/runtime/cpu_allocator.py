"""Allocator of tensors on CPUs: one that keeps their memory for the next step."""

from __future__ import annotations

import os
import sys

from tfdist.runtime.resource_limits import memory

# TensorFlow reads both when it starts the devices of a process.
KEEP_MEMORY = "TF_CPU_ALLOCATOR_USE_BFC"
LIMIT = "TF_CPU_BFC_MEM_LIMIT_IN_MB"  # in MiB; TensorFlow's default is 64 GiB


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
