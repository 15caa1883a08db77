"""Fork server: starts tests' Python processes from one that has TensorFlow imported already.

Python's `multiprocessing` has the same idea. `Popen` here is `subprocess.Popen` for commands such
as `python -m MODULE`, `python -c CODE` and `python FILE.py`: its process is a fork of a process
that was started by exec, has imported TensorFlow, Keras and tfdist, and has touched no device. It
is a true child of the caller, with the caller's files, environment and directory. What a fork
cannot imitate (options of Python, variables that TensorFlow reads when it is loaded) is started by
exec as ever, and so is everything under `pytest --standby 0`, and where there is no Linux.

A `tfdist` or `pytest` command that runs in such a process forks a server of its own before it does
anything else, so that its children, too, are forks, and its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import pathlib
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping, Sequence

from tfdist.launch.import_record import changed

ROOT = pathlib.Path(__file__).resolve().parent.parent
LEAN = ROOT / "tests" / "lean"
OFF = "TFDIST_TEST_FRESH"  # a variable of processes that are to be started by exec
NO_GRAPPLER = "TFDIST_TEST_NO_GRAPPLER"  # of forks whose graphs TensorFlow does not optimize
REGISTRY = pathlib.Path(tempfile.gettempdir()) / f"tfdist-forks-{os.getuid()}"
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
START_S = 120.0
REPLY_S = 30.0
# TensorFlow reads these when it makes devices, and the paths are set again in each fork.
READ_LATE = {
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PATH",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "TF_CONFIG",
    "TF_CPP_MIN_LOG_LEVEL",
    "TF_NUM_INTEROP_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TFDS_DATA_DIR",  # set again in each fork
}
# TensorFlow and others set these when they are loaded.
SET_BY_IMPORTS = {
    "ENABLE_RUNTIME_UPTIME_TELEMETRY",
    "HDF5_PLUGIN_PATH",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "TF2_BEHAVIOR",
    "TPU_ML_PLATFORM",
    "TPU_ML_PLATFORM_VERSION",
}
MODULES = [
    "tensorflow",
    "keras",
    "numpy",
    "tensorflow_datasets",
    "tfdist.app",
    "tfdist.run.build",
    "tfdist.flags",
    "tfdist.run.input_pipeline",
    "tfdist.layers",
    "tfdist.loops",
    "tfdist.models",
    "tfdist.run.telemetry_callbacks",
    "tfdist.parallel",
    "tfdist.cluster.preflight",
    "tfdist.run.train_command",
    "tfdist.strategies.factory",
    "tfdist.sync",
    "tfdist.train.callbacks.backup_and_restore",
    "tfdist.train.callbacks.tensorboard",
    "tfdist.train.synchronous.engine",
]
_libc = ctypes.CDLL(None, use_errno=True)


class Server:
    """Talk to a fork server, as the caller.

    Args:
        connection: Connection to the server.
        environ: Environment that the server was started with.
        address: Address at which programs of shells reach it.
    """

    def __init__(self, connection: socket.socket, environ: Mapping[str, str], address: str = ""):
        self.address = address
        self._connection = connection
        self._environ = dict(environ)
        self._namespaces = _namespaces()
        self._lock = threading.Lock()

    @classmethod
    def start(cls, environ: Mapping[str, str]) -> Server:
        """Start a server by exec; its forks are children of this process."""
        for entry in REGISTRY.glob("*"):  # of processes that were killed
            if not pathlib.Path(f"/proc/{entry.name.partition('-')[0]}").exists():
                entry.unlink(missing_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {**environ, "PYTHONPATH": str(LEAN), "TF_CPP_MIN_LOG_LEVEL": "2"}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.forkserver", str(theirs.fileno())],
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what TensorFlow says when it is loaded
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        ours.settimeout(START_S)
        assert ours.recv(16) == b"ready", "the fork server did not start"
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return cls(ours, environ, f"\0tfdist-forkserver-{process.pid}")

    @classmethod
    def fork(cls) -> Server:
        """Make a server of a copy of this process, which has one thread."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = dict(os.environ)
        if os.fork() == 0:
            ours.close()
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            raise Fork(*_serve(theirs))
        theirs.close()
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return cls(ours, environ)

    def fits(self, environ: Mapping[str, str]) -> bool:
        """Return whether a fork has all that a fresh process gets from these variables."""
        paths = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
        return (
            OFF not in environ
            and environ.get("TF_CPP_MIN_LOG_LEVEL") != "0"  # the server says less
            and not set(paths) - {str(ROOT), str(LEAN)}
            and not set(changed(self._environ, environ)) - READ_LATE - SET_BY_IMPORTS
        )

    def spawn(self, job: Mapping[str, object], files: Sequence[int]) -> int:
        """Return the process id of a fork that does this job with these files as 0, 1 and 2."""
        files = list(files)
        opened = [os.open(path, os.O_RDONLY) for path in self._moved()]
        try:
            with self._lock:
                socket.send_fds(self._connection, [json.dumps(job).encode()], [*files, *opened])
                self._connection.settimeout(REPLY_S)
                return int(self._connection.recv(16))
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _moved(self) -> list[str]:
        """Return the namespaces that this process has left since the server was made."""
        return [path for path, name in _namespaces().items() if name != self._namespaces[path]]


