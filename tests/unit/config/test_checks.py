"""Test that settings from a file or a dict are checked by key, type and value."""

import pytest

from tfdist import config
from tfdist.config import checks, sections
from tfdist.run.train_command import find_directory, parse


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trian": {}}, "trian: no such key. Did you mean train?"),
        ({"train": {"epoch": 3}}, "train.epoch: no such key. Did you mean train.epochs?"),
        ({"parallel": {"fsdp": True}}, "parallel.fsdp: no such key. Set parallel.zero=3."),
        (
            {"parallel": {"model": 2}},
            "parallel.model: no such key. Set parallel.zero=3: it divides the weights over",
        ),
        ({"train": {"lr": 1}}, "train.lr: no such key. Set train.learning_rate."),
        ({"train": 3}, "train: expected a section"),
        ({"train": {"epochs": 0}}, "train.epochs: expected at least 1, received 0"),
        ({"train": {"epochs": "3"}}, "train.epochs: expected a whole number, received '3'"),
        ({"train": {"epochs": True}}, "train.epochs: expected a whole number, received True"),
        ({"train": {"epochs": 2.0}}, "train.epochs: expected a whole number, received 2.0"),
        ({"train": {"learning_rate": -1}}, "train.learning_rate: expected a number above 0"),
        (
            {"train": {"learning_rate": float("nan")}},
            "train.learning_rate: expected a number above 0",
        ),
        ({"data": {"shuffle": 1}}, "data.shuffle: expected true or false, received 1"),
        ({"data": {"data_dir": 1}}, "data.data_dir: expected text"),
        (
            {"strategy": {"communication": "rong"}},
            "strategy.communication: received 'rong'. Did you mean ring?",
        ),
        (
            {"strategy": {"reading": "worker"}},
            "strategy.reading: received 'worker'. Did you mean workers?",
        ),
        (
            {"train": {"optimizer": "adamm"}},
            "train.optimizer: received 'adamm'. Did you mean adam? Allowed: adadelta, ",
        ),
        (
            {"strategy": {"name": "miror"}},
            "strategy.name: received 'miror'. Did you mean mirrored? Allowed: auto, ",
        ),
        ({"train": {"schedule": "Cosine"}}, "train.schedule: received 'Cosine'. Did you mean cos"),
        ({"model": {"name": "CNN"}}, "model.name: received 'CNN'. Expected one of cnn, mlp"),
        ({"model": {"name": "cnm"}}, "model.name: received 'cnm'. Did you mean cnn?"),
        ({"train": {"loss": "msee"}}, "train.loss: received 'msee'. Did you mean mse?"),
        ({"train": {"metrics": "accuracy,auk"}}, "train.metrics: received 'auk'. Did you mean auc"),
        (
            {"train": {"metric_options": {"auc": {}}}},
            "train.metric_options.auc: auc is not in train.metrics, which are 'accuracy'.",
        ),
        (
            {"train": {"metric_options": {"accuracy": {"k": 3}}}},
            "train.metric_options.accuracy: expected the full name of a metric, such as sparse_",
        ),
        (
            {"train": {"optimizer_options": {"use_ema": True}}},
            "train.optimizer_options.use_ema: expected this as the key train.ema",
        ),
        (
            {"data": {"global_batch": "many"}},
            "data.global_batch: expected a whole number or 'auto', received 'many'",
        ),
        (
            {"data": {"global_batch": 1.5}},
            "data.global_batch: expected a whole number or 'auto', received 1.5",
        ),
        ({"data": {"global_batch": 0}}, "data.global_batch: expected at least 1, received 0"),
        (
            {"data": {"global_batch": "auto"}},
            "data.global_batch: 'auto' fills the memory of the devices; expected strategy.device_",
        ),
        (
            {
                "data": {"global_batch": "auto"},
                "strategy": {"device_memory_gb": 16, "name": "parameter_server"},
            },
            "data.global_batch: 'auto' needs a strategy whose memory `tfdist plan` predicts; rec",
        ),
        (
            {
                "data": {"global_batch": "auto"},
                "strategy": {"device_memory_gb": 16},
                "sync": {"accumulate": 2},
            },
            "data.global_batch: 'auto' needs sync.kind=gradients and sync.accumulate=1",
        ),
        ({"train": {"ema": 1.5}}, "train.ema: expected a momentum between 0 and 1"),
        ({"train": {"weight_decay": -1}}, "train.weight_decay: expected at least 0, received -1.0"),
        ({"train": {"warmup_epochs": 8}}, "train.warmup_epochs: expected less than train.epochs"),
        (
            {"train": {"schedule": "steps"}},
            'train.schedule_options.epochs: expected the epochs after which "steps" lowers',
        ),
        (
            {"train": {"schedule": "steps", "schedule_options": {"epochs": (3, 2)}}},
            "train.schedule_options.epochs: expected growing numbers below train.epochs",
        ),
        (
            {
                "train": {
                    "schedule": "steps",
                    "schedule_options": {"epochs": 3, "factor": [0.1, 0.1]},
                }
            },
            "train.schedule_options.factor: expected one number, or 1 as there are epochs",
        ),
        (
            {"train": {"schedule": "cosine", "schedule_options": {"finl": 0}}},
            'train.schedule_options.finl: no option of "cosine". Did you mean final?',
        ),
        (
            {"train": {"schedule": "polynomial", "schedule_options": {"power": "x"}}},
            "train.schedule_options.power: expected a number above 0, received 'x'.",
        ),
        (
            {"train": {"schedule_options": {"final": 0}}},
            'train.schedule_options.final: no option of "constant". It has none.',
        ),
        (
            {"train": {"callbacks": "early_stoping"}},
            "train.callbacks: received 'early_stoping'. Did you mean early_stopping? Allowed: csv",
        ),
        (
            {"train": {"callbacks": "TensorBoard"}},
            "train.callbacks: received 'TensorBoard'. Add tensorboard to telemetry.backends.",
        ),
        (
            {"train": {"callbacks": "terminate_on_nan, TerminateOnNaN"}},
            "train.callbacks: expected each name once, received terminate_on_nan twice.",
        ),
        (
            {"train": {"callback_options": {"early_stopping": {}}}},
            "train.callback_options.early_stopping: early_stopping is not in train.callbacks",
        ),
        *(
            ({"train": {"callbacks": name, "callback_options": {name: options}}}, message)
            for name, options, message in (
                (
                    "early_stopping",
                    {"patient": 3},
                    "train.callback_options.early_stopping.patient: no such option. Did you mean p",
                ),
                (
                    "EarlyStopping",
                    {"patience": -1},
                    "train.callback_options.EarlyStopping.patience: expected a whole number of at",
                ),
                (
                    "early_stopping",
                    {"mode": "mx"},
                    "train.callback_options.early_stopping.mode: expected auto, min or max, rece",
                ),
                ("csv_logger", {}, "train.callback_options.csv_logger.filename: expected the file"),
                (
                    "model_checkpoint",
                    {"filepath": "best.ckpt"},
                    "train.callback_options.model_checkpoint.filepath: expected a file that ends",
                ),
                ("terminate_on_nan", 3, "train.callback_options.terminate_on_nan: expected a map"),
            )
        ),
        (
            {"train": {"callbacks": "swap_ema_weights"}, "parallel": {"zero": 2}},
            "train.callbacks: swap_ema_weights needs parallel.zero=0",
        ),
        (
            {"train": {"class_weight": {"cat": 2}}},
            "train.class_weight.cat: expected the number of a class, received 'cat'.",
        ),
        (
            {"train": {"class_weight": {0: -1}}},
            "train.class_weight.0: expected a number of at least 0, received -1.",
        ),
        ({"model": {"options": 3}}, "model.options: expected a mapping"),
        (
            {"model": {"options": {"filterz": (1, 2)}}},
            'model.options.filterz: no option of "cnn". Did you mean filters?',
        ),
        (
            {"model": {"name": "mlp", "options": {"units": 3}}},
            'model.options.units: no option of "mlp". Expected one of dropout, scale, widths.',
        ),
        ({"data": {"threads": -1}}, "data.threads: expected at least 1, received -1."),
        ({"sync": {"clip_norm": -1}}, "sync.clip_norm: expected a number above 0, received -1.0."),
        (
            {"sync": {"outer_momentum": 3}},
            "sync.outer_momentum: expected a number from 0 to below 1, received 3.0.",
        ),
        (
            {"sync": {"kind": "diloco", "outer_momentum": 1}},
            "sync.outer_momentum: expected a number from 0 to below 1, received 1.0.",
        ),
        (
            {"sync": {"kind": "diloco", "outer_learning_rate": 0}},
            "sync.outer_learning_rate: expected a number above 0, received 0.0.",
        ),
        ({"name": 1}, "name: expected text"),
        *(
            ({"name": name}, "name: expected a name for the directory of the run")
            for name in ("", ".", "..", "../../etc/x", "a/b", "/x", "a\\b", "a\0b", "a\nb")
        ),
        (
            {"sync": {"every": 4}},
            'sync.every: has no effect if sync.kind is "gradients"; received 4. Leave it out',
        ),
        (
            {"sync": {"kind": "diloco", "clip_norm": 1}},
            'sync.clip_norm: has no effect if sync.kind is "diloco"; received 1.0.',
        ),
        (
            {"parallel": {"gather_dtype": "bfloat16", "zero": 2}},
            "parallel.gather_dtype: expected parallel.zero=3 too, received 'bfloat16' with zero=2",
        ),
        (
            {"parallel": {"recompute": True}},
            "parallel.recompute: expected parallel.stages of 2 or more too, received True",
        ),
        (
            {"parallel": {"stages": 2, "zero": 1}},
            "parallel.stages: expected parallel.zero=0, because a pipeline has one replica",
        ),
        (
            {"parallel": {"stages": 2}, "sync": {"comm_dtype": "bfloat16"}},
            "sync.comm_dtype: expected None, because the stages of a pipeline exchange no g",
        ),
        (
            {
                "parallel": {"zero": 3, "reshard_after_forward": False},
                "strategy": {"device_memory_gb": 16},
                "data": {"global_batch": "auto"},
            },
            "data.global_batch: 'auto' needs the defaults of parallel.prefetch and",
        ),
        (
            {
                "parallel": {"stages": 2},
                "strategy": {"device_memory_gb": 16},
                "data": {"global_batch": "auto"},
            },
            "data.global_batch: 'auto' needs parallel.stages=1, received 2",
        ),
        ({"parallel": {"zero": 4}}, "parallel.zero: expected a number from 0 to 3, received 4."),
    ],
)
def test_a_mistake_is_named_with_its_key(settings, message):
    with pytest.raises(ValueError, match="^" + message.replace(".", r"\.").replace("?", r"\?")):
        config.Run.from_dict(settings)


