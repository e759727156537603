# Other launchers over several hosts: a real SLURM, Open MPI and MPICH over ssh, torchrun, and pods of an indexed job.
# Touches the bed of tests/bed.
"""Every host has a second address that reaches no host, as container engines create them: the right one is found."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import bed
import pytest
import slurm
from bed import Network
from test_launchers import DIGITS, LAUNCHERS, MPIS, PACKAGES, PROGRAM, SUM, command, reports

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]
NETWORKS = [Network("172.17.0", connects=False, same_address=True), Network("10.77.2")]
PYTHON = sys.executable
PLACES = [[0, 3, 0, 2, 0, 2], [1, 3, 1, 2, 0, 1], [2, 3, 0, 1, 1, 2]]  # two ranks on the first host, one on the second


def test_make_test_installs_every_package_that_tests_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(bed.ROOT / "scripts"))
    programs = dict(importlib.import_module("environment").PROGRAMS)
    asked = {**bed.TOOLS, **bed.SSH_TOOLS, **slurm.PROGRAMS, **PACKAGES}
    fuzzing = programs.pop("clang++-16")  # scripts/fuzz.py asks for it, no test does
    assert fuzzing and set(asked.values()) - {"util-linux"} == set(programs.values())  # that one every Debian has


def expect(text: str, number: float, rounds: int, places: list[list[int]], silent: bool = True) -> None:
    """Every rank was at its place in every round, summed the right number, and (`silent`) listened on no port."""
    found = reports(text)
    assert sorted(one["place"] for one in found) == sorted(places * rounds), found
    size = places[0][1]
    assert all(one["total"] == [size * number] for one in found), found
    assert not silent or all(one["listening"] == [] for one in found), found


def sums(text: str) -> list[list[object]]:
    """What the ranks of SUM have seen, in their order."""
    return sorted([one["rank"], one["sum"]] for one in reports(text))


def start_on(host: bed.Host, words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return host.start(words, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(running: Sequence[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """What processes that end well have printed; all of them are gone afterwards."""
    try:
        outputs = [process.communicate(timeout=100) for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert not any(process.returncode for process in running), outputs
    return outputs


def assert_nothing_left(hosts: bed.Bed) -> None:
    for host in hosts:
        assert [path for path in host.own_files() if "farandole" in path.name] == []
        assert not [line for line in host.processes().values() if PROGRAM in line]


def test_srun_with_nothing_set_over_hosts_that_share_a_home() -> None:
    if reason := slurm.missing_requirement():
        pytest.skip(reason)
    with bed.hosts(2, networks=NETWORKS, shared_home=True) as hosts, slurm.cluster(hosts) as srun:
        printed = srun(["-N", "2", "-n", "2", PYTHON, *DIGITS], timeout=100).stdout
        assert printed.count("accuracy") == 1, printed
        steps = [["srun", "-N", "2", "-n", "3", PYTHON, PROGRAM, str(number), "3"] for number in (1, 2)]
        running = [start_on(hosts[0], step, slurm.ENVIRONMENT) for step in steps]
        for number, (printed, _) in enumerate(finish(running), 1):
            expect(printed, number, 3, PLACES)
        printed = srun(["-N", "2", "-n", "3", PYTHON, "-c", SUM], timeout=100).stdout
        assert sums(printed) == [[rank, [6.0] * 4] for rank in range(3)], printed
        # A step of one task is a job of one.
        done = srun(["-N", "1", "-n", "1", PYTHON, PROGRAM, "1", "1"])
        expect(done.stdout, 1, 1, [[0, 1, 0, 1, 0, 1]])
        assert_nothing_left(hosts)


BY_NAME = """

class ByName(Digits):
    # In the ranks that srun -n has started: strategies by their names, which Lightning's own SLURM environment refuses.
    def on_train_end(self):
        import os
        from lightning.fabric import Fabric
        assert "SLURM_NTASKS_PER_NODE" not in os.environ and os.environ["SLURM_NTASKS"] == "2"
        quiet = {"accelerator": "cpu", "devices": 1}
        sizes = [pl.Trainer(strategy=name, logger=False, **quiet).world_size for name in ("horovod", "farandole")]
        sizes.append(Fabric(strategy="horovod", **quiet).world_size)
        try:
            pl.Trainer(strategy="ddp", **quiet)
        except RuntimeError as error:
            sizes.append("--ntasks-per-node" in str(error))
        print("by name", sizes, flush=True)
