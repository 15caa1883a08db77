"""Data sets become `tf.data` pipelines of global batches; no device, strategy or worker is known here."""

from tfdist.data.pipeline import Epochs, pipeline
from tfdist.data.sources import Source, load

__all__ = ["Epochs", "Source", "load", "pipeline"]