def test_options_of_a_users_model_are_left_to_it():
    given = {"name": "mine.py:build", "options": {"filterz": 3}}
    assert config.Run.from_dict({"model": given}).model.options == {"filterz": 3}
    assert config.Run.from_dict({"model": {"options": {"classes": 3}}}).model.options


def test_arguments_are_named_by_their_keys():
    for message in ("service=True: expected", "service: expected"):
        with (
            pytest.raises(ValueError, match=f"^data.{message}"),
            checks.keys_for_arguments("data", ("service",)),
        ):
            raise ValueError(message)
    other = UnicodeDecodeError("utf-8", b"", 0, 1, "service")  # another ValueError
    for error in (ValueError("services: expected"), ValueError("the service: expected"), other):
        with pytest.raises(ValueError) as raised, checks.keys_for_arguments("data", ("service",)):
            raise error
        assert raised.value is error


def test_run_survives_conversion_to_a_dict():
    run = config.Run.from_dict(
        {"train": {"learning_rate": 1}, "model": {"options": {"dropout": 0.5}}}
    )
    assert run.train.learning_rate == 1.0
    assert isinstance(run.train.learning_rate, float)
    assert config.Run.from_dict(run.to_dict()) == run


def test_defaults_as_config_dict_are_the_defaults():
    assert config.Run.from_dict(config.default().to_dict()) == config.Run()


