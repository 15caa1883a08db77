"""A task of a launch that reads pipelines by way of its data workers: `served.py read DIRECTORY` or `served.py forever DIRECTORY`."""

import json
import os
import pathlib
import sys
import time

import tensorflow as tf

from tfdist.cluster import ClusterSpec
from tfdist.data import pipeline, records

EPOCHS = 2


def pipelines(directory, service):
    """Of record files that hold numbers: one reads them at random, the other from beginning to end."""

    def noisy(stored, seed):
        return tf.strings.to_number(stored, tf.int64), tf.random.stateless_uniform([2], seed)

    return [
        pipeline(records(directory, access="random"), 12, seed=3, transform=noisy, service=service),
        pipeline(records(directory, access="stream"), 12, seed=4, shuffle=40, tail="pad", transform=noisy, labels=True, service=service),
    ]


def read(directory, service, worker, workers):
    """What a worker gets of each pipeline in each epoch, in its order."""
    shares = [p.share(worker, 1, workers, epoch) for p in pipelines(directory, service) for epoch in range(EPOCHS)]
    return [[[x.numpy().tolist() for x in tf.nest.flatten(share)] for share in epoch] for epoch in shares]


def main():
    action, directory = sys.argv[1:]
    spec = ClusterSpec.from_environ()
    if action == "read":
        found = read(directory, True, spec.rank, len(spec.training_tasks))
        pathlib.Path(f"{spec.task}.json").write_text(json.dumps(found))
        return
    steps = 0
    while True:
        for _ in pipelines(directory, True)[0].repeat():
            time.sleep(0.01)
            steps += 1
            if steps == 3:
                pathlib.Path(f"{os.environ['TFDIST_TASK']}.ready").touch()


if __name__ == "__main__":
    main()
