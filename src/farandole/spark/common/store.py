# Stores for prepared data, checkpoints and logs of estimators, on this machine or at any URL of fsspec.
# Touches fsspec and, for data sets, pyarrow; does not use Spark and starts nothing.
"""`Store.create(prefix_path)` chooses the class. Driver, executors and ranks must all reach the same storage."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from ...bindings.private import spark_names

IN_ONE_PROCESS = ("memory",)  # file systems that exist inside one process


class StoreError(RuntimeError):
    """A store cannot be reached, or a package that it needs is missing."""


class Store:
    """The base class of stores; `create` makes one."""

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> AbstractFilesystemStore:
        """HDFSStore for hdfs://, DBFSLocalStore for the files of Databricks, otherwise a FilesystemStore.

        >>> Store.create("memory://somewhere").get_train_data_path()
        'memory://somewhere/intermediate_train_data'
        """
        prefix = str(prefix_path)
        for kind in (HDFSStore, DBFSLocalStore):
            if kind.matches(prefix):
                return kind(prefix, *args, **kwargs)
        return FilesystemStore(prefix, *args, **kwargs)


@dataclass(frozen=True)
class RemoteStore:
    """The view of a store for the ranks of one run."""

    store: AbstractFilesystemStore
    run_id: str
    train_data_path: str
    val_data_path: str
    test_data_path: str
    saving_runs: bool
    runs_path: str
    run_path: str
    checkpoint_path: str
    logs_path: str
    checkpoint_filename: str
    logs_subdir: str

    def get_local_output_dir(self) -> Any:
        """A context manager with a temporary folder of this machine."""
        return self.store.get_local_output_dir_fn(self.run_id)()

    def sync(self, local_path: str) -> None:
        """Copies such a folder to the folder of the run."""
        self.store.sync_fn(self.run_id)(local_path)


def _absolute(path: Any) -> str:
    """The path in a form that does not depend on the working directory of a process."""
    text = str(path) if "://" in str(path) else os.path.abspath(str(path))
    return text if text == "/" else text.rstrip("/")


class AbstractFilesystemStore(Store):
    """A store on a file system of fsspec."""

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: dict[str, Any] | None = None,
        checkpoint_filename: str | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise TypeError(f"{type(self).__name__} has no argument {', '.join(sorted(kwargs))}")
        self.prefix_path = _absolute(prefix_path)
        self.storage_options = dict(storage_options or {})
        self._train = _absolute(train_path or self._under("intermediate_train_data"))
        self._val = _absolute(val_path or self._under("intermediate_val_data"))
        self._test = _absolute(test_path or self._under("intermediate_test_data"))
        self._runs = _absolute(runs_path or self._under("runs"))
        self._save_runs = save_runs
        self._checkpoint = checkpoint_filename or "checkpoint.ckpt"

    def _under(self, name: str) -> str:
        return f"{self.prefix_path.rstrip('/')}/{name}"

    @property
    def fs(self) -> Any:
        """The file system. fsspec caches one for each set of options."""
        try:
            return fsspec.core.url_to_fs(self.prefix_path, **self.storage_options)[0]
        except Exception as error:  # each driver has other errors, e.g. for a missing package or server
            raise StoreError(f"the store {self.prefix_path} cannot be used: {error}") from error

    def local(self, path: str) -> str:
        """A path in the form of the file system."""
        return spark_names.local_path(self.fs, path)

    @property
    def in_one_process(self) -> bool:
        """Whether only this process can see the files, as with memory://."""
        names = self.fs.protocol
        return any(name in IN_ONE_PROCESS for name in ([names] if isinstance(names, str) else names))

    def check(self) -> None:
        """StoreError unless this process can write here."""
        probe = f"{self.prefix_path}/.farandole-{os.getpid()}"
        try:
            self.write(probe, b"")
            self.remove(probe)
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(
                f"the store {self.prefix_path} cannot be written to: {type(error).__name__}: {error}. "
                "Driver, executors and ranks all need to reach it with these rights"
            ) from error

    # Files.

    def exists(self, path: str) -> bool:
        """Whether this file or folder exists."""
        return bool(self.fs.exists(self.local(path)))

    def read(self, path: str) -> bytes:
        """The bytes of a file."""
        return bytes(self.fs.cat_file(self.local(path)))

    def write(self, path: str, data: bytes) -> None:
        """Writes a file. The file is never incomplete."""
        target, fs = self.local(path), self.fs
        fs.makedirs(target.rpartition("/")[0] or "/", exist_ok=True)
        if isinstance(fs, fsspec.implementations.local.LocalFileSystem):
            part = f"{target}.{os.getpid()}.part"
            Path(part).write_bytes(data)
            os.replace(part, target)
        else:
            fs.pipe_file(target, data)

    def write_text(self, path: str, text: str) -> None:
        """Writes a text file."""
        self.write(path, text.encode())

    def remove(self, path: str) -> None:
        """Removes a file or folder; does nothing if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.local(path), recursive=True)

    # Data.

    def is_parquet_dataset(self, path: str) -> bool:
        """Whether there are Parquet files below this path."""
        try:
            return bool(self.get_parquet_dataset(path).files)
        except (OSError, ValueError):
            return False

    def get_parquet_dataset(self, path: str) -> Any:
        """The Parquet files below a path as a pyarrow.dataset."""
        import pyarrow.dataset

        return pyarrow.dataset.dataset(self.local(path), format="parquet", filesystem=self.fs)

    def get_train_data_path(self, idx: int | str | None = None) -> str:
        """The folder of training data; with `idx`, of the data set with this number."""
        return self._train if idx is None else f"{self._train}.{idx}"

    def get_val_data_path(self, idx: int | str | None = None) -> str:
        """The folder of validation data."""
        return self._val if idx is None else f"{self._val}.{idx}"

    def get_test_data_path(self, idx: int | str | None = None) -> str:
        """The folder of test data."""
        return self._test if idx is None else f"{self._test}.{idx}"

    # Runs.

    def saving_runs(self) -> bool:
        """Whether checkpoints and logs are kept."""
        return self._save_runs

    def get_runs_path(self) -> str:
        """The folder of all runs."""
        return self._runs

    def get_run_path(self, run_id: str) -> str:
        """The folder of a run."""
        return f"{self._runs}/{run_id}"

    def get_checkpoint_path(self, run_id: str) -> str:
        """The file of a run's last checkpoint."""
        return f"{self.get_run_path(run_id)}/{self._checkpoint}"

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """All checkpoint files of a run."""
        path = self.local(self.get_run_path(run_id))
        if not self.fs.exists(path):
            return []
        return sorted(str(name) for name in self.fs.ls(path, detail=False) if str(name).endswith(suffix))

    def get_logs_path(self, run_id: str) -> str:
        """The folder of a run's logs."""
        return f"{self.get_run_path(run_id)}/{self.get_logs_subdir()}"

    def get_checkpoint_filename(self) -> str:
        """The name of checkpoint files."""
        return self._checkpoint

    def get_logs_subdir(self) -> str:
        """The name of the folder of logs."""
        return "logs"

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], Any]:
        """Returns a context manager with a temporary folder of this machine."""

        @contextlib.contextmanager
        def folder() -> Iterator[str]:
            with tempfile.TemporaryDirectory(prefix=f"{run_id}-") as path:
                yield path

        return folder

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Returns a function that copies a local folder to the folder of the run."""

        def sync(local_path: str) -> None:
            for file in sorted(path for path in Path(local_path).rglob("*") if path.is_file()):
                self.write(f"{self.get_run_path(run_id)}/{file.relative_to(local_path).as_posix()}", file.read_bytes())

        return sync

    def to_remote(self, run_id: str, dataset_idx: int | str | None = None) -> RemoteStore:
        """The view of this store for the ranks of a run."""
        return RemoteStore(
            self,
            run_id,
            self.get_train_data_path(dataset_idx),
            self.get_val_data_path(dataset_idx),
            self.get_test_data_path(dataset_idx),
            self.saving_runs(),
            self.get_runs_path(),
            self.get_run_path(run_id),
            self.get_checkpoint_path(run_id),
            self.get_logs_path(run_id),
            self.get_checkpoint_filename(),
            self.get_logs_subdir(),
        )


class FilesystemStore(AbstractFilesystemStore):
    """A store at any URL of fsspec: /path, file://, s3://, gs://, abfs:// ... `storage_options` are for its driver."""


