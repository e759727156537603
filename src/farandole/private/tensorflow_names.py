# Every private name of TensorFlow and Keras that this package uses, and what happens without it.
# Touches objects of theirs that it is given.
"""They are kept in objects, and looked for when they are used.

Not here, because nothing is asked of them: methods that Keras calls on an optimizer (`_clip_gradients`), on a callback
(`_save_model`) and on a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import of


def stop_server(server: Any) -> None:
    """Ends a server of tf.data's service; where that cannot be said, it ends with the process."""
    stop = of(server, "_stop", "ending a server of tf.data's service", "it ends with its process")
    if stop is not None:
        stop()


def accumulated(optimizer: Any) -> list[Any]:
    """Gradients that a Keras optimizer still adds up; where it does not show them, they count as its state."""
    return list(getattr(optimizer, "_accumulated_gradients", None) or ())


def trainable(ask: Callable[[str], Any]) -> list[Any]:
    """The variables that a Keras optimizer was built for; `ask` gives its attributes."""
    try:
        return list(ask("_trainable_variables"))
    except AttributeError:
        text = "this release of Keras does not tell an optimizer's variables: give them to apply()"
        raise RuntimeError(text) from None


def reduction_axes(layer: Any) -> list[int] | None:
    """The axes over which Keras 3 normalises; None where it gives them to the method, as Keras 2 does."""
    found = getattr(layer, "_reduction_axes", None)
    return None if found is None else list(found)
