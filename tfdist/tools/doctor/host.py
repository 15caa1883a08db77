"""Checks of a host: software versions, clock, memory, cores, limits and GPUs."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator

from tfdist.runtime.formatting import counted, format_bytes
from tfdist.tools.doctor.check_results import HOST, Check, graded, of_error
from tfdist.tools.doctor.frameworks import Frameworks
from tfdist.tools.doctor.machine import Machine

OLDEST_PYTHON = (3, 10)
NEWEST_PYTHON = (3, 13)
# Oldest versions that setup.py accepts, and newest versions that the tests have run on.
OLDEST = {"tensorflow": (2, 19), "keras": (3, 10)}
NEWEST = {"tensorflow": (2, 21), "keras": (3, 15)}
PROCESS = 600 << 20  # bytes of a process with TensorFlow and a small model, measured
SHM = 64 << 20
SHM_NCCL = 1 << 30
FEWEST_FILES = 256
FEW_FILES = 1024
DAY_S = 86400.0
LAST_S = 4102444800.0  # the year 2100, as seconds since 1970


def check_machine(machine: Machine, workers: int) -> list[Check]:
    """Check what is known about a host without TensorFlow.

    Args:
        machine: Facts about the host.
        workers: Number of tasks that will run on the host.
    """
    checks = [
        _python(machine),
        *_versions(machine),
        _clock(machine),
        _memory(machine, workers),
        _cores(machine, workers),
    ]
    return [*checks, _threads(machine, workers), _shm(machine), _files(machine)]


def check_frameworks(machine: Machine, frameworks: Frameworks) -> list[Check]:
    """Check TensorFlow and Keras, as a subprocess found them.

    Args:
        machine: Facts about the host.
        frameworks: Report of the subprocess.
    """
    if frameworks.error:
        return [
            of_error(
                HOST,
                "import",
                f"import of TensorFlow and Keras {frameworks.error}",
                "run: python -c 'import tensorflow, keras'",
            )
        ]
    backend = frameworks.backend
    description = (
        f"TensorFlow {frameworks.tensorflow} and Keras {frameworks.keras} "
        f"in {frameworks.seconds:.1f} s"
    )
    checks = [
        graded(HOST, "import", description),
        graded(
            HOST,
            "Keras backend",
            backend,
            'unset KERAS_BACKEND, and set "backend" to "tensorflow" in ~/.keras/keras.json',
            fails=backend != "tensorflow",
        ),
        _cuda(frameworks),
    ]
    return [*checks, _gpus(machine, frameworks)]


def _python(machine: Machine) -> Check:
    short = machine.python[:2]
    span = f"{_dots(OLDEST_PYTHON)} to {_dots(NEWEST_PYTHON)}"
    supported = OLDEST_PYTHON <= short <= NEWEST_PYTHON
    return graded(
        HOST,
        "Python",
        _dots(machine.python) + ("" if supported else f"; supported: {span}"),
        f"make an environment with Python {span}",
        fails=short < OLDEST_PYTHON,
        warns=short > NEWEST_PYTHON,
    )


def _versions(machine: Machine) -> Iterator[Check]:
    for package, title in (("tensorflow", "TensorFlow"), ("keras", "Keras")):
        text = machine.versions.get(package)
        oldest = OLDEST[package]
        newest = NEWEST[package]
        span = f"{_dots(oldest)} to {_dots(newest)}"
        if text is None:
            yield graded(
                HOST,
                title,
                "not installed",
                f"pip install '{package}>={_dots(oldest)}'",
                fails=True,
            )
            continue
        installed_version = tuple(int(number) for number in re.findall(r"\d+", text)[:2])
        too_new = installed_version > newest
        yield graded(
            HOST,
            title,
            text if oldest <= installed_version <= newest else f"{text}; supported: {span}",
            f"tested up to {_dots(newest)}: pip install '{package}=={_dots(newest)}.*'"
            if too_new
            else f"pip install '{package}>={_dots(oldest)}'",
            fails=installed_version < oldest,
            warns=too_new,
        )


def _clock(machine: Machine) -> Check:
    date = datetime.datetime.fromtimestamp(machine.now, datetime.timezone.utc).strftime(
        "%Y-%m-%d %H:%M:%S UTC"
    )
    early = machine.now < machine.installed - DAY_S
    description = f"{date}, which is before tfdist was installed" if early else date
    return graded(
        HOST,
        "clock",
        description,
        "set it: timedatectl set-ntp true",
        fails=early or machine.now > LAST_S,
    )


def _memory(machine: Machine, workers: int) -> Check:
    if machine.available is None:
        return graded(
            HOST,
            "memory",
            "unknown: /proc/meminfo has no value",
            "make sure that each worker has 1 GB",
            warns=True,
        )
    needed = workers * PROCESS
    description = f"{format_bytes(machine.available)} available"
    if machine.capacity is not None:
        description += f" of {format_bytes(machine.capacity)}"
    short = machine.available < 2 * needed
    if short:
        description += (
            f"; {counted(workers, 'worker')} of TensorFlow alone "
            f"{'take' if workers > 1 else 'takes'} some {format_bytes(needed)}"
        )
    return graded(
        HOST,
        "memory",
        description,
        "end other programs, run fewer workers here, or raise the container's limit",
        fails=machine.available < needed,
        warns=short,
    )


def _cores(machine: Machine, workers: int) -> Check:
    description = (
        f"{machine.cores} of {counted(machine.machine_cores, 'core')}"
        if machine.cores < machine.machine_cores
        else counted(machine.cores, "core")
    )
    if machine.quota is not None and machine.quota < machine.cores:
        description += f", but time of {machine.quota:g} by the container's limit"
        limit = max(1, int(machine.quota))
        too_many = workers > limit
        threads = f"tfdist launch --threads {max(1, limit // workers)}"
        fewer = "fewer workers" if too_many else threads
        return graded(
            HOST,
            "cores",
            description + (f" for {counted(workers, 'worker')}" if too_many else ""),
            f"set {fewer}, or raise the limit: TensorFlow starts a thread for each core that it "
            "sees",
            warns=True,
        )
    return graded(
        HOST,
        "cores",
        f"{description} for {counted(workers, 'worker')}",
        "run fewer workers here: they compete for the cores",
        warns=workers > machine.cores,
    )


def _threads(machine: Machine, workers: int) -> Check:
    wrong = {
        name: text
        for name, text in machine.threads.items()
        if not text.isdecimal() or int(text) < 1
    }
    if wrong:
        name, text = next(iter(wrong.items()))
        return graded(
            HOST, "threads", f"{name}={text!r} is no number of threads", f"unset {name}", fails=True
        )
    if not machine.threads:
        share = max(1, machine.cores // workers)
        return graded(
            HOST,
            "threads",
            f"no variable is set; tfdist launch gives each task {counted(share, 'thread')}",
        )
    description = ", ".join(f"{name}={text}" for name, text in machine.threads.items())
    most = max(map(int, machine.threads.values()))
    over = most * workers > machine.cores
    share = max(1, machine.cores // workers)
    return graded(
        HOST,
        "threads",
        description
        + (f": {workers} x {most} threads on {counted(machine.cores, 'core')}" if over else ""),
        f"unset them, or set them to {share}: {' '.join(machine.threads)}",
        warns=over,
    )


def _shm(machine: Machine) -> Check:
    remedy = "docker run --shm-size=2g, or mount -o remount,size=2G /dev/shm"
    if machine.shm is None:
        return graded(HOST, "/dev/shm", "there is none", f"give it: {remedy}", warns=True)
    free, total = machine.shm
    needed = SHM_NCCL if machine.gpus > 1 else SHM
    few = free < needed
    return graded(
        HOST,
        "/dev/shm",
        f"{format_bytes(free)} free of {format_bytes(total)}"
        + (
            f"; {'NCCL' if machine.gpus > 1 else 'TensorFlow'} may need {format_bytes(needed)}"
            if few
            else ""
        ),
        f"give it more: {remedy}",
        warns=few,
    )


def _files(machine: Machine) -> Check:
    soft, hard = machine.files
    if soft < 0:
        return graded(HOST, "open files", "no limit")
    raised = (
        "ulimit -n 65536"
        if hard < 0 or hard >= 65536
        else f"ulimit -n {hard}"
        if hard > soft
        else "raise nofile in /etc/security/limits.conf"
    )
    return graded(
        HOST,
        "open files",
        f"at most {soft:,} in a process",
        f"{raised}, in the shell that starts training",
        fails=soft < FEWEST_FILES,
        warns=soft < FEW_FILES,
    )


def _cuda(frameworks: Frameworks) -> Check:
    if not frameworks.cuda:
        return graded(HOST, "CUDA", "TensorFlow is built without CUDA")
    return graded(
        HOST,
        "CUDA",
        f"TensorFlow is built for CUDA {frameworks.cuda_version}, cuDNN {frameworks.cudnn_version}",
    )


def _gpus(machine: Machine, frameworks: Frameworks) -> Check:
    visible_gpus = len(frameworks.gpus)
    alone = "to train on the CPU, set CUDA_VISIBLE_DEVICES=-1"
    hidden = machine.visible is not None and not visible_any(machine.visible)
    if hidden:
        return graded(
            HOST,
            "GPUs",
            f"hidden by CUDA_VISIBLE_DEVICES={machine.visible!r}; TensorFlow uses the CPU",
        )
    if visible_gpus < machine.gpus:
        description = f"{machine.gpus} with a driver, but TensorFlow sees {visible_gpus}"
        if not frameworks.cuda:
            return graded(
                HOST,
                "GPUs",
                f"{description}: it is built without CUDA",
                f"pip install 'tensorflow[and-cuda]'; {alone}",
                fails=True,
            )
        return graded(
            HOST,
            "GPUs",
            f"{description}: the CUDA libraries are missing, or of another version",
            "pip install 'tensorflow[and-cuda]', and see what `python -c "
            "'import tensorflow as tf; tf.config.list_physical_devices()'` "
            f"warns of; {alone}",
            fails=True,
        )
    if machine.visible is not None and visible_gpus < len(machine.visible.split(",")):
        return graded(
            HOST,
            "GPUs",
            f"CUDA_VISIBLE_DEVICES={machine.visible!r} names "
            f"{len(machine.visible.split(','))}, TensorFlow sees {visible_gpus}",
            f"name GPUs of this host; {alone}",
            fails=True,
        )
    if machine.cards and not machine.driven and not visible_gpus:
        return graded(
            HOST,
            "GPUs",
            f"{counted(machine.cards, 'NVIDIA card')} on the bus, but no driver is loaded",
            "install the driver, or give the container the devices "
            f"(docker run --gpus all); {alone}",
            fails=True,
        )
    if not visible_gpus:
        return graded(HOST, "GPUs", "none; TensorFlow uses the CPU")
    cards = machine.shown
    if not cards:
        return graded(
            HOST,
            "GPUs",
            f"{visible_gpus}: {', '.join(frameworks.gpus)}; "
            "free memory: unknown, nvidia-smi does not report it",
            "see why `nvidia-smi` does not run here, or make sure that no other program uses "
            "these GPUs",
            warns=True,
        )
    sizes = ", ".join(
        f"{card.name} with {format_bytes(card.free)} free of {format_bytes(card.total)}"
        for card in cards
    )
    busy = [card for card in cards if card.free < card.total / 2]
    return graded(
        HOST,
        "GPUs",
        f"{visible_gpus}: {sizes}",
        "see who uses the memory: nvidia-smi",
        warns=bool(busy),
    )


def visible_any(visible: str) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES shows any GPU.

    Args:
        visible: Value of the variable.

    Example:
        >>> visible_any("-1"), visible_any(""), visible_any("0,1")
        (False, False, True)
    """
    return visible.split(",")[0].strip() not in ("", "-1", "none", "void")


def _dots(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
