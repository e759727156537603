"""RayExecutor as in the docs of Ray and Horovod: settings, workers that stay, an executable class, results by rank.
Ends with the numbers of the workers."""

import ray

from horovod.ray import RayExecutor


class MyModel:
    def __init__(self, learning_rate):
        self.learning_rate = learning_rate

    def sum_of_rates(self):
        import torch

        import horovod.torch as hvd

        hvd.init()
        return hvd.allreduce(torch.tensor([self.learning_rate * (hvd.rank() + 1)]), op=hvd.Sum).item()


def simple_fn(epochs):
    import torch

    import horovod.torch as hvd

    hvd.init()
    return hvd.rank(), hvd.allgather(torch.full((1,), hvd.rank() + epochs)).tolist()


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
settings = RayExecutor.create_settings(timeout_s=60)
executor = RayExecutor(settings, num_workers=2, cpus_per_worker=0.5, use_gpu=False)
executor.start(executable_cls=MyModel, executable_args=[0.5])
assert executor.execute(lambda worker: worker.sum_of_rates()) == [1.5, 1.5]
assert executor.run(simple_fn, args=[3]) == [(0, [3, 4]), (1, [3, 4])]
assert ray.get(executor.run_remote(simple_fn, kwargs={"epochs": 1})) == [(0, [1, 2]), (1, [1, 2])]
assert executor.execute_single(lambda worker: worker.learning_rate) == 0.5
executor.shutdown()
ray.shutdown()
