"""Fit classifiers and a regressor of SciKeras: partial fits, a pipeline, a search, a pickle."""

import pickle

import keras
from scikeras.wrappers import KerasClassifier, KerasRegressor
from sklearn.datasets import make_classification
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

x, y = make_classification(256, 20, n_informative=10, random_state=0)
x = x.astype("float32")


def build(width, meta):
    return keras.Sequential(
        [
            keras.Input(meta["X_shape_"][1:]),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )


options = {"epochs": 3, "batch_size": 32, "verbose": 0, "random_state": 0}
classifier = KerasClassifier(build, loss="binary_crossentropy", width=16, **options)
classifier.fit(x, y)
classifier.partial_fit(x, y)
Pipeline([("scale", StandardScaler()), ("classify", classifier)]).fit(x, y).predict(x[:5])
search = GridSearchCV(classifier, {"width": [4, 8]}, cv=2, scoring="accuracy")
search.fit(x, y)
regressor = KerasRegressor(build, loss="mse", width=4, **options)
regressor.fit(x, y.astype("float32"))
assert pickle.loads(pickle.dumps(classifier)).score(x, y) == classifier.score(x, y)
