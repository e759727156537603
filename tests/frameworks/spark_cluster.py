# A Spark application for tests, in a separate process that runs the cases, and a standalone cluster to run it on.
# Touches processes that carry its mark, and a temporary directory.
"""`Application` in the test's process, `main()` in the other; they talk as those of ray_cluster.py do."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray_cluster import HERE, MARK, ROOT, Cluster, answering, marked

JAVA = 17
MODULES = ("java.lang", "java.lang.invoke", "java.net", "java.nio", "java.util", "java.util.concurrent", "sun.nio.ch")
EXECUTOR = "CoarseGrainedExecutorBackend"


def missing() -> str:
    """Why Spark cannot run here; nothing when it can."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed"
    java = shutil.which("java")
    if java is None:
        return "Java is not installed; Spark needs 17 or newer"
    output = subprocess.run([java, "-version"], capture_output=True, text=True).stderr
    found = re.search(r'version "(\d+)', output)
    return "" if found and int(found.group(1)) >= JAVA else f"Spark needs Java 17 or newer, and this is {output!r}"


class Application(Cluster):
    """`ask` runs a case of spark_cases.py in a driver with this `master`; `workers`: of a cluster that is its master,
    each with two cores and two GPUs. Spark Connect listens at `remote`."""

    def __init__(self, master: str = "", workers: int = 0) -> None:
        import pyspark

        self.mark = uuid.uuid4().hex
        self._place = tempfile.TemporaryDirectory(prefix="s")
        self.home = Path(self._place.name)
        self.spark_home = Path(pyspark.__file__).parent
        self.environment = {
            **os.environ,
            MARK: self.mark,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", HERE, HERE.parent / "ranks"))),
            "TMPDIR": str(self.home),
            "SPARK_HOME": str(self.spark_home),
            "SPARK_SCALA_VERSION": "2.13",  # as Spark's own scripts have it
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
            # Six Javas on few cores: quick to start counts, not how they fare later.
            "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData",
            "PYTHONWARNINGS": "ignore",
            "TESTS_WITHOUT": "matplotlib jax",  # TensorFlow would import them
        }
        self._output_file = open(self.home / "output", "w+b")  # noqa: SIM115
        self._servers: list[subprocess.Popen[bytes]] = []
        begun: list[tuple[subprocess.Popen[bytes], Path, str]] = []
        try:
            if workers:
                master, begun = self._cluster(workers)
            command = [sys.executable, str(HERE / "spark_cluster.py"), master, str(self.home), str(int(bool(workers)))]
            self._begin_driver(command, self.home)
            self._servers.append(self._process)
            for one in begun:  # while the driver starts as well
                self._wait_for_line(*one)
            self.remote = self._answer()
        except BaseException:
            self._end_servers()
            raise

    def begin(self, case: str, **arguments: Any) -> None:
        """As `ask`, without waiting for what it returns."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([case, arguments]).encode() + b"\n")
        self._process.stdin.flush()

    def executors(self) -> list[int]:
        """The processes of the executors."""
        return [pid for pid in marked(self.mark) if EXECUTOR.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def close(self) -> None:
        """Ends it, and looks that nothing of it is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._end_servers()
        super().close()

    def _end_servers(self) -> None:
        for server in self._servers:
            server.terminate()
        for server in self._servers:
            server.wait(30)

    def _cluster(self, workers: int) -> tuple[str, list[tuple[subprocess.Popen[bytes], Path, str]]]:
        """A master that runs, and workers that start."""
        address = self._wait_for_line(
            *self._serve("master.Master", [], r"spark://[\d.]+:\d+", ["-Dspark.master.rest.enabled=false"])
        )
        begun = []
        for number in range(workers):
            script = self.home / f"gpus{number}"
            addresses = [str(4 + 2 * number), str(5 + 2 * number)]
            script.write_text(f"#!/bin/sh\necho '{json.dumps({'name': 'gpu', 'addresses': addresses})}'\n")
            script.chmod(0o700)
            options = ["--cores", "2", "--memory", "1g", "--work-dir", str(self.home / f"work{number}"), address]
            gpus = [f"-Dspark.worker.resource.gpu.{name}" for name in ("amount=2", f"discoveryScript={script}")]
            begun.append(self._serve("worker.Worker", options, "registered with master", gpus))
        return address, begun

    def _serve(
        self, name: str, options: Sequence[str], sign: str, properties: Sequence[str] = ()
    ) -> tuple[subprocess.Popen[bytes], Path, str]:
        """Starts a server of Spark's. Spark's own script would start Java twice."""
        opens = [f"--add-opens=java.base/{module}=ALL-UNNAMED" for module in MODULES]
        command = ["java", "-cp", f"{self.spark_home}/jars/*", "-Xmx512m", *opens, *properties]
        command += [f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        log = self.home / f"{name}{len(self._servers)}"
        with open(log, "wb") as file:
            started = subprocess.Popen(
                [*command, *options], env=self.environment, stdout=file, stderr=file, cwd=self.home
            )
        self._servers.append(started)
        return started, log, sign

    def _wait_for_line(self, started: subprocess.Popen[bytes], log: Path, sign: str) -> str:
        """The part of the log that shows that the server is ready."""
        deadline = time.monotonic() + 180
        while not (found := re.search(sign, log.read_text())):
            assert started.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)  # sleep: between two looks
        return found.group()


def main() -> None:
    answer = answering()
    from pyspark.sql import SparkSession

    import farandole.rendezvous.sockets as sockets

    master, home, cluster = sys.argv[1], sys.argv[2], int(sys.argv[3])
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    for name, value in {
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": home,
        "spark.sql.warehouse.dir": home,
        "spark.ui.showConsoleProgress": "false",
        "spark.executor.memory": "512m",
    }.items():
        builder = builder.config(name, value)
    held, port = sockets.hold_port()
    held.close()
    builder = builder.config("spark.plugins", "org.apache.spark.sql.connect.SparkConnectPlugin")
    builder = builder.config("spark.connect.grpc.binding.port", str(port))
    if cluster:
        builder = builder.config("spark.executor.resource.gpu.amount", "2")
        builder = builder.config("spark.task.resource.gpu.amount", "1")
    else:
        builder = builder.config("spark.default.parallelism", "2")  # fewer than slots, so that tests tell them apart
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    answer(True, f"sc://127.0.0.1:{port}")
    for line in sys.stdin:
        name, arguments = json.loads(line)
        module, _, case = name.rpartition(".")
        try:
            cases = importlib.import_module(module or "spark_cases")
            answer(True, getattr(cases, case)(spark, **arguments))
        except BaseException:
            answer(False, traceback.format_exc())
    spark.stop()


if __name__ == "__main__":
    main()
