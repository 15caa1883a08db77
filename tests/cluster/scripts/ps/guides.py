"""Train the models of Keras' guides on parameter servers, and compare them with one device.

With one worker the steps have the order of the data, so that the numbers are those of one device.
"""

import functools
import os

import numpy as np

import tfdist
from tests.parity import guide_cases
from tests.parity.guide_cases import CASES

GUIDES = {}


@functools.cache
def one_device():
    """Return a strategy of this process alone, which sees no cluster."""
    del os.environ["TF_CONFIG"]
    return tfdist.make_strategy("one_device", devices="cpu")


def equal(case, strategy):
    expected, found = CASES[case](one_device()), CASES[case](strategy)
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


for _case, _function in CASES.items():
    if _function.__module__ == guide_cases.__name__:
        GUIDES[_case] = functools.partial(equal, _case)
