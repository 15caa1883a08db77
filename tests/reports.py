"""Write directories of runs and benchmarks for tests of reports, and read pages.

A page is read by a parser or a browser.
"""

from __future__ import annotations

import html.parser
import json
import pathlib
import re
import shutil
import subprocess

from tfdist import config
from tfdist.telemetry import layout, sessions, step_records
from tfdist.telemetry.step_records import PARTS, Window

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
BEGUN = 1_790_000_000.0
VERSIONS = {"tfdist": "0.1.0", "python": "3.12.1", "tensorflow": "2.21.0", "keras": "3.15.1"}
RUN_FILES = [  # of a run without backup
    "config.json",
    "events.out",
    "history.jsonl",
    "model.keras",
    "sessions.jsonl",
    "summary.json",
    "train",
    "validation",
]


def files_of_run(directory: pathlib.Path) -> list[str]:
    """Return the names in a run's directory, sorted; of event files without host and time."""
    return sorted(path.name.partition(".tfevents")[0] for path in directory.iterdir())


def write_run(
    directory: pathlib.Path,
    name: str = "digits",
    workers: int = 2,
    launch: pathlib.Path | None = None,
    metrics=("accuracy",),
) -> pathlib.Path:
    """Make a run of four epochs of 24 steps, begun again after step 37, with all optional parts."""
    directory.mkdir(parents=True)
    settings = config.Run.from_dict(
        {"name": name, "train": {"epochs": 4}, "telemetry": {"step_breakdown": True}}
    )
    (directory / layout.CONFIG).write_text(json.dumps(settings.to_dict()))
    for epoch in range(4):
        values = dict.fromkeys(metrics, 1 - 0.5 / (epoch + 1))
        values |= {
            "loss": 2.0 / (epoch + 1),
            "val_loss": 1.5 / (epoch + 1),
            **{f"val_{k}": v - 0.1 for k, v in values.items()},
        }
        line = {
            "step": epoch,
            **values,
            "learning_rate": 1e-3,
            "seconds": 2.0,
            "time": BEGUN + 20 + 10 * epoch,
        }
        layout.append_json(directory / layout.HISTORY, line)
    for attempt, (when, epoch) in enumerate(((BEGUN + 10, 0), (BEGUN + 28, 1))):
        sessions.write(
            directory,
            sessions.Session(
                when,
                epoch,
                0,
                attempt > 0,
                attempt,
                launch and str(launch),
                "MultiWorkerMirroredStrategy",
                workers,
                workers,
                64,
                VERSIONS,
            ),
        )
    for rank in range(workers):
        (directory / f"worker-{rank}").mkdir()
        for number, step in enumerate([*range(8, 41, 8), *range(32, 97, 8)]):
            parts = {part: 0.01 * (index + 1 + 0.1 * rank) for index, part in enumerate(PARTS)}
            when = BEGUN + 10 + number
            window = Window(
                rank,
                when,
                step // 24,
                step,
                8,
                512,
                sum(parts.values()),
                parts,
                bytes=4000,
                steady=number not in (0, 5),
            )
            step_records.write(directory / f"worker-{rank}", window)
    summary = {
        "name": name,
        "accuracy": 0.9375,
        "loss": 0.25,
        "epochs": 4,
        "examples_per_second": 4321.0,
        "seconds": 61.0,
        "replicas": workers,
    }
    (directory / layout.SUMMARY).write_text(
        json.dumps({**summary, "strategy": "MultiWorkerMirroredStrategy"})
    )
    return directory


def write_launch(directory: pathlib.Path, text: str = "kill worker:1@step=37") -> pathlib.Path:
    """Write the journal of that run's launch: two attempts, 13 steps lost."""
    directory.mkdir(parents=True)
    tasks = ["worker:0", "worker:1"]
    snapshot = {
        "task": "worker:0",
        "epoch": 1,
        "step": 0,
        "total": 24,
        "number": 1,
        "path": "backup/snapshot-1.tfdist",
        "seconds": 0.1,
    }
    lines = [
        (0.0, "launch", {"chaos": None}),
        (0.1, "attempt", {"attempt": 0, "tasks": tasks}),
        (10.0, "stepping", {"task": "worker:0", "epoch": 0, "step": 1, "total": 1}),
        (18.0, "saved", snapshot),
        (
            19.0,
            "fault",
            {"task": "worker:1", "number": 0, "text": text, "total": 37, "seconds": None},
        ),
        (19.5, "detected", {"task": "worker:1"}),
        (20.0, "ended", {"attempt": 0, "codes": {"worker:0": -15, "worker:1": -9}, "total": 37}),
        (20.0, "decided", {"attempt": 0, "restart": True, "delay": 0.0, "text": "restart 1 of 2"}),
        (20.1, "attempt", {"attempt": 1, "tasks": tasks}),
        (27.0, "restored", snapshot),
        (28.0, "stepping", {"task": "worker:0", "epoch": 1, "step": 1, "total": 25}),
        (50.0, "saved", {**snapshot, "epoch": 4, "total": 96, "number": 2}),
        (52.0, "ended", {"attempt": 1, "codes": {"worker:0": 0, "worker:1": 0}, "total": 96}),
        (52.1, "over", {"code": 0}),
    ]
    for when, event, facts in lines:
        layout.append_json(
            directory / "events.jsonl", {"time": BEGUN + when, "event": event, **facts}
        )
    return directory


