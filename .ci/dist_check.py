"""Build wheel and sdist, install each where this clone is not seen, and use it as a user would.

`make dist-check` runs this. It needs a package index, and a few minutes: TensorFlow is installed
twice. `--keep` leaves the built files in dist/, with sbom.json, the wheel's bill of materials
(CycloneDX).
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
INSTALL_S = 1200
COMMAND_S = 300
SBOM = "sbom.json"
# What has no place in a wheel: sources of the library that it has compiled.
SOURCES = (".cc", ".h")


def main(argv: list[str]) -> int:
    """Return 0 if both artefacts work, else 1."""
    parser = argparse.ArgumentParser(prog="make dist-check", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave wheel and sdist in dist/")
    keep = parser.parse_args(argv).keep
    directory = pathlib.Path(tempfile.mkdtemp(prefix="tfdist-dist-"))
    assert ROOT not in directory.parents, f"{directory} is in the clone: set TMPDIR"
    try:
        artefacts = build(directory)
        for artefact in artefacts:
            use(artefact, directory / artefact.suffix.strip("."))
            if keep:
                (ROOT / "dist").mkdir(exist_ok=True)
                shutil.copy(artefact, ROOT / "dist")
        if keep:
            shutil.copy(directory / "whl" / SBOM, ROOT / "dist")
    except Failed as error:
        print(f"dist-check: {error}\nIts files are in {directory}.", file=sys.stderr)
        return 1
    shutil.rmtree(directory)
    print("dist-check: wheel and sdist work.")
    return 0


class Failed(Exception):
    """A step of the check failed; the message has the output."""


def run(*command: str | os.PathLike, cwd: pathlib.Path, timeout: float = COMMAND_S) -> str:
    """Return the output of a command, which sees no variable of Python and no clone.

    Raises:
        Failed: If it fails, or does not end in time.
    """
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    environ["TFDS_DATA_DIR"] = str(cwd / "tfds")
    words = [str(word) for word in command]
    print("$", " ".join([os.path.relpath(words[0], cwd), *words[1:]]), flush=True)
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{words} did not end within {timeout:.0f} s") from error
    if done.returncode:
        raise Failed(f"{words} ended with {done.returncode}\n{done.stdout}")
    return done.stdout


def environment(directory: pathlib.Path) -> pathlib.Path:
    """Make an empty virtual environment, and return the directory of its programs."""
    venv.create(directory, with_pip=True, clear=True)
    return directory / "bin"


def install(bin_: pathlib.Path, *packages: str) -> None:
    """Install packages into an environment."""
    quiet = ("-qq", "--disable-pip-version-check")
    run(bin_ / "python", "-m", "pip", "install", *quiet, *packages, cwd=bin_, timeout=INSTALL_S)


def tracked() -> list[str]:
    """Return the files of the clone that Git does not ignore, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in done.stdout.split("\0") if (ROOT / name).is_file()]


def build(directory: pathlib.Path) -> list[pathlib.Path]:
    """Build the sdist from a copy of the clone, and the wheel from the sdist; check their files."""
    clone = directory / "clone"
    for name in tracked():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    bin_ = environment(directory / "tools")
    install(bin_, "build", "twine", "cyclonedx-bom")
    run(bin_ / "python", "-m", "build", "--outdir", "../dist", ".", cwd=clone, timeout=INSTALL_S)
    paths = sorted((directory / "dist").iterdir())
    (wheel,) = (path for path in paths if path.suffix == ".whl")
    (sdist,) = (path for path in paths if path.suffix == ".gz")
    run(bin_ / "python", "-m", "twine", "check", "--strict", wheel, sdist, cwd=directory)
    packaged = {
        name for name in tracked() if name.startswith(("tfdist/", "configs/")) and "__" not in name
    }
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    pages = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "NOTICE", "README.md", "SECURITY.md"}
    pages |= {name for name in tracked() if re.fullmatch(r"docs/[^/]+\.md", name)}
    compare(sdist, packaged | pages, names)
    inside = {name for name in packaged if not name.endswith(SOURCES)}
    inside = {re.sub("^configs/", "tfdist/configs/", name) for name in inside}
    names = set(zipfile.ZipFile(wheel).namelist())
    compare(wheel, inside, names)
    for licence in ("LICENSE", "NOTICE"):
        if not any(name.endswith(f"/licenses/{licence}") for name in names):
            raise Failed(f"{wheel.name} lacks {licence}")
    return [wheel, sdist]


def compare(path: pathlib.Path, expected: set[str], names: set[str]) -> None:
    """Raise `Failed` if an artefact lacks files, or has Python files that the clone lacks."""
    missing = sorted(expected - names)
    if missing:
        raise Failed(f"{path.name} lacks {', '.join(missing)}")
    of_clone = set(tracked())
    of_clone |= {re.sub("^configs/", "tfdist/configs/", name) for name in of_clone}
    foreign = [name for name in names if name.endswith(".py") and name not in of_clone]
    if foreign:
        raise Failed(f"{path.name} has files that the clone lacks: {', '.join(foreign)}")


def use(artefact: pathlib.Path, directory: pathlib.Path) -> None:
    """Install an artefact in an environment of its own, and use it."""
    print(f"dist-check: {artefact.name}", flush=True)
    bin_ = environment(directory / "venv")
    install(bin_, str(artefact))
    list_materials(bin_, directory / SBOM, directory.parent / "tools" / "bin")
    install(bin_, "pytest")
    work = directory / "work"
    work.mkdir()
    python, tfdist = bin_ / "python", bin_ / "tfdist"
    where = run(python, "-c", "import tfdist; print(tfdist.__file__)", cwd=work).strip()
    if not pathlib.Path(where).is_relative_to(directory):
        raise Failed(f"tfdist was imported from {where}, not from {artefact.name}")
    version = run(tfdist, "--version", cwd=work)
    if f"-{version.split()[-1]}" not in artefact.name:
        raise Failed(f"{artefact.name} says that it is version {version}")
    if "launch" not in run(tfdist, "--help", cwd=work):
        raise Failed("tfdist --help does not list its commands")
    native = glob.glob(str(pathlib.Path(where).parent / "parallel/collectives/native/*.so"))
    if shutil.which("c++") and not native:
        raise Failed(f"{artefact.name}: the native library was not compiled, though c++ is here")
    show = "from tfdist.tools.new import TEMPLATES; print(*TEMPLATES)"
    for template in run(python, "-c", show, cwd=work).split():
        run(tfdist, "new", template, "--template", template, cwd=work)
        tested = run(python, "-m", "pytest", "-q", template, cwd=work).splitlines()[-1]
        print(f"{template}: {tested}", flush=True)
    words = ("--config=digits", "--config.train.epochs=1", f"--config.output.dir={work / 'run'}")
    print(run(tfdist, "train", *words, cwd=work).splitlines()[-1])
    if not (work / "run" / "summary.json").is_file():
        raise Failed("tfdist train --config=digits wrote no summary.json")


def list_materials(bin_: pathlib.Path, path: pathlib.Path, tools: pathlib.Path) -> None:
    """Write the bill of materials of an environment: what pip has installed, by versions."""
    words = ("environment", "--output-reproducible", "-o", path, bin_ / "python")
    run(tools / "cyclonedx-py", *words, cwd=path.parent)
    names = {part["name"] for part in json.loads(path.read_text())["components"]}
    if not {"tfdist", "tensorflow", "keras"} <= names:
        raise Failed(f"{path.name} lacks tfdist, tensorflow or keras: {', '.join(sorted(names))}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
