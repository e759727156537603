# Makes the variants of an operation: `allreduce` waits, `allreduce_async` gives a handle, `allreduce_` works in place.
# Touches pending.
"""Each operation is one function whose first argument is a Form; `variant` makes the functions that users call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller
from types import FunctionType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from .pending import Submission

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
FirstArgument = TypeVar("FirstArgument")


@dataclass(frozen=True, slots=True)
class Form(Generic[Result]):
    """What a variant does with its Submission, which type it returns, and whether it works in place."""

    end: Callable[[Submission], Result]
    returns: str
    in_place: bool = False


# A lambda would add a Python frame to every operation; `methodcaller` calls the method from C.
_wait: Any = methodcaller("result")
_begin: Any = methodcaller("handle")

WAIT: Form[Any] = Form(_wait, "Any")
WAIT_IN_PLACE: Form[Any] = Form(_wait, "Any", in_place=True)
GROUP: Form[tuple[Any, ...]] = Form(_wait, "tuple[Any, ...]")
GROUP_IN_PLACE: Form[tuple[Any, ...]] = Form(_wait, "tuple[Any, ...]", in_place=True)
NOTHING: Form[None] = Form(_wait, "None")
HANDLE: Form[int] = Form(_begin, "int")
HANDLE_IN_PLACE: Form[int] = Form(_begin, "int", in_place=True)
# The caller waits itself, and the call is known then (repeats.py).
FIRST_CALL: Form[Submission] = Form(lambda begun: begun, "Submission")
FIRST_CALL_IN_PLACE: Form[Submission] = Form(lambda begun: begun, "Submission", in_place=True)


def variant(
    name: str,
    operation: Callable[Concatenate[FirstArgument, Arguments], Result],
    form: FirstArgument,
    doc: str | None = None,
) -> Callable[Arguments, Result]:
    """Makes the function `name`. It calls `operation(form, ...)` and has the other arguments of `operation`.

    `form` is a Form, or another value that the operation takes as its first argument. Without `doc`, the new function
    has the docstring of `operation`.
    """
    original = cast(FunctionType, operation)
    # Python's errors about wrong arguments contain the function's name. So a copy with the variant's name is called.
    renamed = FunctionType(original.__code__, original.__globals__, name, original.__defaults__, original.__closure__)
    renamed.__kwdefaults__ = original.__kwdefaults__
    called = cast(Callable[Concatenate[FirstArgument, Arguments], Result], renamed)

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return called(form, *args, **kwargs)

    signature = inspect.signature(original)
    parameters = list(signature.parameters.values())[1:]
    returns = form.returns if isinstance(form, Form) else signature.return_annotation
    untyped: Any = call  # mypy does not allow these attributes on a function
    untyped.__signature__ = signature.replace(parameters=parameters, return_annotation=returns)
    untyped.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": returns}
    untyped.__name__ = untyped.__qualname__ = renamed.__qualname__ = name
    untyped.__module__ = renamed.__module__ = original.__module__
    untyped.__doc__ = doc or original.__doc__
    untyped.__wrapped__ = renamed  # so inspect and debuggers find the source
    return call
