# A driver that is no part of the cluster: it talks to it through Ray Client.
# Touches the cluster whose client address is its argument.
"""Executors work as from inside."""

from __future__ import annotations

import sys

import ray

if __name__ == "__main__":
    ray.init(sys.argv[1], logging_level="ERROR")
    import ray_cases

    from farandole.ray import RayExecutor

    settings = RayExecutor.create_settings(60)
    with RayExecutor(settings, num_workers=2) as executor:
        sums = [one["sum"] for one in executor.run(ray_cases.place)]
        remote = ray.get(executor.run_remote(lambda x: x + 4, args=[3]))
        heard: list[int] = []
        ranks = executor.run(ray_cases.logging_place, callbacks=[lambda info: heard.append(info["step"])])
        print("through the client:", sums, remote, ranks)
        print("heard:", heard)
        try:
            executor.run(ray_cases.raises, args=["on purpose"])
        except ValueError as error:
            print("raised:", str(error).count("ValueError: on purpose"), "traceback of on purpose")
    with RayExecutor(settings, min_workers=2, max_workers=2) as executor:
        print("elastic:", [one["sum"] for one in executor.run(ray_cases.place)])
    ray.shutdown()
