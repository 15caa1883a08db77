"""Test `tfdist report` on runs and benchmarks, whole and damaged, and how a browser shows it."""

import html
import io
import json
import pathlib
import re
import sys

import pytest
from PIL import Image

from tests.processes import ROOT
from tests.reports import BEGUN, CHROMIUM, Page, browse, write_benchmark, write_launch, write_run
from tfdist import cli
from tfdist.telemetry import layout
from tfdist.tools.report.main import read
from tfdist.tools.report.page import Chapter, Section, Table, Tile, render
from tfdist.tools.report.read import read_run
from tfdist.tools.report.step_figures import final_windows

NASTY = "<script>alert('x')</script> $x_1 & \"q\" </style></svg>"


@pytest.fixture
def run(tmp_path):
    return write_run(
        tmp_path / "runs" / "digits", launch=write_launch(tmp_path / "runs" / "launch-1")
    )


@pytest.fixture
def small(tmp_path):
    """Write a run with little to draw."""
    directory = tmp_path / "runs" / "small"
    directory.mkdir(parents=True)
    layout.append_json(directory / layout.HISTORY, {"step": 0, "loss": 2.0, "seconds": 1.0})
    return directory


def report(directory, *words, code=0):
    """Make a page, and return it parsed."""
    assert cli.main(["report", str(directory), *map(str, words)]) == code
    return Page(pathlib.Path(directory) / "report.html")


# --- Runs -----------------------------------------------------------------------------------------
def test_the_facts_of_a_run(run):
    facts = read_run(run)
    assert facts.problems == facts.absent == ()
    assert list(facts.metrics) == ["loss", "accuracy", "learning_rate"]
    curve = facts.metrics["loss"]["validation"]
    assert curve.x == (1, 2, 3, 4)
    assert curve.y == (1.5, 0.75, 0.5, 0.375)
    assert curve.times[0] == BEGUN + 20
    assert (facts.restarts, facts.lost) == (1, 13)
    assert [window.step for window in final_windows(facts.step_breakdown[1])] == [
        8,
        16,
        24,
        *range(32, 97, 8),
    ]
    assert [window.time for window in final_windows(facts.step_breakdown[1])][3] == BEGUN + 15


def test_page_shows_all_parts_of_a_run_and_needs_no_other_file(run, tmp_path, capsys):
    page = report(run, "--png", tmp_path / "png")
    for text in (
        "digits",
        "finished",
        "93.75 %",
        "4,321",
        "lost steps",
        "kill worker:1@step=37",
        "snapshot-1",
        "epoch 2, step 0",
        "2.21.0",
    ):
        assert text in page.text
    for title in (
        "Loss",
        "Loss over time",
        "Accuracy",
        "Throughput by worker",
        "A mean step of each worker",
        "The step over training",
        "Steps done, and what each attempt did",
        "gradient sync",
        "begun again",
    ):
        assert title in page.words["text"]
    assert not re.search("nan|NaN|None", page.text)
    images = sorted((tmp_path / "png").iterdir())
    assert len(images) == page.figures == 9
    for path in images:
        image = Image.open(path)
        assert image.size[0] > 700
        assert len(image.convert("RGB").getcolors(1 << 20)) > 20, path
    out = capsys.readouterr().out
    assert f"report   {run / 'report.html'}" in out
    assert "images   9 in" in out
    assert "left out" not in out
    assert page.outside() == []
    assert "http" not in page.source
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = {
        attributes["xlink:href"] for _, attributes in page.tags if "xlink:href" in attributes
    } | set(re.findall(r"url\((#[^)]*)\)", page.source))
    assert used
    assert used <= {f"#{name}" for name in ids}


def test_text_of_files_is_escaped(tmp_path):
    launch = write_launch(tmp_path / "launch", text=NASTY)
    run = write_run(tmp_path / "run", name="plain", launch=launch, metrics=(NASTY, "accuracy"))
    config = json.loads((run / layout.CONFIG).read_text())
    (run / layout.CONFIG).write_text(json.dumps({**config, "name": NASTY}))
    (run / layout.SUMMARY).write_text(json.dumps({"name": NASTY, "<b>": NASTY, NASTY: 0.5}))
    page = report(run)
    assert page.outside() == []
    assert f"{NASTY} (run)" in page.words["h1"]
    assert NASTY in page.words["td"]
    assert NASTY[:35] in "".join(page.words["text"])  # a name at an axis is shortened


