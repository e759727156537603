# The data service: a compute job and a training job, as users start them, on tf.data's real service.
# Touches the launcher, horovod.tensorflow.data and tensorflow_data_script.py.
"""The dispatcher on either side, workers of the launcher and of Spark; they end when the training job asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from spark_cluster import missing
from tensorflow_jobs import CACHE, TENSORFLOW, needs_tensorflow

pytestmark = [pytest.mark.ranks, pytest.mark.slow, needs_tensorflow]
SCRIPT = str(Path(__file__).with_name("tensorflow_data_script.py"))
LAUNCH = "import sys; from farandole.launch.cli import horovodrun; sys.exit(horovodrun())"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("side", "ranks", "starter"), [("compute", 2, "launcher"), ("training", 1, "spark")])
def test_a_service_job_computes_for_another_job(side: str, ranks: int, starter: str, tmp_path: Path) -> None:
    if starter == "spark" and (why := missing()):
        pytest.skip(why)
    CACHE.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **TENSORFLOW, "TMPDIR": str(tmp_path), "FARANDOLE_TENSORFLOW_OPS": "callback"}
    launch = [sys.executable, "-c", LAUNCH, "-np", str(ranks), sys.executable]
    config = str(tmp_path / "config")
    arguments = [config, "--dispatcher-side", side, "--timeout", "120"]
    program = [*launch, "-m", "horovod.tensorflow.data.compute_worker", *arguments]
    if starter == "spark":
        program = [
            sys.executable,
            "-m",
            "horovod.spark.tensorflow.compute_worker",
            *arguments,
            "--num-proc",
            str(ranks),
        ]
        environment |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", "TESTS_WITHOUT": "jax"}
    with open(tmp_path / "compute", "wb") as log:
        compute = subprocess.Popen(program, env=environment, stdout=log, stderr=log)
        try:
            done = subprocess.run(
                [*launch, SCRIPT, config], env=environment, capture_output=True, text=True, timeout=250, check=False
            )
            log_text = (tmp_path / "compute").read_text()[-3000:]
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + log_text
            assert compute.wait(60) == 0, (tmp_path / "compute").read_text()[-3000:]
        finally:
            if compute.poll() is None:
                compute.terminate()
                compute.wait(30)
    assert "all of them once: True" in done.stdout
    assert not os.path.exists(config)  # the key was in it
