# The error tree: which code becomes which type, with its data.
# Touches farandole.errors alone.
"""errors.py."""

from __future__ import annotations

import pytest

from farandole import errors

TYPES = [
    (2, ValueError),
    (3, errors.Mismatch),
    (4, errors.HorovodInternalError),
    (5, errors.ShutDown),
    (6, errors.PeerLost),
    (7, errors.Revoked),
    (8, errors.FarandoleTimeout),
    (9, MemoryError),
    (10, errors.HorovodInternalError),
    (99, errors.HorovodInternalError),
]


@pytest.mark.parametrize(("code", "kind"), TYPES)
def test_each_code_has_its_type(code: int, kind: type[Exception]) -> None:
    error = errors.translate(code, "what happened")
    assert type(error) is kind
    assert str(error) == "what happened"


def test_a_lost_peer_says_who_where_and_when() -> None:
    error = errors.translate(6, "rank 3 died", rank=3, phase="reduce", generation=7, name="allreduce.w")
    assert isinstance(error, errors.PeerLost)
    assert (error.rank, error.phase, error.generation, error.name) == (3, "reduce", 7, "allreduce.w")


def test_an_elastic_loop_catches_failures_and_nothing_else() -> None:
    for kind in (errors.PeerLost, errors.Revoked, errors.ShutDown, errors.Mismatch):
        assert issubclass(kind, errors.HorovodInternalError)
        assert issubclass(kind, RuntimeError)
    for other in (errors.NotInitialized, errors.FarandoleTimeout, errors.HostsUpdatedInterrupt):
        assert not issubclass(other, errors.HorovodInternalError)
    assert issubclass(errors.NotInitialized, ValueError)
    assert "has not been initialized" in str(errors.NotInitialized())


def test_an_empty_message_still_says_something() -> None:
    assert "code 10" in str(errors.translate(10, ""))


def test_the_names_horovods_users_read() -> None:
    assert errors.HostsUpdatedInterrupt(skip_sync=True).skip_sync
    error = errors.HorovodVersionMismatchError("torch", "1.0", "2.0")
    assert (error.name, error.version, error.installed_version) == ("torch", "1.0", "2.0")
