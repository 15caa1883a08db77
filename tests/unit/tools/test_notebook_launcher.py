"""Test that `notebook_launcher` names what is wrong before it starts workers."""

import pytest

from tfdist.tools import notebook_launcher


@pytest.mark.parametrize("value", [5, None, [print]])
def test_what_is_no_function_is_an_error(value, monkeypatch):
    monkeypatch.setattr(notebook_launcher, "_run", lambda *words: pytest.fail("workers start"))
    with pytest.raises(ValueError, match=r"expected a function, received .* of class") as caught:
        notebook_launcher.notebook_launcher(value)
    assert "notebook_launcher(train, (0.1,), workers=2)" in str(caught.value)
