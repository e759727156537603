# Tuning in real jobs: results keep their bits, all ranks get the same values, log and cache contain what was found.
# Touches farandole.launch through jobs.py, and engines through World.
"""Training loops with the tuner, with settings and files like a user's. These tests measure no times."""

from __future__ import annotations

import csv
import functools
import json
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from world import ENGINES, World, allreduce

from farandole.base.config import Config
from farandole.engine.interface import Engine, Kind, Request
from farandole.world.tuning.live import COLUMNS, Tuner
from farandole.world.tuning.search import PAIRS, Values, choices

pytestmark = pytest.mark.skipif("native" not in ENGINES, reason="the native library is not built")

HOSTS = {"shm": [0, 0], "tcp": [0, 1], "both": [0, 0, 1]}
QUICK: dict[str, Any] = {
    "autotune_warmup_samples": 1,
    "autotune_steps_per_sample": 2,
    "autotune_bayes_opt_max_samples": 6,
}
SIZES = (7, 30_000, 1, 90_001, 4_000)


def gradients(rank: int, turn: int) -> list[Any]:
    chance = np.random.default_rng([rank, turn])
    return [chance.standard_normal(size, dtype=np.float32) for size in SIZES]


def step(engine: Engine, rank: int, turn: int) -> bytes:
    """The sums' bits."""
    data = gradients(rank, turn)
    requests = [Request(Kind.ALLREDUCE, f"layer.{index}", each, each) for index, each in enumerate(data)]
    for handle in engine.submit(requests):
        engine.wait(handle, 30.0)
    return b"".join(each.tobytes() for each in data)


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
@pytest.mark.parametrize("links", HOSTS)
def test_a_tuned_job_computes_the_same_bits(links: str, algorithm: str, tmp_path: Path) -> None:
    hosts, turns = HOSTS[links], 4
    with World(hosts, allreduce_algorithm=algorithm) as world:
        expected = [world.run(functools.partial(step, turn=turn))[0] for turn in range(turns)]
    log = tmp_path / "log.csv"
    config = Config(allreduce_algorithm=algorithm, autotune_log=str(log), **QUICK)
    tuners: list[Tuner] = []

    def train(engine: Engine, rank: int) -> list[int]:
        if rank == 0:
            tuners.append(Tuner(engine, config, choices(config, len(set(hosts)))))
        for turn in range(100_000):
            assert step(engine, rank, turn % turns) == expected[turn % turns]
            over = rank == 0 and not tuners[0]._thread.is_alive()
            if allreduce(engine, np.array([float(over)]), "over")[0] > 0:
                return engine.tuning()
        raise AssertionError("tuning does not end")

    with World(hosts, allreduce_algorithm=algorithm) as world:
        ends = world.run(train, 120.0)
        assert ends == [ends[0]] * len(hosts)  # the same values everywhere
        search = tuners[0].search
        assert search.over and Values(*ends[0]) == search.best
        tried = {values for values, _ in search.measured}
        assert len(tried) >= 6 and search.default in tried
        if algorithm == "ring":  # its bits depend on the bucket, so fusion is not tuned
            assert {values.fusion_threshold for values in tried} == {config.fusion_threshold}
        check_log(log, search)


