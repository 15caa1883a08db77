"""Soak test: kills workers at random moments, and checks that nothing grows meanwhile.

    # Twenty minutes with thirty kills, of which the last three minutes are quiet.
    python benchmarks/soak.py
    python benchmarks/soak.py --minutes 7 --kills 8

Two workers train for ever under `tfdist launch`, which restarts them after each kill. Every few
seconds the threads, file descriptors and memory of the launcher and of the workers are read. At the
end the launch is ended by SIGTERM, and the script prints the goodput and how much each figure grew
per minute (the median slope of all pairs of readings, Theil and Sen's). It fails, with code 1, if a
figure grew faster than its bound, if the launch did not end as it should, or if a process is left.

The launcher is judged over the whole time. Workers are new after each kill, so they are judged in
the quiet end, after a minute to warm up; what a restart adds shows in the launcher.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from common.report import positive

from tfdist.runtime.launch_protocol import PREEMPTED_CODE

SAMPLE_S = 3.0
WARM_UP_S = 60.0  # the first minute of a process: caches, arenas of the allocator, pools
QUIET_S = 180.0  # at the end, without kills: the workers restart, warm up, and are read
START_S = 120.0  # for the first workers to begin
END_S = 120.0  # for the launch to end
# Largest growth per minute. A slope of pairs is no whole number, so one more thread now and then
# passes, and one more for each restart does not.
BOUNDS = {
    "launcher": {"threads": 0.2, "descriptors": 0.2, "MB": 0.5},
    "worker": {"threads": 0.5, "descriptors": 0.5, "MB": 4.0},
}
Reading = tuple[float, dict[str, float]]


def read(pid: int) -> dict[str, float] | None:
    """Return the threads, file descriptors and resident memory of a process; None if it is gone."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmRSS" not in facts:  # it has ended
        return None
    memory = int(facts["VmRSS"].split()[0]) / 1024
    return {"threads": float(facts["Threads"]), "descriptors": float(descriptors), "MB": memory}


def slope(readings: list[Reading], figure: str) -> float:
    """Return the growth of a figure per minute: the median slope of all pairs of readings."""
    points = [(seconds / 60, values[figure]) for seconds, values in readings]
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for number, earlier in enumerate(points)
        for later in points[number + 1 :]
    ]
    return statistics.median(slopes) if slopes else float("nan")


class Soak:
    """A launch that is disturbed and watched.

    Args:
        directory: Directory for its files.
        seconds: Length of the soak.
        kills: Number of kills.
        seed: Seed of the moments and of the victims.
    """

    def __init__(self, directory: pathlib.Path, seconds: float, kills: int, seed: int):
        self.directory = directory
        self.logs = directory / "logs"
        self.killed = 0
        self.readings: dict[str, list[Reading]] = {"launcher": []}
        self._seconds = seconds
        self._random = random.Random(seed)
        self._moments = sorted(self._random.uniform(0, seconds - QUIET_S) for _ in range(kills))
        script = pathlib.Path(__file__).parent / "common" / "soak_worker.py"
        words = ["--workers=2", "--restarts=1000", f"--log-dir={self.logs}"]
        with open(directory / "output", "w", encoding="utf-8") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "tfdist", "launch", *words, "--", script, directory],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def workers(self) -> dict[str, int]:
        """Return the process ids of the workers that run, by name."""
        found = {}
        for path in sorted(self.directory.glob("worker-*.pid")):
            text = path.read_text(encoding="ascii")
            if text and read(int(text)):
                found[path.stem] = int(text)
        return found

    def run(self) -> None:
        """Kill and read until the time is over, then end the launch.

        Raises:
            RuntimeError: If the launch ended by itself, or not as it should.
        """
        begin = time.monotonic()
        while not self.workers():
            self._check_alive()
            if time.monotonic() - begin > START_S:
                raise RuntimeError(f"no worker began within {START_S:g} s\n{self.tail()}")
            time.sleep(0.5)
        begin = time.monotonic()
        while (now := time.monotonic() - begin) < self._seconds:
            self._check_alive()
            if self._moments and self._moments[0] <= now and (workers := self.workers()):
                self._moments.pop(0)
                os.kill(self._random.choice(list(workers.values())), signal.SIGKILL)
                self.killed += 1
            for name, pid in {"launcher": self.launcher.pid, **self.workers()}.items():
                key = name if name == "launcher" else f"{name}, process {pid}"
                if values := read(pid):
                    self.readings.setdefault(key, []).append((now, values))
            time.sleep(SAMPLE_S)
        self.launcher.send_signal(signal.SIGTERM)
        code = self.launcher.wait(END_S)
        if code != PREEMPTED_CODE:
            raise RuntimeError(f"expected exit code {PREEMPTED_CODE}, got {code}\n{self.tail()}")
        if left := self.workers():
            raise RuntimeError(f"these processes are left: {left}")

    def _check_alive(self) -> None:
        if self.launcher.poll() is not None:
            code = self.launcher.returncode
            raise RuntimeError(f"the launch ended by itself, with code {code}\n{self.tail()}")

    def tail(self) -> str:
        """Return the end of the launch's output."""
        return (self.directory / "output").read_text(encoding="utf-8", errors="replace")[-4000:]

    def judge(self) -> list[str]:
        """Print the growth of each figure, and return those that grew too fast."""
        last = {name.partition(",")[0]: name for name in self.readings}  # of each worker
        wrong = []
        for name in last.values():
            readings = self.readings[name]
            begin = readings[0][0] + WARM_UP_S
            readings = [reading for reading in readings if reading[0] >= begin]
            bounds = BOUNDS["launcher" if name == "launcher" else "worker"]
            if len(readings) < 10:
                wrong.append(f"{name}: only {len(readings)} readings after its first minute")
                continue
            for figure, bound in bounds.items():
                growth = slope(readings, figure)
                first, end = readings[0][1][figure], readings[-1][1][figure]
                line = (
                    f"{name}: {figure} {first:.0f} to {end:.0f} in "
                    f"{readings[-1][0] - readings[0][0]:.0f} s, {growth:+.2f} a minute, "
                    f"bound {bound:g}"
                )
                print(line)
                if growth > bound:
                    wrong.append(line)
        return wrong


def main() -> int:
    """Run the soak, print its figures, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--kills", type=positive, default=30)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    if not flags.minutes * 60 > QUIET_S:
        parser.error(
            f"--minutes: expected more than {QUIET_S / 60:g}, the length of the end without kills; "
            f"received {flags.minutes:g}"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as directory:
        soak = Soak(pathlib.Path(directory), flags.minutes * 60, flags.kills, flags.seed)
        try:
            soak.run()
            wrong = soak.judge()
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            wrong = [str(error)]
        finally:
            if soak.launcher.poll() is None:
                soak.launcher.terminate()
                soak.launcher.wait(END_S)
        print(f"{soak.killed} kills")
        goodput = [sys.executable, "-m", "tfdist", "goodput", str(soak.logs)]
        subprocess.run(goodput, check=False, timeout=END_S)
    for line in wrong:
        print(f"FAILED: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
