# Horovod's data loaders: a base class, and a mixin that loads batches in advance.
# Only re-exports names.
"""Replaces `horovod.data` in scripts."""

from __future__ import annotations

from .data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
