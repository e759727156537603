# Farandole on Ray: executors whose workers are Ray actors, and a trainer for Ray Train.
# Checks that Ray is installed and new enough, then imports it. Imports Ray Train when its names are used.
"""`RayExecutor`, `ElasticRayExecutor`, `HorovodTrainer`. See docs/ray.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.ray.installed import check

check()

from farandole.ray.elastic import ElasticRayExecutor  # noqa: E402
from farandole.ray.runner import RayExecutor  # noqa: E402
from farandole.ray.worker import BaseHorovodWorker  # noqa: E402

if TYPE_CHECKING:
    from farandole.ray.train import HorovodConfig as HorovodConfig
    from farandole.ray.train import HorovodTrainer as HorovodTrainer
    from farandole.ray.train import prepare_trainer as prepare_trainer

OF_TRAIN = ("HorovodConfig", "HorovodTrainer", "prepare_trainer")
__all__ = [
    "BaseHorovodWorker",
    "ElasticRayExecutor",
    "HorovodConfig",
    "HorovodTrainer",
    "RayExecutor",
    "prepare_trainer",
]


def __getattr__(name: str) -> Any:
    if name not in OF_TRAIN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from farandole.ray import train  # imports pandas and pyarrow, which are needed only with Ray Train

    return getattr(train, name)
