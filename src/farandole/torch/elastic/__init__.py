# Elastic training for PyTorch: Horovod's names, and exact data order, checkpoints and reproducible bits.
# Only re-exports names.
"""Replaces `horovod.torch.elastic` in scripts."""

from __future__ import annotations

from ...elastic.loop import run, run_fn
from ...elastic.mirror import LostShards, Sharded
from ...elastic.state import ObjectState, State, commits, describe_memory, load_from, memory, save_to
from ...world.basics import init, shutdown
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
    "commits",
    "describe_memory",
    "init",
    "load_from",
    "memory",
    "run",
    "run_fn",
    "save_to",
    "shutdown",
]
