# Errors of the engine that happened inside a compiled function: JAX turns them into its own, here they are turned back.
# Touches JAX and farandole.compiled.
"""`translated(error)` gives what the same call outside a compiled function would have raised."""

from __future__ import annotations

from ..compiled import meant
from .framework import jax, jax_names


def translated(error: Exception) -> Exception | None:
    """What a collective raised inside a compiled function; None when the error comes from something else.

    The functions after it can run again: JAX would pass the error on to each of them.
    """
    found = meant(str(error)) if isinstance(error, jax.errors.JaxRuntimeError) else None
    if found is not None:
        forget()
    return found


def forget() -> None:
    """The next collective of this thread depends on none before it."""
    jax_names.forget_tokens()


def settle() -> None:
    """Waits for the collectives of compiled functions that this thread has begun; raises what went wrong with them."""
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError as error:
        forget()
        raise meant(str(error)) or error from None
