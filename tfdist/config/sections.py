"""Sections of a run's configuration: frozen dataclasses that check their values."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfdist.config import keras_callbacks
from tfdist.config.checks import (
    above,
    at_least,
    between,
    check,
    check_name,
    fraction,
    hint,
    named,
    nearest,
    not_one_of,
    one_of,
    step_range,
    words_of,
)
from tfdist.config.keras_names import BY_LOSS, LOSSES, METRICS, OPTIMIZERS
from tfdist.config.schedules import SCHEDULES, check_options

if TYPE_CHECKING:
    from ml_collections import ConfigDict


# Options of optimizers that are keys of their own.
KEYS_OF_OPTIONS = {
    "learning_rate": "train.learning_rate",
    "weight_decay": "train.weight_decay",
    "use_ema": "train.ema",
    "ema_momentum": "train.ema",
    "gradient_accumulation_steps": "sync.accumulate",
}
LAUNCH = "launch"  # section of `tfdist launch` and `tfdist submit`, which a run does not read
BACKENDS = ("tensorboard", "jsonl", "console", "wandb", "mlflow")
# Attributes of `tfdist.data.transforms.Images`, without the size.
IMAGE_OPTIONS = (
    "crop",
    "area",
    "aspect",
    "fraction",
    "flip",
    "brightness",
    "contrast",
    "saturation",
    "hue",
    "mean",
    "std",
    "dtype",
    "channels",
    "method",
    "antialias",
    "shrink",
)
# Options of each model of `tfdist.models`, besides those that the data have.
MODEL_OPTIONS = {
    "mlp": ("widths", "dropout", "scale"),
    "cnn": ("filters", "units", "dropout", "scale"),
    "resnet": ("filters", "blocks", "scale"),
    "resnet34": ("filters", "dropout", "scale"),
    "resnet50": ("filters", "dropout", "scale"),
    "transformer": ("vocabulary", "width", "heads", "depth", "dropout", "scale"),
}
MODELS = tuple(MODEL_OPTIONS)
OF_DATA = ("input_shape", "classes")  # options of all models, which come from the data
AUTO = "auto"  # in place of a number: the largest that fits
STRATEGIES = (
    "auto",
    "one_device",
    "mirrored",
    "central_storage",
    "multi_worker_mirrored",
    "parameter_server",
    "tpu",
)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Distribution of training: the arguments of `tfdist.make_strategy`.

    Attributes:
        name: Strategy, such as "mirrored"; "auto" chooses one by cluster and devices.
        cluster: File with the cluster's addresses, YAML or JSON; None: the environment describes
            the cluster, or there is only this machine.
        task: Task of this process in that file, such as "worker:1"; None: the file defines it.
        devices: Devices to use, as `make_strategy` accepts them: "2", "cpu:2" or "gpu:0,gpu:1";
            None: all.
        communication: Implementation of the workers' gradient all-reduce: "auto", "ring", "nccl" or
            "native".
        timeout: Longest time to wait for the other workers, in seconds.
        device_memory_gb: Memory of each device in GB (10^9 bytes), which data.global_batch=auto
            fills; None: it is unknown.
        reading: Reader of the data under parameter_server: "workers", "coordinator" or "auto".
    """

    name: str = one_of(STRATEGIES, "auto")
    cluster: str | None = None
    task: str | None = None
    devices: str | None = None
    communication: str = one_of(("auto", "ring", "nccl", "native"), "auto")
    timeout: float = above(0, 600.0)
    device_memory_gb: float | None = above(0, None)
    reading: str = one_of(("auto", "workers", "coordinator"), "auto")

    def __post_init__(self) -> None:
        check(self, "strategy")


