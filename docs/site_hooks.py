"""Hooks of MkDocs: pages made from files outside of docs/, and links between all of them.

The pages of docs/ link to notebooks, reports, configs and scripts by paths that work in the
repository. In the site, a Markdown file or notebook becomes a page, and so does any other file
that a page links to: its text, highlighted.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import posixpath
import re

import nbconvert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tfdist import cli

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "SECURITY.md",
    "benchmarks/reports/*.md",
    "notebooks/*.ipynb",
)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)((?:#[^)\s]*)?)(?=\))")
# A fence with words after the language: a file name, or how tests treat the commands.
FENCE = re.compile(r"^(\s*```\w+) (\S.*)$", re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", "": "text"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from files outside of docs/."""
    waiting = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    for file in files.documentation_pages():
        waiting += linked_files(source_of(file.src_uri), file.content_string)
    while waiting:
        path = waiting.pop()
        source = path.relative_to(ROOT).as_posix()
        if source.startswith("docs/") or files.get_file_from_path(page_of(source)):
            continue
        text, images = page_text(path)
        for name, content in images.items():
            files.append(File.generated(config, name, content=content))
        files.append(File.generated(config, page_of(source), content=text))
        waiting += linked_files(source, text)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to files as links to their pages, and fences as Material reads them."""
    source = source_of(page.file.src_uri)

    def rewrite(link: re.Match) -> str:
        target = target_of(source, link[1])
        if not (ROOT / target).is_file():
            return link[0]  # MkDocs warns of it, or it is an image of a notebook
        path = posixpath.relpath(page_of(target), posixpath.dirname(page.file.src_uri) or ".")
        return path + link[2]

    markdown = FENCE.sub(fence, LINK.sub(rewrite, markdown))
    return markdown + commands() if page.file.src_uri == "api/commands.md" else markdown


def commands() -> str:
    """Return a section for each command, with its help."""
    os.environ["COLUMNS"] = "88"  # whatever terminal this runs in
    sections = []
    for name in ("", *cli.COMMANDS):
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            cli.main([*name.split(), "--help"])
        sections.append(
            f"\n## {f'tfdist {name}'.strip()}\n\n```text\n{text.getvalue().strip()}\n```\n"
        )
    return "".join(sections)


def fence(line: re.Match) -> str:
    """Return the first line of a block of code, with a file's name as its title."""
    name = line[2] if line[1].endswith("```python") else ""
    return f'{line[1]} title="{name}"' if name else line[1]


def page_of(source: str) -> str:
    """Return the page, below the site's root, of a file of the repository."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    stem, extension = posixpath.splitext(source)
    return {".md": source, ".ipynb": f"{stem}.md"}.get(extension, f"{source}.md")


def source_of(page: str) -> str:
    """Return the file of the repository that a page is made from."""
    for source in (f"docs/{page}", page, page.removesuffix(".md")):
        if (ROOT / source).is_file():
            return source
    return page.removesuffix(".md") + ".ipynb"


def target_of(source: str, link: str) -> str:
    """Return the path, from the repository's root, that a link in a file leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def linked_files(source: str, text: str) -> list[pathlib.Path]:
    """Return the files of the repository that a text links to."""
    targets = (ROOT / target_of(source, link) for link, _ in LINK.findall(text))
    return [path for path in targets if path.is_file()]


def page_text(path: pathlib.Path) -> tuple[str, dict[str, bytes]]:
    """Return the Markdown of a file, and the content of its images by their names."""
    source = path.relative_to(ROOT).as_posix()
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8"), {}
    if path.suffix == ".ipynb":
        directory = posixpath.dirname(source)
        text, resources = nbconvert.MarkdownExporter().from_filename(
            str(path), {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
        )
        images = resources["outputs"].items()
        return text, {posixpath.join(directory, name): content for name, content in images}
    language = LANGUAGES.get(path.suffix, "text")
    content = path.read_text(encoding="utf-8")
    return f"# {source}\n\n````{language}\n{content.rstrip()}\n````\n", {}
