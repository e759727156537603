# The driver of the elastic tests: runs a training in the workers of an elastic executor, the older one, or a trainer.
# Touches the Ray cluster that RAY_ADDRESS names.
"""`python ray_elastic_driver.py WAY LEAST MOST MODE`; the training itself tells its progress in files."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import ray

SCRATCH = os.environ["SCRATCH"]
SAMPLES = "101"


def train(_config: Any = None) -> int:
    import os as own_os
    import sys as own_sys

    own_os.environ["SCRATCH"] = SCRATCH
    own_sys.argv = ["elastic_training.py", MODE, SAMPLES, "0", "0"]
    import elastic_training

    elastic_training.main()
    if REPORTS:
        import ray.train as ray_train

        ray_train.report(
            {"rank": ray_train.get_context().get_world_rank(), "size": ray_train.get_context().get_world_size()}
        )
    return own_os.getpid()


def train_with_lightning() -> int:
    import os as own_os

    import lightning_elastic_job

    from farandole import rank
    from horovod.ray import ray_logger

    lightning_elastic_job.main()
    ray_logger.log({"through": rank()})
    return own_os.getpid()


def older(least: int, most: int) -> None:
    """Horovod's first elastic executor, with Lightning in its workers."""
    from horovod.ray import ElasticRayExecutor

    settings = ElasticRayExecutor.create_settings(min_num_proc=least, max_num_proc=most, timeout_s=60)
    names = ("SCRATCH", "RANKS", "DEATHS", "COMMITS", "EPOCHS")
    executor = ElasticRayExecutor(settings, env_vars={name: os.environ[name] for name in names})
    executor.start()
    callback_values: list[Any] = []
    pids = executor.run(train_with_lightning, callbacks=[callback_values.append])
    print("older", len(pids), len(set(pids)), callback_values, flush=True)
    executor.shutdown()


if __name__ == "__main__":
    WAY, LEAST, MOST, MODE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    REPORTS = WAY == "trainer"
    ray.init(logging_level=logging.ERROR)
    if WAY == "executor":
        from farandole.ray import RayExecutor

        with RayExecutor(RayExecutor.create_settings(60), num_workers=(LEAST, MOST)) as executor:
            print("pids", executor.run(train), flush=True)
    elif WAY == "older":
        older(LEAST, MOST)
    else:
        from ray.train import FailureConfig, RunConfig, ScalingConfig

        from farandole.ray import HorovodTrainer

        result = HorovodTrainer(
            train,
            train_loop_config={},
            scaling_config=ScalingConfig(num_workers=(LEAST, MOST)),  # type: ignore[arg-type]
            run_config=RunConfig(storage_path=SCRATCH, failure_config=FailureConfig(max_failures=9)),
        ).fit()
        print("metrics", result.metrics, flush=True)
    ray.shutdown()
