# The names of Horovod's modules, each leading to the module of Farandole that serves it: one table, no code of its own.
# Touches the import system, for names that begin with `horovod.`, and nothing else.
"""`import horovod.torch as hvd` gives the very module `farandole.torch`."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

from farandole.base.named import module_of
from farandole.base.version import HOROVOD_VERSION

__version__ = HOROVOD_VERSION  # farandole.__version__ is the package's own

EMPTY = ""  # a package that only holds others
MODULES = {
    "horovod._keras": "farandole.keras.inner",
    "horovod._keras.callbacks": "farandole.keras.inner.callbacks",
    "horovod._keras.elastic": "farandole.keras.inner.elastic",
    "horovod.common": EMPTY,
    "horovod.common.basics": "farandole.bindings.compat",
    "horovod.common.elastic": "farandole.elastic",
    "horovod.common.exceptions": "farandole.base.errors",
    "horovod.common.process_sets": "farandole",
    "horovod.common.util": "farandole.bindings.compat",
    "horovod.data": "farandole.data",
    "horovod.data.data_loader_base": "farandole.data.data_loader_base",
    "horovod.ray": "farandole.ray",
    "horovod.ray.adapter": "farandole.horovod_names.ray_adapter",
    "horovod.ray.driver_service": "farandole.ray.utils",
    "horovod.ray.elastic": "farandole.ray.elastic",
    "horovod.ray.elastic_v2": "farandole.ray.elastic",
    "horovod.ray.ray_logger": "farandole.ray.ray_logger",
    "horovod.ray.runner": "farandole.ray.runner",
    "horovod.ray.strategy": "farandole.ray.strategy",
    "horovod.ray.train": "farandole.ray.train",
    "horovod.ray.utils": "farandole.ray.utils",
    "horovod.ray.worker": "farandole.ray.worker",
    "horovod.keras": "farandole.keras",
    "horovod.keras.callbacks": "farandole.keras.callbacks",
    "horovod.keras.elastic": "farandole.keras.elastic",
    "horovod.mxnet": "farandole.mxnet",
    "horovod.mxnet.compression": "farandole.mxnet.compression",
    "horovod.mxnet.functions": "farandole.mxnet.functions",
    "horovod.mxnet.mpi_ops": "farandole.mxnet.mpi_ops",
    "horovod.runner": EMPTY,
    "horovod.runner.common": EMPTY,
    "horovod.runner.common.util": EMPTY,
    "horovod.runner.common.util.codec": "farandole.horovod_names.codec",
    "horovod.runner.common.util.config_parser": "farandole.horovod_names.config_parser",
    "horovod.runner.common.util.env": "farandole.horovod_names.env",
    "horovod.runner.common.util.host_hash": "farandole.horovod_names.host_hash",
    "horovod.runner.common.util.hosts": "farandole.horovod_names.hosts",
    "horovod.runner.common.util.network": "farandole.horovod_names.network",
    "horovod.runner.common.util.safe_shell_exec": "farandole.horovod_names.safe_shell_exec",
    "horovod.runner.common.util.secret": "farandole.horovod_names.secret",
    "horovod.runner.common.util.settings": "farandole.horovod_names.settings",
    "horovod.runner.common.util.timeout": "farandole.bindings.compat",
    "horovod.runner.elastic": EMPTY,
    "horovod.runner.elastic.constants": "farandole.rendezvous.elastic.policy",
    "horovod.runner.elastic.discovery": "farandole.horovod_names.discovery",
    "horovod.runner.elastic.settings": "farandole.horovod_names.settings",
    "horovod.runner.elastic.worker": "farandole.horovod_names.notification",
    "horovod.runner.http": EMPTY,
    "horovod.runner.http.http_server": "farandole.horovod_names.http_server",
    "horovod.runner.launch": "farandole.horovod_names.launch",
    "horovod.runner.util": EMPTY,
    "horovod.runner.util.network": "farandole.horovod_names.local_network",
    "horovod.runner.util.streams": "farandole.horovod_names.streams",
    "horovod.runner.util.threads": "farandole.horovod_names.threads",
    "horovod.spark": "farandole.spark",
    "horovod.spark.common": "farandole.spark.common",
    "horovod.spark.common.backend": "farandole.spark.common.backend",
    "horovod.spark.common.constants": "farandole.spark.common.constants",
    "horovod.spark.common.datamodule": "farandole.spark.common.datamodule",
    "horovod.spark.common.estimator": "farandole.spark.common.estimator",
    "horovod.spark.common.params": "farandole.spark.common.params",
    "horovod.spark.common.store": "farandole.spark.common.store",
    "horovod.spark.common.util": "farandole.spark.common.util",
    "horovod.spark.conf": "farandole.spark.conf",
    "horovod.spark.data_loaders": "farandole.spark.data_loaders",
    "horovod.spark.data_loaders.pytorch_data_loaders": "farandole.spark.data_loaders.pytorch_data_loaders",
    **{f"horovod.spark.{kind}.remote": "farandole.spark.common.remote" for kind in ("keras", "lightning", "torch")},
    **{
        f"horovod.spark.{kind}.datamodule": "farandole.spark.common.datamodule"
        for kind in ("keras", "lightning", "torch")
    },
    "horovod.spark.keras.util": "farandole.spark.keras.util",
    "horovod.spark.lightning.util": "farandole.spark.torch.util",
    "horovod.spark.torch.util": "farandole.spark.torch.util",
    "horovod.spark.keras": "farandole.spark.keras",
    "horovod.spark.keras.estimator": "farandole.spark.keras.estimator",
    "horovod.spark.lightning": "farandole.spark.lightning",
    "horovod.spark.lightning.estimator": "farandole.spark.lightning.estimator",
    "horovod.spark.runner": "farandole.spark.runner",
    "horovod.spark.task": "farandole.spark.task",
    "horovod.spark.tensorflow": "farandole.spark.tensorflow",
    "horovod.spark.tensorflow.compute_worker": "farandole.spark.tensorflow.compute_worker",
    "horovod.spark.torch": "farandole.spark.torch",
    "horovod.spark.torch.estimator": "farandole.spark.torch.estimator",
    "horovod.tensorflow": "farandole.tensorflow",
    "horovod.tensorflow.compression": "farandole.tensorflow.compression",
    "horovod.tensorflow.data": "farandole.tensorflow.data",
    "horovod.tensorflow.data.compute_service": "farandole.tensorflow.data.compute_service",
    "horovod.tensorflow.data.compute_worker": "farandole.tensorflow.data.compute_worker",
    "horovod.tensorflow.elastic": "farandole.tensorflow.elastic",
    "horovod.tensorflow.functions": "farandole.tensorflow.functions",
    "horovod.tensorflow.gradient_aggregation": "farandole.tensorflow.aggregation",
    "horovod.tensorflow.keras": "farandole.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks": "farandole.tensorflow.keras.callbacks",
    "horovod.tensorflow.keras.elastic": "farandole.tensorflow.keras.elastic",
    "horovod.tensorflow.mpi_ops": "farandole.tensorflow.mpi_ops",
    "horovod.tensorflow.util": "farandole.tensorflow.util",
    "horovod.tensorflow.sync_batch_norm": "farandole.tensorflow.sync_batch_norm",
    "horovod.torch": "farandole.torch",
    "horovod.torch.compression": "farandole.torch.compression",
    "horovod.torch.elastic": "farandole.torch.elastic",
    "horovod.torch.elastic.sampler": "farandole.torch.elastic.sampler",
    "horovod.torch.elastic.state": "farandole.torch.elastic.state",
    "horovod.torch.functions": "farandole.torch.functions",
    "horovod.torch.mpi_ops": "farandole.torch.mpi_ops",
    "horovod.torch.optimizer": "farandole.torch.optimizer",
    "horovod.torch.sync_batch_norm": "farandole.torch.sync_batch_norm",
    # Ray's own package `ray.train.horovod` begins with `import horovod`; what it then asks for only raises.
    "ray.train.horovod.config": "farandole.ray.train",
    "ray.train.horovod.horovod_trainer": "farandole.ray.train",
    "ray.train.v2.horovod.horovod_trainer": "farandole.ray.train",
}
# Heavy, or programs: imported when somebody asks for them.
LATER = (
    "horovod.ray.train",
    "horovod.tensorflow.data.compute_worker",
    "horovod.spark.tensorflow.compute_worker",
    *(f"horovod.spark.{name}" for name in ("common", "data_loaders", "keras", "lightning", "tensorflow", "torch")),
)
# The names of packages that are empty otherwise: where each name comes from, and what it is called there.
NAMES = {"run": ("farandole", "run"), "_HorovodArgs": ("farandole.horovod_names.arguments", "HorovodArgs")}


def __getattr__(name: str) -> Any:
    if name in NAMES:
        module, there = NAMES[name]
        return getattr(module_of(module), there)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Aliases(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the modules of the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Where a module comes from; those that Horovod has and Farandole does not are refused by name."""
        if fullname in MODULES:
            real = MODULES[fullname]  # also what a program of `python -m` is called
            return importlib.machinery.ModuleSpec(fullname, self, origin=real or None, is_package=real == EMPTY)
        if not fullname.startswith("horovod."):
            return None
        served = ", ".join(name for name in MODULES if name.count(".") == 1)
        # Named after what is really missing: `from horovod import tensorflow` would swallow an error with its own name.
        raise ModuleNotFoundError(
            f"{fullname} is not available: Farandole, which serves the package `horovod` here, has {served} so far",
            name=fullname.replace("horovod", "farandole", 1),
        )

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the real module: `python -m horovod...` runs it."""
        spec = importlib.util.find_spec(MODULES[fullname])
        loader = None if spec is None else spec.loader
        return loader.get_code(MODULES[fullname]) if isinstance(loader, importlib.abc.InspectLoader) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """The import system's own empty module; exec_module puts the real one in its place."""

    def exec_module(self, module: ModuleType) -> None:
        """Lets the alias mean the real module, and makes its submodules attributes, as importing Horovod's does."""
        name = module.__name__
        if MODULES[name] == EMPTY:
            if name == "horovod.runner":  # it has `run` as well
                vars(module)["__getattr__"] = __getattr__
            return
        sys.modules[name] = real = module_of(MODULES[name])
        if name.count(".") == 1:  # `import horovod.torch as hvd`: some programs ask hvd for its version
            vars(real).setdefault("__version__", __version__)
        for child in MODULES:
            parent, _, last = child.rpartition(".")
            # What a module loads late, because it costs something, it gives when it is asked for.
            if parent == name and child not in LATER and last not in getattr(real, "LATE", ()):
                setattr(real, last, module_of(MODULES[child]))


def _refuse_a_mixture() -> None:
    """Two distributions that own this folder overwrite each other's files: better no import than half of each."""
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return
    if not version.endswith("+farandole"):
        raise ImportError(
            f"Horovod {version} and Farandole are both installed, and both own the package `horovod`. "
            "Keep one of them: pip uninstall -y horovod && pip install --force-reinstall --no-deps farandole"
        )


_refuse_a_mixture()
# First in line: the path finder would load farandole/torch/optimizer.py a second time under Horovod's name.
sys.meta_path.insert(0, Aliases())