def check_log(log: Path, search: Any) -> None:
    lines = log.read_text().splitlines()
    assert lines[0] == COLUMNS and lines[0].startswith(
        "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
        "tensor_fusion_threshold,score"
    )
    rows = list(csv.DictReader(lines))
    assert len(rows) == len(search.measured) + 1
    for row, (values, score) in zip(rows, [*search.measured, (search.best, search.score)], strict=True):
        assert int(row["tensor_fusion_threshold"]) == values.fusion_threshold
        assert float(row["cycle_time_ms"]) == values.flush_us / 1000
        assert float(row["score"]) == pytest.approx(score, rel=1e-4) and score > 0
        assert (row["cache_enabled"], row["torus_allreduce"]) == ("1", "0")
        ours = (int(row["chunk_bytes"]), int(row["tcp_streams"]), int(row["spin_us"]))
        assert ours == (values.chunk_bytes, values.streams, values.spin_us)
    best = rows[-1]
    if search.best != search.default:  # never what was measured slower
        duel = search.measured[-2 * PAIRS :]
        scores = sorted(score for values, score in duel if values == search.default)
        assert float(best["score"]) > scores[len(scores) // 2]


LOOP = """
import hashlib, torch
import farandole.torch as ht
from farandole.world.runtime import runtime
torch.manual_seed(1)
ht.init()
layers = torch.nn.Linear(40, 300), torch.nn.ReLU(), torch.nn.Linear(300, 300), torch.nn.Linear(300, 3)
model = torch.nn.Sequential(*layers)
optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
ht.broadcast_parameters(model.state_dict(), 0)
torch.manual_seed(rank)
batches = [torch.randn(8, 40) for _ in range(4)]
digest, steps = None, 0
while True:
    optimizer.zero_grad()
    model(batches[steps % 4]).square().mean().backward()
    optimizer.step()
    steps += 1
    if steps == 30:
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    tuner = runtime.world.tuner
    over = tuner is None or not tuner._thread.is_alive()
    if steps >= 30 and hvd.allreduce(np.array([float(over)]), name="over", op=hvd.Min)[0] > 0:
        break
report(digest=digest, tuning=engine().tuning(), steps=steps)
ht.shutdown()
"""
AUTOTUNE = {
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "1",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "5",
}


@pytest.mark.ranks
def test_training_with_torch_ends_with_the_same_model(tmp_path: Path) -> None:
    hosts, log = ["one", "one", "two"], tmp_path / "autotune.csv"
    scratch = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}  # torch makes it, whether it is used or not
    plain = jobs.run(LOOP, len(hosts), hosts, env=scratch)
    env = {**scratch, **AUTOTUNE, "HOROVOD_AUTOTUNE_LOG": str(log)}
    tuned = jobs.run(LOOP, len(hosts), hosts, env=env, timeout=120.0)
    assert {each["digest"] for each in [*plain, *tuned]} == {plain[0]["digest"]}
    assert {tuple(each["tuning"]) for each in tuned} == {tuple(tuned[0]["tuning"])}
    rows = list(csv.DictReader(log.read_text().splitlines()))
    assert 1 < len(rows) <= 5 + 2 * PAIRS + 1
    assert int(rows[-1]["tensor_fusion_threshold"]) == tuned[0]["tuning"][0]


STEPS = """
hvd.init()
from farandole.world.runtime import runtime
over = False
while not over:
    for layer in range(3):
        hvd.allreduce(np.ones(5000), name=f"layer.{layer}")
    tuner = runtime.world.tuner
    done = rank != 0 or not tuner._thread.is_alive()
    over = hvd.allreduce(np.array([float(done)]), name="over", op=hvd.Min)[0] > 0
report(tuning=engine().tuning())
hvd.shutdown()
"""


def test_values_that_users_have_set_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "autotune.csv"
    env = {**AUTOTUNE, "HOROVOD_AUTOTUNE_LOG": str(log), "HOROVOD_FUSION_THRESHOLD": "1000000"}
    assert all(each["tuning"][0] == 1_000_000 for each in jobs.run(STEPS, 2, env=env, timeout=120.0))
    rows = list(csv.DictReader(log.read_text().splitlines()))
    assert {row["tensor_fusion_threshold"] for row in rows} == {"1000000"} and len(rows) > 3


DEATH = """
hvd.init()
from farandole.world.runtime import runtime
try:
    for turn in range(100_000):
        hvd.allreduce(np.ones(5000), name="x")
        if rank == 1 and turn == 200:
            os.kill(os.getpid(), signal.SIGKILL)
    report(error=None)
except PeerLost as error:
    tuner = runtime.world.tuner
    report(error="PeerLost", rank=error.rank, tuned=rank != 0 or (tuner is not None and not tuner.search.over))
hvd.shutdown()
"""