def test_every_text_of_a_page_is_escaped(tmp_path):
    tables = [Table([[NASTY]], [NASTY], caption=NASTY, folded=folded) for folded in (True, False)]
    section = Section(NASTY, tables=tables, text=[NASTY])
    chapter = Chapter(
        name=NASTY,
        title=NASTY,
        subtitle=NASTY,
        badge=(NASTY, True),
        tiles=[Tile(NASTY, NASTY)],
        sections=[section],
        problems=[NASTY],
        absent=[NASTY],
    )
    path = tmp_path / "page.html"
    path.write_text(render([chapter, chapter], f"{NASTY} \x1b[31m"))
    page = Page(path)
    assert page.outside() == []
    assert "<script" not in page.source
    words = [word for words in page.words.values() for word in words]
    # 15 texts in each chapter; the page's title, its link to the second chapter, and its last line.
    assert sum(NASTY in word for word in words) == 2 * 15 + 3
    assert page.words["footer"] == [f"{NASTY} \N{REPLACEMENT CHARACTER}[31m"]


def test_the_same_files_give_the_same_page(small):
    assert render(read(small), "foot") == render(read(small), "foot")


def test_missing_parts_are_left_out_with_a_hint(small, capsys):
    page = report(small)
    assert page.figures == 1
    out = capsys.readouterr().out
    for remedy in (
        "--config.telemetry.step_breakdown=true",
        "--launch DIR",
        "tfdist.TensorBoard",
        layout.CONFIG,
        layout.SUMMARY,
    ):
        assert remedy in out
        assert remedy in page.text
    assert "finished" not in page.text


def test_unfinished_run(run, tmp_path):
    (run / layout.SUMMARY).unlink()
    journal = tmp_path / "runs" / "launch-1" / "events.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-3]))
    page = report(run)
    assert "runs, or was killed" in page.text
    assert "accuracy, validation, last epoch" in page.text


def test_a_launch_is_found_or_asked_for(run, tmp_path):
    elsewhere = (tmp_path / "runs" / "launch-1").rename(tmp_path / "elsewhere")
    (remedy,) = read_run(run).absent
    assert "it was moved or removed; name it with --launch DIR" in remedy
    assert read_run(run).lost is None
    assert read_run(run, [elsewhere]).lost == 13
    elsewhere.rename(run.parent / "launch-1")  # all runs were moved, as one is
    run.parent.rename(tmp_path / "moved")
    assert read_run(tmp_path / "moved" / "digits").lost == 13


def test_values_that_are_not_finite(small, capsys):
    for epoch in (1, 2):
        layout.append_json(
            small / layout.HISTORY,
            {"step": epoch, "loss": float("nan"), "val_loss": float("inf"), "seconds": 2.0},
        )
    page = report(small, code=1)
    assert "loss of training is not finite after epoch 2" in capsys.readouterr().err
    assert "loss of validation is not finite after epoch 2" in page.text


def test_curves_of_a_script(tmp_path):
    """Use event files alone, as Keras' TensorBoard writes them."""
    import tensorflow as tf

    for name, split in (("train", 1.0), ("validation", 2.0)):
        with tf.summary.create_file_writer(str(tmp_path / "logs" / name)).as_default():
            for epoch in range(3):
                tf.summary.scalar("epoch_loss", split / (epoch + 1), step=epoch)
                tf.summary.scalar("epoch_hits", tf.constant(epoch, tf.int64), step=epoch)
    facts = read_run(tmp_path / "logs")
    assert {name: curve.y for name, curve in facts.metrics["loss"].items()} == {
        "training": pytest.approx((1, 1 / 2, 1 / 3)),
        "validation": pytest.approx((2, 1, 2 / 3)),
    }
    assert facts.metrics["hits"]["training"].y == (0, 1, 2)
    assert facts.metrics["loss"]["training"].times[0] > BEGUN / 2
    assert report(tmp_path / "logs").figures == 4
    (path,) = (tmp_path / "logs" / "train").iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    assert "is cut off or damaged after" in report(tmp_path / "logs", code=1).text


