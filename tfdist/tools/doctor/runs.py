"""Checks of a run, from the trial of its config."""

from __future__ import annotations

from tfdist.runtime.formatting import counted, duration, format_bytes
from tfdist.tools.doctor.check_results import RUN, Check, graded, of_error
from tfdist.tools.doctor.machine import Machine
from tfdist.tools.doctor.trial import STAGES, Trial

# Share of the memory that a run may use: other programs, caches and summed gradients need some too.
FULL = 0.8


def check_trial(trial: Trial, machine: Machine, workers: int, here: int) -> list[Check]:
    """Check a run from the trial of its config.

    Args:
        trial: Result of the trial.
        machine: Facts about the host of the trial, collected before the trial.
        workers: Number of processes that train together, on all hosts.
        here: Number of these processes that run on this host.
    """
    checks = []
    if trial.name:
        checks.append(
            graded(RUN, "config", f"run {trial.name!r} with the strategy {trial.strategy}")
        )
    if trial.name and trial.stage != "output":
        checks.append(graded(RUN, "output", trial.directory))
    if trial.name:
        checks.append(_batch(trial, workers))
    if trial.unprepared:
        return [
            *checks,
            graded(
                RUN,
                "data",
                f"not prepared: {trial.unprepared}; the model was not tried",
                "prepare it once before, "
                "where there is a network: a first run downloads it while all workers wait",
                warns=True,
            ),
        ]
    if trial.data:
        checks.append(graded(RUN, "data", trial.data))
    if trial.parameters:
        checks.append(graded(RUN, "model", counted(trial.parameters, "parameter")))
    if trial.error:
        assert trial.stage in (*STAGES, "import"), trial.stage
        remedy = "run it alone, with `tfdist train`, to see the whole error"
        return [*checks, of_error(RUN, trial.stage, trial.error, remedy)]
    return [*checks, _memory(trial, machine, here)]


def _batch(trial: Trial, workers: int) -> Check:
    servers = trial.strategy == "parameter_server"
    replicas = trial.replicas * (1 if servers else workers)
    whole, rest = divmod(trial.global_batch, replicas)
    of = f"global batch {trial.global_batch:,} over {counted(replicas, 'replica')}" + (
        " of each worker" if servers else ""
    )
    if not rest:
        return graded(RUN, "batch", f"{of}: {whole:,} each")
    nearest = max(whole, 1) * replicas
    return graded(
        RUN,
        "batch",
        f"{of}: some take {whole + 1:,} rows, others {whole:,}, and wait",
        f"choose a multiple of {replicas}: "
        f"--config.data.global_batch={nearest} or {(whole + 1) * replicas}",
        warns=True,
    )


def _memory(trial: Trial, machine: Machine, here: int) -> Check:
    known = trial.weights + trial.gradients + trial.optimizer
    grown = trial.grown if trial.gpu_peak is None else trial.gpu_peak
    description = (
        f"a step of {counted(trial.rows, 'row')} in {duration(trial.seconds)} took "
        f"{format_bytes(grown)}: "
        f"parameters {format_bytes(trial.weights)}, gradients {format_bytes(trial.gradients)}, "
        f"optimizer {format_bytes(trial.optimizer)}, "
        f"activations and other memory {format_bytes(max(grown - known, 0))}"
    )
    smaller = "take a smaller data.global_batch, train.precision=mixed_bfloat16, or more replicas"
    free = min((card.free for card in machine.shown), default=None)
    unknown = trial.gpu_peak is not None and free is None
    if trial.gpu_peak is not None and free is not None:
        description += f"; of {format_bytes(free)} free on a GPU"
        if trial.gpu_peak > FULL * free:
            return graded(
                RUN, "memory", description, smaller, fails=trial.gpu_peak > free, warns=True
            )
    # Replicas on the CPU share the memory of their process, and each has its own variables and
    # activations. Only one replica was measured.
    more = trial.replicas - 1 if trial.gpu_peak is None else 0
    each = trial.peak + more * trial.grown
    needed = each * here
    of = format_bytes(each) + (
        f" ({trial.replicas} replicas, of which one was measured)" if more else ""
    )
    if unknown:
        description += "; free memory of the GPUs: unknown, nvidia-smi does not report it"
    see = "make sure that each GPU has this much free"
    if machine.available is None:
        return graded(RUN, "memory", f"{description}; a process takes {of}", see, warns=unknown)
    description += (
        f"; {here} {'process' if here == 1 else 'processes'} of {of} on this host, "
        f"{format_bytes(machine.available)} available"
    )
    if unknown and needed <= FULL * machine.available:
        return graded(RUN, "memory", description, see, warns=True)
    return graded(
        RUN,
        "memory",
        description,
        f"run fewer workers here, or {smaller}",
        fails=needed > machine.available,
        warns=needed > FULL * machine.available,
    )