def test_a_rank_that_is_killed_while_tuning_is_a_peer_lost() -> None:
    env = {**AUTOTUNE, "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "50"}
    with jobs.start(DEATH, 3, ["one", "one", "two"], env) as job:
        job.wait(60.0)
        assert [code != 0 for code in job.codes] == [False, True, False]
        for rank in (0, 2):
            assert jobs.results(job, rank)[-1] == {"error": "PeerLost", "rank": 1, "tuned": True}, job.stderr(rank)


WHOLE_NUMBER = "a whole number, at least 0"


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "1.5", "a number, at least 0, at most 1"),
        ("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "-1", WHOLE_NUMBER),
        ("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "many", WHOLE_NUMBER),
        ("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "1.5", WHOLE_NUMBER),
        ("HOROVOD_AUTOTUNE", "perhaps", "0 or 1"),
    ],
)
def test_bad_options_are_named(variable: str, value: str, text: str) -> None:
    with pytest.raises(ValueError, match=variable) as caught:
        Config.from_environment({variable: value})
    assert text in str(caught.value) and value in str(caught.value)


def test_a_log_that_cannot_be_written_is_an_error_of_init(tmp_path: Path) -> None:
    body = "try:\n    hvd.init()\nexcept ValueError as error:\n    report(error=str(error))"
    env = {**AUTOTUNE, "HOROVOD_AUTOTUNE_LOG": str(tmp_path / "nowhere" / "log.csv")}
    [output, _] = jobs.run(body, 2, env=env)
    assert "nowhere" in output["error"] and "HOROVOD_AUTOTUNE_LOG" in output["error"]


SHORT = """
hvd.init()
sums = [hvd.allreduce(np.arange(5.0) * (rank + 1), op=hvd.Sum, name="x").tolist() for _ in range(5)]
report(tuning=engine().tuning(), sums=sums)
hvd.shutdown()
"""


@pytest.mark.parametrize("hosts", [["one", "one"], ["one", "one", "two"]], ids=["one host", "two hosts"])
def test_tuning_at_init_is_done_once_and_remembered(hosts: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    env = {"FARANDOLE_TUNE_AT_INIT": "1", "FARANDOLE_CACHE_DIRECTORY": str(folder)}
    plain = jobs.run(SHORT, len(hosts), hosts)
    first = jobs.run(SHORT, len(hosts), hosts, env=env)
    [file] = folder.iterdir()
    kept = json.loads(file.read_text())
    assert [each["tuning"] for each in first] == [list(kept["values"].values())] * len(hosts)
    assert [each["sums"] for each in first] == [each["sums"] for each in plain]
    # The next job uses the file, and writes none.
    kept["values"]["spin_us"] = 77
    file.write_text(json.dumps(kept))
    before = file.stat().st_mtime_ns
    assert [each["tuning"][2] for each in jobs.run(SHORT, len(hosts), hosts, env=env)] == [77] * len(hosts)
    assert file.stat().st_mtime_ns == before
    # If the file is damaged, the job measures again, and one line says why.
    file.write_text("nonsense")
    with jobs.start(SHORT, len(hosts), hosts, env) as job:
        assert job.wait(60.0) == 0
        output = "".join(job.stderr(rank) for rank in range(len(hosts)))
    assert output.count("is not used: it is not JSON") == 1, output
    assert json.loads(file.read_text())["shape"] == kept["shape"]


def test_one_rank_and_the_reference_engine_tune_nothing() -> None:
    env = {**AUTOTUNE, "FARANDOLE_TUNE_AT_INIT": "1"}
    jobs.run("hvd.init(); hvd.allreduce(np.ones(3)); hvd.shutdown()", 1, env=env)
    with jobs.start("hvd.init(); hvd.barrier(); hvd.shutdown()", 2, env={**env, "FARANDOLE_ENGINE": "python"}) as job:
        assert job.wait(60) == 0
        assert job.stderr(0).count("has nothing to tune") == 1
    with World([0, 0], "python") as world, pytest.raises(ValueError, match="nothing to tune"):
        world.engines[0].submit([Request(Kind.TUNE, splits=[0, 0, 0, 64, 1, 0])])
