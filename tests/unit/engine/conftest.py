# Engines that several files of tests use.
# Touches the native engine.
"""Fixtures of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farandole.base.config import Config
from farandole.engine.native import NativeEngine


@pytest.fixture
def engine() -> Iterator[NativeEngine]:
    """A world of one, started."""
    engine = NativeEngine(Config(), 0, [0])
    engine.start(5.0)
    yield engine
    engine.close()


@pytest.fixture
def waiting() -> Iterator[NativeEngine]:
    """An engine whose operations stay pending: the other rank never comes."""
    engine = NativeEngine(Config(), 0, [0, 0])
    yield engine
    engine.close()
