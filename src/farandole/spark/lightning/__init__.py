# The face of Spark's estimator for Lightning.
# Re-exports alone; Horovod calls both classes as those for plain PyTorch.
"""Stands where a script has `horovod.spark.lightning`."""

from __future__ import annotations

from .estimator import LightningEstimator, LightningModel, TorchEstimator, TorchModel

__all__ = ["LightningEstimator", "LightningModel", "TorchEstimator", "TorchModel"]
