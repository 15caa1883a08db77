"""Run jobs in processes that carry out orders.

Their output goes to log files, and none outlives this process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn


class ProcessFailed(RuntimeError):
    """Raised when a process raised, died or did not answer in time.

    The message ends with the output of all processes in its group.
    """


class Processes:
    """Run processes that take orders together, and end together.

    Args:
        name: Name of the processes, for messages.
        logs: Directory for their output.
        timeout: Seconds that any answer may take.
    """

    def __init__(self, name: str, logs: pathlib.Path, timeout: float):
        self.name = name
        self._logs_directory = logs
        self._timeout = timeout
        self._processes: dict = {}  # connection -> process
        self._logs: dict = {}  # connection -> file of its output

    def start(
        self, name: str, target: Callable, job: Any, children: bool = False
    ) -> multiprocessing.connection.Connection:
        """Start a process.

        Args:
            name: Name of its log file.
            target: Function that is called with the job there. It returns its first answer, and a
                function that carries out an order: that takes the order's words as arguments and
                returns the answer. A server need never return.
            job: Argument of the function.
            children: True if it may start processes of its own, which it must end itself.

        Returns:
            Connection through which it takes orders.
        """
        context = multiprocessing.get_context("spawn")
        screen, terminal = os.openpty()  # progress bars are drawn as on a person's terminal
        log = self._logs_directory / f"{name}.log"
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_run,
            args=(target, job, os.ttyname(terminal), theirs),
            name=name,
            daemon=not children,
        )
        process.start()
        theirs.close()
        threading.Thread(target=_copy, args=(screen, terminal, log), daemon=True).start()
        self._processes[ours] = process
        self._logs[ours] = log
        return ours

    @property
    def pids(self) -> dict[str, int]:
        """Return process ids by name."""
        return {process.name: process.pid for process in self._processes.values()}

    def order(self, connections: list, *words: Any) -> None:
        """Send an order to processes."""
        for connection in connections:
            with contextlib.suppress(
                BrokenPipeError
            ):  # a dead process has left its reason in its answer
                connection.send(words)

    def answers(self, connections: list, task: str) -> list:
        """Return the answers of these processes to their last order.

        Raises:
            ProcessFailed: `task` says what they were asked.
        """
        deadline = time.monotonic() + self._timeout
        waiting = list(connections)
        answers = []
        while waiting:
            ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            for connection in ready:
                waiting.remove(connection)
                try:
                    answers.append(connection.recv())
                except (EOFError, ConnectionResetError):
                    answers.append(f"process {self._processes[connection].pid} died")
                if isinstance(answers[-1], str):
                    raise self._failed(task, answers[-1])
            if not ready:
                raise self._failed(
                    task, f"no answer in {self._timeout:g} s; allow more with --timeout"
                )
        return answers

    def end(self) -> None:
        """Kill the processes."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join(10)

    def _failed(self, task: str, reason: str) -> ProcessFailed:
        outputs = [
            f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}"
            for log in self._logs.values()
            if log.exists()
        ]
        return ProcessFailed("\n".join([f"{self.name}, asked to {task}: {reason}", *outputs]))


def run_python(words: Sequence[str], timeout: float, what: str) -> str:
    """Return what a Python process of its own prints to its standard output.

    Args:
        words: Arguments of Python.
        timeout: Seconds that it may take.
        what: Description of the process, for messages.

    Raises:
        ProcessFailed: If it fails or takes too long; the message has the end of its errors.
    """
    try:
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise ProcessFailed(f"{what} took more than {timeout:g} s; --timeout allows more") from None
    if done.returncode:
        raise ProcessFailed(f"{what} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def run_main(main: Callable[[list[str]], int]) -> NoReturn:
    """Exit with the code of a benchmark's `main`, or with 2 and a message if a process failed."""
    try:
        sys.exit(main(sys.argv[1:]))
    except ProcessFailed as failure:
        print(f"{pathlib.Path(sys.argv[0]).stem}: {failure}", file=sys.stderr)
        sys.exit(2)


def _run(
    target: Callable, job: Any, terminal: str, connection: multiprocessing.connection.Connection
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    screen = os.open(terminal, os.O_WRONLY | os.O_NOCTTY)
    for stream in (1, 2):
        os.dup2(screen, stream)
    try:
        answer, carry_out = target(job)
        while True:
            connection.send(answer)
            answer = carry_out(*connection.recv())
    except Exception:
        connection.send(traceback.format_exc())


def _end_with_parent() -> None:
    """End this process with its parent, even while it waits in a collective."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _copy(screen: int, terminal: int, log: pathlib.Path) -> None:
    """Copy the output of a process to a file.

    Our end of the terminal stays open, so that reading never fails.
    """
    with log.open("wb", buffering=0) as file:
        while chunk := os.read(screen, 65536):
            file.write(chunk)