class Fork(BaseException):
    """Unwind the stack of a process that has been forked from a server, to its job."""

    def __init__(self, job: dict, files: list[int]):
        self.job = job
        self.files = files


class Popen(subprocess.Popen):
    """Start a process as `subprocess.Popen`, by the fork server where that is equivalent."""

    server: Server | None = None
    make_server: Callable[[], Server] | None = None  # for when one is first needed

    def _execute_child(self, *given):
        args, executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell = given[:10]
        ends = given[10:16]  # of the pipes to 0, 1 and 2: for each, where it is read and written
        start_new_session = given[21]
        environ = os.environ if env is None else env
        # No argument that only exec can honour.
        plain = not (executable or preexec_fn or pass_fds or shell) and is_python(args)
        if plain and Popen.server is None and Popen.make_server is not None:
            Popen.server = Popen.make_server()
        server = Popen.server
        if not plain or server is None or not server.fits(environ):
            super()._execute_child(*given)
            return
        job = {
            "command": [str(word) for word in args],
            "environ": dict(environ),
            "cwd": os.fspath(cwd or os.getcwd()),
            "session": bool(start_new_session),
        }
        stdin, _, _, stdout, _, stderr = ends
        files = [
            own if own >= 0 else inherited
            for own, inherited in zip((stdin, stdout, stderr), (0, 1, 2), strict=True)
        ]
        self.pid = server.spawn(job, files)
        self._child_created = True
        self._close_pipe_fds(*ends)


def is_python(words: object) -> bool:
    """Return whether a command is a Python program, without options of Python."""
    return (
        isinstance(words, list | tuple)
        and len(words) > 1
        and words[0] == sys.executable
        and (words[1] in ("-m", "-c") or str(words[1]).endswith(".py"))
    )


def environ_of(pid: int | str) -> dict[str, str]:
    """Return the variables with which a process was started; none of one that is gone."""
    try:
        state, started = _state(pid)
        path = REGISTRY / f"{pid}-{started}"
        if state == "Z":
            return {}
        text = (
            path.read_bytes()
            if path.exists()
            else pathlib.Path(f"/proc/{pid}/environ").read_bytes()
        )
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in text.split(b"\0") if entry)
    return {
        name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs
    }


