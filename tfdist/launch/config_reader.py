"""Process that runs a config file, and prints its section `launch` as JSON.

A config file is a program. In a process of its own it may import TensorFlow, start threads or
print, without effect on the launcher.
"""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
import traceback
from collections.abc import Sequence
from typing import Any

SECTION = "launch"


def read(path: str, *text: str) -> dict[str, Any]:
    """Return the section of a config file, or what is wrong with the file.

    Args:
        path: Path of the file.
        *text: Text for `get_config`, if there is one.

    Returns:
        A dict with the key "section", or with the key "error".
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            section = runpy.run_path(path)["get_config"](*text).get(SECTION) or {}
        section = section.to_dict() if hasattr(section, "to_dict") else section
        if not isinstance(section, dict):
            return {"error": f"{SECTION}: expected a section of options, received {section!r}"}
        json.dumps(section)
    except BaseException as error:
        if isinstance(error, KeyError) and error.args == ("get_config",):
            return {"error": "expected a function get_config(), found none"}
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == path
        ]
        where = f" (line {lines[-1]})" if lines else ""
        return {"error": f"expected a config, received {type(error).__name__}: {error}{where}"}
    return {"section": section}


def main(argv: Sequence[str]) -> None:
    """Print the section of the config file that the words name."""
    print(json.dumps(read(*argv)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
