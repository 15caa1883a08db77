"""Read data pipelines by way of data workers, as a task of a launch.

The command is `served.py read DIRECTORY` or `served.py forever DIRECTORY`.
"""

import json
import os
import pathlib
import sys
import time

import tensorflow as tf

from tfdist.cluster.spec import ClusterSpec
from tfdist.data import pipeline, records

EPOCHS = 2


def by_number(directory, service):
    """Return a data pipeline of record files that hold numbers, read at random."""
    return pipeline(
        records(directory, access="random"), 12, seed=3, transform=noisy, service=service
    )


def by_file(directory, service):
    """Return a data pipeline of the record files, each read from beginning to end."""
    return pipeline(
        records(directory, access="stream"),
        12,
        seed=4,
        shuffle=40,
        tail="pad",
        transform=noisy,
        service=service,
    )


def noisy(stored, seed):
    return tf.strings.to_number(stored, tf.int64), tf.random.stateless_uniform([2], seed)


def read(batches, worker, workers):
    """Return the batches that a worker gets from a data pipeline in each epoch, in order."""
    share = batches.replica_rows(worker, 1, workers)
    return [
        [[x.numpy().tolist() for x in tf.nest.flatten(step)] for step in share]
        for _ in range(EPOCHS)
    ]


def main():
    action, directory = sys.argv[1:]
    spec = ClusterSpec.from_environ()
    if action == "read":
        batches = [
            read(kind(directory, True), spec.rank, len(spec.training_tasks))
            for kind in (by_number, by_file)
        ]
        pathlib.Path(f"{spec.task}.json").write_text(json.dumps(batches))
        return
    steps = 0
    while True:
        for _ in by_number(directory, True).repeat():
            time.sleep(0.01)
            steps += 1
            if steps == 3:
                pathlib.Path(f"{os.environ['TFDIST_TASK']}.ready").touch()


if __name__ == "__main__":
    main()
