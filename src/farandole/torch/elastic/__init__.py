# Elastic training for PyTorch: Horovod's names, and exact data, checkpoints and reproducible bits beside them.
# Re-exports alone.
"""Stands where a script has `horovod.torch.elastic`."""

from __future__ import annotations

from ...elastic.loop import run, run_fn
from ...elastic.mirror import LostShards, Sharded
from ...elastic.state import ObjectState, State
from .loader import ElasticDataLoader, Shard
from .sampler import ElasticSampler
from .state import TorchRandomState, TorchState
from .virtual import VirtualSteps

__all__ = [
    "ElasticDataLoader",
    "ElasticSampler",
    "LostShards",
    "ObjectState",
    "Shard",
    "Sharded",
    "State",
    "TorchRandomState",
    "TorchState",
    "VirtualSteps",
    "run",
    "run_fn",
]
