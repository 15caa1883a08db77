"""Extension of griffe, which reads the docstrings for the API reference."""

import re

import griffe


class Examples(griffe.Extension):
    """Show the doctests of `Example:` as code: griffe knows the plural alone."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Rename the section of an object's docstring."""
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