def test_the_command_line_changes_a_config_file():
    run = parse(
        [
            "--config=configs/digits.py",
            "--config.train.epochs=3",
            "--config.data.data_dir=here",
            "--noconfig.data.shuffle",
            "--config.model.options.units=32",
        ]
    )
    assert (run.name, run.train.epochs, run.data.data_dir, run.data.shuffle) == (
        "digits",
        3,
        "here",
        False,
    )
    assert run.model.options == {"dropout": 0.25, "units": 32}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--config: expected one config file"),
        (["--config"], "--config=: no such file"),
        (["--config=none.py"], "--config=none.py: no such file"),
        (["--config=configs/digits.py", "--config.train.epoch=3"], "Did you mean train.epochs"),
        (["--config=configs/digits.py", "--config.train.epochs.more=3"], "train.epochs is a value"),
        (["--config=configs/digits.py", "--config.train.epochs=x"], "--config.train.epochs=x"),
        (["--config=configs/digits.py", "--config.train.epochs"], "config.train.epochs"),
        (["--config=configs/digits.py", "--epochs=3"], "epochs"),
        (["--config=configs/digits.py", "3"], "3: expected --config.KEY=VALUE"),
    ],
)
def test_a_wrong_command_line_is_named(words, message):
    with pytest.raises(ValueError, match=message):
        parse(words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_config():\n    return 1 / 0\n", "ZeroDivisionError in line 2"),
        ("x = 3\n", "KeyError"),
        ("x = 1\ny = = 2\n", r"SyntaxError in line 2 of .*config\.py: invalid syntax"),
        (
            "import json\ndef get_config():\n    return json.loads('{')\n",
            r"JSONDecodeError in line 3 of .*config\.py",
        ),
        ("def get_config(): return {}\n", "expected get_config.. to return"),
    ],
)
def test_a_wrong_config_file_is_named(tmp_path, text, message):
    path = tmp_path / "config.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"--config={path}.*{message}"):
        parse([f"--config={path}"])