@dataclasses.dataclass(frozen=True)
class Data:
    """Data to train and evaluate on.

    Attributes:
        name: Entry of the catalog, or TFDS data set; or FILE.py:FUNCTION, called with this section
            and "train" or "eval", which returns a Source, a `tfdist.data.pipeline` or a
            `tf.data.Dataset` of global batches. The latter two are used unchanged.
        catalog: File of a catalog of data sets; None: names are TFDS'.
        train_split: Split to train on.
        eval_split: Split to evaluate on, after every epoch and at the end.
        data_dir: Directory of prepared TFDS data sets; None: TFDS' default.
        global_batch: Number of examples per step, of all replicas together; "auto": the largest
            that fits strategy.device_memory_gb.
        shuffle: Whether to shuffle the training split again every epoch.
        tail: Treatment in training of the last examples if they do not fill a batch: "partial",
            "pad" or "drop".
        classes: Classes to use, by numbers, ranges and names with commas, "0:100,217"; their labels
            are renumbered from 0. A range ends before its second number. None: all.
        image_size: Height and width to resize images to, in pixels; None: all images already have
            one size.
        image_options: Options of `tfdist.data.transforms.images` for training and evaluation, such
            as {"fraction": 1.0}; needs image_size.
        augment: Whether to train on random crops and flips of the images; needs image_size.
        augment_options: Options of `tfdist.data.transforms.images` for training alone, such as
            {"brightness": 0.4}; needs augment.
        ignore_errors: Number of unreadable examples that training may skip, in each process.
        cache: Whether to keep the examples in memory.
        threads: Number of threads that read and transform; None: TensorFlow's default.
        service: Whether the data workers of `tfdist launch --data-workers N` read the training
            split.
    """

    name: str = "tfdist_digits"
    catalog: str | None = None
    train_split: str = "train"
    eval_split: str = "test"
    data_dir: str | None = None
    global_batch: int | str = at_least(1, 64, word=AUTO)
    shuffle: bool = True
    tail: str = one_of(("partial", "pad", "drop"), "partial")
    classes: str | None = None
    image_size: int | None = at_least(1, None)
    image_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    augment: bool = False
    augment_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ignore_errors: int = at_least(0, 0)
    cache: bool = False
    threads: int | None = at_least(1, None)
    service: bool = False

    def __post_init__(self) -> None:
        check(self, "data")
        for key, needed in (
            ("augment", "image_size"),
            ("image_options", "image_size"),
            ("augment_options", "augment"),
        ):
            value = getattr(self, key)
            if value and not getattr(self, needed):
                raise ValueError(
                    f"data.{key}: expected data.{needed} too, received {value!r} without it."
                )
        for key in ("image_options", "augment_options"):
            for name in getattr(self, key):
                if name not in IMAGE_OPTIONS:
                    raise ValueError(not_one_of(f"data.{key}", name, IMAGE_OPTIONS))

    @property
    def global_batch_size(self) -> int:
        """Return the number of examples per step.

        Raises:
            ValueError: If it is not known yet: `tfdist train` alone finds it.
        """
        if isinstance(self.global_batch, str):
            raise ValueError(
                f"data.global_batch: expected a number, received {self.global_batch!r}, which only "
                "`tfdist train` replaces by one. Pass --config.data.global_batch=N."
            )
        return self.global_batch


@dataclasses.dataclass(frozen=True)
class Model:
    """Model to train.

    Attributes:
        name: One of `tfdist.models.MODELS`; or FILE.py:FUNCTION or package.module:FUNCTION, called
            with input_shape, classes and the options, which returns a `keras.Model`. A compiled
            model is not compiled again.
        options: Options of the model, such as {"dropout": 0.1}: arguments of the function of that
            name in `tfdist.models`. "resnet" takes blocks, one number for all stages or one for
            each. Shape and classes come from the data.
    """

    name: str = named(MODELS, "cnn")
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self, "model")
        if self.name not in MODEL_OPTIONS:  # a user's function
            return
        allowed = MODEL_OPTIONS[self.name]
        for name in self.options:
            if name not in (*allowed, *OF_DATA):
                raise ValueError(
                    f'model.options.{name}: no option of "{self.name}". '
                    f"{nearest(str(name), allowed)}"
                )


