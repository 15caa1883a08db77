"""A module of doctor runs in a bounded process of its own; what it says becomes a dict, and how it ends a sentence."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from tfdist.runtime.launch_protocol import environment

_MARK = "tfdist-doctor:"  # before the answer: frameworks write to the same output


def run(module: str, question: Any, timeout: float, **environ: str) -> tuple[dict[str, Any], str]:
    """Runs `python -m MODULE` with a question.

    Args:
        module: Its full name; it calls `answer`, perhaps several times as it gets on.
        question: What its `sys.argv[1]` holds, as JSON.
        timeout: Seconds after which it is killed.
        **environ: Variables of its environment, beside those of this process.

    Returns:
        Its last answer, {} where it gave none; and how it ended, as the rest of a sentence, "" where it ended well.
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
    """Tells the facts to `run`, of which the last count."""
    print(_MARK + json.dumps(facts), flush=True)


def _kill(process: subprocess.Popen) -> None:
    """Ends it and what it has started, which holds its pipes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _ending(code: int, errors: str) -> str:
    """How a process ended."""
    if not code:
        return ""
    last = next(
        (line.strip() for line in reversed(errors.splitlines()) if line.strip()), "nothing was said"
    )
    if code == -signal.SIGILL:
        return "ended by SIGILL: this processor lacks instructions that the build needs; install another build of TensorFlow"
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL), by the system where memory ran out; free memory, or raise the container's limit"
    if code < 0:
        return f"crashed with signal {-code}: {last[:300]}"
    return f"failed: {last[:300]}"
