"""Run Keras' own tests of trainers, metrics and losses inside the scope of tfdist's strategies.

    # All files in all setups, writes benchmarks/reports/keras_suite.{md,json}.
    python benchmarks/keras_suite.py
    # Some files in one setup, writes nothing.
    python benchmarks/keras_suite.py --setups mirrored --no-report trainers/trainer_test.py
    # The tests of a checkout of Keras, and that Keras.
    python benchmarks/keras_suite.py --keras ../keras

Keras' packages contain its tests, so the default is the installed Keras. Each test method runs in
the scope of a strategy, after its `setUp`, which clears Keras' state. A test that fails without a
strategy too says nothing about strategies. The script needs tfdist[test], so `make bench` leaves it
out.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable

from common.report import begin, heading

FILES = ("trainers/*_test.py", "metrics/*_test.py", "losses/*_test.py")
SETUPS = {
    "none": "no strategy",
    "one_device": "tfdist `one_device`",
    "mirrored": "tfdist `mirrored`, 2 CPU devices",
}
OURS = ("one_device", "mirrored")
TEST_TIMEOUT_S = 180
REPORT = pathlib.Path(__file__).parent / "reports" / "keras_suite"
# Tests, a part of their message, and why they fail. The first that matches is the reason.
REASONS: tuple[tuple[str, str, str], ...] = (
    (
        r"losses/|TestCompileLoss",
        "AssertionError",
        "The test calls a loss in the scope, but outside of a step. There, Keras scales it by "
        "1 / replicas, which is TensorFlow's convention for loops with `strategy.run`.",
    ),
    (
        "metrics/iou_metrics",
        "AssertionError",
        "The test updates a metric in the scope, but outside of a step. The result is 0: there, "
        "TensorFlow divides a sum that is assigned by the replicas, and the counts are integers.",
    ),
    (
        "",
        "compile(jit_compile=True) under",
        "Refused: XLA cannot compile the collectives of a step (keras #18716).",
    ),
    (
        "raggeds",
        "expected dense outputs",
        "Refused: `predict` needs dense outputs under several replicas.",
    ),
    (
        "test_retracing",
        "3 not less than or equal to 2",
        "The test allows two traces of a `train_step`. tfdist traces one to build the model, and "
        "one for each replica of the process.",
    ),
)


class InScope:
    """A plugin of pytest that runs each test in a strategy's scope, and records its outcome."""

    def __init__(self, scope: Callable[[], contextlib.AbstractContextManager]):
        self.scope = scope
        self.outcomes: dict[str, list[str]] = {}
        self.stub = types.ModuleType("jax")

    def pytest_configure(self, config):
        for marker in ("requires_trainable_backend", "multi_device"):
            config.addinivalue_line("markers", f"{marker}: of Keras' own conftest.py")

    def pytest_collection_modifyitems(self, items):
        if sys.modules.get("jax") is self.stub:
            del sys.modules["jax"]
        for item in items:
            item.obj = self._inside(item.obj)

    def _inside(self, test):
        @functools.wraps(test)
        def inside(*args, **kwargs):
            with self.scope():
                return test(*args, **kwargs)

        return inside

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            reason = report.longrepr[2] if report.skipped else ""
            self.outcomes.setdefault(report.nodeid, [report.outcome, reason])

    def pytest_exception_interact(self, node, call):
        """Record the message of a failure, in one line."""
        message = " ".join(call.excinfo.exconly().split())
        self.outcomes[node.nodeid] = ["failed", message[:500]]


def run_setup(setup: str, root: pathlib.Path, files: list[str], out: pathlib.Path) -> None:
    """Run test files in this process, and write their outcomes by test."""
    import pytest

    sys.path.insert(0, str(root))
    plugin = InScope(_scope(setup))
    if importlib.util.find_spec("jax") is None:
        # trainer_test.py imports it at its top, for a test that only the JAX back end runs.
        importlib.import_module("keras")  # looks for JAX, and uses it
        sys.modules["jax"] = plugin.stub
    out.with_suffix(".ini").write_text("[pytest]\n")
    pytest.main(
        [
            f"--config-file={out.with_suffix('.ini')}",
            f"--rootdir={root}",
            f"--timeout={TEST_TIMEOUT_S}",
            *("-q", "--no-header", "--tb=native", "-p", "no:cacheprovider"),
            *(str(root / "keras/src" / file) for file in files),
        ],
        plugins=[plugin],
    )
    out.write_text(json.dumps(plugin.outcomes))
    os._exit(0)  # threads of endless data sets still run


