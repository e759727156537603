# JAX itself: present and new enough, or words that say what to install; and the parts of it that have no public name.
# Touches the import system and the version of JAX.
"""`jax` is JAX; every file of this binding takes it, and what is private in it, from here."""

from __future__ import annotations

from typing import Any

from ..compat import is_version_greater_equal_than

LEAST = "0.10.0"


def require() -> Any:
    """JAX; ImportError says what to install."""
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


def parts(module: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Effects, tokens, core, batching and mlir; ImportError when this JAX has them elsewhere."""
    try:
        from jax._src import core as private_core
        from jax._src import dispatch, effects
        from jax.interpreters import batching, mlir

        return effects, dispatch.runtime_tokens, private_core, batching, mlir
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"farandole.jax does not know JAX {module.__version__} ({error}): upgrade farandole, or take an older jax"
        ) from None


jax: Any = require()
effects: Any
tokens: Any
effects, tokens, private_core, batching, mlir = parts(jax)


def cuda_built() -> bool:
    """Whether arrays on CUDA devices can be used: they travel through the host's memory, by callbacks."""
    return any(device.platform == "gpu" for device in jax.devices())


def rocm_built() -> bool:
    """Whether arrays on ROCm devices can be used: as for CUDA, JAX calls both gpu."""
    return cuda_built() and "rocm" in jax.devices()[0].client.platform_version.lower()
