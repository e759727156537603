# Places the workers of a fixed job: makes placement groups and the actors in them.
# Touches only Ray.
"""`PGStrategy`: a number of workers on any nodes. `ColocatedStrategy`: the same number of workers on each node."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from farandole.ray.worker import BaseHorovodWorker

CHECK_SECONDS = 1.0  # between two checks of a group that waits for resources
ROUNDING = 1e-6  # Ray counts in steps of 1e-4


class Strategy:
    """The common part of both strategies: bundles, and the number of workers in each."""

    def __init__(
        self,
        settings: Any,
        *,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = False,
    ) -> None:
        self.settings = settings
        self.cpus_per_worker = cpus_per_worker
        self.gpus_per_worker = gpus_of(use_gpu, gpus_per_worker)
        self._use_current = use_current_placement_group
        self._created: Any = None

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        raise NotImplementedError

    def _bundles(self) -> tuple[list[dict[str, float]], str, int]:
        """The bundles, Ray's strategy for them, and the number of workers in each."""
        raise NotImplementedError

    def create_workers(self) -> tuple[list[Any], list[Any]]:
        """Makes the actors. Returns all actors, and one actor of each bundle."""
        bundles, spread, each = self._bundles()
        group, indices = self._group(bundles, spread, each)
        resources = {"num_cpus": self.cpus_per_worker, "num_gpus": self.gpus_per_worker}
        actor = ray.remote(BaseHorovodWorker)
        workers = []
        for index in indices:
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
            )
            workers += [actor.options(scheduling_strategy=strategy, **resources).remote() for _ in range(each)]
        return workers, workers[::each]

    def _group(self, bundles: list[dict[str, float]], spread: str, each: int) -> tuple[Any, list[int]]:
        current = get_current_placement_group() if self._use_current else None
        if current is not None:
            # The caller itself may run in the first bundle. We use the last bundles that are large enough.
            indices = [at for at, one in enumerate(current.bundle_specs) if _fits(bundles[0], one)]
            if len(indices) < len(bundles):
                raise ValueError(
                    f"the current placement group has {len(indices)} bundles with {_words(bundles[0])}, but "
                    f"{len(bundles)} are needed; add bundles, or give use_current_placement_group=False"
                )
            return current, indices[-len(bundles) :]
        self._created = placement_group(bundles, strategy=spread)
        self._wait(bundles, spread)
        return self._created, list(range(len(bundles)))

    def _wait(self, bundles: list[dict[str, float]], spread: str) -> None:
        seconds = float(getattr(self.settings, "placement_group_timeout_s", 100))
        ready = self._created.ready()
        try:
            ray.get(ready, timeout=seconds)
        except GetTimeoutError:
            missing = shortage(bundles, spread)
            self.shutdown()
            raise TimeoutError(
                f"the cluster had no free resources for {self.num_workers} workers within {seconds:g} s "
                f"(placement_group_timeout_s): {missing}"
            ) from None

    def shutdown(self) -> None:
        """Releases the placement group, if we made it."""
        group, self._created = self._created, None
        if group is not None:
            with contextlib.suppress(Exception):  # Ray itself may be gone
                remove_placement_group(group)


class PGStrategy(Strategy):
    """A number of workers; Ray uses as few nodes as possible."""

    def __init__(self, settings: Any, num_workers: int, **more: Any) -> None:
        super().__init__(settings, **more)
        self._num_workers = num_workers

    @property
    def num_workers(self) -> int:
        """The number that was given."""
        return self._num_workers

    def _bundles(self) -> tuple[list[dict[str, float]], str, int]:
        return [bundle(self.cpus_per_worker, self.gpus_per_worker)] * self._num_workers, "PACK", 1


class ColocatedStrategy(Strategy):
    """The same number of workers on each node."""

    def __init__(self, settings: Any, num_hosts: int, num_workers_per_host: int, **more: Any) -> None:
        super().__init__(settings, **more)
        self.num_hosts = num_hosts
        self.num_workers_per_host = num_workers_per_host

    @property
    def num_workers(self) -> int:
        """The number of workers on all nodes together."""
        return self.num_hosts * self.num_workers_per_host

    def _bundles(self) -> tuple[list[dict[str, float]], str, int]:
        each = self.num_workers_per_host
        one = bundle(self.cpus_per_worker * each, self.gpus_per_worker * each)
        return [one] * self.num_hosts, "STRICT_SPREAD", each


