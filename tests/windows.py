"""Compute typical values of the windows of a step breakdown."""

import statistics

from tfdist.telemetry.step_records import PARTS


def typical(windows):
    """Return the seconds per step of each part: the median over the windows.

    A pause of the machine spoils only a few windows.
    """
    return {
        part: statistics.median(window.parts[part] / window.steps for window in windows)
        for part in PARTS
    }
