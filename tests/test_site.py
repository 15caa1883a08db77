"""The documentation site has no warnings or dead links, and loads nothing from a network."""

import html.parser
import pathlib
import re
import subprocess
import sys
import urllib.parse

import pytest

from tests.processes import ROOT
from tests.test_public_names import exported

pytest.importorskip("material", reason="pip install -e '.[docs]' installs MkDocs")

# Attributes by which a page loads or leads to something.
LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}
# A function in a module of its name, whose anchor has the name twice; a module.
HEADED = {"tfdist.data.pipeline", "tfdist.data.transforms"}
TIMEOUT_S = 240  # some 10 on an idle machine


class Page(html.parser.HTMLParser):
    """What a page loads, where its links lead, and which anchors it has."""

    def __init__(self, path: pathlib.Path):
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif (tag, name) in LOADED and value:
                self.loaded.append(value)
            elif (tag, name) == ("a", "href") and value:
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it, elsewhere."""
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def external(link):
    return bool(urllib.parse.urlsplit(link).scheme or urllib.parse.urlsplit(link).netloc)


def test_every_link_has_a_target(site, pages):
    dead = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # a server shows it in place of any page, so its links begin at the root
        for link in {*page.links, *page.loaded}:
            if external(link):
                continue
            parts = urllib.parse.urlsplit(link)
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve()
            target = target if parts.path else path
            anchor = urllib.parse.unquote(parts.fragment)
            if not target.is_file() or (
                anchor and target in pages and anchor not in pages[target].anchors
            ):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert not dead


def test_pages_load_nothing_from_a_network(site, pages):
    loaded = [
        f"{path.relative_to(site)}: {link}"
        for path, page in pages.items()
        for link in page.loaded
        if external(link) and not link.startswith("data:")
    ]
    styles = [
        f"{path.relative_to(site)}: {match[0]}"
        for path in site.rglob("*.css")
        for match in re.finditer(
            r"(url\(|@import)\s*['\"]?(https?:)?//[^)'\"]*", path.read_text(encoding="utf-8")
        )
    ]
    assert not loaded + styles


def test_every_public_name_is_in_the_reference(pages):
    anchors = set().union(*(page.anchors for page in pages.values()))
    modules = exported()
    names = {f"{module}.{name}" for module, names in modules.items() for name in names}
    assert not names - set(modules) - anchors - HEADED - {"tfdist.__version__"}
    private = {"tfdist.models.is_own", "tfdist.config.nearest", "tfdist.backup.snapshot.pack"}
    assert not private & anchors


def test_site_has_each_kind_of_page(site):
    for page in ("index", "notebooks/quickstart", "benchmarks/reports/sync", "CONTRIBUTING"):
        assert (site / f"{page}.html").is_file()
    assert "usage: tfdist launch" in (site / "api" / "commands.html").read_text(encoding="utf-8")
    assert (site / "search" / "search_index.js").is_file()  # search in pages opened as files
