"""Serve in worker and ps tasks, and count in the chief on a stock ParameterServerStrategy.

The command is `serving.py HOW [START RETURN]`.

HOW the chief goes on once it has counted: `finish` tells the servers, `leave` ends without a word,
`stay` stays.
"""

import logging
import sys
import time

import tensorflow as tf

from tfdist.cluster import resolvers
from tfdist.cluster.addresses import answers
from tfdist.strategies.server import end_servers, serve


def count(cluster):
    """Run loops on the workers that update a variable on the ps."""
    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
    )
    print("chief answers:", answers(cluster.task.address, 3), flush=True)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        total = tf.Variable(0)

    @tf.function
    def add():
        for _ in tf.range(5):
            total.assign_add(1)

    for _ in range(10):
        coordinator.schedule(add)
    coordinator.join()
    return int(total)


def main(how, start="120", back="60"):
    logging.basicConfig(format="%(message)s")
    logging.getLogger("tfdist").setLevel(logging.INFO)
    cluster = resolvers.resolve()
    if cluster.task_type != "chief":
        serve(cluster, start_timeout=float(start), return_timeout=float(back))
    print("counted", count(cluster), flush=True)
    if how == "stay":
        time.sleep(1000)
    if how == "finish":
        end_servers(cluster)


if __name__ == "__main__":
    main(*sys.argv[1:])
