# The public names of Spark's estimator for Lightning.
# Re-exports alone; Horovod calls both classes as those for plain PyTorch.
"""Replaces `horovod.spark.lightning` in scripts."""

from __future__ import annotations

from .estimator import LightningEstimator, LightningModel, TorchEstimator, TorchModel

__all__ = ["LightningEstimator", "LightningModel", "TorchEstimator", "TorchModel"]
