"""Train the CNN of digits.py by two workers that share one parameter server: over 96 % right.

    tfdist launch --chief --workers 2 --ps 1 -- tfdist train --config=configs/digits_ps.py

Every task runs this command. The chief trains, writes and prints; workers and parameter servers
serve until it is done. Without a cluster the same file trains in one process.
"""

import tfdist


def get_config():
    config = tfdist.config.default()
    config.name = "digits_ps"  # logs, backup and model go to runs/digits_ps

    config.data.name = "tfdist_digits"
    config.data.global_batch = (
        32  # of one step, on one worker: more workers make more steps at a time, not smaller shares
    )
    config.data.cache = True

    config.model.name = "cnn"
    config.model.options.dropout = 0.25

    config.train.epochs = 10
    config.train.learning_rate = 2e-3
    config.train.schedule = "cosine"
    config.train.steps_per_execution = 10  # what a worker does at a time
    return config