def test_files_that_are_damaged(run, tmp_path, capsys):
    def append(path, text):
        path.write_text(path.read_text() + text)

    append(run / layout.HISTORY, '{"step": 4, "lo')
    append(run / layout.SESSIONS, '[1]\n{"time": "now"}\n')
    append(run / "worker-0" / layout.STEP_BREAKDOWN, '{"worker": 0}\n')
    append(tmp_path / "runs" / "launch-1" / "events.jsonl", '{"time": 1}\n')
    (run / layout.CONFIG).write_text("{")
    (run / layout.SUMMARY).unlink()
    (run / layout.SUMMARY).mkdir()
    (run / "train").mkdir()
    (run / "train" / "events.out.tfevents.1.host").write_bytes(b"\x10\0\0\0\0\0\0\0and so on")
    page = report(run, code=1)
    err = capsys.readouterr().err
    for text in (
        f"{layout.HISTORY}: its last line, 5, is cut off",
        f"{layout.SESSIONS}: 2 of 4 lines are damaged, the first is line 3",
        f"{layout.STEP_BREAKDOWN}: its last line, 15, is cut off or damaged",
        "events.jsonl: its last line, 15,",
        (
            f"{layout.CONFIG} is damaged: expected one JSON object, received 1 bytes that begin "
            f"with '{{'"
        ),
        f"{layout.SUMMARY} cannot be read: Is a directory",
        "host is cut off or damaged after 0 of 17 bytes",
    ):
        assert text in err
        assert text in page.text
    assert page.figures == 9


def test_a_journal_without_its_facts(run, tmp_path):
    journal = tmp_path / "runs" / "launch-1" / "events.jsonl"
    journal.write_text(re.sub('"total": [0-9]+, "number"', '"number"', journal.read_text()))
    page = report(run, code=1)
    assert (
        "events.jsonl: 3 of 14 lines are damaged, the first is line 4; they are left" in page.text
    )


# --- Several runs, and benchmarks -----------------------------------------------------------------
def test_runs_are_compared(small, capsys):
    other = small.parent / "other"
    other.mkdir()
    layout.append_json(other / layout.HISTORY, {"step": 0, "loss": 1.0, "seconds": 1.0})
    write_benchmark(small.parent / "bench-1", "scaling")
    page = report(small.parent)
    assert "2 runs in runs" in page.text
    assert {"Loss, training", "small", "other"} <= set(page.words["text"])
    anchors = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    assert anchors == {"#chapter-1-other", "#chapter-2-small"}
    assert anchors <= {f"#{attributes.get('id')}" for _, attributes in page.tags}
    assert "tfdist report " + str(small.parent / "bench-1") in page.text
    assert "other: no restarts on the time axis" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (
            "scaling",
            (
                "Strong scaling",
                "Weak scaling",
                "Efficiency",
                "ideal",
                "with 4 replicas 17 % of the step is gradient synchronization",
            ),
        ),
        ("predict", ("Inference", "mirrored \N{MULTIPLICATION SIGN}4")),
        (
            "allreduce",
            (
                "Bandwidth",
                "Time of a sum",
                "16 KiB",
                "bandwidth at most: mirrored \N{MULTIPLICATION SIGN}4",
            ),
        ),
    ],
)
def test_benchmarks(kind, texts, tmp_path):
    page = report(write_benchmark(tmp_path / "bench", kind))
    for text in texts:
        assert text in page.text
    assert page.outside() == []
    assert page.figures == {"scaling": 4, "predict": 1, "allreduce": 2}[kind]


