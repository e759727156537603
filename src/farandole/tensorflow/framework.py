# TensorFlow itself: present and new enough, or words that say what to install.
# Touches the import system and the version of TensorFlow.
"""`tf` is TensorFlow; every file of this binding takes it from here."""

from __future__ import annotations

from typing import Any

from .. import tested
from ..compat import is_version_greater_equal_than

LEAST = tested.LEAST["tensorflow"]


def require() -> Any:
    """TensorFlow; ImportError says what to install."""
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
    """Whether tensors on CUDA devices can be used: TensorFlow decides that."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Whether tensors on ROCm devices can be used: TensorFlow decides that."""
    return bool(tf.test.is_built_with_rocm())
