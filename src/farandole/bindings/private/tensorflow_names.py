# Every private name of TensorFlow and Keras that this package uses, and what happens without it.
# Touches objects of TensorFlow and Keras that its callers pass.
"""Methods of classes are looked up when our class is derived from them; attributes of objects, in the first object.

Methods that the wrapped optimizers of farandole.tensorflow forward are not listed here: the documentation of
tf.compat.v1 asks subclasses for them, and they are abstract there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import has, of

_STOP = ("ending a server of tf.data's service", "it ends with its process")
_MOMENTS = ("SyncBatchNormalization", "it cannot be made: NotImplementedError")
_SUMS = (
    "reducing the sums of several passes",
    "optimizers with gradient_accumulation_steps or backward_passes_per_step > 1 raise RuntimeError",
)
_ACCUMULATED = (
    "telling gradients that are still added up from a Keras optimizer's state",
    "they count as its state: rank 0 broadcasts its own with the variables",
)
_SLOTS = (
    "making the variables of an optimizer of tf_keras.optimizers.legacy",
    "these optimizers with backward_passes_per_step > 1 raise RuntimeError",
)
_VARIABLES = ("the variables of a Keras optimizer", "apply() without variables raises RuntimeError: give them to it")


def check_servers(*kinds: type) -> None:
    """Looks up the method that ends a server of tf.data's service."""
    for kind in kinds:
        of(kind, "_stop", *_STOP)


def stop_server(server: Any) -> None:
    """Ends a server of tf.data's service; without the method, the server ends with the process."""
    stop = of(server, "_stop", *_STOP)
    if stop is not None:
        stop()


def moments_of(layer: type) -> Any:
    """The method in which a batch normalisation computes its statistics; None if it uses another."""
    return of(layer, "_moments", *_MOMENTS)


def check_sums(optimizer: type) -> None:
    """Raises RuntimeError if this Keras has no method that gets the sums of several passes."""
    if of(optimizer, "_clip_gradients", *_SUMS) is None:
        raise RuntimeError(
            f"this release of Keras does not give access to the gradients that {optimizer.__name__} has accumulated: "
            "train without gradient_accumulation_steps and with backward_passes_per_step=1"
        )


def make_slots(optimizer: Any, variables: list[Any]) -> None:
    """Makes the variables of an optimizer of tf_keras before its first step."""
    make = getattr(optimizer, "build", None) or of(optimizer, "_create_all_weights", *_SLOTS)
    if make is None:
        raise RuntimeError(
            f"this release of tf_keras does not make the variables of {type(optimizer).__name__} when it is asked: "
            "train with backward_passes_per_step=1, or use the optimizer of tf_keras.optimizers"
        )
    make(variables)


def accumulated(optimizer: Any) -> list[Any]:
    """Gradients that a Keras optimizer is still adding up. If it does not show them, they count as its state."""
    if not getattr(optimizer, "gradient_accumulation_steps", None) or not getattr(optimizer, "built", False):
        return []
    return list(of(optimizer, "_accumulated_gradients", *_ACCUMULATED) or ())


def trainable(ask: Callable[[str], Any]) -> list[Any]:
    """The variables for which a Keras optimizer was built; `ask` gives its attributes."""
    try:
        return list(ask("_trainable_variables"))
    except AttributeError:
        text = "this release of Keras does not report an optimizer's variables: give them to apply()"
        raise RuntimeError(text) from None


def check_variables(optimizer: Any) -> None:
    """Warns if the optimizer does not show its variables."""
    has(optimizer, "_trainable_variables", *_VARIABLES)
