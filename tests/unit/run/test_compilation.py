"""Test optimizers, schedules, losses and metrics that a config names."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import config
from tfdist.config.keras_names import OPTIMIZERS
from tfdist.run import compilation
from tfdist.run.train_command import run
from tfdist.telemetry.layout import read_json_lines

CODE = """
import keras

def optimizer(learning_rate, momentum=0.0):
    return keras.optimizers.SGD(learning_rate, momentum)

def number(learning_rate):
    return 3

def half(learning_rate, updates, power):
    return keras.optimizers.schedules.PolynomialDecay(learning_rate, updates, power=power)

def loss(y_true, y_pred, scale=1.0):
    return scale * keras.losses.sparse_categorical_crossentropy(y_true, y_pred)

def right(y_true, y_pred):
    return keras.metrics.sparse_categorical_accuracy(y_true, y_pred)

class Hits(keras.metrics.SparseTopKCategoricalAccuracy):
    pass
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own_training.py"
    path.write_text(CODE)
    return path


def train(**settings):
    return config.Run.from_dict({"train": settings}).train


def batches(steps=10):
    return tf.data.Dataset.range(steps)


def rates(steps=10, accumulate=1, **settings):
    """Return the learning rates of all updates and of one more."""
    settings = train(learning_rate=1.0, **settings)
    rate = compilation.learning_rate(settings, batches(steps), accumulate)
    updates = steps * settings.epochs // accumulate
    return [round(float(rate(step)), 3) for step in range(updates + 1)]


def test_steps_multiply_the_rate_after_epochs():
    options = {"epochs": (1, 3)}
    assert rates(2, epochs=4, schedule="steps", schedule_options=options) == [
        *[1] * 2,
        *[0.1] * 4,
        *[0.01] * 3,
    ]
    options = {"epochs": [1, 3], "factor": [0.5, 0.2]}
    assert rates(2, epochs=4, schedule="steps", schedule_options=options) == [
        *[1] * 2,
        *[0.5] * 4,
        *[0.1] * 3,
    ]


def test_a_warm_up_comes_before_each_schedule():
    warm = [0, 0.25, 0.5, 0.75]
    assert rates(4, epochs=2, warmup_epochs=1) == [*warm, *[1] * 5]
    linear = {"schedule": "polynomial", "schedule_options": {"final": 0.2}}
    assert rates(4, epochs=2, warmup_epochs=1, **linear) == [*warm, 1, 0.8, 0.6, 0.4, 0.2]
    cosine = rates(4, epochs=2, warmup_epochs=1, schedule="cosine")
    assert cosine == [*warm, 1, 0.854, 0.5, 0.146, 0]
    after = {"schedule": "steps", "schedule_options": {"epochs": 1.5}}
    assert rates(4, epochs=2, warmup_epochs=1, **after) == [*warm, 1, 1, 0.1, 0.1, 0.1]


def test_schedules_count_updates_not_steps():
    linear = {"schedule": "polynomial", "epochs": 2}
    assert rates(4, accumulate=2, **linear) == [1, 0.75, 0.5, 0.25, 0]


def test_a_schedule_needs_a_known_length():
    unknown = tf.data.Dataset.range(3).filter(lambda x: x > 0)
    for settings in ({"schedule": "cosine"}, {"warmup_epochs": 1}):
        with pytest.raises(ValueError, match=r"^train\.(schedule|warmup_epochs): expected a data"):
            compilation.learning_rate(train(**settings), unknown)
    assert compilation.learning_rate(train(), unknown) == 1e-3


def test_an_optimizer_gets_its_options():
    settings = train(
        optimizer="AdamW",
        optimizer_options={"beta_1": 0.8, "clipnorm": 1.0},
        weight_decay=0.02,
        ema=0.99,
    )
    built = compilation.optimizer(settings, batches())
    assert isinstance(built, keras.optimizers.AdamW)
    values = (built.beta_1, built.clipnorm, built.weight_decay, built.use_ema, built.ema_momentum)
    assert values == (0.8, 1.0, 0.02, True, 0.99)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_can_be_made(name):
    assert isinstance(
        compilation.optimizer(train(optimizer=name), batches()), keras.optimizers.Optimizer
    )


