# The public names of Spark's estimator for PyTorch.
# Only re-exports names.
"""Replaces `horovod.spark.torch` in scripts."""

from __future__ import annotations

from .estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
