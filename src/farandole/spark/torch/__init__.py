# The face of Spark's estimator for PyTorch.
# Only re-exports names.
"""Stands where a script has `horovod.spark.torch`."""

from __future__ import annotations

from .estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