def _scope(setup: str) -> Callable[[], contextlib.AbstractContextManager]:
    if setup == "none":
        return contextlib.nullcontext
    import tfdist

    strategy = tfdist.make_strategy(setup, devices="2" if setup == "mirrored" else None)
    _hook_trainer()
    return strategy.scope


def _hook_trainer() -> None:
    """Give tfdist's hooks of `keras.Model` to the class that Keras' tests use instead of it.

    The models of `trainer_test.py` inherit from Keras' trainer and a layer.
    """
    import keras

    module = importlib.import_module("keras.src.backend.tensorflow.trainer")

    class Trainer(module.TensorFlowTrainer):
        pass

    for name in (*keras.Model._tfdist_hooks, "_maybe_symbolic_build"):
        if hasattr(Trainer, name):
            setattr(Trainer, name, getattr(keras.Model, name))
    module.TensorFlowTrainer = Trainer


def _installed() -> pathlib.Path:
    """Return the directory of the installed Keras, without importing it."""
    return pathlib.Path(importlib.util.find_spec("keras").origin).parents[1]


def _run_child(setup: str, args: argparse.Namespace, files: list[str], directory: str) -> dict:
    """Run test files in a process of their own; return the outcome and reason of each test."""
    out = pathlib.Path(directory) / f"{setup}.json"
    root = ["--keras", str(args.keras)] if args.keras else []
    command = [sys.executable, __file__, *root, "--child", setup, str(out), *files]
    with open(out.with_suffix(".log"), "w", encoding="utf-8") as log:
        subprocess.run(command, stdout=log, stderr=log, timeout=args.timeout, check=False)
    if not out.exists():
        tail = out.with_suffix(".log").read_text(encoding="utf-8", errors="replace")[-2000:]
        raise SystemExit(f"{setup}: the tests did not end; the end of their log:\n{tail}")
    return json.loads(out.read_text(encoding="utf-8"))


def _applies(test: str, outcomes: dict[str, dict]) -> bool:
    """Return whether a test says anything about strategies: it passes without one."""
    return outcomes.get("none", {}).get(test, ["passed"])[0] == "passed"


def reason_of(test: str, message: str) -> str:
    """Return the reason for a failure, or "" if it is not known."""
    return next(
        (text for tests, words, text in REASONS if re.search(tests, test) and words in message), ""
    )


def counts(outcomes: dict[str, dict]) -> dict[str, dict[str, collections.Counter]]:
    """Return by file and setup how many tests passed, failed, or do not apply."""
    counters: dict[str, dict[str, collections.Counter]] = {}
    for setup, of_setup in outcomes.items():
        for test, (outcome, _) in of_setup.items():
            file = test.partition("::")[0].removeprefix("keras/src/")
            if outcome == "skipped" or (setup != "none" and not _applies(test, outcomes)):
                outcome = "not applicable"
            if setup == "none" and outcome == "failed":
                outcome = "not applicable"
            counters.setdefault(file, {}).setdefault(setup, collections.Counter())[outcome] += 1
    return counters