def test_text_after_a_colon_reaches_get_config(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(
        "import tfdist\ndef get_config(text):\n    c = tfdist.config.default()\n    c.name = text\n"
        "    return c\n"
    )
    assert parse([f"--config={path}:abc"]).name == "abc"


def test_a_finished_run_is_never_written_over(tmp_path):
    mine = config.Run(name="mine")
    first = find_directory(mine, tmp_path)
    assert first == tmp_path / "mine"
    first.mkdir()
    assert find_directory(mine, tmp_path) == first  # interrupted: goes on there
    (first / "summary.json").write_text("{}")
    assert find_directory(mine, tmp_path) == tmp_path / "mine-2"
    with pytest.raises(ValueError, match=r"output\.dir: .* holds a finished run"):
        find_directory(config.Run(output=config.Output(dir=str(first))), tmp_path)


def test_reading_a_config_imports_no_tensorflow(run_python):
    done = run_python(
        "import sys; from tfdist.run.train_command import parse\n"
        "parse(['--config=configs/digits.py']); print('tensorflow' in sys.modules)\n"
        "try: parse(['--config=configs/digits.py', '--config.train.optimizer=adamm'])\n"
        "except ValueError: print('tensorflow' in sys.modules)\n"
        "try: parse(['--config=configs/digits.py', '--config.train.callbacks=early_stoping'])\n"
        "except ValueError: print('tensorflow' in sys.modules)\n"
    )
    assert done.stdout.split() == ["False"] * 3, done.stderr


def test_wrong_settings_are_found_before_tensorflow_is_loaded(run_python):
    run_python(
        """
import sys
from tfdist.run import train_command
for word in (
    "sync.clip_norm=-1",
    "model.options.filterz=3",
    "train.loss=absent.py:loss",
    "telemetry.backends=absent_backend",
    "telemetry.images=3 --config.telemetry.backends=jsonl",
):
    try:
        words = ["--config=digits", *f"--config.{word}".split()]
        train_command.run(train_command.parse(words))
    except ValueError as error:
        assert str(error).startswith(word.partition("=")[0] + ": "), error
        assert not {"tensorflow", "keras"} & set(sys.modules), word
    else:
        raise AssertionError(word)
"""
    )


def test_options_of_options_can_be_set_on_the_command_line():
    run = parse(
        [
            "--config=configs/digits.py",
            "--config.train.optimizer_options.beta_1=0.8",
            "--config.train.metrics=auc",
            "--config.train.metric_options.auc.num_thresholds=50",
            "--config.train.schedule=steps",
            "--config.train.schedule_options.epochs=(3, 6)",
        ]
    )
    assert run.train.optimizer_options == {"beta_1": 0.8}
    assert run.train.metric_options == {"auc": {"num_thresholds": 50}}
    assert run.train.schedule_options == {"epochs": (3, 6)}


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        ("--config.data.global_batch=auto", "auto"),
        ("--config.data.global_batch=96", 96),
        ("--config.data.global_batch 96", 96),
        ("--config.data.global_batch=auto --config.data.global_batch=32", 32),
        ("", 64),
    ],
)
def test_batch_on_the_command_line_is_a_number_or_auto(words, batch):
    memory = "--config.strategy.device_memory_gb=16"
    run = parse(["--config=configs/digits.py", memory, *words.split()])
    assert run.data.global_batch == batch
    if batch == "auto":
        with pytest.raises(ValueError, match="which only `tfdist train` replaces by one"):
            _ = run.data.global_batch_size
    else:
        assert run.data.global_batch_size == batch


