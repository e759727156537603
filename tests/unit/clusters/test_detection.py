# Detectors: complete, incomplete and contradicting environment variables of every launcher.
# Pure: environments are dictionaries.
"""clusters/{detection,mpi,schedulers,cluster_rank}.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from farandole.base.config import SETTINGS, Config
from farandole.clusters import ClusterError, ClusterRank, detect
from farandole.clusters.ancestors import Process, ancestors
from farandole.clusters.detection import DETECTORS
from farandole.clusters.schedulers import tasks_per_node
from farandole.rendezvous.mesh import join

HYDRA_OPTIONS = ("hydra_pmi_proxy", "--control-port", "node1:32963", "--pgid", "0", "--proxy-id", "0", "")
PROXY = Process(4711, 998877, "hydra_pmi_proxy", HYDRA_OPTIONS)
# Open MPI 4, MPICH, SLURM and torchrun run in tests/clusters. The others are written from their documentation:
# Open MPI 5, Spectrum MPI, Intel MPI, MVAPICH2, PALS, jsrun, Flux.
ABOVE = [Process(5000, 1, "sh"), PROXY, Process(1, 0, "init")]

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "4",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "2038628353",
    "OMPI_MCA_orte_hnp_uri": "2038628352.0;tcp://10.0.0.1:34429",
}
OPEN_MPI_5 = {
    **{name: text for name, text in OPEN_MPI.items() if "orte" not in name},
    "PMIX_NAMESPACE": "prterun-node1-5501@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "8"}
INTEL = {**MPICH, "I_MPI_HYDRA_TOPOLIB": "hwloc", "PMI_SIZE": "4"}
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "PMI_PORT": "node1:40001",
}
PALS = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
    "PALS_APID": "9f0c",
    "PALS_RANKID": "5",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "2",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "0",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "jsm-1",
    "LSB_JOBID": "77",
}
SPECTRUM = {**JSRUN, **{f"OMPI_COMM_WORLD_{name}": JSRUN[f"JSM_NAMESPACE_{name}"] for name in ("RANK", "SIZE")}}
SPECTRUM |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
FLUX = {
    "FLUX_TASK_RANK": "1",
    "FLUX_JOB_SIZE": "2",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_ID": "ƒ2x",
    "FLUX_JOB_NNODES": "1",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
SLURM = {
    "SLURM_CLUSTER_NAME": "try",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURMD_NODENAME": "node4",
    "SLURM_STEP_LAUNCHER_PORT": "41447",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
PMIX_SLURM = {**SLURM, "PMIX_RANK": "6", "PMIX_NAMESPACE": "slurm.pmix.12.0"}
PMI2_SLURM = {**SLURM, "PMI_RANK": "6", "PMI_SIZE": "7", "PMI_FD": "9"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
FOUR = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
POD = {
    "JOB_COMPLETION_INDEX": "2",
    "FARANDOLE_JOB_SIZE": "3",
    "FARANDOLE_MEET_AT": "tcp:train-0.train:29400",
    "FARANDOLE_SECRET_FILE": "/etc/secret/key",
}
CASES: dict[str, tuple[dict[str, str], tuple[Any, ...]]] = {
    # environment: launcher, rank, size, local rank, local size, host name, one host
    "Open MPI 4": (OPEN_MPI, ("openmpi", 1, 4, 1, 2, "here", False)),
    "Open MPI 5": (OPEN_MPI_5, ("openmpi", 1, 4, 1, 2, "here", False)),
    "Spectrum MPI": (SPECTRUM, ("openmpi", 2, 4, 0, 2, "here", False)),
    "Open MPI inside SLURM": ({**SLURM, **OPEN_MPI}, ("openmpi", 1, 4, 1, 2, "here", False)),
    "MPICH": (MPICH, ("mpich", 1, 2, 1, 2, "here", True)),
    "Intel MPI": (INTEL, ("mpich", 1, 4, 1, 2, "here", False)),
    "MPICH inside SLURM": ({**SLURM, **MPICH}, ("mpich", 1, 2, 1, 2, "here", True)),
    "MVAPICH2": (MVAPICH2, ("mvapich2", 3, 4, 1, 2, "here", False)),
    "PALS": (PALS, ("pals", 5, 8, 1, 4, "here", False)),
    "jsrun": (JSRUN, ("jsrun", 2, 4, 0, 2, "here", False)),
    "Flux": (FLUX, ("flux", 1, 2, 1, 2, "here", True)),
    "Flux over nodes": ({**FLUX, "FLUX_JOB_NNODES": "2"}, ("flux", 1, 2, 1, None, "here", False)),
    "SLURM": (SLURM, ("slurm", 6, 7, 0, 1, "node4", False)),
    "SLURM with PMIx": (PMIX_SLURM, ("slurm", 6, 7, 0, 1, "node4", False)),
    "SLURM with PMI-2": (PMI2_SLURM, ("slurm", 6, 7, 0, 1, "node4", False)),
    "torchrun": (TORCHRUN, ("torchrun", 3, 4, 1, 2, "here#1", False)),
    "torchrun inside SLURM": ({**SLURM, **TORCHRUN}, ("torchrun", 3, 4, 1, 2, "here#1", False)),
    "torch.distributed's variables": (FOUR, ("torchrun", 1, 2, 1, None, "here", False)),
    "a pod of an indexed job": (POD, ("indexed-job", 2, 3, 0, 1, "here", False)),
}


def detect_with(
    environ: dict[str, str], launcher: str = "auto", above: Sequence[Process] = tuple(ABOVE)
) -> ClusterRank | None:
    return detect(environ, launcher, "here", lambda: above)


@pytest.mark.parametrize("name", CASES)
def test_the_variables_of_each_cluster_are_understood(name: str) -> None:
    environ, expected = CASES[name]
    found = detect_with(environ)
    assert found is not None
    seen = (found.launcher, found.rank, found.size, found.local_rank, found.local_size, found.hostname, found.one_host)
    assert seen == expected
    forced = detect_with(environ, found.launcher)
    assert forced == found
    assert detect_with(environ, "none") is None


NOBODY: dict[str, dict[str, str]] = {
    "nothing": {},
    "any indexed job": {"JOB_COMPLETION_INDEX": "2"},
    # salloc's shell and a batch script have tasks, but are none themselves.
    "salloc": {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"},
    "sbatch": {
        "SLURM_JOB_ID": "2",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    },
    "an interactive step": {**SLURM, "SLURM_STEP_ID": "4294967290"},
    "srun -n 1": {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    "somebody's RANK": {"RANK": "sergeant"},
    "PMI of one": {"PMI_RANK": "0", "PMI_SIZE": "1"},
    "empty variables": dict.fromkeys(OPEN_MPI, ""),
}


@pytest.mark.parametrize("name", NOBODY)
def test_a_world_of_one(name: str) -> None:
    assert detect_with(NOBODY[name]) is None


def test_mpirun_of_one_needs_no_key() -> None:
    one = {
        f"OMPI_COMM_WORLD_{name}": text
        for name, text in zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "0101", strict=True)
    }
    found = detect_with(one)
    assert found is not None and (found.rank, found.size) == (0, 1)


HALF = {
    "Open MPI without size": (OPEN_MPI, ["OMPI_COMM_WORLD_SIZE"], r"OMPI_COMM_WORLD_SIZE is not set.*WORLD_RANK=1"),
    "Open MPI without local rank": (OPEN_MPI, ["OMPI_COMM_WORLD_LOCAL_RANK"], r"LOCAL_RANK is not set"),
    "Open MPI without namespace": (OPEN_MPI, ["PMIX_NAMESPACE"], r"PMIX_NAMESPACE.*could not be distinguished"),
    "MPICH without rank": (MPICH, ["PMI_RANK"], r"PMI_RANK or PMI_ID is not set, but seen: PMI_FD=8, PMI_SIZE=2"),
    "MPICH without local ranks": (MPICH, ["MPI_LOCALRANKID", "MPI_LOCALNRANKS"], r"no local rank; seen: PMI_FD=8"),
    "MVAPICH2": (MVAPICH2, ["MV2_COMM_WORLD_SIZE"], r"MV2_COMM_WORLD_SIZE is not set"),
    "PALS without application": (PALS, ["PALS_APID"], r"PALS_APID, PMI_JOBID.*PALS_RANKID=5"),
    "jsrun without step": (JSRUN, ["PMIX_NAMESPACE"], r"PMIX_NAMESPACE, JSM_NAMESPACE_ID, JSM_JSRUN_STEP_ID"),
    "Flux": (FLUX, ["FLUX_JOB_SIZE"], r"FLUX_JOB_SIZE is not set"),
    "SLURM without rank": (SLURM, ["SLURM_PROCID"], r"SLURM_PROCID is not set.*SLURM_JOB_ID=12"),
    "SLURM without tasks": (
        SLURM,
        ["SLURM_STEP_TASKS_PER_NODE"],
        r"TASKS_PER_NODE=None does not fit 7 tasks and node 3",
    ),
    "torchrun": (TORCHRUN, ["WORLD_SIZE"], r"WORLD_SIZE is not set, but seen:.*RANK=3"),
    "torch's without local rank": (
        FOUR,
        ["LOCAL_RANK"],
        r"RANK and WORLD_SIZE are set, but no local rank; seen: RANK=1",
    ),
    "PMIx alone": (PMIX_SLURM, list(SLURM), r"PMIx gives neither a size.*PMIX_RANK=6"),
    "a pod without a secret": (POD, ["FARANDOLE_SECRET_FILE"], r"FARANDOLE_SECRET_FILE \(a mounted secret\)"),
    "a pod without an index": (POD, ["JOB_COMPLETION_INDEX"], r"JOB_COMPLETION_INDEX is not set"),
}


@pytest.mark.parametrize("name", HALF)
def test_one_of_two_variables_is_an_error_that_names_the_one_that_was_found(name: str) -> None:
    whole, missing, text = HALF[name]
    with pytest.raises(ClusterError, match=text):
        detect_with({variable: value for variable, value in whole.items() if variable not in missing})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"OMPI_COMM_WORLD_RANK": "4"}, "rank 4 of 4.*impossible"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "local rank 2 of 2"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "of 5"),
        ({"OMPI_COMM_WORLD_RANK": "-1"}, "OMPI_COMM_WORLD_RANK='-1' is not a number"),
        ({"OMPI_COMM_WORLD_SIZE": "four"}, "OMPI_COMM_WORLD_SIZE='four' is not a number"),
        (MPICH, "Open MPI says rank 1 of 4, MPICH says rank 1 of 2; seen: OMPI.*PMI_RANK=1.*FARANDOLE_LAUNCHER"),
    ],
)
def test_contradicting_launchers_are_an_error(change: dict[str, str], text: str) -> None:
    with pytest.raises(ClusterError, match=text):
        detect_with({**OPEN_MPI, **change})


def test_rank_and_size_from_the_user_are_used_and_one_of_them_alone_is_refused() -> None:
    assert detect_with({**OPEN_MPI, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}) is None
    with pytest.raises(ValueError, match="rank=1 must be smaller than size=1"):
        Config.from_environment({**OPEN_MPI, "HOROVOD_RANK": "1"})
    alone = {"HOROVOD_SIZE": "2"}
    assert detect_with({**OPEN_MPI, **alone}) is None
    with pytest.raises(ValueError, match="FARANDOLE_RENDEZVOUS is not set"):
        join(Config.from_environment(alone))


def test_naming_a_cluster_resolves_a_contradiction() -> None:
    found = detect_with({**OPEN_MPI, **MPICH}, "mpich")
    assert found is not None and found.size == 2
    with pytest.raises(ClusterError, match="FARANDOLE_LAUNCHER=slurm, but its variables are not set"):
        detect_with(MPICH, "slurm")


def key(environ: dict[str, str], above: Sequence[Process] = tuple(ABOVE)) -> str:
    found = detect_with(environ, above=above)
    assert found is not None
    return found.key


# What differs between two jobs of one launcher, and what differs between ranks of one job.
OTHER_JOB: list[tuple[dict[str, str], dict[str, str]]] = [
    (OPEN_MPI, {"PMIX_NAMESPACE": "2038628354"}),
    (OPEN_MPI, {"OMPI_MCA_orte_hnp_uri": "2038628352.0;tcp://10.0.0.2:34429"}),
    (MVAPICH2, {"PMI_PORT": "node1:40002"}),
    (PALS, {"PALS_APID": "9f0d"}),
    (JSRUN, {"PMIX_NAMESPACE": "jsm-2"}),
    (FLUX, {"FLUX_JOB_ID": "ƒ2y"}),
    (SLURM, {"SLURM_JOB_ID": "13"}),
    (SLURM, {"SLURM_STEP_ID": "1"}),
    (SLURM, {"SLURM_RESTART_COUNT": "1"}),
    (SLURM, {"SLURM_CLUSTER_NAME": "other"}),
    (TORCHRUN, {"TORCHELASTIC_RUN_ID": "b"}),
    (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1"}),
    (TORCHRUN, {"MASTER_PORT": "29501"}),
    (POD, {"FARANDOLE_MEET_AT": "tcp:other-0.train:29400"}),
]
OTHER_RANK: list[tuple[dict[str, str], dict[str, str]]] = [
    (OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_RANK": "2"}),
    (MPICH, {"PMI_RANK": "0", "MPI_LOCALRANKID": "0", "PMI_FD": "6"}),
    (SLURM, {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "node1", "SLURM_TASK_PID": "5"}),
    (TORCHRUN, {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}),
]


def test_two_jobs_have_two_keys_and_all_ranks_of_one_the_same() -> None:
    for environ, change in OTHER_JOB:
        above = [] if environ is MVAPICH2 else ABOVE  # mpirun_rsh has no proxy
        assert key(environ, above) != key({**environ, **change}, above), change
    for environ, change in OTHER_RANK:
        assert key(environ) == key({**environ, **change}), change


def test_mpich_is_detected_by_the_proxy_of_hydra() -> None:
    assert key(MPICH) != key(MPICH, [Process(4711, 998878, "hydra_pmi_proxy", HYDRA_OPTIONS)]), "a number used again"
    assert key(MPICH) != key(MPICH, [Process(4712, 998877, "hydra_pmi_proxy", HYDRA_OPTIONS)])
    over_hosts = {**MPICH, "PMI_SIZE": "4"}
    elsewhere = Process(99, 5, "hydra_pmi_proxy", HYDRA_OPTIONS)
    assert key(over_hosts) == key(over_hosts, [elsewhere]), "each host has its own proxy"
    other = Process(4711, 998877, "hydra_pmi_proxy", ("--control-port", "node1:32964", "--pgid", "0", ""))
    assert key(over_hosts) != key(over_hosts, [other])
    with pytest.raises(ClusterError, match="no hydra_pmi_proxy among the processes above"):
        detect_with(MPICH, above=[])


def test_the_processes_above_are_found() -> None:
    above = ancestors()
    assert above and all(process.pid > 0 and process.name for process in above)
    assert any(argument for process in above for argument in process.arguments)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("", []), ("2(x", []), ("2(x99999999)", []), ("9999999(x9999999)", [])],
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


def test_the_setting_names_every_detector() -> None:
    assert SETTINGS["launcher"].choices == ("auto", "none", *DETECTORS)
