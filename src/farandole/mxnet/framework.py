# Imports MXNet, if the supported version is installed; otherwise ImportError says what to install.
# Touches the import system and the version of MXNet.
"""`mx` is MXNet. Every file of this binding imports it from here."""

from __future__ import annotations

from typing import Any

import numpy

from ..base import tested
from ..bindings.compat import is_version_greater_equal_than
from ..bindings.required import missing

OLDEST, TOO_NEW = tested.OLDEST["mxnet"], "2.0.0"
INSTALL = "pip install mxnet==1.9.1 'numpy<1.24', in an environment of its own with Python 3.11 or older"


def require() -> Any:
    """Imports MXNet. ImportError says what to install."""
    try:
        import mxnet
    except ModuleNotFoundError as error:
        if error.name == "mxnet":
            raise missing(
                f"farandole.mxnet needs MXNet {OLDEST}, and it is not installed: {INSTALL}", "mxnet"
            ) from None
        if error.name == "distutils":  # Python 3.12 has no distutils
            raise ImportError(f"MXNet cannot be imported by this version of Python: {INSTALL}") from None
        raise
    except AttributeError as error:  # numpy.bool does not exist since 1.24
        raise ImportError(
            f"MXNet cannot be imported with NumPy {numpy.__version__} ({error}): it needs one before 1.24: {INSTALL}"
        ) from None
    except OSError as error:
        raise ImportError(f"MXNet's own library cannot be loaded: {error}; docs/mxnet.md says what to do") from None
    found = mxnet.__version__
    if not is_version_greater_equal_than(found, OLDEST) or is_version_greater_equal_than(found, TOO_NEW):
        raise ImportError(
            f"farandole.mxnet needs MXNet {OLDEST} or newer, and older than {TOO_NEW}; this is {found}: {INSTALL}"
        )
    return mxnet


mx: Any = require()


def _has(feature: str) -> bool:
    return bool(mx.runtime.Features().is_enabled(feature))


def cuda_built() -> bool:
    """Whether MXNet was built with CUDA."""
    return _has("CUDA")


def rocm_built() -> bool:
    """False: MXNet does not support ROCm."""
    return False
