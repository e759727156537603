# Packages that a job of the tests does without. Touches Python's search for modules, in processes with this folder on
# their path alone.
"""Frameworks import whatever optional package they find: TensorFlow takes twice as long beside scikit-learn, Matplotlib
and JAX. TESTS_WITHOUT names packages that a job shall not find, as on a machine that has only what it needs."""

import os
import sys

ABSENT = frozenset(os.environ.get("TESTS_WITHOUT", "").split())


class Absent:
    """Comes before all other finders."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}: the test does without it", name=name)


if ABSENT:
    sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]
