"""Test which metrics must add up, which do, and which results a step's logs are."""

import keras
import pytest
import tensorflow as tf

from tfdist.keras_compat import is_keras_metric, metrics_of
from tfdist.train.metric_calls import Results, check_adds, needs_all_rows, observed


class Total(keras.metrics.Metric):
    def __init__(self, aggregation="sum"):
        super().__init__(name="total")
        self.state = self.add_variable([], "zeros", aggregation=aggregation)

    def update_state(self, x):
        self.state.assign_add(tf.reduce_sum(x))

    def result(self):
        return self.state


class DeclaredTotal(Total):
    tfdist_sums_rows = True


class Largest(Total):
    def update_state(self, x):
        self.state.assign(tf.maximum(self.state, tf.reduce_max(x)))


class Picky(Total):
    def update_state(self, x):
        if tf.executing_eagerly():
            raise RuntimeError("graphs only")
        super().update_state(x)


class DeclaredPicky(Picky):
    tfdist_sums_rows = True


class Beside(DeclaredTotal):
    def __init__(self):
        super().__init__()
        self.beside = [tf.Variable(0.0, name="beside")]


class Untold(DeclaredTotal):
    def __init__(self):
        super().__init__()
        self.beside = keras.Variable(0.0, name="untold")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Total, None),
        (DeclaredTotal, None),
        (DeclaredPicky, None),
        (Largest, "received another one"),
        (Picky, r"trial update failed: RuntimeError: graphs only.*tfdist_sums_rows = True"),
        (Beside, r"received the state 'beside:0'"),
        (Untold, r"received the state 'untold'"),
        (lambda: Total(aggregation="mean"), r"received the state 'total/variable"),
    ],
)
def test_states_that_servers_cannot_add_are_refused(make, message):
    metric = make()
    if message is None:
        check_adds(metric, (tf.ones([2, 1]),), {})
    else:
        with pytest.raises(ValueError, match=f"metric total: .*can only add.*{message}"):
            check_adds(metric, (tf.ones([2, 1]),), {})


@pytest.mark.parametrize(
    ("make", "needs"),
    [
        (Total, True),
        (Beside, True),
        (Untold, True),
        (DeclaredTotal, False),
        (lambda: Total(aggregation="mean"), False),
    ],
)
def test_metrics_that_declare_nothing_need_all_rows(make, needs):
    assert needs_all_rows(make()) is needs


class OfKeras(keras.metrics.Mean):
    def result(self):
        return 2 * super().result()

    def helper(self):
        pass


class NotOfKeras(keras.metrics.Mean):
    def update_state(self, values, sample_weight=None):
        super().update_state(tf.reduce_max(values))


@pytest.mark.parametrize(
    ("metric", "keras_own"),
    [
        (keras.metrics.AUC, True),
        (OfKeras, True),
        (NotOfKeras, False),
        (Total, False),
        (lambda: keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error), True),
        (lambda: keras.metrics.MeanMetricWrapper(keras.losses.dice), False),
        (lambda: keras.metrics.MeanMetricWrapper(keras.losses.Dice()), False),
        (lambda: keras.metrics.MeanMetricWrapper(lambda y, p: y - p), False),
        (lambda: keras.metrics.CosineSimilarity(), True),
        (lambda: keras.metrics.CosineSimilarity(axis=0), False),
    ],
)
def test_metrics_that_keras_updates(metric, keras_own):
    assert is_keras_metric(metric()) is keras_own


def test_results_of_metrics_are_found_also_of_those_that_are_not_listed():
    class Model(keras.Sequential):
        @property
        def metrics(self):
            return [self.listed]

    model = Model([keras.Input([1]), keras.layers.Dense(1)])
    model.listed = keras.metrics.Mean()
    model.omitted = [keras.metrics.Mean()]
    assert metrics_of(model) == [model.listed, *model.omitted]
    results = Results(model)
    with observed(model, lambda metric, method, args, kwargs: None, results.record):
        listed, omitted = model.listed.result(), model.omitted[0].result()
    assert results.source_of(listed) == (0, 0)
    assert results.source_of(omitted) == (1, 0)
    assert results.source_of(2 * listed) is None