"""


@pytest.mark.timeout(240)
def test_a_stack_from_a_file_by_slurm() -> None:
    """`farandole fit` with `orchestration: slurm`, one rank on each host: a few steps. Others find ours by its name."""
    if reason := slurm.missing_requirement():
        pytest.skip(reason)
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("Lightning is not installed")
    (bed.ROOT / "build").mkdir(exist_ok=True)
    # Below the repository: the hosts share that, not their temporary folders.
    with tempfile.TemporaryDirectory(dir=bed.ROOT / "build") as path, bed.hosts(2, shared_home=True) as hosts:
        with slurm.cluster(hosts):
            Path(path, "digits.py").write_text((bed.ROOT / "examples" / "lightning_digits.py").read_text() + BY_NAME)
            text = (bed.ROOT / "examples" / "stack.yaml").read_text().replace("kind: local", "kind: slurm")
            text = text.replace("lightning_digits.Digits", "digits.ByName").replace("lightning_digits.", "digits.")
            Path(path, "stack.yaml").write_text(text.replace("max_epochs: 2", "max_steps: 3"))
            before = hosts[1].counters()
            environment = {**slurm.ENVIRONMENT, "PYTHONPATH": str(bed.ROOT / "src")}
            environment |= dict.fromkeys(("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK"), "4")  # all that a host has
            words = [PYTHON, "-m", "farandole", "fit", f"{path}/stack.yaml"]
            done = hosts[0].run(words, environment, bed.ROOT, 200, check=False)
            output = done.stdout + done.stderr
            assert done.returncode == 0 and "`max_steps=3` reached" in output, output
            assert output.count("by name [2, 2, 2, True]") == 2, output
            assert (hosts[1].counters() - before).sent > 30_000, "the ranks should have met over the wire"
        assert_nothing_left(hosts)


def test_srun_over_hosts_that_share_nothing_says_what_to_do() -> None:
    if reason := slurm.missing_requirement():
        pytest.skip(reason)
    with bed.hosts(2, networks=NETWORKS) as hosts, slurm.cluster(hosts) as srun:
        words = ["-N", "2", "-n", "2", PYTHON, PROGRAM, "1", "1"]
        done = srun(words, check=False, FARANDOLE_START_TIMEOUT="1")
        assert done.returncode != 0
        for text in ("rank 1 has not found rank 0 within 1 s", "no rank of another host has reached", "share no home"):
            assert text in done.stderr
        assert_nothing_left(hosts)


def over_ssh(launcher: str, *script: str) -> list[str]:
    """mpirun over two hosts: two ranks on the first, one on the second."""
    words = command(launcher, 3, *script)
    if launcher == "mpich":
        return [words[0], "-iface", "eth1", "-hosts", "host1,host2", "-ppn", "2", *words[1:]]
    # Open MPI's own messages take any network that is up; it cannot know which one connects.
    for layer in ("oob", "btl"):
        words[1:1] = ["--mca", f"{layer}_tcp_if_include", "10.77.2.0/24"]
    return [words[0], "--host", "host1:2,host2:1", "-x", "PYTHONPATH", "-x", "FARANDOLE_LOG_LEVEL", *words[1:]]


@pytest.mark.parametrize("launcher", MPIS)
def test_mpirun_over_hosts_that_share_a_home(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')")
    with bed.hosts(2, networks=NETWORKS, shared_home=True, ssh=True, visible=[tmp_path]) as hosts:
        environment = {"PYTHONPATH": str(tmp_path), "FARANDOLE_LOG_LEVEL": "debug"}
        done = hosts[0].run(over_ssh(launcher, PROGRAM, "5", "3"), environment)
        assert "mpi4py is not used: not here" in done.stderr
        expect(done.stdout, 5, 3, PLACES)
        assert_nothing_left(hosts)


def test_mpi4py_carries_the_secret_where_no_home_is_shared() -> None:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed: there is no wheel for this Python")
    with bed.hosts(2, networks=NETWORKS, ssh=True) as hosts:
        environment = {"FARANDOLE_LOG_LEVEL": "debug", "PYTHONPATH": ""}
        done = hosts[0].run(over_ssh("openmpi", PROGRAM, "5", "3"), environment)
        assert "mpi4py is not used" not in done.stderr
        expect(done.stdout, 5, 3, PLACES, silent=False)  # MPI itself listens
        # One that is built for Open MPI is of no use under MPICH, and there is no other way here: no rank hangs.
        environment["FARANDOLE_START_TIMEOUT"] = "1"
        done = hosts[0].run(over_ssh("mpich", PROGRAM, "5", "1"), environment, check=False)
        assert done.returncode != 0
        assert "no rank of another host has reached" in done.stderr or "has not found rank 0 within 1 s" in done.stderr
        assert_nothing_left(hosts)


@pytest.mark.parametrize("shared", [True, False], ids=["shared home", "no shared home"])
def test_torchrun_over_hosts(shared: bool) -> None:
    words = [*LAUNCHERS["torchrun"], "1", "--nnodes", "2", "--master_addr", "host1", "--master_port", "29511"]
    with bed.hosts(2, networks=NETWORKS, shared_home=shared) as hosts:
        running = []
        for number, host in enumerate(hosts):
            line = [*words, "--node_rank", str(number), PROGRAM, "5", "1"]
            running.append(start_on(host, line, {"TORCH_CPP_LOG_LEVEL": "ERROR"}))
        outputs = finish(running)
        expect(outputs[0][0] + outputs[1][0], 5, 1, [[0, 2, 0, 1, 0, 2], [1, 2, 0, 1, 1, 2]])
        warned = "the job's secret is sent through torchrun's store at host1:29511"
        assert (warned in outputs[0][1]) is not shared and warned not in outputs[1][1], outputs
        assert_nothing_left(hosts)


def test_pods_of_an_indexed_job() -> None:
    """Two pods share nothing but a mounted secret; the second starts first."""
    with bed.hosts(2, networks=NETWORKS) as hosts:
        environment = {
            "FARANDOLE_JOB_SIZE": "2",
            "FARANDOLE_MEET_AT": "tcp:host1:29400",
            "FARANDOLE_SECRET_FILE": "/run/host/secret",
        }
        for number in range(2):
            (hosts[number].files / "secret").write_text("0123456789abcdef" * 4 + "\n")
            (hosts[number].files / "secret").chmod(0o400)

        def pods(*words: str) -> list[tuple[str, str]]:
            places = [{**environment, "JOB_COMPLETION_INDEX": str(index)} for index in range(2)]
            return finish([start_on(hosts[index], [PYTHON, *words], places[index]) for index in (1, 0)])

        outputs = pods(*DIGITS)
        assert outputs[1][0].count("accuracy") == 1 and outputs[0][0] == "", outputs
        outputs = pods("-c", SUM)
        assert sums(outputs[0][0] + outputs[1][0]) == [[rank, [3.0] * 4] for rank in range(2)], outputs
        assert not [place for host in hosts for place in host.listening()]
        assert_nothing_left(hosts)
