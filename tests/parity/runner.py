"""Run cases in a process of one strategy, and write their numbers to a file.

The command is `python runner.py STRATEGY DEVICES OUT [CASE ...]`.
"""

import pathlib
import pickle
import sys
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))


def connected(devices):
    """Return the strategy of processes that `keras.distribution` has connected."""
    import keras
    import tensorflow as tf

    import tfdist

    tfdist.enable(devices)
    cluster = tfdist.ClusterSpec.from_environ()
    keras.distribution.initialize(
        ",".join(cluster.jobs["worker"]), len(cluster.tasks), cluster.task_index
    )
    with keras.distribution.DataParallel().scope():
        return tf.distribute.get_strategy()


def main(name: str, devices: str, out: str, *names: str) -> None:
    import tfdist

    devices_or_none = None if devices == "-" else devices
    if name == "keras.distribution":
        strategy = connected(devices_or_none)
    else:
        strategy = tfdist.make_strategy(name, devices=devices_or_none)
    import keras

    from tests.parity.guide_cases import CASES

    results = {}
    for case in names or CASES:
        keras.backend.clear_session()
        try:
            results[case] = CASES[case](strategy)
        except Exception:
            results[case] = traceback.format_exc()
            print(case, results[case], file=sys.stderr, flush=True)
    pathlib.Path(out).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
