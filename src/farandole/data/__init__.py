# Horovod's data loaders: a base class, and a mixin that loads ahead.
# Re-exports alone.
"""Stands where a script has `horovod.data`."""

from __future__ import annotations

from .data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