def test_functions_of_the_user_are_taken(file):
    settings = train(
        optimizer=f"{file}:optimizer",
        optimizer_options={"momentum": 0.9},
        schedule=f"{file}:half",
        schedule_options={"power": 1.0},
        loss=f"{file}:loss",
        loss_options={"scale": 2.0},
        metrics=f"accuracy, {file}:right, {file}:Hits",
        metric_options={f"{file}:Hits": {"k": 2, "name": "hits"}},
    )
    built = compilation.optimizer(settings, batches())
    assert built.momentum == 0.9
    assert float(compilation.learning_rate(settings, batches())(40)) == pytest.approx(0.00055)
    y, p = np.array([0]), np.array([[0.5, 0.5]])
    loss = compilation.loss(settings)
    assert float(loss(y, p)[0]) == pytest.approx(2 * np.log(2))
    assert loss.__name__ == "loss"
    accuracy, right, hits = compilation.metrics(settings)
    assert (accuracy, right.__name__, hits.name, hits.get_config()["k"]) == (
        "accuracy",
        "right",
        "hits",
        2,
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"optimizer": "sgd", "optimizer_options": {"momentun": 1}},
            r"train\.optimizer_options\.momentun: train\.optimizer=sgd has no such option. "
            "Did you mean momentum",
        ),
        (
            {"optimizer": "sgd", "optimizer_options": {"momentum": 7}},
            r"train\.optimizer=sgd, train\.optimizer_options: .*momentum",
        ),
        (
            {"optimizer": "adam", "optimizer_options": {"momentm": 0.9}},
            r"train\.optimizer_options\.momentm: train\.optimizer=adam has no such option. "
            "Expected one of amsgrad, beta_1, beta_2, (?!.*ema_momentum)",
        ),
        ({"optimizer": "{file}:number"}, r"expected the function to return a keras\.optimizers"),
        ({"loss_options": {"logits": True}}, r"train\.loss_options\.logits: .*Did you mean"),
        (
            {"metrics": "auc", "metric_options": {"auc": {"num": 3}}},
            r"train\.metric_options\.auc\.num: train\.metrics=auc has no such option",
        ),
        ({"metrics": "{file}:absent"}, r"train\.metrics=.*absent: .* defines no function absent"),
    ],
)
def test_wrong_options_are_named(file, settings, message):
    settings = train(
        **{
            key: value.format(file=file) if isinstance(value, str) else value
            for key, value in settings.items()
        }
    )
    with pytest.raises(ValueError, match=message):
        (
            compilation.optimizer(settings, batches()),
            compilation.loss(settings),
            compilation.metrics(settings),
        )


def test_a_run_with_all_of_them_leaves_a_model_that_loads_elsewhere(
    tmp_path, digits_dir, run_python
):
    summary = run(
        config.Run.from_dict(
            {
                "strategy": {"name": "one_device", "devices": "cpu"},
                "data": {
                    "data_dir": str(digits_dir),
                    "train_split": "train[:20%]",
                    "eval_split": "test[:240]",
                    "global_batch": 60,
                },
                "model": {"name": "mlp", "options": {"widths": (8,)}},
                "train": {
                    "epochs": 3,
                    "optimizer": "sgd",
                    "optimizer_options": {"momentum": 0.9},
                    "learning_rate": 0.1,
                    "schedule": "steps",
                    "schedule_options": {"epochs": (2,)},
                    "warmup_epochs": 1,
                    "weight_decay": 1e-4,
                    "ema": 0.9,
                    "metrics": "accuracy,sparse_top_k_categorical_accuracy",
                    "metric_options": {"sparse_top_k_categorical_accuracy": {"k": 3}},
                },
                "output": {"dir": str(tmp_path / "run")},
            }
        )
    )
    metrics = summary["metrics"]
    assert metrics["sparse_top_k_categorical_accuracy"] >= metrics["accuracy"] > 0
    last = read_json_lines(tmp_path / "run" / "history.jsonl")[-1]
    assert metrics["loss"] != last["val_loss"]  # the average has replaced the weights
    done = run_python(
        "import keras, sys, tfdist.run.warm_up; m = keras.models.load_model(sys.argv[1]); "
        "rate = m.optimizer.get_config()['learning_rate']; "
        "print(keras.saving.get_registered_object(rate['registered_name']).__module__)",
        summary["model"],
    )
    assert done.stdout.split()[-1:] == ["tfdist.run.warm_up"], done.stderr
