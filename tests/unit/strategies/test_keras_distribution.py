"""Test that `keras.distribution` trains on all devices, or says what it cannot do.

Two processes are tested in tests/parity, where they are started anyway.
"""

import concurrent.futures
import contextlib
import json
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.distribution import (
    DataParallel,
    DeviceMesh,
    TensorLayout,
    set_distribution,
)

import tfdist
from tests.parity.cases import CROSSENTROPY, data, mlp, model_parallel
from tfdist.keras_compat import local_component
from tfdist.parallel.placement import Placement
from tfdist.strategies import keras_distribution as module
from tfdist.train.synchronous.loop import Runner

TWO = ["cpu:0", "cpu:1"]


@pytest.fixture(autouse=True)
def _enabled(logical_devices, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    tfdist.enable()
    yield
    set_distribution(None)
    assert not tf.distribute.has_strategy()


def build(seed=1, optimizer=lambda: keras.optimizers.Adam(0.01)):
    keras.utils.set_random_seed(seed)
    model = mlp()
    model.compile(optimizer(), CROSSENTROPY, metrics=["accuracy"])
    return model


def fitted(model):
    """Return what training gives; the last batch is uneven."""
    history = model.fit(*data(29), batch_size=12, epochs=2, shuffle=False, verbose=0).history
    return [*history.values(), *model.get_weights()]


def numbers(model):
    """Return what training, evaluation and prediction give."""
    x, y = data(29)
    return [*fitted(model), model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)]


def assert_equal(results, expected):
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def alone():
    """Return the numbers of Keras on one device."""
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        return numbers(build())


@pytest.fixture(scope="module")
def fitted_alone(alone):
    return alone[:-2]


# --- Data parallelism -----------------------------------------------------------------------------
@pytest.mark.parametrize("devices", [TWO, ["cpu:1"]])
def test_a_model_trains_on_the_devices_of_the_mesh_with_the_numbers_of_one(devices, alone):
    set_distribution(DataParallel(devices=devices))
    model = build()
    assert_equal(numbers(model), alone)
    assert isinstance(model.train_function, Runner)
    copies = model.distribute_strategy.experimental_local_results(model.weights[0].value)
    assert [copy.device[-5:].lower() for copy in copies] == devices


def test_scopes_are_those_of_keras(fitted_alone):
    first = DataParallel(device_mesh=DeviceMesh((2,), ["batch"], TWO))
    second = DataParallel(devices=["cpu:1", "cpu:2"])
    with first.scope():
        strategy = tf.distribute.get_strategy()
        with second.scope():
            assert keras.distribution.distribution() is second
            assert tf.distribute.get_strategy() is not strategy
        assert keras.distribution.distribution() is first
        assert tf.distribute.get_strategy() is strategy
        model = build()
    assert keras.distribution.distribution() is None
    assert_equal(fitted(model), fitted_alone)  # fit works outside of the scope
    with DataParallel(devices=TWO).scope():  # a notebook's cell that runs again
        assert tf.distribute.get_strategy() is strategy
    assert_equal(fitted(build()), fitted_alone)  # without a distribution, as Keras: on one device


def test_clear_session_keeps_the_distribution():
    distribution = DataParallel(devices=TWO)
    set_distribution(distribution)
    for _ in range(2):
        keras.utils.clear_session()
        assert keras.distribution.distribution() is distribution
        assert build().distribute_strategy.num_replicas_in_sync == 2


def test_a_distribution_belongs_to_a_thread():
    set_distribution(DataParallel(devices=TWO))

    def in_a_thread():
        before = keras.distribution.distribution(), tf.distribute.has_strategy()
        with DataParallel(devices=TWO).scope():
            return before, build().distribute_strategy

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        before, strategy = pool.submit(in_a_thread).result()
    assert before == (None, False)
    assert strategy is tf.distribute.get_strategy()


def test_devices_are_listed_without_the_start_of_tensorflow():
    assert keras.distribution.list_devices() == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert keras.distribution.list_devices("CPU") == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert keras.distribution.list_devices("tpu") == []
    assert module.Backend().get_device_count("gpu") == 0
    assert module.Backend("cpu:1,cpu:2").list_devices() == ["cpu:1", "cpu:2"]


def test_enable_is_called_once_and_only_for_tensorflow(monkeypatch):
    tfdist.enable()
    with pytest.raises(ValueError, match=r"first call, cpu:0, cpu:1, cpu:2, cpu:3, received 'cpu'"):
        tfdist.enable("cpu")
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    tfdist.enable("no device")