class LocalStore(FilesystemStore):
    """A folder with the same path on every host: on a shared disk, or only on this machine."""

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(prefix_path, *args, **kwargs)
        if not isinstance(self.fs, fsspec.implementations.local.LocalFileSystem):
            raise StoreError(f"LocalStore({prefix_path!r}): expected a path; Store.create takes other URLs")


class HDFSStore(AbstractFilesystemStore):
    """A store at hdfs://host:port/path, through pyarrow and Hadoop's own client library."""

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: dict[str, str] | None = None,
        storage_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if driver != "libhdfs":
            raise StoreError(f"driver={driver!r}: pyarrow supports only libhdfs")
        arguments = {"host": host, "port": port, "user": user, "kerb_ticket": kerb_ticket, "extra_conf": extra_conf}
        options = {name: value for name, value in arguments.items() if value is not None}
        super().__init__(prefix_path, storage_options={**options, **(storage_options or {})}, **kwargs)
        try:
            _ = self.fs
        except (OSError, ImportError, StoreError) as error:
            raise StoreError(
                f"HDFSStore({prefix_path!r}) needs Hadoop's client on the driver, the executors and the ranks: "
                "HADOOP_HOME set (or ARROW_LIBHDFS_DIR, where libhdfs.so is), JAVA_HOME, and "
                f"CLASSPATH=$($HADOOP_HOME/bin/hadoop classpath --glob). pyarrow says: {error}"
            ) from error

    @staticmethod
    def matches(path: str) -> bool:
        """Whether a path is for this class."""
        return path.startswith("hdfs://")


class DBFSLocalStore(FilesystemStore):
    """A store in files of Databricks. dbfs:/x, file:///dbfs/x and /dbfs/x are the same; clusters mount it at /dbfs."""

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(self.normalize(str(prefix_path)), *args, **kwargs)
        if not os.path.isdir("/dbfs"):
            raise StoreError(
                f"DBFSLocalStore({prefix_path!r}) needs /dbfs, the mount of a Databricks cluster, and there is none "
                "here; elsewhere, give Store.create a path or a URL that all hosts reach"
            )

    @staticmethod
    def matches(path: str) -> bool:
        """Whether a path is for this class."""
        return path.startswith(("dbfs:/", "/dbfs/", "file:///dbfs/"))

    @staticmethod
    def normalize(path: str) -> str:
        """The path below the mount point.

        >>> DBFSLocalStore.normalize("dbfs:/models"), DBFSLocalStore.normalize("file:///dbfs/models")
        ('/dbfs/models', '/dbfs/models')
        """
        for start in ("dbfs:///", "dbfs:/", "file:///dbfs/", "/dbfs/"):
            if path.startswith(start):
                return "/dbfs/" + path.removeprefix(start)
        return path
