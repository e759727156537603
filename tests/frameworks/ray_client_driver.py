# A driver outside of the cluster: it uses Ray Client.
# Touches the cluster whose client address is its argument.
"""Executors work as in a driver inside the cluster."""

from __future__ import annotations

import logging
import sys

import ray


def connect(address: str) -> None:
    """Ray gives a client's server 30 s to start, which a busy machine may need more than once."""
    for attempt in range(3):
        try:
            ray.init(address, logging_level=logging.ERROR)
            return
        except ConnectionError:
            if attempt == 2:
                raise


if __name__ == "__main__":
    connect(sys.argv[1])
    import ray_cases

    from farandole.ray import RayExecutor

    settings = RayExecutor.create_settings(60)
    with RayExecutor(settings, num_workers=2) as executor:
        sums = [one["sum"] for one in executor.run(ray_cases.place)]
        remote = ray.get(executor.run_remote(lambda x: x + 4, args=[3]))
        callback_values: list[int] = []
        ranks = executor.run(ray_cases.logging_place, callbacks=[lambda info: callback_values.append(info["step"])])
        print("through the client:", sums, remote, ranks)
        print("heard:", callback_values)
        try:
            executor.run(ray_cases.raises, args=["on purpose"])
        except ValueError as error:
            print("raised:", str(error).count("ValueError: on purpose"), "traceback of on purpose")
    with RayExecutor(settings, min_workers=2, max_workers=2) as executor:
        print("elastic:", [one["sum"] for one in executor.run(ray_cases.place)])
    ray.shutdown()
