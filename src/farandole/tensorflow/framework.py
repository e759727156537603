# Imports TensorFlow. If it is missing or too old, an ImportError says what to install.
# Touches bindings/required.
"""`tf` is TensorFlow. Every file of this binding imports it from here."""

from __future__ import annotations

from typing import Any

from ..bindings.required import required

tf: Any = required("tensorflow", "TensorFlow")


def cuda_built() -> bool:
    """Whether TensorFlow was built with CUDA."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Whether TensorFlow was built with ROCm."""
    return bool(tf.test.is_built_with_rocm())
