# What the tests of farandole.ray do on a real cluster, in a driver that ray_cluster.py has connected.
# Touches Ray, farandole.ray and horovod.ray as users see them.
"""Each case returns plain data; the tests look at it."""

from __future__ import annotations

import json
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
        time.sleep(0.05)  # sleep: between two looks
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
    callback_values: list[Any] = []
    found = {
        "run": executor.run(place),
        "again": executor.run(lambda x, y: x + y + farandole.rank(), args=[1], kwargs={"y": 10}),
        "remote": ray.get(executor.run_remote(lambda x: x * 2, args=[4])),
        "execute": [executor.execute(lambda w: w.count()), executor.execute(Counter.count)],
        "single": executor.execute_single(lambda w: w.value),
        "submit": ray.get(executor.submit(lambda x: (x, farandole.rank()), 1, "x")),
        "logged": executor.run(logging_place, callbacks=[callback_values.append]),
        "heard": callback_values,
        "workers": executor.num_workers,
    }
    executor.shutdown()
    executor.shutdown()
    return {**found, "free": wait_for_free(4)}


def raises(message: str) -> None:
    import numpy as np

    farandole.init()
    if farandole.rank() == 1:
        raise ValueError(message)
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
    output = []
    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    cases: list[dict[str, Any]] = [
        {"num_workers": 50},
        {"num_hosts": 9},
        {"num_workers": 1, "use_gpu": True, "gpus_per_worker": 64},
    ]
    for more in cases:
        executor = RayExecutor(settings, **more)
        try:
            executor.start()
        except TimeoutError as error:
            output.append(str(error))
        executor.shutdown()
    executor = RayExecutor(settings, min_workers=50, elastic_timeout=5)
    executor.start()
    try:
        executor.run(place)
    except farandole.RankFailed as error:
        output.append(str(error))
    executor.shutdown()
    return [*output, str(wait_for_free(4))]


def stack_without_room(path: str) -> list[Any]:
    """What `farandole fit` prints, and its code."""
    import contextlib
    import functools
    import io

    from farandole.launch.cli import main

    output, original = io.StringIO(), RayExecutor.create_settings
    RayExecutor.create_settings = functools.partial(original, placement_group_timeout_s=1)  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = main(["fit", path])
    finally:
        RayExecutor.create_settings = staticmethod(original)  # type: ignore[method-assign]
    return [output.getvalue(), code]


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


def lesson(config: dict[str, Any]) -> str:
    """Two epochs over a shard of the data; a checkpoint with the first report alone."""
    import tempfile
    from pathlib import Path

    import numpy as np
    import ray.train
    from ray.train import Checkpoint

    farandole.init()
    context = ray.train.get_context()
    assert (context.get_world_rank(), context.get_world_size()) == (farandole.rank(), farandole.size())
    assert context.get_local_rank() == farandole.local_rank()
    shard = ray.train.get_dataset_shard("train")
    for epoch in range(2):
        numbers = np.concatenate([batch["id"] for batch in shard.iter_batches(batch_size=4)])
        total = farandole.allreduce(np.array([numbers.sum(), len(numbers)]), op=farandole.Sum, name="data")
        metrics = {"epoch": epoch, "total": int(total[0]), "count": int(total[1]), "x": config["x"]}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if epoch == 0 and farandole.rank() == 0:
                (Path(folder) / "model").write_text("weights")
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)
    return "done"


def trained(storage: str) -> dict[str, Any]:
    import ray.data
    from ray.train import RunConfig, ScalingConfig
    from ray.train.horovod import HorovodConfig, HorovodTrainer

    trainer = HorovodTrainer(
        train_loop_per_worker=lesson,  # type: ignore[arg-type]
        train_loop_config={"x": 5},
        horovod_config=HorovodConfig(verbose=2),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=True),
        run_config=RunConfig(name="lesson", storage_path=storage),
        datasets={"train": ray.data.range(40)},
    )
    result: Any = trainer.fit()
    with result.checkpoint.as_directory() as folder, open(f"{folder}/model") as file:
        saved = file.read()
    return {
        "metrics": result.metrics,
        "error": result.error,
        "saved": saved,
        "returned": result.return_value,
        "path": result.path,
    }


