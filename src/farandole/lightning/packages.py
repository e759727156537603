# Lightning's two packages: their names, the names of their Fabrics, and whether they are installed and new enough.
# Touches Lightning's packages by their names, when a script has chosen one.
"""`lightning.pytorch` and `pytorch_lightning` are the same code under two names."""

from __future__ import annotations

from typing import Any

from ..base.named import module_of

OLDEST = (2, 6)
TRAINERS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def fabric_of(tree: str) -> str:
    """The name of the package's Fabric."""
    return TRAINERS.get(tree, tree)


def package_of(tree: str) -> Any:
    """Imports the package, or a Fabric, by its name; ImportError unless it can be used."""
    try:
        package = module_of(tree)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != tree.partition(".")[0]:
            raise  # Lightning is installed, but lacks another package
        raise ModuleNotFoundError(
            f"farandole.lightning needs {tree}, which is not installed: pip install 'farandole[lightning]'",
            name=error.name,
        ) from None
    version = getattr(package, "__version__", None) or module_of(tree.partition(".")[0]).__version__
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise ImportError(f"{tree} is version {version}; farandole.lightning needs {wanted} or newer: pip install -U")
    return package