def test_callbacks_and_class_weights_can_be_set_on_the_command_line(tmp_path):
    (tmp_path / "mine.py").touch()
    run = parse(
        [
            "--config=configs/digits.py",
            f"--config.train.callbacks=EarlyStopping, {tmp_path}/mine.py:Note",
            "--config.train.callback_options.EarlyStopping.patience=3",
            "--config.train.callback_options.Note.word=hello",
            "--config.train.class_weight={0: 1, 3: 2.5}",
        ]
    )
    assert run.train.callback_options == {
        "EarlyStopping": {"patience": 3},
        "Note": {"word": "hello"},
    }
    assert run.train.class_weights() == {0: 1.0, 3: 2.5}
    with pytest.raises(ValueError, match=r"^--config\.train\.class_weight\.3: .*class_weight='{"):
        parse(["--config=configs/digits.py", "--config.train.class_weight.3=2.5"])


def test_functions_have_their_options_by_their_own_names(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(
        "import tfdist\ndef get_config():\n    c = tfdist.config.default()\n"
        f"    c.train.metrics = '{path}:Hits'\n    c.train.metric_options.Hits = {{'k': 2}}\n"
        "    return c\n"
    )
    train = parse([f"--config={path}"]).train
    assert sections.options_of(train.metric_options, f"{path}:Hits") == {"k": 2}


def test_public_names_are_lazy_and_listed(run_python):
    done = run_python(
        "import sys, tfdist\n"
        "assert 'tensorflow' not in sys.modules and set(tfdist.__all__) <= set(dir(tfdist))\n"
        "assert [getattr(tfdist, name) for name in tfdist.__all__]\n"
        "try: tfdist.make_stategy\n"
        "except AttributeError as error: print(error)\n"
    )
    assert "has no attribute 'make_stategy'" in done.stdout, done.stderr
