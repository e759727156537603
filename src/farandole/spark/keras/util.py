# The names of horovod.spark.keras.util.
# Touches library.py and models.py.
"""`TFKerasUtil`: the Keras of this process and its binding, models and optimizers as text."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable
from typing import Any

from ...launch.calls import pack as serialize
from ...launch.calls import unpack as deserialize
from . import models
from .library import KERAS, LEGACY, binding, load

TF_KERAS = "tf_keras"  # Horovod's name for TFKerasUtil, with either Keras


def _library() -> str:
    return LEGACY if LEGACY in sys.modules else KERAS  # TensorFlow loads it where TF_USE_LEGACY_KERAS asks for it


class TFKerasUtil:
    """Only static functions. Those whose names end in `_fn` return functions that are sent to ranks."""

    type = TF_KERAS

    @staticmethod
    def keras() -> Any:
        """Keras itself."""
        return load(_library())

    @staticmethod
    def keras_fn() -> Callable[[], Any]:
        """A function that returns Keras."""
        return TFKerasUtil.keras

    @staticmethod
    def get_horovod() -> Any:
        """The module that replaces `horovod.tensorflow.keras`."""
        return binding(_library())

    @staticmethod
    def horovod_fn() -> Callable[[], Any]:
        """A function that returns this module."""
        return TFKerasUtil.get_horovod

    @staticmethod
    def serialize_model(model: Any) -> str:
        """A model as text."""
        return base64.b64encode(models.packed(model)).decode()

    @staticmethod
    def deserialize_model(model_bytes: str, custom_objects: Any = None) -> Any:
        """The model from such a text."""
        return models.unpacked(base64.b64decode(model_bytes), custom_objects, _library())

    @staticmethod
    def serialize_optimizer(optimizer: Any) -> str:
        """An optimizer's settings as text."""
        return base64.b64encode(serialize(TFKerasUtil.keras().optimizers.serialize(optimizer))).decode()

    @staticmethod
    def deserialize_optimizer(text: str, custom_objects: Any = None) -> Any:
        """An optimizer with such settings."""
        return TFKerasUtil.keras().optimizers.deserialize(
            deserialize(base64.b64decode(text)), custom_objects=custom_objects
        )
