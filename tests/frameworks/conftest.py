# Which tests of frameworks may run at the same time, and which are for `make nightly` alone.
# Touches the names of files and tests alone.
"""For `pytest -n 3 --dist loadgroup`: files run at the same time, but not two that start a cluster of the same kind."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CLUSTERS = ("test_ray", "test_spark")
# What `make test` has in another form.
NIGHTLY = (
    # With another number of ranks, or with the engine in Python.
    "test_jax.py::test_the_battery[[]3]",
    "test_mxnet.py::test_the_battery[[]2]",
    "test_torch_distributed.py::test_results_equal_those_of_gloo[[]2 ranks*",
    "test_torch_distributed.py::test_operations_that_gloo_does_not_have[[]*2 ranks*",
    "test_torch_ops.py::test_case[[]2 ranks*",
    "test_torch_optimizer.py::test_cases[[]2-*",
    "test_torch_training.py::test_*[[]2]",
    # By the other way into the framework: callbacks where operations are compiled, the way into torch's next release.
    "test_jax.py::test_training[[]callback*",
    "test_tensorflow_training.py::test_training[[]callback*",
    "test_tensorflow_training.py::test_a_killed_rank_raises_on_the_others[[]callback]",
    "test_torch_distributed.py::test_training_as_on_gloo[[]BASE*",
    "test_torch_distributed.py::test_a_death_is_reported_at_once_with_the_rank[[]*BASE]",
    "test_torch_parallelism.py::test_hook_for_ddp[[]gloo]",
    # Examples and the code of pages: what they use has cases of its own.
    "test_jax.py::test_examples*",
    "test_jax.py::test_the_code_of_the_page",
    "test_keras.py::test_examples*",
    "test_keras.py::test_the_code_of_the_pages*",
    "test_mxnet.py::test_the_example_runs_with_and_without_a_launcher",
    "test_ray_train.py::test_the_example_with_torch",
    "test_ray_train.py::test_lightning_in_ray_train",
    "test_ray_stack.py::test_lightning_on_ray_with_horovod",
    "test_ray_stack.py::test_a_model_from_data_to_predictions",
    "test_spark_estimators.py::test_the_example",
    "test_spark_estimators.py::test_keras_through_spark_connect*",
    "test_spark_estimators.py::test_lightning_in_a_pipeline",
    "test_torch_parallelism.py::test_examples[[]fsdp2]",
    "test_torch_parallelism.py::test_examples[[]tensor_parallel]",
    "test_torch_parallelism.py::test_examples[[]pipeline]",
    "test_torch_parallelism.py::test_examples[[]hybrid]",
    # Started by another launcher: other tests start the same training.
    "test_lightning_starts.py::test_a_stack_from_a_file*",
    "test_lightning_starts.py::test_under_a_launcher_lightning_starts_no_ranks[[]openmpi]",
    "test_lightning_starts.py::test_loggers_of_other_packages_write_one_run",
    "test_ray_elastic.py::test_lightning_in_the_older_executor",
    "test_ray_elastic.py::test_a_trainer_whose_survivors_go_on*",
    "test_tensorflow_data.py::test_a_service_job_computes_for_another_job[[]training-1-spark]",
    # Faults of which `make chaos` has more.
    "test_torch_elastic_faults.py::test_row_25_samples_are_counted_once_through_random_kills[[]sampler]",
    "test_torch_elastic_faults.py::test_row_26_faults_change_no_bit*",
)


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != HERE:
            continue
        name = item.path.stem
        group = next((cluster for cluster in CLUSTERS if name.startswith(cluster)), name)
        item.add_marker(pytest.mark.xdist_group(group))
        if any(fnmatchcase(item.nodeid.rpartition("/")[2], pattern) for pattern in NIGHTLY):
            item.add_marker(pytest.mark.nightly)