def test_a_benchmark_with_failures(tmp_path, capsys):
    path = write_benchmark(tmp_path / "bench", "scaling") / "bench.json"
    facts = json.loads(path.read_text())
    facts["setups"][0] |= {
        "rates": [],
        "seconds": [],
        "step_breakdown": {},
        "speedup": None,
        "efficiency": None,
        "error": "out of memory",
    }
    facts["setups"][1] = {"strategy": "mirrored", "replicas": "two", "workers": 1}
    path.write_text(json.dumps(facts))
    page = report(path.parent, code=1)
    assert "1 setup failed" in page.text
    assert "out of memory" in page.text
    assert "setups[1] is damaged (expected a number, received 'two'); it is left out" in page.text
    path.write_text("[]")
    assert "expected one JSON object" in report(path.parent, code=1).text


# --- Mistakes -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["nowhere"],
            (
                "LOGDIR: expected the directory of a run, of runs or of a benchmark, received "
                "nowhere, which does not exist"
            ),
        ),
        (["file"], "which is a file"),
        (["empty"], "empty holds no run; expected config.json"),
        (["runs/launch-1"], "tfdist report RUN --launch runs/launch-1"),
        (["launches"], "launches holds the logs of 2 launches, but no run; expected the directory"),
        (["launches"], "tfdist report RUN --launch launches/b. "),
        (
            ["launches"],
            "tfdist.TensorBoard(RUN)]). Without a run, `tfdist goodput launches/b` says",
        ),
        (["runs/digits", "runs/two"], "received 'runs/two'. LOGDIR is one directory. To compare"),
        (["runs/digits", "--zzz"], "--zzz: no such flag. Expected one of"),
        (["benches"], "benches holds no run; for its benchmark: tfdist report benches/one"),
        (
            ["runs/digits", "--launch", "empty"],
            (
                "--launch: expected the directory of a launch's logs, received empty: it has no "
                "events.jsonl"
            ),
        ),
        (["runs", "--launch", "runs/launch-1"], "--launch: expected with the directory of one run"),
        (
            ["benches/one", "--launch", "runs/launch-1"],
            "--launch: expected with the directory of one run",
        ),
        (["runs/digits", "--pgn", "here"], "--pgn"),
        ([], "LOGDIR"),
    ],
)
def test_wrong_arguments_are_named(words, text, run, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    write_benchmark(tmp_path / "benches" / "one", "predict")
    for name in "ab":
        write_launch(tmp_path / "launches" / name)
    (tmp_path / "launches" / "latest").symlink_to("b")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *words]) == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.html"))


def test_unwritable_directory_is_named(small, tmp_path, capsys):
    (tmp_path / "file").touch()
    for words in (
        ["--out", tmp_path / "file" / "x.html"],
        ["--out", tmp_path],
        ["--png", tmp_path / "file"],
    ):
        assert cli.main(["report", str(small), *map(str, words)]) == 1
        assert re.search(
            f"cannot be written: .*; name another path with {words[0]}", capsys.readouterr().err
        )
    assert not list(tmp_path.rglob(".*"))


def test_without_matplotlib(small, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["report", str(small)]) == 1
    assert "pip install 'tfdist[plot]'" in capsys.readouterr().err
    assert not (small / "report.html").exists()