@dataclasses.dataclass(frozen=True)
class Train:
    """Training: epochs, optimizer, learning rate, loss, metrics, callbacks and seed.

    Attributes:
        epochs: Number of passes over the training split.
        optimizer: Keras optimizer; or FILE.py:FUNCTION, called with learning_rate and the options,
            which returns a `keras.optimizers.Optimizer`.
        optimizer_options: Options of the optimizer, such as {"momentum": 0.9}.
        learning_rate: Learning rate; with a schedule, that of its beginning, after the warm-up.
        base_global_batch: Number of examples of an update that learning_rate is meant for. It is
            multiplied by the number that an update really has, over this one (Goyal et al. 2017,
            arXiv 1706.02677). None: it stays as it is.
        schedule: Schedule of the learning rate. "cosine" and "polynomial" decay it until the last
            step, "steps" multiplies it after some epochs; or FILE.py:FUNCTION, called with
            learning_rate, the number of updates after the warm-up, and the options, which returns a
            Keras learning-rate schedule.
        schedule_options: Options of the schedule. "cosine": final, the share of the rate at the end
            (0). "polynomial": final, and power (1). "steps": epochs, after which the rate is
            multiplied by factor (0.1), one number for all or one for each.
        warmup_epochs: Number of first epochs in which the learning rate grows from 0, in a line;
            may be a fraction.
        weight_decay: Share of each weight that the optimizer takes away in an update, multiplied by
            the learning rate; None: the optimizer's default.
        ema: Momentum of an exponential moving average of the weights, such as 0.999, which replaces
            the weights at the end of training; None: no average.
        loss: Keras loss; or FILE.py:FUNCTION, a function loss(y_true, y_pred) or a subclass of
            `keras.losses.Loss`.
        loss_options: Options of the loss, such as {"from_logits": True}.
        metrics: Keras metrics, as words with commas; FILE.py:FUNCTION may be one, a function
            metric(y_true, y_pred) or a subclass of `keras.metrics.Metric`. Empty: none.
        metric_options: Options of the metrics, by their names, such as
            {"sparse_top_k_categorical_accuracy": {"k": 5}}; those of FILE.py:FUNCTION by FUNCTION.
        callbacks: Keras callbacks, as words with commas; FILE.py:CLASS may be one, a subclass of
            `keras.callbacks.Callback`, or a function that returns one. Empty: none.
        callback_options: Options of the callbacks, by their names, such as
            {"early_stopping": {"patience": 3}}; those of FILE.py:CLASS by CLASS.
        class_weight: Weight in the loss of the examples of each class, such as {0: 1.0, 1: 5.0};
            that of other classes is 1. Metrics and the evaluation do not use it.
        precision: Keras' dtype policy.
        steps_per_execution: Number of steps per call of the train function. Logs and callbacks are
            updated every so many steps.
        jit_compile: Whether XLA compiles the steps. None: on GPUs, where it can.
        memory_freq: Number of steps after which a snapshot is saved in the memory of the host, for
            restarts by `tfdist launch --restarts`; 0: no such snapshots.
        seed: Seed of initial weights, dropout and the order of examples.
    """

    epochs: int = at_least(1, 8)
    optimizer: str = named(OPTIMIZERS, "adam", loose=True)
    optimizer_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    learning_rate: float = above(0, 1e-3)
    base_global_batch: int | None = at_least(1, None)
    schedule: str = named(tuple(SCHEDULES), "constant")
    schedule_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    warmup_epochs: float = at_least(0, 0.0)
    weight_decay: float | None = at_least(0, None)
    ema: float | None = None
    loss: str = named(LOSSES, "sparse_categorical_crossentropy", loose=True)
    loss_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: str = "accuracy"
    metric_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    callbacks: str = ""
    callback_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    class_weight: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    precision: str = one_of(("float32", "mixed_bfloat16", "mixed_float16"), "float32")
    steps_per_execution: int = at_least(1, 1)
    jit_compile: bool | None = None
    memory_freq: int = at_least(0, 0)
    seed: int = at_least(0, 0)

    def __post_init__(self) -> None:
        check(self, "train")
        check_options(self.schedule, self.schedule_options, self.epochs)
        if self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"train.warmup_epochs: expected less than train.epochs, which are {self.epochs}; "
                f"received {self.warmup_epochs:g}."
            )
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(
                f"train.ema: expected a momentum between 0 and 1, such as 0.999; received "
                f"{self.ema!r}."
            )
        for name in self.optimizer_options:
            if key := KEYS_OF_OPTIONS.get(name):
                raise ValueError(
                    f"train.optimizer_options.{name}: expected this as the key {key}, which says "
                    "the same."
                )
        self.metric_names()
        for word in self.callback_names():
            keras_callbacks.check_options(word, options_of(self.callback_options, word))
        self.class_weights()

    def metric_names(self) -> tuple[str, ...]:
        """Return the names in `metrics`.

        Raises:
            ValueError: If a word is not a Keras metric or a function, or a metric with options is
                not listed.

        Example:
            >>> Train(metrics="accuracy, auc").metric_names()
            ('accuracy', 'auc')
        """
        words = words_of(self.metrics)
        for word in words:
            check_name("train.metrics", word, METRICS, loose=True)
        _check_options("train.metric", self.metric_options, words)
        for name in self.metric_options:
            if name.lower() in BY_LOSS:
                raise ValueError(
                    f"train.metric_options.{name}: expected the full name of a metric, such as "
                    f"sparse_categorical_{name.lower()}; received {name!r}, whose kind the loss "
                    "chooses."
                )
        return words

    def callback_names(self) -> tuple[str, ...]:
        """Return the names in `callbacks`.

        Raises:
            ValueError: If a word is not a Keras callback or a class, or appears twice, or a
                callback with options is not listed.

        Example:
            >>> Train(callbacks="early_stopping, terminate_on_nan").callback_names()
            ('early_stopping', 'terminate_on_nan')
        """
        words = words_of(self.callbacks)
        names: list[str] = []
        for word in words:
            name = keras_callbacks.name_of(word) or short_name(word)
            if name in names:
                raise ValueError(
                    f"train.callbacks: expected each name once, received {name} twice. Name a "
                    "function of your own, FILE.py:FUNCTION, that returns the second one."
                )
            names.append(name)
        _check_options("train.callback", self.callback_options, words)
        return words

    def class_weights(self) -> dict[int, float]:
        """Return the weight of each class in `class_weight`.

        Raises:
            ValueError: If a class or a weight is wrong.

        Example:
            >>> Train(class_weight={"0": 1, "1": 2.5}).class_weights()
            {0: 1.0, 1: 2.5}
        """
        weights = {}
        for name, weight in self.class_weight.items():
            key = f"train.class_weight.{name}"
            if not str(name).isdecimal():  # keys of JSON are texts
                raise ValueError(f"{key}: expected the number of a class, received {name!r}.")
            if (
                isinstance(weight, bool)
                or not isinstance(weight, int | float)
                or not 0 <= weight < math.inf
            ):
                raise ValueError(f"{key}: expected a number of at least 0, received {weight!r}.")
            weights[int(name)] = float(weight)
        return weights


