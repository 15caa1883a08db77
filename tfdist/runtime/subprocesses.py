"""Child processes of a command: start, time limits, reasons for their end, and cleanup.

Every child runs a Python module in a session of its own, so that Ctrl-C reaches only the command,
which then ends its children and all that they have started. If the command itself is killed, even
by `kill -9`, its guardian kills them (`tfdist.runtime.guardian`), as it does for the launcher. The
children do nothing for this. They could watch a pipe or a lock file of the command instead, but no
child can do so while it imports TensorFlow, a pipe does not reach the tasks of a launcher, and a
lock file needs a disk that works.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.runtime.guardian import Guardian, kill_group
from tfdist.runtime.launch_protocol import environment, private
from tfdist.runtime.termination import deferred_signals

_ANSWER = "tfdist-answer:"  # prefix of an answer, because frameworks write to the same output


class Children(contextlib.AbstractContextManager):
    """Child processes, which end with the `with` block and with this process.

    Args:
        grace: Seconds between SIGTERM and SIGKILL, in which a launcher ends its tasks. Default: 0,
            which sends SIGKILL at once.

    Example:
        >>> with Children() as children:
        ...     child = children.start(["timeit", "-n1", "-r1", "import time; time.sleep(60)"])
        >>> exit_reason(child.returncode)
        'was ended by SIGKILL, as the system does where memory runs out'
    """

    def __init__(self, grace: float = 0.0):
        self._grace = grace
        self._alive: list[subprocess.Popen] = []
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Children:
        self._guardian = self._cleanup.enter_context(Guardian())
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """End all children, close their pipes and end the guardian. Safe to call repeatedly."""
        with self._cleanup:
            self.end()

    def start(
        self,
        words: Sequence[str],
        log: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.Popen:
        """Start `python -m WORDS`.

        Args:
            words: Name of the module, and its arguments.
            log: File for the output and the errors. Default: a pipe for each.
            stdin: Standard input, as in `subprocess.Popen`. Default: none.
            environ: Environment variables to add to those of this process. Default: none.

        Returns:
            The process, whose pipes have text.

        Raises:
            OSError: If the process cannot be started, or the log cannot be written.
        """
        with contextlib.ExitStack() as stack:
            file = (
                subprocess.PIPE
                if log is None
                else stack.enter_context(open(log, "wb", opener=private))
            )
            stack.enter_context(deferred_signals())
            process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=stdin,
                stdout=file,
                stderr=subprocess.PIPE if log is None else subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
                env=environment(**(environ or {})),
            )
            self._alive.append(process)
            self._guardian.add(process.pid)
            for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
                self._cleanup.callback(_close, pipe)
        return process

    def end(self) -> None:
        """End all children and the processes that they have started. Safe to call repeatedly."""
        try:
            if self._grace:
                running = [process for process in self._alive if process.poll() is None]
                for process in running:
                    process.terminate()
                deadline = time.monotonic() + self._grace
                for process in running:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(max(0.0, deadline - time.monotonic()))
        finally:  # a second signal may interrupt the wait
            for process in self._alive:
                kill_group(process.pid)
            while self._alive:
                self._alive[-1].wait()
                self._guardian.remove(self._alive.pop().pid)


def ask(module: str, question: Any, timeout: float, **environ: str) -> tuple[dict[str, Any], str]:
    """Run a module that answers a question.

    Args:
        module: Full name of the module. It calls `answer`, perhaps several times as it progresses.
        question: Value that the module receives as JSON in `sys.argv[1]`.
        timeout: Seconds after which the module is killed.
        **environ: Environment variables to add to those of this process.

    Returns:
        The module's last answer, {} if it gave none; and the way it ended as the rest of a
        sentence, "" if it ended well.
    """
    try:
        with Children() as children:
            process = children.start([module, json.dumps(question)], environ=environ)
            try:
                output, errors = process.communicate(timeout=timeout)
                problem = _problem(process.returncode, errors)
            except subprocess.TimeoutExpired:
                children.end()
                output, _ = process.communicate()
                problem = f"did not end within {timeout:g} s"
    except OSError as error:
        return {}, f"could not begin: {error}"
    answers = [
        line.removeprefix(_ANSWER) for line in output.splitlines() if line.startswith(_ANSWER)
    ]
    return json.loads(answers[-1]) if answers else {}, problem


def answer(facts: Any) -> None:
    """Send facts to `ask`, which keeps only the last ones."""
    print(_ANSWER + json.dumps(facts), flush=True)


def exit_reason(code: int, where: str = "") -> str:
    """Return how a process ended, as the rest of a sentence.

    Args:
        code: Exit code of the process, negative for a signal.
        where: Words on how far it had come. Default: "".

    Example:
        >>> exit_reason(3), exit_reason(-11, ", after step 5")
        ('ended with code 3', 'was ended by SIGSEGV, after step 5')
    """
    if code >= 0:
        return f"ended with code {code}{where}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    hint = ", as the system does where memory runs out" if code == -signal.SIGKILL else ""
    return f"was ended by {name}{where}{hint}"


def _problem(code: int, errors: str) -> str:
    """Return how a module ended, with what it wrote last to stderr; "" if it succeeded."""
    if not code:
        return ""
    if code == -signal.SIGILL:
        return (
            f"{exit_reason(code)}: this processor lacks instructions that the build needs; "
            "install another build of TensorFlow"
        )
    if code == -signal.SIGKILL:
        return f"{exit_reason(code)}; free memory, or raise the container's limit"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = lines[-1][:300] if lines else "nothing was said"
    return f"{exit_reason(code) if code < 0 else 'failed'}: {last}"


def _close(pipe: Any) -> None:
    with contextlib.suppress(OSError):
        pipe.close()
