# TensorFlow itself: present and new enough or an ImportError says what to install.
# Touches the import system and the version of TensorFlow.
"""`tf` is TensorFlow. Every file of this binding imports it from here."""

from __future__ import annotations

from typing import Any

from ..base import tested
from ..bindings.compat import is_version_greater_equal_than

LEAST = tested.LEAST["tensorflow"]


def require() -> Any:
    """Imports TensorFlow. ImportError says what to install."""
    try:
        import tensorflow
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise ImportError(
            f"farandole.tensorflow needs TensorFlow {LEAST} or newer, and it is not installed: pip install tensorflow"
        ) from None
    if not is_version_greater_equal_than(tensorflow.__version__, LEAST):
        raise ImportError(
            f"farandole.tensorflow needs TensorFlow {LEAST} or newer; this is {tensorflow.__version__}: "
            "pip install --upgrade tensorflow"
        )
    return tensorflow


tf: Any = require()


def cuda_built() -> bool:
    """Whether TensorFlow was built with CUDA."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Whether TensorFlow was built with ROCm."""
    return bool(tf.test.is_built_with_rocm())