def render(facts: dict[str, str | int], outcomes: dict[str, dict]) -> str:
    """Return the report as Markdown."""
    lines = heading("Keras' own tests under tfdist", facts)
    lines += [
        "Each test of Keras' trainers, metrics and losses runs inside of a strategy's scope. A",
        "cell is `passed / failed / not applicable`. A test is not applicable if Keras skips it on",
        "TensorFlow, or if it fails without a strategy too: it needs a package that is not",
        "installed (JAX, PyTorch, Grain).",
        "",
    ]
    setups = list(outcomes)
    lines += ["| file | " + " | ".join(SETUPS[setup] for setup in setups) + " |"]
    lines += ["|---|" + "--:|" * len(setups)]
    by_file = counts(outcomes)
    total = {setup: collections.Counter() for setup in setups}
    for file, of_file in sorted(by_file.items()):
        for setup in setups:
            total[setup] += of_file.get(setup, collections.Counter())
        lines.append(f"| `{file}` | " + " | ".join(_cell(of_file.get(s)) for s in setups) + " |")
    lines.append("| **all** | " + " | ".join(_cell(total[setup]) for setup in setups) + " |")
    for setup in setups:
        if setup in OURS:
            lines += ["", f"## Failures under {SETUPS[setup]}", "", *_failures(setup, outcomes)]
    return "\n".join(lines) + "\n"


def _cell(count: collections.Counter | None) -> str:
    count = count or collections.Counter()
    return f"{count['passed']} / {count['failed']} / {count['not applicable']}"


def failed(setup: str, outcomes: dict[str, dict]) -> dict[str, str]:
    """Return the messages of the tests that fail under a strategy and pass without one."""
    return {
        test: message
        for test, (outcome, message) in outcomes[setup].items()
        if outcome == "failed" and _applies(test, outcomes)
    }


def _failures(setup: str, outcomes: dict[str, dict]) -> list[str]:
    failures = failed(setup, outcomes)
    if not failures:
        return ["None."]
    groups: dict[str, list[str]] = {}
    for test, message in failures.items():
        groups.setdefault(reason_of(test, message) or f"Not classified: {message}", []).append(test)
    lines = ["| tests | reason |", "|--:|---|"]
    for reason, tests in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {len(tests)} | {reason.replace('|', chr(92) + '|')} |")
    lines += ["", "<details><summary>The tests by reason</summary>", ""]
    for reason, tests in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines += [f"- {reason}"]
        lines += [f"    - `{test.removeprefix('keras/src/')}`" for test in sorted(tests)]
    return [*lines, "", "</details>"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help=f"below keras/src, default {' '.join(FILES)}")
    parser.add_argument("--keras", type=pathlib.Path, help="a checkout, default the installed one")
    parser.add_argument("--setups", default=",".join(SETUPS), help="default %(default)s")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds for one setup")
    parser.add_argument("--no-report", action="store_true", help="print the table only")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    root = args.keras.resolve() if args.keras else _installed()
    if args.child:
        run_setup(args.child[0], root, args.files, pathlib.Path(args.child[1]))
        return 0
    facts = begin("keras_suite.py", sys.argv[1:], rounds=1)
    del facts["Rounds"]
    source = root / "keras" / "src"
    files = sorted(
        str(path.relative_to(source))
        for pattern in args.files or FILES
        for path in source.glob(pattern)
    )
    if not files:
        parser.error(f"expected test files of Keras below {source}, found none")
    with tempfile.TemporaryDirectory(prefix="tfdist-") as directory:
        outcomes = {
            setup: _run_child(setup, args, files, directory) for setup in args.setups.split(",")
        }
    conclude(facts, outcomes, None if args.no_report else REPORT)
    return int(
        any(
            not reason_of(*failure)
            for setup in OURS
            if setup in outcomes
            for failure in failed(setup, outcomes).items()
        )
    )


def conclude(facts: dict, outcomes: dict[str, dict], report: pathlib.Path | None) -> None:
    """Print the report, and write it with the outcome of each test that did not pass."""
    text = render(facts, outcomes)
    print(text)
    if report:
        report.with_suffix(".md").write_text(text)
        others = {
            setup: {test: outcome for test, outcome in tests.items() if outcome[0] != "passed"}
            for setup, tests in outcomes.items()
        }
        report.with_suffix(".json").write_text(
            json.dumps({"facts": facts, "outcomes": others}, indent=1) + "\n"
        )


if __name__ == "__main__":
    sys.exit(main())