# --- Model parallelism ----------------------------------------------------------------------------
def held(variable):
    """Return the number of elements of a variable that each device holds."""
    return [int(tf.size(local_component(variable, i))) for i in range(2)]


def test_each_device_holds_a_part_of_the_weights_and_slots_with_the_numbers_of_one(alone, tmp_path):
    with model_parallel(kernel=(None, "model")).scope():
        model = build()
        assert_equal(numbers(model), alone)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
    # The pattern also matches the names of slots, which are rows by then.
    with model_parallel((3, 1), **{"kernel.*": ("batch", None)}).scope():
        assert_equal(fitted(build()), alone[:-2])
    for each in (model, loaded):
        kernel = each.layers[0].kernel
        slots = [v for v in each.optimizer.variables if "kernel" in v.path]
        assert len(slots) == 4
        half = kernel.shape[0] * kernel.shape[1] // 2
        assert held(kernel) == held(slots[0]) == held(slots[1]) == [half, half]
        x, y = data(29)
        np.testing.assert_allclose(each.evaluate(x, y, verbose=0), alone[-2], rtol=1e-5)


def test_a_model_that_one_mesh_saved_trains_on_another(tmp_path):
    """Train on a mesh, on one device and on another mesh, each from the file of the one before."""
    file = tmp_path / "model.keras"

    def momentum():
        return keras.optimizers.SGD(0.1, momentum=0.9)

    def trained(*shapes):
        results = []
        for shape in shapes:
            layouts = {"kernel": (None, "model"), "bias": ("batch",)}
            place = model_parallel(shape, **layouts).scope() if shape else contextlib.nullcontext()
            with place:
                model = keras.models.load_model(file) if results else build(optimizer=momentum)
                results += fitted(model)
                model.save(file)
        return [*results, *(v.numpy() for v in model.optimizer.variables)]

    assert_equal(trained((1, 2), None, (2, 2)), trained(None, None, None))


def test_lora_that_is_enabled_between_two_compilations_trains():
    """Fine-tune as KerasHub's guides do: its classes compile themselves, with their layouts."""

    def fine_tuned(*axes):
        with model_parallel(kernel=axes).scope():
            model = build()
            for layer in model.layers:
                layer.enable_lora(2)
            model.compile(keras.optimizers.Adam(0.01), CROSSENTROPY, metrics=["accuracy"])
            return model, fitted(model)

    whole, expected = fine_tuned(None, None)
    model, found = fine_tuned(None, "model")
    assert_equal(found, expected)
    kernel, added = model.layers[0]._kernel, model.layers[0].lora_kernel_a
    assert [held(v)[0] for v in (kernel, added)] == [24, 6]  # of 6 * 8 and 6 * 2
    np.testing.assert_array_equal(kernel.numpy(), whole.layers[0]._kernel.numpy())


def test_layouts_that_split_nothing_leave_weights_whole(fitted_alone):
    with model_parallel(kernel=(None, None)).scope():
        model = build()
        assert_equal(fitted(model), fitted_alone)
    assert held(model.weights[0])[0] == model.weights[0].value.shape.num_elements()


@pytest.mark.parametrize("method", ["fit", "predict"])
def test_a_model_whose_weights_come_after_compile_is_refused(method):
    with model_parallel(kernel=(None, "model")).scope():
        model = keras.Sequential([keras.layers.Dense(3)])
        model.compile("sgd", CROSSENTROPY)
        with pytest.raises(ValueError, match=r"dense\w*/kernel': the model .*keras.Input"):
            model.fit(*data(6), verbose=0) if method == "fit" else model.predict(data(6)[0])


def test_layouts_that_cannot_be_honoured_name_the_variable_or_layer():
    with model_parallel(kernel=("model",)).scope():
        with pytest.raises(ValueError, match=r"/kernel': expected 2 axes.*received \('model',\)"):
            build()
    with model_parallel(moving_mean=("model",)).scope():
        normal = keras.layers.BatchNormalization(name="normal")
        model = keras.Sequential([keras.Input([6]), normal, keras.layers.Dense(3)])
        with pytest.raises(ValueError, match=r"normal/moving_mean': expected None .* state and"):
            model.compile("sgd", CROSSENTROPY)
    with model_parallel(output=("batch", "model")).scope():
        with pytest.raises(ValueError, match=r"output of 'dense\w*': expected one that splits at"):
            keras.layers.Dense(3)(tf.zeros([2, 6]))
    with model_parallel(output=("batch", None)).scope():
        keras.layers.Dense(3)(tf.zeros([2, 6]))