def stumbling(config: dict[str, Any]) -> None:
    """Goes on from the checkpoint of the last report; rank 1 of the first attempt dies on the way."""
    import tempfile
    from pathlib import Path

    import numpy as np
    import ray.train
    from ray.train import Checkpoint

    farandole.init()
    first = 0
    given = ray.train.get_checkpoint()
    if given is not None:
        with given.as_directory() as folder:
            first = int(Path(folder, "step").read_text()) + 1
    for step in range(first, 4):
        farandole.allreduce(np.ones(3), name="step")
        if given is not None and step == first and farandole.rank() == 0:
            Path(config["scratch"], "again").write_text(str(time.time()))
        if given is None and step == 2 and farandole.rank() == 1:
            Path(config["scratch"], "died").write_text(str(time.time()))
            os._exit(1)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step").write_text(str(step))
            checkpoint = Checkpoint.from_directory(folder) if farandole.rank() == 0 else None
            ray.train.report({"step": step, "first": first}, checkpoint=checkpoint)


def restarted(storage: str, workers: int) -> dict[str, Any]:
    from pathlib import Path

    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from farandole.ray import HorovodTrainer

    result = HorovodTrainer(
        stumbling,
        train_loop_config={"scratch": storage},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    died, again = (float(Path(storage, name).read_text()) for name in ("died", "again"))
    return {"metrics": result.metrics, "seconds": again - died}


def raising(storage: str) -> dict[str, Any]:
    from ray.train import RunConfig, ScalingConfig, TrainingFailedError

    from farandole.ray import HorovodTrainer

    def loop() -> None:
        raises("on purpose")

    trainer = HorovodTrainer(
        loop, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=storage)
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        failed: Any = error
        return {"text": str(error), "ranks": sorted(failed.worker_failures)}
    return {}


def trainers_too_large(storage: str) -> dict[str, Any]:
    """What trainers say that the cluster cannot hold; for a range of workers its lower end counts."""
    from ray.train import RunConfig, ScalingConfig

    from farandole.ray import HorovodConfig, HorovodTrainer

    found: dict[str, Any] = {"messages": [], "seconds": []}
    for scaling in (
        ScalingConfig(num_workers=50),
        ScalingConfig(num_workers=(7, 9)),  # type: ignore[arg-type]
        ScalingConfig(num_workers=2, resources_per_worker={"CPU": 3}),
        ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1, "late": 1}),
    ):
        config = HorovodConfig(placement_group_timeout_s=1.5)
        run_config = RunConfig(storage_path=storage)
        trainer = HorovodTrainer(print, horovod_config=config, scaling_config=scaling, run_config=run_config)
        began = time.monotonic()
        try:
            trainer.fit()
        except TimeoutError as error:
            found["messages"].append(str(error))
        found["seconds"].append(time.monotonic() - began)
    return {**found, "free": wait_for_free(4)}


def waiting_groups() -> int:
    """Used as soon as a worker waits for resources."""
    from ray.util import placement_group_table

    while True:
        waiting = [one for one in placement_group_table().values() if one["state"] == "PENDING"]
        if waiting:
            return len(waiting)
        time.sleep(0.1)  # sleep: between two looks


def torch_loop() -> None:
    import ray.train
    import ray.train.torch
    import torch
    import torch.distributed as dist

    total = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(total)
    model = ray.train.torch.prepare_model(torch.nn.Linear(2, 1))
    model(torch.ones(4, 2) * dist.get_rank()).sum().backward()
    gradient = next(model.parameters()).grad.flatten().tolist()
    ray.train.report({"backend": dist.get_backend(), "sum": total[0].item(), "gradient": gradient})


def torch_trainer(storage: str) -> Any:
    from ray.train import RunConfig, ScalingConfig, UserCallback
    from ray.train.torch import TorchConfig, TorchTrainer

    class Note(UserCallback):
        def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
            with open(f"{storage}/metrics", "w") as file:
                json.dump(metrics, file)

    TorchTrainer(
        torch_loop,
        torch_config=TorchConfig(backend="farandole"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=storage, callbacks=[Note()]),  # type: ignore[list-item]
    ).fit()
    with open(f"{storage}/metrics") as file:
        return json.load(file)