@dataclasses.dataclass(frozen=True)
class Sync:
    """Synchronization of the replicas: the arguments of the policies in `tfdist.sync`.

    Attributes:
        kind: "gradients": replicas aggregate gradients before each update. "local_sgd" or "diloco":
            replicas exchange weights after some steps.
        combine: Gradient aggregation: "mean", "replicas" or "sum".
        comm_dtype: Data type of the tensors that are sent, "bfloat16" or "float16"; None:
            unchanged.
        bucket_bytes: Bytes of small tensors that are sent together in one bucket.
        clip_norm: Largest global norm of the gradients, to which they are clipped; None: no
            clipping.
        accumulate: Number of steps whose gradients are averaged for one update and one exchange.
        skip_nonfinite: Whether to skip an update with a gradient that is infinite or NaN, on all
            replicas.
        every: Number of steps between two exchanges of local_sgd and diloco; 0: an epoch.
        warmup: Number of first steps in which local_sgd and diloco exchange gradients.
        outer_learning_rate: Learning rate of diloco's outer optimizer; None: 0.7.
        outer_momentum: Momentum of diloco's outer optimizer; None: 0.9.
    """

    kind: str = one_of(("gradients", "local_sgd", "diloco"), "gradients")
    combine: str = one_of(("mean", "replicas", "sum"), "mean")
    comm_dtype: str | None = one_of(("bfloat16", "float16"), None)
    bucket_bytes: int = at_least(1, 4 << 20)
    clip_norm: float | None = above(0, None)
    accumulate: int = at_least(1, 1)
    skip_nonfinite: bool = False
    every: int = at_least(0, 8)
    warmup: int = at_least(0, 0)
    outer_learning_rate: float | None = above(0, None)
    outer_momentum: float | None = fraction(None)

    def __post_init__(self) -> None:
        check(self, "sync")
        of_gradients = ("combine", "clip_norm", "accumulate", "skip_nonfinite")
        of_local = ("every", "warmup")
        of_outer = ("outer_learning_rate", "outer_momentum")
        idle = {
            "gradients": (*of_local, *of_outer),
            "local_sgd": (*of_gradients, *of_outer),
            "diloco": of_gradients,
        }[self.kind]
        for field in dataclasses.fields(self):
            if field.name in idle and getattr(self, field.name) != field.default:
                raise ValueError(
                    f'sync.{field.name}: has no effect if sync.kind is "{self.kind}"; received '
                    f"{getattr(self, field.name)!r}. Leave it out, or choose another kind."
                )


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Division of a large model: sharding over the replicas, or stages of a pipeline.

    Attributes:
        zero: ZeRO stage. 0: each replica holds everything. 1: the optimizer's state is sharded. 2:
            so are the gradients; see `tfdist.parallel.zero`. 3: so are the weights; see
            `tfdist.parallel.fsdp`.
        prefetch: Number of layers ahead whose weights are gathered, if zero is 3.
        gather_dtype: Data type in which weights are sent and used, if zero is 3: "bfloat16" or
            "float16"; None: unchanged. That of gradients is sync.comm_dtype.
        reshard_after_forward: Whether gathered weights are dropped after the forward pass, if zero
            is 3.
        stages: Number of stages of a pipeline, each on a device of this process; 1: no pipeline.
            See `tfdist.parallel.pipeline`.
        microbatches: Number of micro-batches into which a pipeline splits each batch.
        schedule: Order of a pipeline's forward and backward passes.
        recompute: Whether the stages compute activations again for the backward pass.
    """

    zero: int = between(0, 3, 0)
    prefetch: int = at_least(0, 1)
    gather_dtype: str | None = one_of(("bfloat16", "float16"), None)
    reshard_after_forward: bool = True
    stages: int = at_least(1, 1)
    microbatches: int = at_least(1, 8)
    schedule: str = one_of(("1f1b", "gpipe"), "1f1b")
    recompute: bool = False

    def __post_init__(self) -> None:
        check(self, "parallel")
        needs = {
            **dict.fromkeys(("prefetch", "gather_dtype", "reshard_after_forward"), "zero=3"),
            **dict.fromkeys(("microbatches", "schedule", "recompute"), "stages of 2 or more"),
        }
        has = {"zero=3": self.zero == 3, "stages of 2 or more": self.stages > 1}
        for field in dataclasses.fields(self):
            value, needed = getattr(self, field.name), needs.get(field.name)
            if needed and not has[needed] and value != field.default:
                raise ValueError(
                    f"parallel.{field.name}: expected parallel.{needed} too, received {value!r} "
                    f"with zero={self.zero} and stages={self.stages}. Set it, or leave out "
                    f"parallel.{field.name}."
                )
        if self.stages > 1 and self.zero:
            raise ValueError(
                "parallel.stages: expected parallel.zero=0, because a pipeline has one replica; "
                f"received parallel.stages={self.stages} and parallel.zero={self.zero}."
            )


@dataclasses.dataclass(frozen=True)
class Output:
    """Output files of a run.

    Attributes:
        dir: Directory of this run; None: `runs/NAME`, or `runs/NAME-2` and so on after runs that
            are finished.
        save_model: Whether to save the trained model.
        export: Whether to export the trained model as a SavedModel, for serving.
    """

    dir: str | None = None
    save_model: bool = True
    export: bool = False

    def __post_init__(self) -> None:
        check(self, "output")


@dataclasses.dataclass(frozen=True)
class Telemetry:
    """Logs, metrics and profiles of a run.

    Attributes:
        step_breakdown: Whether to write the step breakdown, the time of each part of a step, on
            every worker.
        backends: Backends for losses and metrics, as words with commas: "tensorboard", "jsonl",
            "console", "wandb", "mlflow".
        graph: Whether to write the model's graph to TensorBoard.
        histograms: Number of epochs between histograms of the weights in TensorBoard; 0: none.
        hparams: Whether to write the settings to TensorBoard, to compare runs by.
        images: Number of evaluation images with their predictions to write to TensorBoard after
            each epoch.
        profile: Steps to profile, counted from 1 since training began, such as "steps=10..15";
            None: none.
        profile_workers: Workers that profile them: the "chief", or "all" workers.
    """

    step_breakdown: bool = False
    backends: str = "tensorboard,jsonl"
    graph: bool = True
    histograms: int = at_least(0, 0)
    hparams: bool = True
    images: int = at_least(0, 0)
    profile: str | None = None
    profile_workers: str = one_of(("chief", "all"), "chief")

    def __post_init__(self) -> None:
        check(self, "telemetry")
        self.backend_names()
        if self.profile is not None:
            step_range("telemetry.profile", self.profile)

    def backend_names(self) -> tuple[str, ...]:
        """Return the names in `backends`.

        Raises:
            ValueError: If a word is not a known backend.

        Example:
            >>> Telemetry(backends="console, jsonl").backend_names()
            ('console', 'jsonl')
        """
        words = words_of(self.backends)
        for word in words:
            if word not in BACKENDS:
                raise ValueError(not_one_of("telemetry.backends", word, BACKENDS))
        return words


@dataclasses.dataclass(frozen=True)
class Run:
    """All settings of one training run.

    Attributes:
        name: Name of the run, "run" by default.
        strategy: Distribution of training.
        data: Data to train and evaluate on.
        model: Model to train.
        train: Epochs, optimizer, precision and seed.
        sync: Synchronization of the replicas.
        parallel: Sharding of a large model over the replicas.
        output: Output files.
        telemetry: Logs, metrics and profiles.

    Example:
        >>> run = Run.from_dict({"name": "mine", "train": {"epochs": 3}})
        >>> run.train.epochs, run.data.global_batch
        (3, 64)
    """

    name: str = "run"
    strategy: Strategy = dataclasses.field(default_factory=Strategy)
    data: Data = dataclasses.field(default_factory=Data)
    model: Model = dataclasses.field(default_factory=Model)
    train: Train = dataclasses.field(default_factory=Train)
    sync: Sync = dataclasses.field(default_factory=Sync)
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    output: Output = dataclasses.field(default_factory=Output)
    telemetry: Telemetry = dataclasses.field(default_factory=Telemetry)

    def __post_init__(self) -> None:
        check(self, "")
        if self.name in ("", ".", "..") or any(c in "/\\" or ord(c) < 32 for c in self.name):
            raise ValueError(
                "name: expected a name for the directory of the run, without slashes; "
                f"received {self.name!r}."
            )
        self._check_auto_batch()
        for field in dataclasses.fields(Sync) if self.parallel.stages > 1 else ():
            if (value := getattr(self.sync, field.name)) != field.default:
                raise ValueError(
                    f"sync.{field.name}: expected {field.default!r}, because the stages of a "
                    f"pipeline exchange no gradients; received {value!r} and "
                    f"parallel.stages={self.parallel.stages}. Leave one of them out."
                )
        names = map(keras_callbacks.name_of, self.train.callback_names())
        if self.parallel.zero and "swap_ema_weights" in names:
            raise ValueError(
                "train.callbacks: swap_ema_weights needs parallel.zero=0, because each replica "
                "holds only a part of the averages; received parallel.zero="
                f"{self.parallel.zero}. Remove it: with train.ema, the averages replace the "
                "weights at the end of training."
            )

    def _check_auto_batch(self) -> None:
        """Raise ValueError if the largest batch is asked for and cannot be found."""
        if self.data.global_batch != AUTO:
            return
        key = f"data.global_batch: {AUTO!r}"
        if self.strategy.device_memory_gb is None:
            raise ValueError(
                f"{key} fills the memory of the devices; expected strategy.device_memory_gb too, "
                "received none. `tfdist doctor` shows the memory of GPUs."
            )
        if self.strategy.name in ("central_storage", "parameter_server", "tpu"):
            raise ValueError(
                f"{key} needs a strategy whose memory `tfdist plan` predicts; received "
                f"strategy.name={self.strategy.name!r}. Set a number."
            )
        if self.parallel.prefetch != 1 or not self.parallel.reshard_after_forward:
            raise ValueError(
                f"{key} needs the defaults of parallel.prefetch and "
                "parallel.reshard_after_forward, whose memory `tfdist plan` predicts; received "
                f"{self.parallel.prefetch} and {self.parallel.reshard_after_forward}. Set a number."
            )
        if self.parallel.stages > 1:
            raise ValueError(
                f"{key} needs parallel.stages=1, received {self.parallel.stages}. `tfdist plan "
                "--find-batch` finds the largest batch of a pipeline."
            )
        if self.sync.kind != "gradients" or self.sync.accumulate > 1:
            raise ValueError(
                f"{key} needs sync.kind=gradients and sync.accumulate=1, whose memory `tfdist "
                f"plan` predicts; received {self.sync.kind!r} and {self.sync.accumulate}. Set a "
                "number."
            )

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Run:
        """Return a Run with these settings, and defaults for all others.

        Args:
            settings: Nested mapping of section to key to value, such as the `to_dict()` of a
                `ConfigDict`. The section "launch" is left to the launcher.

        Returns:
            The Run.

        Raises:
            ValueError: If a key is unknown, in which case the message names the nearest known one
                or what comes nearest to a key of another tool; or if a value has the wrong type or
                range.

        Example:
            >>> Run.from_dict({"train": {"epoch": 3}})
            Traceback (most recent call last):
            ValueError: train.epoch: no such key. Did you mean train.epochs?
        """
        sections = {
            key: _section(cls, key, value) for key, value in settings.items() if key != LAUNCH
        }
        return cls(**sections)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as nested dicts, which `from_dict` accepts."""
        return dataclasses.asdict(self)


