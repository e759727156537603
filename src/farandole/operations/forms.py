# How the variants of an operation are made: `allreduce` waits, `allreduce_async` gives a handle, `_` works in place.
# Touches pending.
"""One function describes an operation with its arguments; `variant` makes of it the functions that users call."""

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
Given = TypeVar("Given")


@dataclass(frozen=True, slots=True)
class Form(Generic[Result]):
    """What a variant does with the requests, the type that it returns, and whether it works in place."""

    end: Callable[[Submission], Result]
    returns: str
    in_place: bool = False


# C calls these methods: a Python function here would be one more frame in every operation.
_wait: Any = methodcaller("result")
_begin: Any = methodcaller("handle")

WAIT: Form[Any] = Form(_wait, "Any")
WAIT_IN_PLACE: Form[Any] = Form(_wait, "Any", True)
GROUP: Form[tuple[Any, ...]] = Form(_wait, "tuple[Any, ...]")
GROUP_IN_PLACE: Form[tuple[Any, ...]] = Form(_wait, "tuple[Any, ...]", True)
NOTHING: Form[None] = Form(_wait, "None")
HANDLE: Form[int] = Form(_begin, "int")
HANDLE_IN_PLACE: Form[int] = Form(_begin, "int", True)


def variant(
    name: str, operation: Callable[Concatenate[Given, Arguments], Result], form: Given, doc: str | None = None
) -> Callable[Arguments, Result]:
    """The function `name`: it calls `operation(form, ...)`, and its signature is that of `operation` without the form.

    `form` is a Form, or what else the operation takes in its place. Without `doc`, it has the operation's docstring.
    """
    model = cast(FunctionType, operation)
    # A copy under the variant's name, which Python's own errors about arguments then tell.
    named = FunctionType(model.__code__, model.__globals__, name, model.__defaults__, model.__closure__)
    named.__kwdefaults__ = model.__kwdefaults__
    called = cast(Callable[Concatenate[Given, Arguments], Result], named)

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return called(form, *args, **kwargs)

    signature = inspect.signature(model)
    parameters = list(signature.parameters.values())[1:]
    returns = form.returns if isinstance(form, Form) else signature.return_annotation
    made: Any = call
    made.__signature__ = signature.replace(parameters=parameters, return_annotation=returns)
    made.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": returns}
    made.__name__ = made.__qualname__ = named.__qualname__ = name
    made.__module__ = named.__module__ = model.__module__
    made.__doc__ = doc or model.__doc__
    made.__wrapped__ = named  # where inspect and debuggers find the source
    return call
