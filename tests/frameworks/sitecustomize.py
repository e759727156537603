# Hides packages from a job of the tests. Touches Python's search for modules, only in processes that have this folder
# on their path.
"""Frameworks import the optional packages that they find: with scikit-learn and JAX, the import of TensorFlow
takes twice as long. TESTS_WITHOUT names packages that a job must not find."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an import that every process would pay for
    from importlib.metadata import DistributionFinder

ABSENT = frozenset(os.environ.get("TESTS_WITHOUT", "").split())


class OthersAlone(PathFinder):
    """Looks for modules as ever, but for those."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname in ABSENT else super().find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, context: DistributionFinder.Context | None = None) -> Iterable[Any]:
        """What pip has recorded of them is not found either."""
        if context is not None and context.name in ABSENT:
            return ()
        return super().find_distributions(*() if context is None else (context,))


if ABSENT:
    sys.meta_path[sys.meta_path.index(PathFinder)] = OthersAlone
