"""Subprocess runner with a time limit for modules that answer one question."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from tfdist.runtime.launch_protocol import environment

_MARK = "tfdist-doctor:"  # prefix of an answer, because frameworks write to the same output


def run(module: str, question: Any, timeout: float, **environ: str) -> tuple[dict[str, Any], str]:
    """Run `python -m MODULE` with a question.

    Args:
        module: Full name of the module. It calls `answer`, perhaps several times as it progresses.
        question: Value that the module receives as JSON in `sys.argv[1]`.
        timeout: Seconds after which the module is killed.
        **environ: Environment variables to add to those of this process.

    Returns:
        The module's last answer, {} if it gave none; and the way it ended as the rest of a
        sentence, "" if it ended well.
    """
    command = [sys.executable, "-m", module, json.dumps(question)]
    try:
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env=environment(**environ),
        ) as process:
            try:
                output, errors = process.communicate(timeout=timeout)
                ending = _ending(process.returncode, errors)
            except subprocess.TimeoutExpired:
                _kill(process)
                output, _ = process.communicate()
                ending = f"did not end within {timeout:g} s"
            except BaseException:  # Ctrl-C
                _kill(process)
                raise
    except OSError as error:
        return {}, f"could not begin: {error}"
    said = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    return json.loads(said[-1]) if said else {}, ending


def answer(facts: Any) -> None:
    """Send facts to `run`, which keeps only the last ones."""
    print(_MARK + json.dumps(facts), flush=True)


def _kill(process: subprocess.Popen) -> None:
    """Kill the process and all processes that it has started.

    The other processes would keep the pipes of the first one open.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _ending(code: int, errors: str) -> str:
    """Describe how a process ended; "" if it succeeded.

    Args:
        code: Exit code of the process, negative for a signal.
        errors: Text that it wrote to stderr.
    """
    if not code:
        return ""
    last = next(
        (line.strip() for line in reversed(errors.splitlines()) if line.strip()), "nothing was said"
    )
    if code == -signal.SIGILL:
        return (
            "ended by SIGILL: this processor lacks instructions that the build needs; "
            "install another build of TensorFlow"
        )
    if code == -signal.SIGKILL:
        return (
            "was killed (SIGKILL), by the system where memory ran out; "
            "free memory, or raise the container's limit"
        )
    if code < 0:
        return f"crashed with signal {-code}: {last[:300]}"
    return f"failed: {last[:300]}"
