# Recovers engine errors from inside compiled functions, which JAX raises as its own errors.
# Touches JAX and farandole.bindings.compiled.
"""`translated(error)` gives the error that the same call raises outside a compiled function."""

from __future__ import annotations

from ..bindings.compiled import error_of
from .framework import jax, jax_names


def translated(error: Exception) -> Exception | None:
    """The error that a collective raised inside a compiled function; None if the error has another source.

    Later functions can run again; otherwise JAX would pass the error on to each of them.
    """
    found = error_of(str(error)) if isinstance(error, jax.errors.JaxRuntimeError) else None
    if found is not None:
        forget()
    return found


def forget() -> None:
    """The next collective of this thread does not depend on earlier ones."""
    jax_names.forget_tokens()


def settle() -> None:
    """Waits for the collectives of compiled functions that this thread has begun; raises their error."""
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError as error:
        forget()
        raise error_of(str(error)) or error from None
