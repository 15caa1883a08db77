"""Windows of a step breakdown become what is typical of them."""

import statistics

from tfdist.telemetry.step_records import PARTS


def typical(windows):
    """Seconds per step of each part: the median over the windows, of which a pause of the machine spoils a few."""
    return {
        part: statistics.median(window.parts[part] / window.steps for window in windows)
        for part in PARTS
    }
