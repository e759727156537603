"""The package `horovod`: the same modules under Horovod's names, and clear errors for absent ones.
Imports it here, and in separate processes where a fresh interpreter is needed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")  # here, since its import sets a variable of the process
import farandole
import farandole.torch
import horovod
import horovod.torch as hvd
from farandole.bindings import compat

SRC = Path(__file__).resolve().parents[2] / "src"

# The common names of Horovod's framework modules.
BASICS = """init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank
    cross_rank is_homogeneous mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built ddl_built ccl_built
    cuda_built rocm_built nccl_built Average Sum Adasum Min Max Product"""
SETS = "ProcessSet global_process_set add_process_set remove_process_set"
TORCH = """allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce grouped_allreduce_async
    grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async grouped_allgather
    grouped_allgather_async broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async reducescatter
    reducescatter_async grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize
    broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object DistributedOptimizer SyncBatchNorm
    Compression"""
UTIL = """check_extension extension_available gpu_available mpi_built gloo_built nccl_built ddl_built ccl_built env
    split_list num_rank_is_power_2 is_iterable is_version_greater_equal_than get_average_backwards_compatibility_fun
    check_installed_version EXTENSIONS"""
NAMES = {
    "horovod.torch": f"{BASICS} {SETS} {TORCH}",
    "horovod.torch.mpi_ops": f"{BASICS} {SETS} {TORCH}",
    "horovod.torch.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "horovod.torch.functions": "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object",
    "horovod.torch.optimizer": "DistributedOptimizer",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
    "horovod.common.basics": "HorovodBasics",
    "horovod.common.process_sets": SETS,
    "horovod.common.elastic": "State ObjectState run_fn notification_manager HostUpdateResult",
    "horovod.runner.elastic.constants": "RESET_LIMIT_EXCEEDED_MESSAGE",
    "horovod.torch.elastic": "run TorchState ElasticSampler state sampler",
    "horovod.torch.elastic.state": """TorchState StateHandler ModelStateHandler OptimizerStateHandler
        SamplerStateHandler get_handler_registry set_handler_registry""",
    "horovod.torch.elastic.sampler": "ElasticSampler",
    "horovod.ray": "RayExecutor BaseHorovodWorker ElasticRayExecutor",
    "horovod.ray.elastic": "ElasticRayExecutor RayHostDiscovery TestDiscovery",
    "horovod.ray.elastic_v2": "ElasticParams ElasticAdapter",
    "horovod.ray.ray_logger": "configure log",
    "horovod.ray.runner": "Coordinator MiniSettings StaticParams StaticAdapter RayExecutor",
    "horovod.ray.strategy": "ColocatedStrategy PGStrategy",
    "horovod.ray.train": "HorovodTrainer HorovodConfig",
    "horovod.ray.utils": "detect_nics nics_to_env_var",
    "horovod.ray.worker": "BaseHorovodWorker",
    "horovod.spark.common.backend": "Backend SparkBackend",
    "horovod.spark.common.datamodule": "DataModule",
    "horovod.spark.common.estimator": "HorovodEstimator HorovodModel",
    "horovod.spark.common.params": "EstimatorParams ModelParams",
    "horovod.spark.common.store": """Store AbstractFilesystemStore FilesystemStore LocalStore HDFSStore
        DBFSLocalStore""",
    "horovod.spark.common.util": "clear_training_cache",
    "horovod.spark.conf": "SPARK_CONF_ALWAYS_RESTART_FAILED_TASK SPARK_CONF_BLACKLIST_DISABLED",
    "horovod.spark.lightning": "TorchEstimator TorchModel",
    "horovod.spark.torch": "TorchEstimator TorchModel",
    "horovod.runner.common.util.secret": "make_secret_key",
    "horovod.runner.common.util.timeout": "Timeout",
    "horovod.common.exceptions": "HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError",
    "horovod.common.util": UTIL,
}


@pytest.mark.parametrize("module", NAMES)
def test_every_name_of_the_contract_exists(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("alias", [alias for alias, real in horovod.MODULES.items() if real])
def test_an_alias_is_the_module_itself(alias: str) -> None:
    if {"tensorflow", "keras", "mxnet"} & set(alias.split(".")):  # loading it costs more than all the rest
        place = SRC / horovod.MODULES[alias].replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__init__.py").exists()
        return
    assert importlib.import_module(alias) is importlib.import_module(horovod.MODULES[alias])


def test_all_ways_to_import() -> None:
    import horovod.common.util as util
    from horovod import run
    from horovod import torch as from_package
    from horovod.torch import mpi_ops

    assert hvd is farandole.torch and from_package is hvd and hvd.optimizer.__name__ == "farandole.torch.optimizer"
    assert mpi_ops.__name__ == "farandole.torch.mpi_ops" and mpi_ops.allreduce is hvd.allreduce
    assert util is compat and run is farandole.run
    assert hvd.__spec__ is not None and hvd.__name__ == hvd.__spec__.name == "farandole.torch"
    assert horovod.__version__ == "0.28.1" and farandole.__version__ != "0.28.1"
    assert hvd.HorovodInternalError is farandole.HorovodInternalError


def test_basics_are_those_of_the_package() -> None:
    basics = compat.HorovodBasics("some/path", "mpi_lib")
    assert [name for name in BASICS.split() if not hasattr(basics, name)] == []
    assert not basics.is_initialized() and basics.Sum == farandole.Sum == 1
    with pytest.raises(ValueError, match="not been initialized"):
        basics.rank()


@pytest.mark.parametrize("name", ["cobol", "cobol.mpi_ops"])
def test_missing_components_are_reported(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"horovod.{name.split('.')[0]} is not available: Farandole"):
        importlib.import_module(f"horovod.{name}")


def test_from_horovod_import_says_so_as_well() -> None:
    with pytest.raises(ImportError, match="Farandole"):
        from horovod import cobol  # noqa: F401
    with pytest.raises(AttributeError):
        _ = horovod.nonsense


def test_run_has_two_names(capsys: pytest.CaptureFixture[str]) -> None:
    from horovod.runner import run
    from horovod.runner.launch import run_commandline

    assert run is horovod.run is farandole.run
    assert run_commandline(["--version"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "0.28.1\n" and farandole.__version__ in printed.err


def test_helpers() -> None:
    assert compat.split_list(list(range(7)), 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert [n for n in range(-1, 9) if compat.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    assert compat.is_iterable("ab") and not compat.is_iterable(1)
    assert compat.is_version_greater_equal_than("2.10.0", "2.9.1")
    assert not compat.is_version_greater_equal_than("2.9.0+cpu", "2.9.1")
    with pytest.raises(ValueError):
        compat.is_version_greater_equal_than("1.0.0", "1")
    assert compat.extension_available("torch") and not compat.extension_available("mxnet")
    assert compat.gpu_available("torch") == (hvd.cuda_built() or hvd.rocm_built())
    compat.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__)
    with pytest.raises(ImportError, match="mxnet"):
        compat.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__)
    choose = compat.get_average_backwards_compatibility_fun(farandole)
    assert choose(None, None) == farandole.Average and choose(farandole.Sum, None) == farandole.Sum
    with pytest.raises(ValueError, match=r"The op parameter supersedes average\. Please provide only one of them"):
        choose(farandole.Sum, True)


def test_env_sets_and_restores() -> None:
    before = dict(os.environ)
    with compat.env(FARANDOLE_TRY="1", HOME="/nowhere", PATH=None):
        assert os.environ["FARANDOLE_TRY"] == "1" and os.environ["HOME"] == "/nowhere"
        assert os.environ["PATH"] == before["PATH"]
    assert dict(os.environ) == before


def fresh(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(folder) for folder in (*folders, SRC))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("version", "fine"), [("0.28.1", False), ("0.28.1+farandole", True)])
def test_an_installed_horovod_is_refused(version: str, fine: bool, tmp_path: Path) -> None:
    info = tmp_path / f"horovod-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: horovod\nVersion: {version}\n")
    run = fresh("import horovod.common.exceptions", tmp_path)
    assert (run.returncode == 0) is fine, run.stderr
    assert fine or f"Horovod {version} and Farandole are both installed" in run.stderr


def test_importing_horovod_imports_no_framework() -> None:
    run = fresh("import sys, horovod.common.util; assert not {'torch', 'tensorflow'} & set(sys.modules)")
    assert run.returncode == 0, run.stderr


def test_horovodrun_starts_ranks() -> None:
    job = "from horovod.common.basics import HorovodBasics as B; b = B(); b.init(); print('rank', b.rank(), b.size())"
    arguments = ["-np", "2", sys.executable, "-c", job]
    run = fresh(f"import sys; from farandole.launch.cli import horovodrun; sys.exit(horovodrun({arguments!r}))")
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.split("\n")) == ["", "[0]<stdout>:rank 0 2", "[1]<stdout>:rank 1 2"]