def create_placement_group(
    resources_per_bundle: Mapping[str, float], num_bundles: int, pg_timeout: float, pg_strategy: str
) -> tuple[Any, list[dict[str, float]]]:
    """Makes a placement group and waits for it. Returns it with its bundles; TimeoutError without resources."""
    bundles = [dict(resources_per_bundle) for _ in range(num_bundles)]
    group = placement_group(bundles, strategy=pg_strategy)
    try:
        ray.get(group.ready(), timeout=pg_timeout)
    except GetTimeoutError:
        missing = shortage(bundles, pg_strategy)
        with contextlib.suppress(Exception):  # Ray itself may be gone
            remove_placement_group(group)
        raise TimeoutError(
            "Placement group creation timed out. Make sure your cluster either has enough resources or use an "
            f"autoscaling cluster: {missing}"
        ) from None
    return group, bundles


def gpus_of(use_gpu: bool, gpus_per_worker: float | None) -> float:
    """The number of GPUs of one worker. Raises ValueError if the arguments contradict each other."""
    if gpus_per_worker is not None and not use_gpu:
        raise ValueError(
            "gpus_per_worker is set, but use_gpu is False. use_gpu must be True if gpus_per_worker is set."
        )
    if gpus_per_worker is not None and gpus_per_worker <= 0:
        raise ValueError(f"gpus_per_worker must be > 0: Got {gpus_per_worker}.")
    return (1 if gpus_per_worker is None else gpus_per_worker) if use_gpu else 0


def bundle(cpus: float, gpus: float) -> dict[str, float]:
    """The resources that Ray reserves for a worker, or for the workers of one node."""
    wanted = {"CPU": cpus, "GPU": gpus}
    return {name: count for name, count in wanted.items() if count} or {"CPU": 0.001}


def _fits(wanted: Mapping[str, float], there: Mapping[str, float]) -> bool:
    return all(there.get(name, 0) >= count for name, count in wanted.items())


def room(one: Mapping[str, float], spread: str = "PACK") -> int:
    """How many such bundles fit on the nodes if nothing else runs there."""
    counts = [
        min(int(node["Resources"].get(name, 0) / count + ROUNDING) for name, count in one.items())
        for node in ray.nodes()
        if node.get("Alive")
    ]
    if spread == "STRICT_SPREAD":
        return sum(count > 0 for count in counts)
    return max(counts, default=0) if spread == "STRICT_PACK" else sum(counts)


def await_room(one: Mapping[str, float], many: int, spread: str, seconds: float) -> None:
    """Waits until the cluster, with new nodes of its autoscaler, is large enough. Raises TimeoutError if it is not.

    Resources that other jobs use count as available here. Ray decides who gets them when the bundles are requested.
    """
    if room(one, spread) >= many:
        return
    deadline = time.monotonic() + seconds
    asked = placement_group([dict(one)] * many, strategy=spread)  # autoscalers react to waiting requests
    try:
        while (found := room(one, spread)) < many:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"the cluster had free resources for {found} of {many} workers with {_words(one)} within "
                    f"{seconds:g} s "
                    f"(placement_group_timeout_s): {shortage([one] * many, spread)}"
                )
            time.sleep(max(0.0, min(CHECK_SECONDS, deadline - time.monotonic())))
    finally:
        with contextlib.suppress(Exception):  # Ray itself may be gone
            remove_placement_group(asked)


def shortage(bundles: Sequence[Mapping[str, float]], spread: str = "PACK") -> str:
    """Why these bundles do not fit: what is needed, what the cluster has, and what is free now."""
    nodes = [node for node in ray.nodes() if node.get("Alive")]
    has, free = ray.cluster_resources(), ray.available_resources()
    parts = []
    for name in bundles[0]:
        needed = sum(one[name] for one in bundles)
        parts.append(
            f"{needed:g} {name} are needed, the cluster has {has.get(name, 0):g}, {free.get(name, 0):g} are free"
        )
    fitting = [node for node in nodes if _fits(bundles[0], node["Resources"])]
    if spread == "STRICT_SPREAD" and len(fitting) < len(bundles):
        parts.append(f"{len(bundles)} nodes with {_words(bundles[0])} are needed, there are {len(fitting)}")
    elif not fitting:
        parts.append(f"no node has {_words(bundles[0])}")
    return "; ".join(parts)


def _words(one: Mapping[str, float]) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in one.items())


def by_node(actors: Sequence[Any], deadline: float) -> list[tuple[Any, Any]]:
    """(actor, location) in the order of ranks: node after node, and on each node by GPU."""
    locations = ray.get([actor.where.remote() for actor in actors], timeout=max(0.1, deadline - time.monotonic()))
    order = {node: at for at, node in enumerate(dict.fromkeys(location.node for location in locations))}
    pairs = list(zip(actors, locations, strict=True))
    return sorted(pairs, key=lambda pair: (order[pair[1].node], [int(g) if g.isdigit() else 0 for g in pair[1].gpus]))
