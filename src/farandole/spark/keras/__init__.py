# The public names of Spark's estimator for Keras.
# Only re-exports names.
"""Replaces `horovod.spark.keras` in scripts."""

from __future__ import annotations

from .estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
