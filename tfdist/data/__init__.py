"""Sources of examples and deterministic `tf.data` input pipelines of global batches.

Nothing in this package depends on a device, a strategy or the number of workers.
"""

from tfdist.data import transforms
from tfdist.data.pipeline import Epochs, pipeline
from tfdist.data.sources.catalog import Catalog
from tfdist.data.sources.convert import as_source
from tfdist.data.sources.image_files import image_folder, imagenet, manifest
from tfdist.data.sources.records import records
from tfdist.data.sources.source import Source, of_arrays, of_generator
from tfdist.data.sources.tables import table
from tfdist.data.sources.tfds import load
from tfdist.data.writing.writer import verify, write

__all__ = [
    "Catalog",
    "Epochs",
    "Source",
    "as_source",
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
