"""The data section of a Run becomes the pipelines it trains and evaluates on; no model or strategy is known here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist import config
    from tfdist.data import Source


def pipeline(settings: config.Run, split: str = "train") -> tf.data.Dataset:
    """The batches of a run: what `tfdist train` reads, and `tfdist data audit` checks.

    Args:
        settings: The Run.
        split: "train" or "eval".

    Returns:
        A `tfdist.data.pipeline`.

    Raises:
        ValueError: For settings that do not fit the data.
    """
    from tfdist import data
    from tfdist.data.catalog import resolve

    where, train = settings.data, split == "train"
    options: dict[str, Any] = {"shuffle": False}
    if train:
        options = {
            "shuffle": where.shuffle,
            "tail": where.tail,
            "ignore_errors": where.ignore_errors,
            "service": where.service or None,
        }
    source = resolve(where.name, where.train_split if train else where.eval_split, where.data_dir, where.catalog)
    if where.image_size is not None:
        options["transform"] = _resized(source, where, where.augment and train)
    elif where.augment:
        raise ValueError("data.augment: expected data.image_size with it, the size of the crops in pixels; received none.")
    return data.pipeline(source, where.global_batch, seed=settings.train.seed, cache=where.cache, threads=where.threads, **options)


def shapes(batches: tf.data.Dataset) -> tuple[tuple[int, ...], int]:
    """What a model of images needs to know of a run's data.

    Args:
        batches: Of `pipeline`.

    Returns:
        The shape of one input, and the number of classes.

    Raises:
        ValueError: The data are no inputs of one shape with a class each.
    """
    source, spec = batches.batches.source, batches.element_spec
    if not isinstance(spec, tuple) or len(spec) < 2 or not hasattr(spec[0], "shape") or source.classes is None:
        raise ValueError(
            f"data.name: {source.name} is no data set of inputs with a class each, but of {spec}. Choose one with "
            "supervised_keys, or write a script with a model of your own (see examples/)."
        )
    return tuple(spec[0].shape[1:]), source.classes


def _resized(source: Source, where: config.Data, augment: bool) -> Any:
    from tfdist.data.transforms import images

    spec = source.element_spec[0] if isinstance(source.element_spec, tuple) else source.element_spec
    shape = getattr(spec, "shape", None)
    if shape is None or shape.rank not in (0, 3):
        raise ValueError(f"data.image_size: expected a data set of images, received {source.name} of {source.element_spec}. Leave it out.")
    channels = {"channels": shape[-1]} if shape.rank == 3 else {}
    return images(where.image_size, augment=augment, **channels)  # type: ignore[arg-type]
