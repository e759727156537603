"""Stores: on paths, file:// and memory://; the errors of HDFS and DBFS say what is missing.
Writes into temporary folders and into fsspec's memory."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
fsspec = pytest.importorskip("fsspec")
from farandole.spark.common.store import (  # noqa: E402
    AbstractFilesystemStore,
    DBFSLocalStore,
    FilesystemStore,
    HDFSStore,
    LocalStore,
    Store,
    StoreError,
)


@pytest.fixture(params=["path", "file", "memory"])
def prefix(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {"path": f"{tmp_path}/s", "file": f"file://{tmp_path}/s", "memory": f"memory://{tmp_path}/s"}[request.param]


def make(prefix: str) -> AbstractFilesystemStore:
    made = Store.create(prefix)
    assert type(made) is FilesystemStore
    return made


def test_paths_in_a_store(prefix: str) -> None:
    store = make(prefix + "/")
    assert store.get_train_data_path() == f"{prefix}/intermediate_train_data"
    assert store.get_val_data_path(3) == f"{prefix}/intermediate_val_data.3"
    assert store.get_test_data_path("a") == f"{prefix}/intermediate_test_data.a"
    assert store.get_runs_path() == f"{prefix}/runs" and store.get_run_path("r") == f"{prefix}/runs/r"
    assert store.get_checkpoint_path("r") == f"{prefix}/runs/r/{store.get_checkpoint_filename()}"
    assert store.get_logs_path("r") == f"{prefix}/runs/r/{store.get_logs_subdir()}" and store.saving_runs()
    remote = pickle.loads(pickle.dumps(store.to_remote("r", 3)))
    assert remote.train_data_path == store.get_train_data_path(3) and remote.run_path == store.get_run_path("r")


def test_files(prefix: str, tmp_path: Path) -> None:
    store = make(prefix)
    store.check()
    path = store.get_checkpoint_path("r")
    assert not store.exists(path) and store.get_checkpoints("r") == []
    store.write_text(path, "one")
    store.write(path, b"two")
    assert store.exists(path) and store.read(path) == b"two" and len(store.get_checkpoints("r")) == 1
    remote = store.to_remote("r")
    with remote.get_local_output_dir() as folder:
        (Path(folder) / "logs").mkdir()
        (Path(folder) / "logs" / "events").write_text("x")
        remote.sync(folder)
    assert store.read(f"{store.get_logs_path('r')}/events") == b"x" and not Path(folder).exists()
    assert not store.is_parquet_dataset(store.get_run_path("r")) and not store.is_parquet_dataset(prefix + "/none")
    store.remove(prefix)
    assert not store.exists(path)


def test_paths_that_the_user_sets_and_wrong_ones(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path), train_path="/data/train", runs_path="/runs", save_runs=False,
                       checkpoint_filename="last.ckpt")  # fmt: skip
    assert store.get_train_data_path() == "/data/train" and not store.saving_runs()
    assert store.get_checkpoint_path("r") == "/runs/r/last.ckpt"
    with pytest.raises(TypeError, match="no argument colour"):
        LocalStore(str(tmp_path), colour=1)
    with pytest.raises(StoreError, match="expected a path"):
        LocalStore("memory://x")


def test_errors_name_the_missing_client_or_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HADOOP_HOME", "ARROW_LIBHDFS_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StoreError, match=r"needs Hadoop's client .* HADOOP_HOME"):
        Store.create("hdfs://nowhere:1/x")
    with pytest.raises(StoreError, match="only libhdfs"):
        HDFSStore("hdfs://nowhere/x", driver="libhdfs3")
    if not Path("/dbfs").exists():
        for path in ("dbfs:/x", "/dbfs/x", "file:///dbfs/x"):
            with pytest.raises(StoreError, match="needs /dbfs"):
                Store.create(path)
    assert DBFSLocalStore.normalize("dbfs:/a/b") == DBFSLocalStore.normalize("file:///dbfs/a/b") == "/dbfs/a/b"


def test_a_store_that_cannot_be_reached() -> None:
    with pytest.raises(StoreError, match="/proc/nowhere cannot be written to"):
        make("/proc/nowhere").check()
    with pytest.raises(StoreError, match="nonsense"):
        make("nonsense://x").check()
    with pytest.raises(StoreError, match=r"ftp://127.0.0.1:1/x cannot be used: .*refused"):
        make("ftp://127.0.0.1:1/x").check()
    assert make("memory://x").in_one_process and not make("/tmp").in_one_process


@pytest.mark.parametrize(("url", "package"), [("s3://b/x", "s3fs"), ("gs://b/x", "gcsfs"), ("abfs://b/x", "adlfs")])
def test_stores_of_clouds_name_their_package(url: str, package: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed, so that nothing is missing")
    with pytest.raises(StoreError, match=f"{url} cannot be used: .*{package}"):
        make(url).check()
