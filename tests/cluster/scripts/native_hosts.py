"""Train on one of several hosts with native collectives.

The command is `native_hosts.py FILE`; the file gets the results.
"""

import pathlib
import pickle
import sys

import tfdist
from tests.cluster.scripts.native import CASES, fitted


def main(file):
    strategy = tfdist.make_strategy(communication="native", timeout=100)
    cases = "single steps", "zero", "fsdp", "few rows"
    results = {case: fitted(strategy, **CASES[case]) for case in cases}
    results["kind"] = strategy.tfdist_engine.transport.kind
    strategy.tfdist_engine.use_transport(None)
    results["tensorflow"] = fitted(strategy)
    results["tensorflow, few rows"] = fitted(strategy, **CASES["few rows"])
    pathlib.Path(file).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
