# The public interface of farandole.torch, and how it accesses tensors. Horovod's names: test_horovod_names.py.
# Touches farandole.torch; starts nothing.
"""Tests that need no ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

import farandole.torch as hvd
from farandole.torch import memory


def test_every_public_name_exists() -> None:
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    assert callable(hvd.Compression.none.compress) and callable(hvd.Compression.fp16.decompress)


def test_pending_memory_outlives_the_tensor_that_owns_it() -> None:
    tensor = torch.arange(1000.0)
    buffer = memory.TensorBuffer(tensor)
    tensor.data = torch.zeros(1)  # as module.half() does
    taken = torch.zeros(1000)  # would get the memory if it were free
    assert taken.data_ptr() != buffer.array.address
    assert buffer.array.array(buffer.dtype).tolist() == list(range(1000))


def test_tensors_that_are_negated_when_read_are_refused() -> None:
    lazily = torch.ones(1, dtype=torch.complex64).conj().imag
    with pytest.raises(ValueError, match="resolve_neg"):
        memory.TensorBuffer(lazily)