def write_benchmark(directory: pathlib.Path, kind: str) -> pathlib.Path:
    """Write a benchmark of up to four replicas, as `tfdist bench` does."""
    directory.mkdir(parents=True)
    setups = []
    for strategy in ("mirrored", "multi_worker_mirrored"):
        for replicas in (1, 2, 4):
            for mode in ("strong", "weak") if kind == "scaling" else ("",):
                rate = 1000.0 * replicas**0.7
                parts = dict.fromkeys(PARTS, 0.002)
                setup = {
                    "strategy": strategy,
                    "replicas": replicas,
                    "workers": 1,
                    "modes": [mode] if mode else [],
                    "global_batch": 64 * replicas,
                }
                setup |= {
                    "bytes": 4096 * 4**replicas,
                    "seconds": [0.01, 0.011, 0.012],
                    "rates": [rate, 0.9 * rate, 1.1 * rate],
                    "error": None,
                }
                setup |= {
                    "step_breakdown": {"0": parts} if mode else {},
                    "speedup": replicas**0.7,
                    "efficiency": replicas**-0.3,
                    "bus_bandwidth": 5e8,
                }
                setups.append(
                    setup
                    | {
                        "reason": (
                            f"with {replicas} replicas 17 % of the step is gradient synchronization"
                        )
                        if mode
                        else ""
                    }
                )
    facts = {
        "kind": kind,
        "name": "digits",
        "command": "tfdist bench",
        "time": BEGUN,
        "config": {"data": {"global_batch": 64}},
    }
    facts |= {
        "machine": {"cores": 2, "memory": 16 * 10**9, "gpus": []},
        "versions": VERSIONS,
        "options": {"steps": 50},
        "notes": ["A note."],
    }
    (directory / "bench.json").write_text(json.dumps({**facts, "setups": setups}))
    return directory


class Page(html.parser.HTMLParser):
    """Parse a page into text and attributes of tags; check that tags close in order."""

    VOID = {"meta", "link", "br", "hr", "img", "input"}

    def __init__(self, path: pathlib.Path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(self.source)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data):
        if self.open:
            self.words.setdefault(self.open[-1], []).append(data)

    @property
    def text(self) -> str:
        """Return all text but style sheets."""
        return "\n".join(
            word for tag, words in self.words.items() if tag != "style" for word in words
        )

    @property
    def figures(self) -> int:
        return sum(tag == "svg" for tag, _ in self.tags)

    def outside(self) -> list[str]:
        """Return references that a browser would fetch from elsewhere, or run."""
        references = [
            f"<{tag}>"
            for tag, _ in self.tags
            if tag
            in (
                "script",
                "iframe",
                "object",
                "embed",
                "img",
                "image",
                "base",
                "form",
                "video",
                "audio",
            )
        ]
        for tag, attributes in self.tags:
            references += [f"<{tag} {name}>" for name in attributes if name.startswith("on")]
            urls = [
                attributes.get(name)
                for name in ("src", "href", "xlink:href", "srcset", "data", "action")
            ]
            references += [url for url in urls if url and not url.startswith(("#", "data:,"))]
        references += [
            url for url in re.findall(r"url\(([^)]*)\)", self.source) if not url.startswith("#")
        ]
        return references + re.findall(r"@import[^;]*", self.source)


def browse(directory: pathlib.Path, address: str, width: int, *flags: str) -> tuple[str, str]:
    """Load a page in Chromium; return its document and the browser's complaints."""
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={directory / 'profile'}",
    ]
    command += [
        f"--window-size={width},1000",
        "--virtual-time-budget=4000",
        *flags,
        "--dump-dom",
        address,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(
        line for line in done.stderr.splitlines() if ":CONSOLE" in line or "Uncaught" in line
    )
