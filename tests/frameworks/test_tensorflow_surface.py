# The names of horovod.tensorflow, horovod.tensorflow.keras and horovod.keras, their arguments and defaults.
# Touches the modules in a process of its own: what TensorFlow leaves open belongs to nobody's test.
"""A script written for Horovod finds every name, and its arguments mean the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tensorflow_jobs import TENSORFLOW, needs_tensorflow

pytestmark = [needs_tensorflow, pytest.mark.slow]

DEVICES = "device_dense='', device_sparse=''"
SCALES = "prescale_factor=1.0, postscale_factor=1.0"
TAPE = f"{DEVICES}, compression=NONE, sparse_as_dense=False, op=0, gradient_predivide_factor=1.0, "
TAPE += "num_groups=0, groups=None"
KERAS = f"optimizer, name=None, {DEVICES}, compression=NONE, sparse_as_dense=False, gradient_predivide_factor=1.0, op=0"
LOAD = "filepath, custom_optimizers=None, custom_objects=None, compression=NONE, legacy_opts=False"
VALUES = {
    "allgather": "value, name=None",
    "broadcast": "value, root_rank, name=None",
    "reducescatter": "value, name=None, op=0",
}
SCHEDULE = "initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, momentum_correction=True"
CALLBACKS = {
    "callbacks.BroadcastGlobalVariablesCallback": "root_rank, device='', local_variables=None",
    "callbacks.MetricAverageCallback": "device=''",
    "callbacks.LearningRateScheduleCallback": f"{SCHEDULE}, steps_per_epoch=None",
    "callbacks.LearningRateWarmupCallback": "initial_lr, warmup_epochs=5, momentum_correction=True, "
    "steps_per_epoch=None, verbose=0",
    "elastic.KerasState": "model, optimizer=None, kwargs",
    "elastic.CommitStateCallback": "state, batches_per_commit=1",
    "elastic.UpdateBatchStateCallback": "state",
    "elastic.UpdateEpochStateCallback": "state",
    "elastic.run": "func",
}
# An argument that the contract does not have may follow, if it has a default.
CONTRACT = {
    "horovod.tensorflow": {
        "allreduce": f"tensor, average=None, {DEVICES}, compression=NONE, op=None, {SCALES}, name=None, "
        "process_set=SET, ignore_name_scope=False",
        "grouped_allreduce": f"tensors, average=None, {DEVICES}, compression=NONE, op=None, {SCALES}, process_set=SET, "
        "ignore_name_scope=False, name=None",
        "allgather": "tensor, name=None, ignore_name_scope=False, process_set=SET",
        "grouped_allgather": "tensors, name=None, ignore_name_scope=False, process_set=SET",
        "broadcast": "tensor, root_rank, name=None, ignore_name_scope=False, process_set=SET",
        "broadcast_": "variables, root_rank, name=None, process_set=SET",
        "alltoall": "tensor, splits=None, name=None, ignore_name_scope=False, process_set=SET",
        "reducescatter": "tensor, device_dense='', compression=NONE, op=0, name=None, process_set=SET, "
        f"ignore_name_scope=False, {SCALES}",
        "grouped_reducescatter": f"tensors, device_dense='', compression=NONE, op=0, process_set=SET, {SCALES}",
        "join": "",
        "rank_op": "name=None",
        "local_rank_op": "name=None",
        "size_op": "process_set_id=0, name=None",
        "local_size_op": "name=None",
        "process_set_included_op": "process_set_id=0, name=None",
        "broadcast_variables": "variables, root_rank, process_set=SET, inplace=False",
        "broadcast_global_variables": "root_rank",
        "broadcast_object": "obj=None, root_rank=0, session=None, name=None, process_set=SET",
        "broadcast_object_fn": "root_rank=0, session=None, name=None, process_set=SET",
        "allgather_object": "obj, session=None, name=None, process_set=SET",
        "BroadcastGlobalVariablesHook": "root_rank, device=''",
        "DistributedOptimizer": f"optimizer, name=None, use_locking=False, {DEVICES}, compression=NONE, "
        "sparse_as_dense=False, backward_passes_per_step=1, op=0, gradient_predivide_factor=1.0, "
        "average_aggregated_gradients=False, num_groups=0, groups=None, process_set=SET, scale_local_gradients=True",
        "DistributedGradientTape": f"gradtape, {TAPE}, process_set=SET, scale_local_gradients=True",
        "PartialDistributedGradientTape": f"gradtape, {TAPE}, process_set=SET, local_layers=None, "
        "scale_local_gradients=True",
        "SyncBatchNormalization": "fused=False, kwargs",
        "elastic.run": "func",
        "elastic.TensorFlowKerasState": "model, optimizer=None, backend=None, kwargs",
        "elastic.TensorFlowState": "variables=None, session=None, kwargs",
        "init": "comm=None, process_sets=None",
    },
    "horovod.tensorflow.keras": {
        "DistributedOptimizer": f"{KERAS}, backward_passes_per_step=1, average_aggregated_gradients=False, "
        "num_groups=0, groups=None, process_set=SET, scale_local_gradients=True",
        "allreduce": f"value, name=None, average=None, {SCALES}, op=None, compression=NONE",
        **VALUES,
        "load_model": LOAD,
        "broadcast_global_variables": "root_rank",
        **CALLBACKS,
        "callbacks.BestModelCheckpoint": "monitor='val_loss', verbose=0, save_weights_only=False, mode='auto', "
        "save_freq='epoch'",
    },
    "horovod.keras": {
        "DistributedOptimizer": f"{KERAS}, num_groups=0, groups=None",
        "PartialDistributedOptimizer": f"{KERAS}, backward_passes_per_step=1, average_aggregated_gradients=False, "
        "groups=None, process_set=SET, local_layers=None, scale_local_gradients=True",
        "allreduce": f"value, name=None, average=True, {SCALES}, op=None, compression=NONE",
        **VALUES,
        "load_model": LOAD,
        **CALLBACKS,
        "callbacks.BestModelCheckpoint": "monitor='val_loss', verbose=0, mode='auto', save_freq='epoch'",
    },
}
BASICS = """shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank
    is_homogeneous mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
    cuda_built rocm_built Average Sum Compression global_process_set"""
OTHERS = ["LocalGradientAggregationHelper", "check_num_rank_power_of_2", "handle_average_backwards_compatibility"]
LOOK = """
import importlib, inspect, json, operator, sys
def written(parameter):
    default = parameter.default
    if default is inspect.Parameter.empty:
        return parameter.name
    if type(default).__name__ == "ProcessSet":
        return f"{parameter.name}=SET"
    if getattr(default, "__name__", "") == "NoneCompressor":
        return f"{parameter.name}=NONE"
    return f"{parameter.name}={int(default) if parameter.name == 'op' and default is not None else default!r}"
found = {}
for module, names in json.loads(sys.argv[1]).items():
    place = importlib.import_module(module)
    for name in names:
        value = operator.attrgetter(name)(place)
        found[f"{module} {name}"] = [
            (written(one), one.default is not inspect.Parameter.empty)
            for one in (inspect.signature(value).parameters.values() if callable(value) else ())
        ]
    missing = [name for name in place.__all__ if not hasattr(place, name)]
    assert not missing, missing
print(json.dumps(found))
"""


@pytest.mark.timeout(200)
def test_names_and_arguments_are_those_of_the_contract() -> None:
    wanted = {module: [*names, *BASICS.split()] for module, names in CONTRACT.items()}
    wanted["horovod.tensorflow"] += OTHERS
    done = subprocess.run(
        [sys.executable, "-c", LOOK, json.dumps(wanted)],
        env={**os.environ, **TENSORFLOW},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for module, names in CONTRACT.items():
        for name, arguments in names.items():
            said = found[f"{module} {name}"]
            expected = arguments.split(", ") if arguments else []
            assert [words for words, _ in said[: len(expected)]] == expected, f"{module}.{name}"
            assert all(optional for _, optional in said[len(expected) :]), f"{module}.{name}"