def test_no_framework_is_loaded(run, run_python):
    (run / "train").mkdir()
    code = (
        "import sys; from tfdist import cli; assert cli.main(['report', sys.argv[1]]) == 0; "
        "assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    done = run_python(code, str(run))
    assert done.returncode == 0, done.stderr


# --- A browser ------------------------------------------------------------------------------------
_MEASURE = """<script>addEventListener("load", () => {
  const found = [], name = document.title;
  if (document.documentElement.scrollWidth > innerWidth) found.push("wider than the screen: " + document.documentElement.scrollWidth);
  for (const svg of document.querySelectorAll("figure svg")) {
    const all = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
    if (all.width < 300 || texts.length < 4) found.push("no figure: " + svg.getAttribute("aria-label"));
    texts.forEach(([a, p], i) => {
      if (p.left < all.left - 2 || p.right > all.right + 2 || p.top < all.top - 2 || p.bottom > all.bottom + 2) found.push("cut off: " + a);
      for (const [b, q] of texts.slice(i + 1)) {
        const x = Math.min(p.right, q.right) - Math.max(p.left, q.left), y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
        if (x > 1 && y > 3) found.push("overlap: " + a + " / " + b + " in " + svg.getAttribute("aria-label"));
      }
    });
  }
  for (const cell of document.querySelectorAll(".tile, .subtitle, h1, h2, h3, figcaption, .problems, .absent"))
    if (cell.scrollWidth > cell.clientWidth + 1) found.push("does not fit: " + cell.textContent);
  parent.postMessage([innerWidth, name, document.querySelectorAll("svg").length, found], "*");
});</script>"""  # noqa: E501
_BAD = """<!DOCTYPE html><title>bad</title><div style="width: 600px">wide</div><figure><svg viewBox="0 0 400 100" width="400" height="100">
<text x="10" y="50">one</text><text x="15" y="52">two</text><text x="390" y="50">three</text><text x="200" y="50">four</text></svg></figure>"""  # noqa: E501
_FRAMES = """<!DOCTYPE html><body><ol id="results"></ol><script>addEventListener("message", event => {
  const line = document.createElement("li"); line.textContent = JSON.stringify(event.data); document.getElementById("results").append(line);
});</script>"""  # noqa: E501


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_pages_in_a_browser(run, tmp_path):
    """Test that no words overlap or are cut off, and that nothing is wider than the screen.

    Also test that the browser does not complain, on a desktop and on a phone.
    """
    names = ("accuracy", "top_k_categorical_accuracy_of_a_very_long_name_indeed", "f1", NASTY)
    write_run(
        run.parent / "crowded-with-a-rather-long-name-of-a-directory",
        name="crowded",
        workers=12,
        launch=run.parent / "launch-1",
        metrics=names,
    )
    journal = run.parent / "launch-1" / "events.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    lines += [
        {**lines[4], "time": BEGUN + 19 + 0.1 * number, "number": number} for number in range(1, 5)
    ]
    journal.write_text(
        "".join(json.dumps(line) + "\n" for line in sorted(lines, key=lambda line: line["time"]))
    )
    directories = [
        run.parent,
        *(write_benchmark(tmp_path / kind, kind) for kind in ("scaling", "predict", "allreduce")),
    ]
    pages = [report(directory) for directory in directories]

    dom, complaints = browse(
        tmp_path, f"file://{run.parent}/report.html", 1280, f"--screenshot={tmp_path / 'page.png'}"
    )
    assert complaints == ""
    assert dom.count("<svg") == pages[0].figures
    assert dom.count("<article") == 3
    assert "Steps done, and what each attempt did" in html.unescape(dom)

    (tmp_path / "bad.html").write_text(_BAD + _MEASURE)
    frames = ['<iframe src="bad.html" style="width: 500px; height: 900px"></iframe>']
    for number, page in enumerate(pages):
        path = tmp_path / f"page-{number}.html"
        path.write_text(page.source.replace("</body>", _MEASURE + "</body>"), encoding="utf-8")
        frames += [
            f'<iframe src="{path.name}" style="width: {width}px; height: 900px"></iframe>'
            for width in (1280, 420)
        ]
    (tmp_path / "frames.html").write_text(_FRAMES + "".join(frames), encoding="utf-8")
    dom, complaints = browse(tmp_path, f"file://{tmp_path}/frames.html", 1400)
    assert complaints == ""
    results = [json.loads(html.unescape(line)) for line in re.findall("<li>(.*?)</li>", dom)]
    (bad,) = (problems for _, name, _, problems in results if name == "bad")
    assert [sentence.partition(":")[0] for sentence in bad] == [
        "wider than the screen",
        "overlap",
        "cut off",
    ]  # it sees what is wrong
    results = [result for result in results if result[1] != "bad"]
    assert sorted((width, figures) for width, _, figures, _ in results) == sorted(
        (width, page.figures) for page in pages for width in (1280, 420)
    )
    assert not [(width, name, problems) for width, name, _, problems in results if problems]


def test_the_image_of_the_docs_is_small():
    path = ROOT / "docs" / "images" / "report.png"
    assert path.stat().st_size < 250_000
    assert Image.open(io.BytesIO(path.read_bytes())).size[0] >= 1000
