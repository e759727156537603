# Gives engine errors TensorFlow's classes as well, and recovers engine errors that TensorFlow raises from graphs.
# Touches TensorFlow; the rooms base and bindings.
"""`with_tensorflow_classes()` adds TensorFlow's classes to the errors of its block; `translated(error)` finds ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..base.errors import HorovodInternalError, Mismatch, NoRows, NotInitialized
from ..bindings.compiled import error_of
from .framework import tf


class _Both(tf.errors.OpError):  # type: ignore[misc]
    """An error of ours and of TensorFlow. AutoGraph and pickle construct it with these arguments."""

    def __init__(self, node_def: Any, op: Any, message: str, *_: Any) -> None:
        tf.errors.OpError.__init__(self, node_def, op, message, self._code)
        self.name, self.rank = "", -1

    _code: int


class GraphMismatch(_Both, Mismatch, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """A Mismatch for calls in which Horovod raises tf.errors.FailedPreconditionError."""

    _code = tf.errors.FAILED_PRECONDITION


class GraphNoRows(_Both, NoRows, tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """A tensor without rows. For it, Horovod raises one or the other of TensorFlow's errors, depending on the
    operation.
    """

    _code = tf.errors.FAILED_PRECONDITION


class GraphNotInitialized(_Both, NotInitialized, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """A NotInitialized for calls in which Horovod raises tf.errors.FailedPreconditionError."""

    _code = tf.errors.FAILED_PRECONDITION


class GraphArgument(_Both, ValueError, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """A ValueError for calls in which Horovod raises tf.errors.InvalidArgumentError."""

    _code = tf.errors.INVALID_ARGUMENT


class GraphAborted(_Both, HorovodInternalError, tf.errors.AbortedError):  # type: ignore[misc]
    """A HorovodInternalError for calls in which Horovod raises tf.errors.AbortedError."""

    _code = tf.errors.ABORTED


@contextlib.contextmanager
def with_tensorflow_classes() -> Iterator[None]:
    """Errors in its block are also of the TensorFlow class that Horovod raises, and remain errors of ours."""
    try:
        yield
    except Mismatch as error:
        if isinstance(error, _Both):
            raise
        both = (GraphNoRows if isinstance(error, NoRows) else GraphMismatch)(None, None, str(error))
        both.name, both.rank = error.name, error.rank
        raise both from error.__cause__
    except NotInitialized as error:
        raise GraphNotInitialized(None, None, str(error)) from error.__cause__
    except ValueError as error:
        if type(error) is not ValueError:  # a subclass is more exact than a class of TensorFlow
            raise
        raise GraphArgument(None, None, str(error)) from error.__cause__


# A Python callback cannot raise FAILED_PRECONDITION. A file operation of TensorFlow raises it if a part of its path is
# not a folder. So a node that writes below /dev/null ends the graph, and the path contains the message.
_NO_FOLDER = "/dev/null/ "
_LONGEST = 1000  # characters; the length of paths is limited
_SLASH, _DIVISION = "/", "\u2215"  # the division sign looks like a slash and does not separate folders


def words(error: Mismatch) -> bytes:
    """A mismatch as one line, for `unless_empty`."""
    return f"{Mismatch.__name__}: {' '.join(str(error).split())}"[:_LONGEST].replace(_SLASH, _DIVISION).encode()


def unless_empty(error_text: Any) -> Any:
    """A node that raises tf.errors.FailedPreconditionError with this text, unless the text is empty."""
    error_text.set_shape([])

    def fail() -> Any:
        path = tf.strings.join([_NO_FOLDER, error_text])
        with tf.control_dependencies([tf.io.write_file(path, "")]):
            return tf.constant(False)

    return tf.cond(tf.equal(error_text, ""), lambda: tf.constant(True), fail)


def translated(error: Exception) -> Exception | None:
    """The error that our operation raised inside the graph; None if the error has another source."""
    if not isinstance(error, tf.errors.OpError):
        return None
    return error_of(str(error.message).replace("; Not a directory", "").replace(_DIVISION, _SLASH))