# --- What TensorFlow cannot do --------------------------------------------------------------------
def test_layouts_that_split_variables_or_tensors_are_refused():
    class ByRows(DataParallel):
        def get_variable_layout(self, variable):
            return TensorLayout(("batch",), self.device_mesh)

    distribution = DataParallel(devices=TWO)
    mesh = distribution.device_mesh
    with pytest.raises(ValueError, match=r"variable 'mine': expected None.*\('batch',\).*Use M"):
        keras.Variable([1.0, 2.0], name="mine", layout=TensorLayout(("batch",), mesh))
    with distribution.scope():
        keras.Variable([1.0, 2.0], layout=TensorLayout((None,), mesh))
        rows = keras.distribution.distribute_tensor(tf.zeros([4, 2]), TensorLayout(["batch"], mesh))
        assert rows.shape == (4, 2)
        with pytest.raises(ValueError, match=r"layout of a tensor: .*'batch', received \(None"):
            keras.distribution.distribute_tensor(rows, TensorLayout((None, "batch"), mesh))
    with ByRows(devices=TWO).scope(), pytest.raises(ValueError, match="layout of the variable"):
        keras.Variable([1.0, 2.0])
    with pytest.raises(ValueError, match=r"DeviceMesh.backend_mesh"):
        _ = mesh.backend_mesh


def test_a_distribution_of_another_class_makes_no_variables():
    base = DataParallel.__mro__[1]
    with base(DeviceMesh((2,), ["batch"], TWO)).scope():
        assert not tf.distribute.has_strategy()
        with pytest.raises(
            ValueError, match=r"expected a DataParallel or ModelParallel, received <D"
        ):
            keras.layers.Dense(1).build((None, 2))


@pytest.mark.parametrize(
    ("devices", "message"),
    [(["cpu:0", "cpu:7"], "too late: 8 CPU devices"), (["tpu:0"], "received 'tpu:0'")],
)
def test_devices_that_are_not_there_are_named(devices, message):
    with pytest.raises(ValueError, match=message):
        set_distribution(DataParallel(devices=devices))


def test_another_strategys_scope_is_refused(mirrored):
    with mirrored.scope(), pytest.raises(ValueError, match=r"keras\.distribution: expected to be"):
        set_distribution(DataParallel(devices=TWO))
    assert keras.distribution.distribution() is None
    with mirrored.scope():
        set_distribution(None)
        keras.utils.clear_session()
        assert tf.distribute.get_strategy() is mirrored


# --- Several processes ----------------------------------------------------------------------------
def test_processes_of_the_environment_must_be_connected_first(monkeypatch):
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match=r"TF_CONFIG lists 2 processes.*initialize\(\) first"):
        set_distribution(DataParallel(devices=TWO[::-1]))
    tf.constant(0)
    with pytest.raises(ValueError, match=r"keras.distribution.initialize was called too late"):
        keras.distribution.initialize()
    monkeypatch.setenv("TF_CONFIG", json.dumps({**config, "cluster": {**cluster, "ps": ["h:3"]}}))
    with pytest.raises(ValueError, match=r"all processes train, TF_CONFIG has a ps.*tfdist.init"):
        keras.distribution.initialize()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a:1", 2, 0), "addresses of all 2 processes, separated by commas, received 'a:1'"),
        (("a:1,b:1", 2, None), "process_id: expected .* from 0 to 1, received None"),
        (("a:1,b:1", None, 2), "job 'worker' has 2 tasks"),
        (("a,b:1", 2, 0), "initialize: .*'a'"),
        ((None, 2, 0), "num_processes: expected 1, as the environment says, received 2"),
    ],
)
def test_wrong_arguments_of_initialize_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        keras.distribution.initialize(*arguments)


def test_a_mesh_has_all_devices_of_all_processes():
    engine = types.SimpleNamespace(placement=Placement(2, 1))
    backend = module.Backend("cpu:0")
    backend._workers = types.SimpleNamespace(tfdist_engine=engine)
    assert backend.list_devices() == TWO
    assert (backend.num_processes(), backend.process_id()) == (2, 1)
    with pytest.raises(ValueError, match=r"of 2 processes, cpu:0, cpu:1, received cpu:1\. Make it"):
        backend.change(DataParallel(devices=["cpu:1"]))
    assert backend.current() is None


def test_one_process_needs_no_others():
    backend = module.Backend()
    backend.initialize("127.0.0.1:1", 1, 0)
    backend.initialize("127.0.0.1:1", 1, 0)
    assert (backend.num_processes(), backend.process_id()) == (1, 0)
    with pytest.raises(ValueError, match="expected one call in a process"):
        backend.initialize()