def main() -> None:
    """Import the packages that tests need, and serve until the caller ends."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that collections do not copy what all forks share
    # An abstract address: no file is left.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0tfdist-forkserver-{os.getpid()}")
    listener.listen(64)
    connection.send(b"ready")
    job, files = _serve(connection, listener)
    while True:
        try:
            become(job, files)
            return
        except Fork as fork:  # of the server that this process has made
            job = fork.job
            files = fork.files


def _serve(
    connection: socket.socket, listener: socket.socket | None = None
) -> tuple[dict, list[int]]:
    """Fork a process for each job; return in that process alone."""
    while True:
        ready, _, _ = select.select([connection, *filter(None, [listener])], [], [])
        if connection not in ready:
            assert listener is not None
            if job := _serve_command(listener):
                return job
            continue
        text, files, _, _ = socket.recv_fds(connection, 1 << 20, 8)
        if not text:
            os._exit(0)
        reading, writing = os.pipe()
        middle = os.fork()
        if middle == 0:
            if os.fork() == 0:
                job = json.loads(text)
                if job["session"]:
                    os.setsid()  # before the caller knows the process, whose group it may end
                os.write(writing, str(os.getpid()).encode())
                return job, files
            os._exit(0)  # the child's parent is the subreaper now: the caller
        os.waitpid(middle, 0)
        connection.send(os.read(reading, 16))
        for descriptor in (reading, writing, *files):
            os.close(descriptor)


def _serve_command(listener: socket.socket) -> tuple[dict, list[int]] | None:
    """Fork a process for a command that a shell started as `_CLIENT`; return in that process alone.

    Its parent waits for it, tells the client how it ended, and ends it when the client is gone.
    """
    client, _ = listener.accept()
    if os.fork():
        client.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        return None
    client.settimeout(REPLY_S)
    text, files, _, _ = socket.recv_fds(client, 1 << 20, 8)
    job = json.loads(text)
    fits = Server(client, os.environ).fits(job["environ"])
    child = os.fork() if fits else 0
    if fits and child == 0:
        os.setsid()
        return job, files
    if not fits:
        client.send(b"no")
        os._exit(0)
    end = os.pidfd_open(child)
    ready, _, _ = select.select([end, client], [], [])
    if end not in ready:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(OSError):
        client.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
    os._exit(0)


_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
own = os.path.basename(sys.argv[0])
words = [{python!r}, *(["-m", "tfdist"] if own == "tfdist" else []), *sys.argv[1:]]
answer = "no"
if len(words) > 1 and (words[1] in ("-m", "-c") or words[1].endswith(".py")):
    job = {{"command": words, "environ": dict(os.environ), "cwd": os.getcwd()}}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect({address!r})
        socket.send_fds(server, [json.dumps(job).encode()], [0, 1, 2])
        answer = server.recv(16).decode()
if answer == "no":
    os.execv(words[0], words)
code = int(answer or 1)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def write_programs(directory: pathlib.Path) -> pathlib.Path:
    """Write programs `tfdist` and `python` that a shell finds and whose processes are forks.

    Args:
        directory: For them and the address of the server.

    Returns:
        The directory to put first in PATH.
    """
    if Popen.server is None and Popen.make_server is not None:
        Popen.server = Popen.make_server()
    if Popen.server is not None:
        for name in ("tfdist", "python"):
            program = directory / name
            program.write_text(_CLIENT.format(python=sys.executable, address=Popen.server.address))
            program.chmod(0o755)
    return directory


def become(job: dict, files: list[int]) -> None:
    """Run a command in this process as if it had been started for it."""
    command = job["command"]
    environ = job["environ"]
    for namespace in files[3:]:
        if _libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")
    for number, descriptor in enumerate(files[:3]):
        os.dup2(descriptor, number)
    os.closerange(3, 4096)
    own = sys.path[1 + len(_paths(os.environ)) :]
    os.environ.update(environ)
    for name in os.environ.keys() - environ.keys():
        if name not in SET_BY_IMPORTS:
            del os.environ[name]
    entry = _register(environ)
    os.chdir(job["cwd"])
    if environ.get("PYTHONUNBUFFERED"):
        for name, number in (("stdout", 1), ("stderr", 2)):
            raw = io.FileIO(number, "w", closefd=False)
            setattr(
                sys,
                name,
                io.TextIOWrapper(raw, sys.stdout.encoding, "backslashreplace", write_through=True),
            )
    sys.orig_argv[:] = command
    sys.path[:] = ["", *_paths(environ), *own]
    importlib.invalidate_caches()
    tempfile.tempdir = None  # of the server's TMPDIR
    random.seed()
    if "tensorflow_datasets" in sys.modules:
        constants = importlib.import_module("tensorflow_datasets.core.constants")
        constants.DATA_DIR = constants.get_default_data_dir()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if environ.get(NO_GRAPPLER) and "tensorflow" in sys.modules:
        optimizer = sys.modules["tensorflow"].config.optimizer
        optimizer.set_experimental_options({"disable_meta_optimizer": True})
    code: object = None
    try:
        _run(command[1:])
    except SystemExit as stop:
        code = stop.code
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    _end(code, entry)


def _end(code: object, entry: pathlib.Path) -> None:
    """End this process as Python does, but for the modules: to take them down copies all memory."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    entry.unlink(missing_ok=True)
    os._exit((code or 0) & 0xFF)


def _run(words: list[str]) -> None:
    """Run what Python would run for these arguments."""
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(words[1], "<string>", "exec"), module.__dict__)
    elif words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path[0] = os.getcwd()
        if words[1] in ("pytest", "tfdist"):
            Popen.server = Server.fork()
            subprocess.Popen = Popen  # type: ignore[misc]
        sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


def _register(environ: Mapping[str, str]) -> pathlib.Path:
    """Leave the variables where `environ_of` finds them: the kernel shows those of the server."""
    REGISTRY.mkdir(exist_ok=True)
    entries = (f"{name}={value}" for name, value in environ.items())
    path = REGISTRY / f"{os.getpid()}-{_state('self')[1]}"
    path.write_bytes(b"\0".join(entry.encode(errors="surrogateescape") for entry in entries))
    return path


def _state(pid: int | str) -> tuple[str, str]:
    """Return a process's state and when it started, in ticks; raise OSError where there is none."""
    words = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return words[0], words[19]


def _namespaces() -> dict[str, str]:
    return {path: os.readlink(path) for path in ("/proc/self/ns/user", "/proc/self/ns/net")}


def _paths(environ: Mapping[str, str]) -> list[str]:
    return [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]


if __name__ == "__main__":
    main()
