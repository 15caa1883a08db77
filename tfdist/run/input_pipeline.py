"""Data pipelines for training and evaluation, built from the data section of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfdist.config import user_functions
from tfdist.config.checks import keys_for_arguments

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist import config
    from tfdist.data import Source


def pipeline(settings: config.Run, split: str = "train") -> tf.data.Dataset:
    """Return the batches that `tfdist train` reads and `tfdist data audit` checks.

    Args:
        settings: Run to read for.
        split: "train" or "eval"; "train" by default.

    Returns:
        A `tfdist.data.pipeline`. If a user's function provides the data, the result is what that
        function returns: a `tf.data.Dataset` of global batches at least.

    Raises:
        ValueError: If settings are not compatible with the data.
    """
    import tensorflow as tf

    from tfdist import data
    from tfdist.data.sources.catalog import resolve
    from tfdist.data.sources.subset import of_classes

    section = settings.data
    train = split == "train"
    options: dict[str, Any] = {"shuffle": False}
    if train:
        options = {
            "shuffle": section.shuffle,
            "tail": section.tail,
            "ignore_errors": section.ignore_errors,
            "service": section.service or None,
        }
    if user_functions.in_file(section.name):
        source = _from_function(section, split)
        if isinstance(source, tf.data.Dataset):
            return source
    else:
        source = resolve(
            section.name,
            section.train_split if train else section.eval_split,
            section.data_dir,
            section.catalog,
        )
    if section.classes is not None:
        source = of_classes(source, section.classes)
    if section.image_size is not None:
        options["transform"] = _resize_transform(source, section, section.augment and train)
    names = ("global_batch", "tail", "ignore_errors", "cache", "threads", "service")
    with keys_for_arguments("data", names):
        return data.pipeline(
            source,
            section.global_batch_size,
            seed=settings.train.seed,
            cache=section.cache,
            threads=section.threads,
            **options,
        )


def is_pipeline(batches: tf.data.Dataset) -> bool:
    """Return whether a data set was made by `tfdist.data.pipeline`.

    The order of such a data set is determined by seed, epoch and step.
    """
    return hasattr(batches, "of_epoch")


def examples(batches: tf.data.Dataset) -> int | None:
    """Return the number of examples of an epoch, or None if it is not known without reading."""
    return batches.batches.source.cardinality if is_pipeline(batches) else None


def begin_epoch(batches: tf.data.Dataset, epoch: int) -> None:
    """Set the epoch of the next iteration over a run's data.

    The epoch number then determines the order of examples.
    """
    if is_pipeline(batches):
        batches.epochs.next = epoch


def shapes(batches: tf.data.Dataset) -> tuple[Any, int | None]:
    """Return the input shape and the number of classes of a run's data.

    Args:
        batches: Batches that `pipeline` returned.

    Returns:
        The shape of one input without the batch dimension, or a nest of such shapes; and the number
        of classes, None if it is unknown.
    """
    import tensorflow as tf

    spec = batches.element_spec
    inputs = spec[0] if isinstance(spec, tuple) else spec
    shape = tf.nest.map_structure(lambda x: tuple(x.shape[1:]), inputs)
    return shape, batches.batches.source.classes if is_pipeline(batches) else None


def check_supervised(batches: tf.data.Dataset, options: Mapping[str, Any]) -> None:
    """Raise ValueError unless the data are suitable for a model of `tfdist.models`.

    Args:
        batches: Batches that `pipeline` returned.
        options: Options of the model.

    Raises:
        ValueError: If the data are not inputs of one shape with a class each.
    """
    spec = batches.element_spec
    _, classes = shapes(batches)
    single = isinstance(spec, tuple) and len(spec) > 1 and hasattr(spec[0], "shape")
    if single and (classes is not None or "classes" in options):
        return
    name = batches.batches.source.name if is_pipeline(batches) else "this data set"
    remedy = "Set model.options.classes, or" if single else "Choose one with supervised_keys, or"
    raise ValueError(
        f"data.name: expected inputs with labels of a known number of classes, received {spec} "
        f"of {name}. {remedy} use your own model, model.name=FILE.py:FUNCTION."
    )


def _from_function(section: config.Data, split: str) -> Any:
    """Return the data that a user's function provides."""
    import tensorflow as tf

    from tfdist.data.sources.source import Source

    result = user_functions.load(section.name, "data.name")(section, split)
    if not isinstance(result, Source | tf.data.Dataset):
        raise ValueError(
            f"data.name={section.name}: expected the function to return a Source, the result of "
            "tfdist.data.pipeline, or a "
            f"tf.data.Dataset of global batches, for the split {split!r}; received "
            f"{type(result).__name__}."
        )
    return result


def _resize_transform(source: Source, section: config.Data, augment: bool) -> Any:
    from tfdist.data.transforms import images

    spec = source.element_spec[0] if isinstance(source.element_spec, tuple) else source.element_spec
    shape = getattr(spec, "shape", None)
    if shape is None or shape.rank not in (0, 3):
        raise ValueError(
            f"data.image_size: expected a data set of images, received {source.name} of "
            f"{source.element_spec}. Remove it."
        )
    options: dict[str, Any] = {"channels": shape[-1]} if shape.rank == 3 and shape[-1] else {}
    options |= {**section.image_options, **(section.augment_options if augment else {})}
    try:
        return images(section.image_size, augment=augment, **options)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        keys = "data.image_options and data.augment_options" if augment else "data.image_options"
        raise ValueError(f"{keys}: {error}") from error
