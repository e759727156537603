# Which tests of frameworks may run at the same time: files may, but not two that start a cluster of the same kind.
# Touches the names of files alone.
"""For `pytest -n 2 --dist loadgroup`."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
CLUSTERS = ("test_ray", "test_spark")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            name = item.path.stem
            group = next((cluster for cluster in CLUSTERS if name.startswith(cluster)), name)
            item.add_marker(pytest.mark.xdist_group(group))
