# The face of Spark's estimator for Keras.
# Only re-exports names.
"""Stands where a script has `horovod.spark.keras`."""

from __future__ import annotations

from .estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
