"""Run the processes of setups, each once a session, and return their results."""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Callable, Mapping, Sequence

import pytest

from tests.processes import PYTHON, group, workers


def runs(
    make: pytest.TempPathFactory,
    runner: str,
    setups: Mapping[str, Sequence],
    pairs: Sequence[Sequence[str]],
    seconds: float,
) -> Callable[[str], list]:
    """Return a function from a setup's name to the results of its processes, in their order.

    Args:
        make: Makes directories for results and logs.
        runner: A script beside this one; gets a strategy, devices, the file to write, and cases.
        setups: By name: strategy, devices, how many processes, and cases.
        pairs: Names of setups of one process that run at a time.
        seconds: For one setup.
    """
    done: dict[str, list] = {}

    def run(setup: str) -> list:
        if setup not in done:
            together = next((pair for pair in pairs if setup in pair), (setup,))
            directories = {name: make.mktemp(name) for name in together}
            with group(make.mktemp("logs")) as members:
                for name, directory in directories.items():
                    strategy, devices, processes, *cases = setups[name]
                    command = [
                        PYTHON,
                        str(pathlib.Path(__file__).with_name(runner)),
                        strategy,
                        devices,
                        str(directory / "{index}.pickle"),
                        *cases,
                    ]
                    if processes > 1:
                        workers(members, processes, command)
                    else:
                        members.start(name, [c.format(index=0) for c in command])
                members.succeed(seconds)
            for name, directory in directories.items():
                done[name] = [
                    pickle.loads(file.read_bytes()) for file in sorted(directory.glob("*.pickle"))
                ]
        return done[setup]

    return run
