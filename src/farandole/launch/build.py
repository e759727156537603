# The table that `--check-build` prints: which frameworks are installed, and which library moves the data.
# Touches the list of installed packages; loads the core to look for NCCL.
"""The table has the same form as Horovod's."""

from __future__ import annotations

import importlib.util

from farandole.base.config import Config
from farandole.base.errors import LibraryMissing
from farandole.base.version import package_version

FRAMEWORKS = (("TensorFlow", "tensorflow"), ("PyTorch", "torch"), ("MXNet", "mxnet"), ("JAX", "jax"))
# (name, whether it is used, a note)
CONTROLLERS = (
    ("MPI", False, "ranks can be started by mpirun (--mpi); MPI moves no bytes"),
    ("Gloo", True, "means our own agents and links; no code of Gloo is inside"),
)
OPERATIONS = (
    ("DDL", False, ""),
    ("CCL", False, ""),
    ("MPI", False, ""),
    ("Gloo", True, "means our own links: shared memory inside a host, TCP between hosts"),
)


def usable(framework: str) -> bool:
    """Whether we have a binding for a framework, and the framework is installed."""
    return all(importlib.util.find_spec(name) is not None for name in (f"farandole.{framework}", framework))


def nccl() -> tuple[bool, str]:
    """Whether NCCL may be used; which was found, and how CUDA tensors are sent."""
    from farandole.engine import cuda

    try:
        config = Config.from_environment()
        libraries = cuda.libraries(config)
    except (LibraryMissing, ValueError) as error:
        return False, f"not looked for: {error}"
    found = libraries[-1]
    what = f"{found.version} is found in {found.path}" if found.usable else found.why
    return cuda.nccl_version(libraries, config) > 0, f"{what}; CUDA tensors go {cuda.way(libraries, config)}"


def table() -> str:
    """The text of the table."""
    lines = [f"Farandole v{package_version()} (instead of Horovod):", "", "Available Frameworks:"]
    lines += [_row(title, usable(name), "") for title, name in FRAMEWORKS]
    operations = (("NCCL", *nccl()), *OPERATIONS)
    for title, rows in (("Available Controllers:", CONTROLLERS), ("Available Tensor Operations:", operations)):
        lines += ["", title, *(_row(*row) for row in rows)]
    return "\n".join(lines) + "\n"


def _row(name: str, available: bool, note: str) -> str:
    return f"    [{'X' if available else ' '}] {name}" + (f"  ({note})" if note else "")
