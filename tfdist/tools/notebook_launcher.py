"""Workers from a notebook: runs a function of a cell in a launch of new processes."""

from __future__ import annotations

import codecs
import pickle
import re
import reprlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfdist.cluster.resolvers import resolve
from tfdist.runtime.subprocesses import Children, exit_reason

_GRACE_S = 30.0  # seconds that the launcher gets to stop its tasks
_POLL_S = 0.1


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    workers: int = 2,
    launch_flags: Sequence[str] = (),
) -> Any:
    """Run a function in new processes on this machine, one for each worker.

    The processes are those of `tfdist launch`: their output appears in the cell, a failure of one
    ends all, and an interrupt of the kernel ends them. Each receives a copy of the function and of
    what it uses of the notebook. The function makes its strategy, data and model itself.

    Args:
        function: Function to run in each worker.
        args: Arguments of the function.
        workers: Number of workers, default 2.
        launch_flags: Further flags of `tfdist launch`, such as `["--restarts=3", "--show=chief"]`.
            Default: none.

    Returns:
        What the function returns in the chief.

    Raises:
        ModuleNotFoundError: If cloudpickle is not installed.
        ValueError: If what should be a function is none, or it or an argument cannot be pickled.
        RuntimeError: If the workers fail; the message names the root cause, and the output of the
            cell has the report.
        KeyboardInterrupt: If the kernel is interrupted; the workers have ended by then.
    """
    if not callable(function):
        raise ValueError(
            f"notebook_launcher: expected a function, received {reprlib.repr(function)} of class "
            f"{type(function).__name__}. Name the function without calling it, and give its "
            "arguments as a tuple: notebook_launcher(train, (0.1,), workers=2)"
        )
    with tempfile.TemporaryDirectory(prefix="tfdist-notebook-") as directory:
        call = Path(directory, "call.pickle")
        value = Path(directory, "value.pickle")
        pickled = _pickle((function, tuple(args)), "the function and its arguments")
        call.write_bytes(pickle.dumps((sys.path, pickled)))
        words = ["tfdist", "launch", f"--workers={workers}", *launch_flags]
        words += ["--", "-m", __name__, str(call), str(value)]
        code, output = _run(words, Path(directory, "launch.log"))
        if code:
            causes = re.findall(r"^ROOT CAUSE: (.*)", output, re.MULTILINE)
            raise RuntimeError(causes[-1] if causes else f"tfdist launch {exit_reason(code)}")
        return pickle.loads(value.read_bytes())


def _run(words: Sequence[str], log: Path) -> tuple[int, str]:
    """Run a Python module, print its output as it comes, and return its exit code and output.

    An interrupt is passed on, and becomes KeyboardInterrupt when the module has ended.
    """
    interrupted = False
    code = None
    output = ""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with Children(_GRACE_S) as children:
        process = children.start(words, log)
        with open(log, "rb") as file:
            while code is None:
                try:
                    time.sleep(_POLL_S)
                    code = process.poll()
                    text = decoder.decode(file.read())
                    output += text
                    print(text, end="", flush=True)
                except KeyboardInterrupt:
                    interrupted = True
                    process.send_signal(signal.SIGINT)
    if interrupted:
        raise KeyboardInterrupt
    return code, output


def _pickle(value: Any, what: str) -> bytes:
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "notebook_launcher: needs the package cloudpickle, which is not installed. "
            "Run: pip install 'tfdist[notebooks]'"
        ) from error
    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # of any class, as objects define how they are pickled
        raise ValueError(
            f"notebook_launcher: expected that {what} can be pickled, received "
            f"{type(error).__name__}: {error}. Make strategies, data sets and open files within "
            "the function, and return numbers, arrays or a model"
        ) from error


def main() -> None:
    """Call the function in one of the tasks: `python -m ... CALL VALUE`."""
    _, call, value = sys.argv
    sys.path[:], pickled = pickle.loads(Path(call).read_bytes())
    function, args = pickle.loads(pickled)
    # In all tasks: to pickle a model, Keras makes variables, which the chief broadcasts.
    pickled = _pickle(function(*args), "the value that the function returns")
    cluster = resolve()
    if cluster is None or cluster.is_chief:
        Path(value).write_bytes(pickled)


if __name__ == "__main__":
    main()
