# JAX itself: present and new enough or an ImportError says what to install.
# Touches the import system, the version of JAX and private.
"""`jax` is JAX. Every file of this binding imports it from here, after its private names were found."""

from __future__ import annotations

from typing import Any

from ..base import tested
from ..bindings.compat import is_version_greater_equal_than

LEAST = tested.LEAST["jax"]


def require() -> Any:
    """Imports JAX. ImportError says what to install."""
    try:
        import jax
        import jax.extend.core
    except ModuleNotFoundError as error:
        if error.name != "jax":
            raise
        raise ImportError(
            f"farandole.jax needs JAX {LEAST} or newer, and it is not installed: pip install jax"
        ) from None
    if not is_version_greater_equal_than(jax.__version__, LEAST):
        raise ImportError(
            f"farandole.jax needs JAX {LEAST} or newer; this is {jax.__version__}: pip install --upgrade jax"
        )
    return jax


jax: Any = require()

from ..bindings.private import jax_names as jax_names  # noqa: E402 (it looks for names of JAX)

jax_names.check(jax.__version__)


def cuda_built() -> bool:
    """Whether there are GPUs. Their arrays are sent through the host's memory, by callbacks."""
    return any(device.platform == "gpu" for device in jax.devices())


def rocm_built() -> bool:
    """Whether the GPUs use ROCm; JAX calls both kinds gpu."""
    return cuda_built() and "rocm" in jax.devices()[0].client.platform_version.lower()
