# The metadata of the package `lightning-horovod`, where programs look for its version.
# Touches nothing.
"""The version is that of the lightning-horovod whose interface we serve; `farandole.__version__` is our own."""

from __future__ import annotations

__version__ = "0.1.0"
__author__ = "Farandole"
__license__ = "Apache-2.0"
__docs__ = "Horovod's strategy for Lightning, served by Farandole."

__all__ = ["__author__", "__docs__", "__license__", "__version__"]
