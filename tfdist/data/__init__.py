"""Data sets become `tf.data` pipelines of global batches; no device, strategy or worker is known here."""

from tfdist.data import transforms
from tfdist.data.catalog import Catalog
from tfdist.data.files import image_folder, imagenet, manifest
from tfdist.data.pipeline import Epochs, pipeline
from tfdist.data.records import records
from tfdist.data.sources import Source, of_arrays, of_generator
from tfdist.data.tables import table
from tfdist.data.tfds import load
from tfdist.data.write import verify, write

__all__ = [
    "Catalog",
    "Epochs",
    "Source",
    "image_folder",
    "imagenet",
    "load",
    "manifest",
    "of_arrays",
    "of_generator",
    "pipeline",
    "records",
    "table",
    "transforms",
    "verify",
    "write",
]
