# What the tests of farandole.ray do on a real cluster, in a driver that ray_cluster.py has connected.
# Touches Ray, farandole.ray and horovod.ray as users see them.
"""Each case returns plain data; the tests look at it."""

from __future__ import annotations

import os
import time
from typing import Any

import ray

import farandole
from farandole.ray import RayExecutor


def place() -> dict[str, Any]:
    """Joins, adds up, and says where it stands."""
    import numpy as np

    farandole.init()
    total = farandole.allreduce(np.full(3, farandole.rank() + 1.0), op=farandole.Sum, name="sum")
    return {
        "rank": farandole.rank(),
        "size": farandole.size(),
        "local": [farandole.local_rank(), farandole.local_size()],
        "cross": [farandole.cross_rank(), farandole.cross_size()],
        "sum": float(total[0]),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "extra": os.environ.get("EXTRA"),
        "pid": os.getpid(),
        "torch": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")],
    }


def wait_for_free(cpus: float) -> float:
    """Ray gives back what an executor had within a moment."""
    deadline = time.monotonic() + 20
    while (free := ray.available_resources().get("CPU", 0)) < cpus and time.monotonic() < deadline:
        time.sleep(0.05)
    return float(free)


class Counter:
    """An executable."""

    def __init__(self, start: int, step: int = 1) -> None:
        self.value, self.step = start, step

    def count(self) -> int:
        self.value += self.step
        return self.value


def logging_place() -> int:
    from horovod.ray import ray_logger

    farandole.init()
    for step in range(3):
        ray_logger.log({"step": step, "rank": farandole.rank()})
    return farandole.rank()


def contract() -> dict[str, Any]:
    from horovod.ray import RayExecutor as TheirName

    assert TheirName is RayExecutor
    settings = RayExecutor.create_settings(timeout_s=60)
    executor = RayExecutor(settings, num_workers=2, use_gpu=True)
    executor.start(
        executable_cls=Counter, executable_args=[10], executable_kwargs={"step": 2}, extra_env_vars={"EXTRA": 7}
    )
    heard: list[Any] = []
    found = {
        "run": executor.run(place),
        "again": executor.run(lambda x, y: x + y + farandole.rank(), args=[1], kwargs={"y": 10}),
        "remote": ray.get(executor.run_remote(lambda x: x * 2, args=[4])),
        "execute": [executor.execute(lambda w: w.count()), executor.execute(Counter.count)],
        "single": executor.execute_single(lambda w: w.value),
        "submit": ray.get(executor.submit(lambda x: (x, farandole.rank()), 1, "x")),
        "logged": executor.run(logging_place, callbacks=[heard.append]),
        "heard": heard,
        "workers": executor.num_workers,
    }
    executor.shutdown()
    executor.shutdown()
    return {**found, "free": wait_for_free(4)}


def raises(words: str) -> None:
    import numpy as np

    farandole.init()
    if farandole.rank() == 1:
        raise ValueError(words)
    farandole.allreduce(np.ones(3), name="never")


def dies() -> None:
    import numpy as np

    farandole.init()
    if farandole.rank() == 0:
        os._exit(3)
    farandole.allreduce(np.ones(3), name="never")


def failing() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with RayExecutor(RayExecutor.create_settings(60), num_workers=2) as executor:
        before = executor.run(place)
        began = time.monotonic()
        try:
            executor.run(raises, args=["on purpose"])
        except ValueError as error:
            found["error"] = str(error)
        found["seconds"] = time.monotonic() - began
        after = executor.run(place)
        found["same"] = [one["pid"] for one in before] == [one["pid"] for one in after]
        found["after"] = [one["sum"] for one in after]
        began = time.monotonic()
        try:
            executor.run(dies)
        except farandole.RankFailed as error:
            found["died"] = [error.rank, str(error)]
        found["death_seconds"] = time.monotonic() - began
    return found


def too_many() -> list[str]:
    said = []
    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    for more in ({"num_workers": 50}, {"num_hosts": 9}, {"num_workers": 1, "use_gpu": True, "gpus_per_worker": 64}):
        executor = RayExecutor(settings, **more)
        try:
            executor.start()
        except TimeoutError as error:
            said.append(str(error))
        executor.shutdown()
    executor = RayExecutor(settings, min_workers=50, elastic_timeout=5)
    executor.start()
    try:
        executor.run(place)
    except farandole.RankFailed as error:
        said.append(str(error))
    executor.shutdown()
    return [*said, str(wait_for_free(4))]


def colocated(hosts: int, each: int) -> list[dict[str, Any]]:
    with RayExecutor(RayExecutor.create_settings(60), num_hosts=hosts, num_workers_per_host=each) as executor:
        return executor.run(place)


def current_group() -> dict[str, Any]:
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1}, {"CPU": 1}, {"CPU": 1}])
    ray.get(group.ready())

    @ray.remote(num_cpus=1)
    def inside() -> Any:
        with RayExecutor(RayExecutor.create_settings(60, placement_group_timeout_s=5), num_workers=2) as executor:
            places = [place["sum"] for place in executor.run(place)]
            free = ray.available_resources().get("CPU", 0)
        try:
            RayExecutor(RayExecutor.create_settings(60), num_workers=9).start()
        except ValueError as error:
            return places, free, str(error)

    strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    try:
        sums, free, error = ray.get(inside.options(scheduling_strategy=strategy).remote())
        return {"sums": sums, "free": free, "error": error}
    finally:
        remove_placement_group(group)


def names() -> list[str]:
    from ray.train.horovod import HorovodConfig, HorovodTrainer

    import farandole.ray

    return [HorovodTrainer.__module__, HorovodConfig.__module__, farandole.ray.HorovodTrainer.__module__]
