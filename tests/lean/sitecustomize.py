"""Hide scikit-learn, matplotlib and the like from Keras.

Keras imports them wherever they are installed.

Python imports this at the start of each process of a test. Such a process would spend a third of
its start on packages that are there for other tests, and that users of tfdist need not have. Any
other importer gets them.
"""

import sys

OPTIONAL = frozenset({"IPython", "matplotlib", "pandas", "sklearn"})


class Absent:
    """Raise ModuleNotFoundError where Keras imports an optional package."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in OPTIONAL and _importer().startswith("keras."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _importer():
    """Return the module whose import statement runs."""
    frame = sys._getframe(2)
    while frame and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame else ""


sys.meta_path.insert(0, Absent)
