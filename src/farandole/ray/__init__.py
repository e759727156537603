# Farandole on Ray: executors whose workers are Ray actors, and a trainer for Ray Train.
# Imports Ray, once it has looked whether it is there and new enough.
"""`RayExecutor`, `ElasticRayExecutor`, `HorovodTrainer`. See docs/ray.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.ray.installed import check

check()

from farandole.ray.runner import RayExecutor  # noqa: E402
from farandole.ray.worker import BaseHorovodWorker  # noqa: E402

__all__ = ["BaseHorovodWorker", "RayExecutor"]
