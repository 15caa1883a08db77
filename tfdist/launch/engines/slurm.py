"""Slurm engine: runs agents by `srun`, in a job's allocation or in one that it makes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.launch.engines import slurm_commands, slurm_job, slurm_lease
from tfdist.launch.engines.agent_connection import ProcessTransport
from tfdist.launch.engines.fleet import Interrupted, NoRoom, Slot
from tfdist.launch.engines.slurm_job import Job
from tfdist.runtime.launch_protocol import THREAD_VARIABLES

PROBE_S = 10.0  # for a step that does nothing
ASK_S = 5.0  # interval at which Slurm is asked about a pending job
GIVE_BACK_S = 30.0
# Options of srun that a job's script has in its environment. Each agent is a step of one task.
STEP_VARIABLES = re.compile(
    r"SLURM_(CPU_BIND.*|MEM_BIND.*|CPUS_PER_TASK|CPUS_PER_GPU|DISTRIBUTION|DIST_PLANESIZE|EXCLUSIVE"
    r"|EXACT|OVERLAP|GPUS.*|GRES.*|HINT|HOSTFILE|ARBITRARY_NODELIST|JOB_NODELIST|NODELIST|NNODES"
    r"|JOB_NUM_NODES|MEM_PER_.*|NPROCS|NTASKS.*|NTASKS_PER_.*|TASKS_PER_NODE|OPEN_MODE|LABELIO"
    r"|UNBUFFEREDIO|STDINMODE|STDOUTMODE|STDERRMODE|KILL_BAD_EXIT|WAIT|RESV_PORTS|THREADS_PER_CORE"
    r"|STEP_.*|THREADS|WORKING_DIR|TRES_.*|SPREAD_JOB|USE_MIN_NODES|EXPORT_ENV|MPI_TYPE)"
    r"|SRUN_CPUS_PER_TASK"
)


class Slurm:
    """The nodes of a Slurm job; see `fleet.Engine`.

    Args:
        job: Number of the job whose allocation to use; None to make an allocation.
        request: Options of `salloc` for a new allocation.
        python: Python of the agents; None for the path of this one.
        gpus_per_task: GPUs of each task, by component of a heterogeneous job, whose last number
            holds for all further components; 0 to let each task see all GPUs that the job has on
            its node.
        queue_timeout: Seconds to wait for a new allocation.
        show_line: Function that shows a line to the user.
        interrupted: Function that returns whether the user has ended the launch.
    """

    def __init__(
        self,
        job: str | None,
        request: Sequence[str] = (),
        *,
        python: str | None = None,
        gpus_per_task: Sequence[int] = (0,),
        queue_timeout: float = 3600.0,
        show_line: Callable[[str], None] = print,
        interrupted: Callable[[], bool] = lambda: False,
    ):
        self._job = job
        self._is_ours = job is None
        self._request = tuple(request)
        self._python = python or sys.executable
        self._gpus_per_task = tuple(gpus_per_task)
        self._queue_timeout = queue_timeout
        self._show_line = show_line
        self._interrupted = interrupted
        self._lease: Lease | None = None
        self._suspects: set[str] = set()  # nodes whose agents were lost
        self._slow: set[str] = set()  # nodes on which a task was slow
        self._bad: set[str] = set()  # nodes that cannot run a step any more
        self._components: dict[str, int | None] = {}  # of the nodes; None in most jobs

    def allocate(self, count: int, lost: Sequence[Slot]) -> list[Slot]:
        """See `Engine`. A lost node of our own allocation leads to a new one."""
        hosts = {slot.host for slot in lost}
        self._suspects |= hosts
        if self._job is not None:
            job = slurm_job.find(self._job)
            if job.state == "RUNNING":
                # Slurm takes minutes to notice that a node is gone; a step there fails at once.
                self._bad |= {host for host in hosts if not self._runs_steps(host)}
                left = self._usable(job)
                if slots := self._slots(left, count):
                    return slots
                problem = f"has room for {left.slots} of {count} tasks, as nodes are lost"
            else:
                problem = f"is {job.state}"
            if not self._is_ours:
                raise NoRoom(f"job {self._job} of Slurm {problem}; queue it again")
            self._show_line(f"tfdist: job {self._job} of Slurm {problem}: asking for another")
            self.close()
        job = self._make_allocation()
        slots = self._slots(self._usable(job), count)
        if not slots:
            raise NoRoom(
                f"job {job.id} of Slurm has room for {job.slots} of {count} tasks; change --nodes "
                "or --slurm-options"
            )
        return slots

    def avoid(self, slot: Slot, count: int) -> bool:
        """See `Fleet.give_up`. The other nodes of the job count; no further job is asked for."""
        assert self._job is not None
        before = self._slow
        self._slow = {*before, slot.host}
        slots = self._slots(self._usable(slurm_job.find(self._job)), count)
        if not slots or not self._slow.isdisjoint(each.host for each in slots):
            self._slow = before
            return False
        return True

    def connect(self, slot: Slot) -> ProcessTransport:
        """See `Engine`."""
        assert self._job is not None
        cpus = int(slot.key.rpartition("/")[2])
        component = self._components.get(slot.host)
        gpus = self._gpus_per_task[min(component or 0, len(self._gpus_per_task) - 1)]
        # Without a guardian: the end of standard input ends the agent, then the step and srun. A
        # srun that is killed would leave its step behind.
        return ProcessTransport(
            agent_command(self._job, slot.host, cpus, gpus, component)
            + [self._python, "-m", "tfdist.launch.engines.agent_process"],
            None,
            step_environ(os.environ),
        )

    def close(self) -> None:
        """See `Engine`. An allocation that this launch has made is cancelled."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None
            self._job = None

    def _usable(self, job: Job) -> Job:
        """Return the job without the nodes that cannot run a task."""
        if not job.nodes:
            return job
        names = ",".join(node.name for node in job.nodes)
        down = slurm_job.is_down(
            slurm_commands.run("sinfo", "-h", "-N", "-n", names, "-o", "%N %T")
        )
        nodes = tuple(node for node in job.nodes if node.name not in down | self._bad)
        return dataclasses.replace(job, nodes=nodes)

    def _runs_steps(self, host: str) -> bool:
        assert self._job is not None
        try:
            code = subprocess.run(
                [*agent_command(self._job, host, 1, 0, self._components.get(host)), "true"],
                env=step_environ(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=PROBE_S,
            ).returncode
        except subprocess.TimeoutExpired:
            return False
        return code == 0

    def _slots(self, job: Job, count: int) -> list[Slot] | None:
        avoided = self._suspects | self._slow
        places = (
            slurm_job.place_in_components(job.nodes, job.quotas, count, avoided)
            if job.quotas
            else slurm_job.place(job.nodes, count, avoided)
        )
        if places is None:
            return None
        self._components |= {
            node.name: node.component if job.quotas else None for node in job.nodes
        }
        on_node = dict.fromkeys((node.name for node, _ in places), 0)
        for node, _ in places:
            on_node[node.name] += 1
        slots = []
        for node, number in places:
            cpus = max(1, node.cpus // on_node[node.name])
            threads = tuple(
                (name, str(cpus)) for name in THREAD_VARIABLES if name not in os.environ
            )
            slots.append(Slot(node.name, node.name, f"{self._job}/{number}/{cpus}", threads))
        return slots

    def _make_allocation(self) -> Job:
        """Wait for an allocation; show why it is pending."""
        excluded = [f"--exclude={','.join(sorted(self._bad))}"] if self._bad else []
        words: list[str] = []
        for part in _split(self._request, ":"):
            words += [*([":"] if words else []), *part, *excluded]
        self._lease = Lease(words)
        deadline = time.monotonic() + self._queue_timeout
        asked = 0.0
        shown = ""
        try:
            while True:
                if self._interrupted():
                    raise Interrupted
                if self._lease.granted(0.2):
                    self._job = self._lease.job
                    assert self._job is not None
                    return slurm_job.find(self._job)
                now = time.monotonic()
                if self._lease.job is not None and (now - asked > ASK_S or now >= deadline):
                    asked = now
                    shown = self._show_pending(self._lease.job, shown)
                if now >= deadline:
                    raise NoRoom(
                        f"Slurm gave no nodes within {self._queue_timeout:g} s ({shown or 'no'} "
                        "reason); wait longer by --queue-timeout, or use `tfdist submit`"
                    )
        except BaseException:
            self.close()
            raise

    def _show_pending(self, number: str, shown: str) -> str:
        reason = slurm_job.find(number).reason
        if remedy := slurm_commands.NEVER.get(reason):
            raise ValueError(f"Slurm: the job would never start: {reason}: {remedy}")
        if reason != shown and reason != "None":
            self._show_line(f"tfdist: job {number} of Slurm is pending: {reason}")
        return reason


class Lease:
    """An allocation that a process of its own holds until `close`, or until this process ends.

    Args:
        request: Options of `salloc`.
    """

    def __init__(self, request: Sequence[str]):
        self.job: str | None = None
        self._granted = False
        self._said: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(slurm_lease.__file__), *request],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def granted(self, seconds: float) -> bool:
        """Wait for the nodes for at most some seconds; return whether they are there.

        Raises:
            ValueError: If Slurm refuses the request.
            NoRoom: If Slurm's controller does not answer.
        """
        end = time.monotonic() + seconds
        while not self._granted:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return False
            if line is None or re.fullmatch(r"ended with [1-9]\d*\s*", line):
                raise slurm_commands.refusal("salloc", "".join(self._said))
            self._said.append(line)
            if found := re.search(r"job allocation (\d+)", line):
                self.job = found[1]
            if line.startswith("ended with "):
                self._granted = line.split() == ["ended", "with", "0"] and self.job is not None
        return True

    def close(self) -> None:
        """Give the nodes back."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GIVE_BACK_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)


def agent_command(
    job: str, node: str, cpus: int, gpus: int = 0, component: int | None = None
) -> list[str]:
    """Return the words of the `srun` that starts an agent; the agent's command follows.

    Steps share the cores of the job on a node, because `--exact` would keep a restarted agent
    waiting for its predecessor. GPUs must not be shared, so with GPUs each step has its own.

    Args:
        job: Number of the job.
        node: Name of the node.
        cpus: Number of cores of the task.
        gpus: Number of GPUs of the task.
        component: Number of the node's component in a heterogeneous job; None in other jobs.

    Example:
        >>> " ".join(agent_command("5", "n1", 4))
        'srun --jobid=5 --nodes=1 --ntasks=1 --nodelist=n1 --cpus-per-task=4 --input=all \
--unbuffered --mpi=none --kill-on-bad-exit=0 --overlap --cpu-bind=none'
    """
    own = (
        ["--exact", "--mem=0", f"--gpus-per-task={gpus}"]
        if gpus
        else ["--overlap", "--cpu-bind=none"]
    )
    return [
        "srun",
        f"--jobid={job}",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        f"--cpus-per-task={cpus}",
        "--input=all",
        "--unbuffered",
        "--mpi=none",
        "--kill-on-bad-exit=0",
        *([] if component is None else [f"--het-group={component}"]),
        *own,
    ]


def step_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the options that a job's script passes on to its steps.

    Example:
        >>> step_environ({"SLURM_NTASKS": "4", "SLURM_ARRAY_TASK_ID": "2", "HOME": "/h"})
        {'SLURM_ARRAY_TASK_ID': '2', 'HOME': '/h'}
    """
    return {name: value for name, value in environ.items() if not STEP_VARIABLES.fullmatch(name)}


def request_of(
    tasks: int,
    *,
    name: str = "tfdist",
    nodes: int | None = None,
    partition: str | None = None,
    time_limit: str | None = None,
    account: str | None = None,
    gpus_per_task: int | None = None,
    options: Sequence[str] = (),
) -> list[str]:
    """Return the options of `salloc` and `sbatch` that ask for the nodes of a launch.

    Args:
        tasks: Number of tasks.
        name: Name of the job.
        nodes: Number of nodes; None to let Slurm choose.
        partition: Partition; None for the default one.
        time_limit: Time limit in Slurm's form; None for that of the partition.
        account: Account; None for the user's default.
        gpus_per_task: GPUs of each task.
        options: Further options; they come last, and so prevail. After ":", those of the next
            component of a heterogeneous job.

    Raises:
        ValueError: If a component after the first does not say how many tasks it takes.

    Example:
        >>> request_of(4, nodes=2, time_limit="30", options=["--exclusive"])
        ['--job-name=tfdist', '--ntasks=4', '--nodes=2', '--time=30', '--no-kill', '--exclusive']
        >>> request_of(3, options=["--exclusive", ":", "--ntasks=1"])
        ['--job-name=tfdist', '--ntasks=2', '--no-kill', '--exclusive', ':', \
'--job-name=tfdist', '--no-kill', '--ntasks=1']
    """
    first, *others = _split(options, ":")
    further = [_tasks_of(part) for part in others]
    common = {
        "--job-name": name,
        "--partition": partition,
        "--time": time_limit,
        "--account": account,
    }
    own = {
        "--job-name": name,
        "--ntasks": tasks - sum(further),
        "--nodes": nodes,
        **common,
        "--gpus-per-task": gpus_per_task or None,
    }
    words = [*_words(own), *first]
    for part in others:
        words += [":", *_words(common), *part]
    return words


def _words(options: Mapping[str, str | int | None]) -> list[str]:
    # Without --no-kill, Slurm ends the whole job when it notices the loss of a node.
    words = [f"{option}={value}" for option, value in options.items() if value is not None]
    return [*words, "--no-kill"]


def _split(words: Sequence[str], separator: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == separator:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _tasks_of(options: Sequence[str]) -> int:
    """Return the number of tasks that options of Slurm ask for."""
    found = [re.fullmatch(r"(?:--ntasks=|-n)(\d+)", word) for word in options]
    numbers = [int(match[1]) for match in found if match]
    if not numbers:
        raise ValueError(
            "--slurm-options: expected --ntasks=N in each component after ':', received "
            f"{' '.join(options)!r}"
        )
    return numbers[-1]
