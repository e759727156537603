# Which tests of frameworks may run at the same time, and which are for `make nightly` alone.
# Touches the names of files and tests alone.
"""For `pytest -n 2 --dist loadgroup`: files run at the same time, but not two that start a cluster of the same kind."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CLUSTERS = ("test_ray", "test_spark")
# What `make test` has in another form. With two ranks: the same cases run with three. BASE: the way into torch's next
# release, whose battery runs. On Ray: Tune and Lightning are used by examples of their own.
NIGHTLY = (
    "test_jax.py::test_the_battery[[]2]",
    "test_mxnet.py::test_the_battery[[]2]",
    "test_torch_distributed.py::test_as_on_gloo[[]*2 ranks*",
    "test_torch_distributed.py::test_beyond_gloo[[]*2 ranks*",
    "test_torch_distributed.py::test_training_as_on_gloo[[]BASE*",
    "test_torch_distributed.py::test_a_death_is_told_at_once_and_by_name[[]*BASE]",
    "test_ray_stack.py::test_from_data_to_answers",
    "test_ray_stack.py::test_lightning_on_ray_with_horovod",
    "test_torch_ops.py::test_case[[]2 ranks*",
    "test_torch_optimizer.py::test_cases[[]2-native]",
    "test_torch_training.py::test_*[[]2]",
)


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != HERE:
            continue
        name = item.path.stem
        group = next((cluster for cluster in CLUSTERS if name.startswith(cluster)), name)
        item.add_marker(pytest.mark.xdist_group(group))
        if any(fnmatchcase(item.nodeid.rpartition("/")[2], pattern) for pattern in NIGHTLY):
            item.add_marker(pytest.mark.nightly)
