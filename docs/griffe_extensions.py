"""Extension of griffe, which reads the docstrings for the API reference."""

import re

import griffe


class Docstrings(griffe.Extension):
    """Show doctests as code, and leave out methods that only Keras calls."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Rename the section `Example:`, since griffe knows the plural alone."""
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
            if text.startswith("See `keras."):
                obj.public = False