# Keys that take a number or a word.
AUTO_KEYS = tuple(
    f"{section}.{field.name}"
    for section, kind in typing.get_type_hints(Run).items()
    if dataclasses.is_dataclass(kind)
    for field in dataclasses.fields(kind)
    if "word" in field.metadata
)


def default() -> ConfigDict:
    """Return the defaults as a `ConfigDict`, for `get_config()` in a config file to change.

    Example:
        >>> config = default()
        >>> config.train.epochs = 3
        >>> Run.from_dict(config.to_dict()).train.epochs
        3
    """
    from ml_collections import ConfigDict, config_dict

    # Not type-safe, because Run.from_dict checks the types, and reports errors with their keys.
    config = ConfigDict(Run().to_dict(), type_safe=False)
    for section, kind in typing.get_type_hints(Run).items():
        for key, known in (
            typing.get_type_hints(kind).items() if dataclasses.is_dataclass(kind) else ()
        ):
            if config[section][key] is None:  # lets --config.output.dir=... know its type
                config[section][key] = config_dict.placeholder(typing.get_args(known)[0])
    config[LAUNCH] = ConfigDict()
    return config


def check_key(key: str) -> None:
    """Raise ValueError unless a dotted key is one of a Run, or an option in a mapping of it.

    Example:
        >>> check_key("train.epochs"), check_key("model.options.dropout")
        (None, None)
        >>> check_key("trian.epochs")
        Traceback (most recent call last):
        ValueError: trian: no such key. Did you mean train?
    """
    head, _, rest = key.partition(".")
    if head == LAUNCH:
        raise ValueError(
            f"{key}: expected in the config file, or as a flag of `tfdist launch` or `tfdist "
            "submit`; received it on the command line of a run"
        )
    section = hint(Run, head, "")
    if rest and not dataclasses.is_dataclass(section):
        raise ValueError(
            f"{key}: no such key; {head} is a value, not a section. Set {head} itself."
        )
    if rest:
        name, _, inner = rest.partition(".")
        if inner and "Mapping" not in str(hint(section, name, head)):
            raise ValueError(
                f"{key}: no such key; {head}.{name} is a value, not a section. Set {head}.{name} "
                "itself."
            )
        hint(section, name, head)


