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

    def on_class_members(self, *, cls: griffe.Class, **kwargs: object) -> None:
        """Remove a class' overrides of Keras' methods, whose docstrings only name Keras' class."""
        for name, member in list(cls.members.items()):
            if member.docstring and member.docstring.value.startswith("See `keras."):
                cls.del_member(name)
