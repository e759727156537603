# Checks that JAX is installed and new enough, and imports it; otherwise ImportError says what to install.
# Touches the import system; the rooms base, bindings and bindings.private.
"""`jax` is JAX. Every file of this binding imports it from here, after its private names were found."""

from __future__ import annotations

from typing import Any

from ..base.named import module_of
from ..bindings.required import required

jax: Any = required("jax", "JAX")

module_of("jax.extend.core")  # `import jax` does not load it

from ..bindings.private import jax_names as jax_names  # noqa: E402 (it looks for names of JAX)

jax_names.check(jax.__version__)


def cuda_built() -> bool:
    """Whether there are GPUs. Their arrays are sent through the host's memory, by callbacks."""
    return any(device.platform == "gpu" for device in jax.devices())


def rocm_built() -> bool:
    """Whether the GPUs use ROCm; JAX calls both kinds gpu."""
    return cuda_built() and "rocm" in jax.devices()[0].client.platform_version.lower()
