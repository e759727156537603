# Which variables ranks get, here and on other hosts.
# Touches only farandole.launch.
from __future__ import annotations

from farandole.base.config import Config
from farandole.clusters.detection import detect
from farandole.launch.environment import forwarded, of_rank, of_this_host
from farandole.launch.slots import rank_numbers

OWN = {
    "PATH": "/bin",
    "WANDB_API_KEY": "k",
    "HOROVOD_CYCLE_TIME": "2",
    "HOME": "/home/me",
    "SSH_AUTH_SOCK": "/x",
    "CUDA_VISIBLE_DEVICES": "1",
    "HOROVOD_RANK": "5",
    "FARANDOLE_SECRET_FD": "3",
    "_HOROVOD_SECRET_KEY": "s",
    "BASH_FUNC_x%%": "() { :; }",
    "OLDPWD": "/",
}


def test_environment_variables_of_a_rank() -> None:
    common = {"PATH": "/bin", "WANDB_API_KEY": "k", "HOROVOD_CYCLE_TIME": "2"}
    assert forwarded(OWN, other_host=True) == common
    here = {name: OWN[name] for name in ("HOME", "SSH_AUTH_SOCK", "CUDA_VISIBLE_DEVICES")}
    assert forwarded(OWN, other_host=False) == {**common, **here}, (
        "ranks on this host get the variables that describe it"
    )


def test_an_agent_adds_the_variables_of_its_host() -> None:
    own = {b"HOME": b"/home/there", b"TMPDIR": b"/scratch", b"PATH": b"/sbin", b"FARANDOLE_RANK": b"1", b"\xff": b""}
    assert of_this_host(own) == {b"HOME": b"/home/there", b"TMPDIR": b"/scratch"}


def test_a_rank_reads_its_numbers_from_the_environment() -> None:
    found = of_rank(rank_numbers(["a", "a", "b"])[2], ("10.0.0.1", 1234))
    config = Config.from_environment(found)
    assert (config.rank, config.size, config.local_rank, config.cross_rank, config.hostname) == (2, 3, 0, 1, "b")
    assert found["RANK"] == found["HOROVOD_RANK"] == "2" and found["LOCAL_WORLD_SIZE"] == "1"
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "1234")
    assert found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1" and detect(found) is None, "it is no RendezvousServer"
