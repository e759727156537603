# Elastic training with PyTorch while ranks are killed: real processes, real losses.
# Touches tests/ranks/elastic_runs.py, elastic_training.py and horovod_script.py.
"""The ledger stays exact, the bits stay the same, and a Horovod script needs no change."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
from elastic_runs import ElasticRun

pytest.importorskip("torch")
HERE = Path(__file__).parent
TRAINING = str(HERE / "elastic_training.py")
LONG = "CHAOS_N" in os.environ  # `make chaos`
TIMES = int(os.environ.get("CHAOS_N", "1"))
EPOCHS = 3  # in which the Horovod script learns its task


@pytest.mark.ranks
@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sampler", "loader"])
def test_row_25_samples_are_counted_once_through_random_kills(mode: str, tmp_path: Path) -> None:
    draw = random.Random(25)
    kills = 10 * TIMES if LONG else 1
    with ElasticRun(tmp_path, [TRAINING, mode, "101", "0", "1"]) as run:
        times = [run.kill_at_random(draw, full=False) for _ in range(kills)]
        run.until(lambda now: now["size"] == run.np)
        assert run.finish() == 0, run.output()
        found, results = run.counts(), run.results()
    assert (found.lost, found.duplicated) == (0, 0)
    assert found.padded < 3 if mode == "sampler" else found.padded == 0
    sizes = results[0]["sizes"]
    assert len(results) == 3 and min(sizes) < 3 and sizes[0] == 3  # three have ended: the lost ones were replaced
    went_on = ", ".join(f"{seconds:.2f}" for seconds, _ in times)
    print(f"{mode}: {kills} kills, {len(results[0]['used'])} epochs; training continued after {went_on} s; {found}")


@pytest.mark.ranks
@pytest.mark.chaos
@pytest.mark.slow
def test_row_23_ranks_that_have_to_leave_save_first(tmp_path: Path) -> None:
    with ElasticRun(tmp_path, [TRAINING, "loader", "101", "0", "1"], 4, "localhost:2,127.0.0.1:2", SAVES="1") as run:
        before = run.until(lambda now: now["size"] == 4 and now["step"] > 10)
        run.hurt_agent(3, signal.SIGTERM)
        after = run.until(lambda now: now["size"] == 2 and now["step"] > before["step"] + 40)
        assert set(after["pids"]) == set(before["pids"][:2])
        assert run.finish() == 0, run.output()
        found, sizes = run.counts(), run.results()[0]["sizes"]
        saved = [file.name.split(".")[1:] for file in tmp_path.glob("saved.*")]
    # Once on each rank, and all at the same step.
    assert sorted(int(pid) for pid, _ in saved) == sorted(before["pids"]) and len({step for _, step in saved}) == 1
    assert (found.lost, found.duplicated, found.padded) == (0, 0, 0)
    assert set(sizes) == {4, 2} and sizes.index(2) == int(saved[0][1])  # nothing was rolled back


@pytest.mark.ranks
@pytest.mark.chaos
@pytest.mark.slow
def test_rows_1_and_4_optimizer_shards_survive_the_loss_of_their_ranks(tmp_path: Path) -> None:
    """shard_optimizer_state=True: if a rank or a host is lost, no committed step is, and the bits are plain Adam's."""
    draw = random.Random(4)
    kills = 10 * TIMES if LONG else 2
    with ElasticRun(tmp_path, [str(HERE / "elastic_sharded_training.py")], 4, "localhost:2,127.0.0.1:2") as run:
        for number in range(kills):
            full = run.until(lambda now: now["size"] == 4, 120)
            steps = full["step"] + draw.randrange(8, 20)
            now = run.until(lambda now: now["step"] > steps)  # noqa: B023
            if number % 2:  # a host, with both of its ranks
                run.hurt_agent(draw.choice([0, 2]), signal.SIGKILL)
            else:
                os.kill(now["pids"][draw.randrange(4)], signal.SIGKILL)
            run.until(lambda later: later["generation"] > now["generation"] and later["size"] < 4)  # noqa: B023
        last = run.until(lambda now: now["size"] == 4, 120)
        run.until(lambda now: now["step"] > last["step"] + 10)
        assert run.finish() == 0, run.output()
        results = run.results()
    assert len(results) == 4 and "LostShards" not in run.output()
    assert results[0]["plain"] == {"weights": True, "state": True, "rates": True}
    for one in results:
        assert set(one["counted"]) == {one["steps"]} and len({other["weights"] for other in results}) == 1
        assert {2, 3, 4} <= set(one["sizes"])
    print(f"{kills} kills in {results[0]['steps']} steps; a commit holds {results[0]['memory']} bytes")


@pytest.mark.ranks
@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "cnn", "transformer"] if LONG else ["cnn"])
def test_row_26_faults_change_no_bit(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", model)
    draw = random.Random(26)
    weights = set()
    for name, kills in (("calm", 0), ("stormy", 2 if LONG else 1)):
        with ElasticRun(tmp_path / name, [TRAINING, "shards", "150", "40", "0"]) as run:
            for _ in range(kills):
                run.kill_at_random(draw, full=False)
            assert run.process.wait(100) == 0, run.output()
            assert run.counts().lost == run.counts().duplicated == run.counts().padded == 0
            weights.add(run.results()[0]["weights"])
            sizes = set(run.results()[0]["sizes"])
        assert sizes == {3} if kills == 0 else len(sizes) > 1
    assert len(weights) == 1


@pytest.mark.ranks
@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_horovod_script_unchanged_through_kills(tmp_path: Path) -> None:
    """Twenty of them with `make chaos`."""
    draw, kills = random.Random(7), 20 if LONG else 2
    with ElasticRun(tmp_path, [str(HERE / "horovod_script.py")], np=4) as run:
        times = [run.kill_at_random(draw, full=False)[0] for _ in range(kills)]
        run.until(lambda now: now["epoch"] >= EPOCHS)  # until it has learned
        assert run.finish() == 0, run.output()
        results = run.results()
    assert len(results) >= 2 and max(len(one["changes"]) for one in results) >= 1
    for one in results:
        assert one["epochs"] > EPOCHS and one["right"] > 0.9
        # Every sample once per epoch, and fewer than four of them twice.
        assert one["least"] >= one["epochs"] and one["extra"] < 4 * one["epochs"]
    print(f"{kills} kills; the others continued after {max(times):.2f} s at most: {results[0]}")
    if os.environ.get("CHAOS_JSON"):
        Path(os.environ["CHAOS_JSON"]).write_text(json.dumps({"kills": kills, "went_on_s": times, "ranks": results}))
