"""Names of Keras' optimizers, losses and metrics, for checks before TensorFlow is loaded.

A test compares them with Keras. Underscores and case do not count: "AdamW" is "adamw".
"""

from __future__ import annotations

from collections.abc import Iterable

OPTIMIZERS = (
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "ftrl",
    "lamb",
    "lion",
    "muon",
    "nadam",
    "rmsprop",
    "schedule_free_adamw",
    "sgd",
)
# Short names of Keras, which stand for others.
SHORT = {
    "bce": "binary_crossentropy",
    "kld": "kl_divergence",
    "mae": "mean_absolute_error",
    "mape": "mean_absolute_percentage_error",
    "mse": "mean_squared_error",
    "msle": "mean_squared_logarithmic_error",
}
LOSSES = (
    *SHORT,
    "binary_crossentropy",
    "binary_focal_crossentropy",
    "categorical_crossentropy",
    "categorical_focal_crossentropy",
    "categorical_generalized_cross_entropy",
    "categorical_hinge",
    "circle",
    "cosine_similarity",
    "ctc",
    "dice",
    "hinge",
    "huber",
    "kl_divergence",
    "log_cosh",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
    "poisson",
    "sparse_categorical_crossentropy",
    "squared_hinge",
    "tversky",
)
# Metrics whose kind Keras derives from the loss.
BY_LOSS = ("accuracy", "crossentropy")
METRICS = (
    *BY_LOSS,
    *SHORT,
    "auc",
    "binary_accuracy",
    "binary_crossentropy",
    "binary_iou",
    "categorical_accuracy",
    "categorical_crossentropy",
    "categorical_hinge",
    "concordance_correlation",
    "cosine_similarity",
    "f1_score",
    "false_negatives",
    "false_positives",
    "fbeta_score",
    "hinge",
    "iou",
    "kl_divergence",
    "log_cosh_error",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_iou",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
    "one_hot_iou",
    "one_hot_mean_iou",
    "pearson_correlation",
    "poisson",
    "precision",
    "precision_at_recall",
    "r2_score",
    "recall",
    "recall_at_precision",
    "root_mean_squared_error",
    "sensitivity_at_specificity",
    "sparse_categorical_accuracy",
    "sparse_categorical_crossentropy",
    "sparse_top_k_categorical_accuracy",
    "specificity_at_sensitivity",
    "squared_hinge",
    "top_k_categorical_accuracy",
    "true_negatives",
    "true_positives",
)


def plain(name: str) -> str:
    """Return a name without what does not count: case and underscores.

    Example:
        >>> plain("SparseCategoricalCrossentropy") == plain("sparse_categorical_crossentropy")
        True
    """
    return name.replace("_", "").lower()


def known(name: str, names: Iterable[str]) -> bool:
    """Return whether a name is one of some names, except for case and underscores."""
    return plain(name) in map(plain, names)