def short_name(word: str) -> str:
    """Return the name under which a setting has the options of a word.

    This is the word itself, or the FUNCTION in FILE.py:FUNCTION.

    Example:
        >>> short_name("auc"), short_name("mine.py:Hits")
        ('auc', 'Hits')
    """
    return word.rpartition(":")[2]


def options_of(options: Mapping[str, Any], word: str) -> Mapping[str, Any]:
    """Return the options of a word, such as a metric; empty if it has none."""
    return options.get(word) or options.get(short_name(word)) or {}


def _check_options(key: str, options: Mapping[str, Any], words: tuple[str, ...]) -> None:
    """Raise ValueError if options are no mapping, or are those of a word that is not listed."""
    for name, value in options.items():
        if name not in words and name not in map(short_name, words):
            raise ValueError(
                f"{key}_options.{name}: {name} is not in {key}s, which are {', '.join(words)!r}."
            )
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{key}_options.{name}: expected a mapping of options, received {value!r}."
            )


def _section(cls: type, key: str, value: Any) -> Any:
    kind = hint(cls, key, "")
    if not dataclasses.is_dataclass(kind):
        return value
    if not isinstance(value, Mapping):
        keys = ", ".join(typing.get_type_hints(kind))
        raise ValueError(f"{key}: expected a section with keys such as {keys}; received {value!r}.")
    for name in value:
        hint(kind, name, key)
    return kind(**value)  # type: ignore[operator]
