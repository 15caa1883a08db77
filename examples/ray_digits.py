"""Train a network on handwritten digits with Ray Train, on workers that may fail, come and go.

pip install 'tfdist[ray]'
python examples/ray_digits.py --backup_dir /shared/backup
python examples/ray_digits.py --backup_dir /shared/backup --min_workers 1 --workers 4
"""

import argparse
import os

try:
    import ray
    import ray.train
    from ray.train.tensorflow import TensorflowTrainer
except ImportError as error:
    raise SystemExit(f"{error}; pip install 'tfdist[ray]'") from error


def train_worker(config):
    """Train in a worker; Ray Train calls this again in new workers after a failure."""
    import keras

    import tfdist

    class Report(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            context = ray.train.get_context()
            if context.get_world_rank() == 0:
                workers = context.get_world_size()
                print(f"epoch {epoch + 1} of {self.params['epochs']} on {workers} workers")
            ray.train.report({"epoch": epoch + 1, **{k: float(v) for k, v in logs.items()}})

    backup = tfdist.BackupAndRestore(config["backup_dir"], save_freq=config["save_freq"])

    class SaveOnPreemption(keras.callbacks.Callback):
        saved = False

        def on_train_batch_end(self, batch, logs=None):
            # All workers ask at the same steps; the answer is the same on all of them.
            if batch % 10 == 0 and not self.saved and ray.train.get_preemption_info():
                self.saved = True
                backup.request_save()

    strategy = tfdist.make_strategy()  # finds the TF_CONFIG that Ray Train has set
    keras.utils.set_random_seed(0)
    train = tfdist.data.pipeline(
        tfdist.data.load("tfdist_digits", "train", config["data_dir"]), global_batch=64, seed=0
    )
    with strategy.scope():
        model = tfdist.models.build("cnn", input_shape=(8, 8, 1), classes=10)
        model.compile(
            optimizer=keras.optimizers.Adam(3e-3),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    model.fit(
        train,
        epochs=config["epochs"],
        shuffle=False,
        verbose=0,
        callbacks=[Report(), SaveOnPreemption(), backup],
    )
    model.save(os.path.join(config["results"], "digits.keras"))  # the chief writes


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default="auto", help="HOST:PORT of the cluster (auto)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--min_workers", type=int, help="train with fewer if nodes are lacking")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--backup_dir", required=True, help="on storage that all nodes see")
    parser.add_argument("--save_freq", default="epoch")
    parser.add_argument("--results", default="runs/ray", help="on storage that all nodes see")
    parser.add_argument("--data_dir", help="directory of TFDS on the nodes")
    args = parser.parse_args()
    results = os.path.abspath(args.results)
    os.makedirs(results, exist_ok=True)
    ray.init(address=args.address)
    workers = args.workers if args.min_workers is None else (args.min_workers, args.workers)
    TensorflowTrainer(
        train_worker,
        train_loop_config={
            "epochs": args.epochs,
            "backup_dir": os.path.abspath(args.backup_dir),
            "save_freq": int(args.save_freq) if args.save_freq.isdigit() else args.save_freq,
            "results": results,
            "data_dir": args.data_dir,
        },
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            storage_path=results, failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    ).fit()
    print(f"training is complete; the model is in {results}")


if __name__ == "__main__":
    main()
