# Which of the strangers' scripts run at the same time as others.
# Touches the names of tests alone.
"""For `pytest --dist loadgroup`: all scripts in one place; no second cluster of Ray or Spark beside the frameworks'."""

from __future__ import annotations

import pytest

CLUSTERS = {"ray_executor": "test_ray", "spark_run": "test_spark"}


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "strangers":
            group = next((group for name, group in CLUSTERS.items() if f"[{name}" in item.name), "strangers")
            item.add_marker(pytest.mark.xdist_group(group))
