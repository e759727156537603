# The error tree: which code becomes which type, with its data.
# Touches farandole.base.errors, a header, and a world of one.
"""The errors of errors.py."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import farandole
from farandole.base import errors

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
    assert str(error).endswith("what happened")


def test_the_error_of_a_lost_peer_has_rank_phase_and_generation() -> None:
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
    assert str(errors.NotInitialized()).startswith("Horovod has not been initialized; use hvd.init().")


def test_an_error_without_a_message_has_a_text() -> None:
    assert "code 10" in str(errors.translate(10, ""))


def test_the_names_horovods_users_read() -> None:
    assert errors.HostsUpdatedInterrupt(skip_sync=True).skip_sync
    error = errors.HorovodVersionMismatchError("torch", "1.0", "2.0")
    assert (error.name, error.version, error.installed_version) == ("torch", "1.0", "2.0")


# Section 3.10 of Horovod's contract, and what its Python raises: programs look for these words.
HOROVODS_WORDS = {
    errors.SHUT_DOWN: ("rank 1 has left", "Horovod has been shut down: rank 1 has left"),
    errors.PEER_LOST: ("rank 1 was lost", "Horovod has been shut down: rank 1 was lost"),
    errors.REVOKED: ("rank 1 gave up", "Horovod has been shut down: rank 1 gave up"),
    errors.PRECONDITION: ("Mismatched data types: ...", "Mismatched data types: ..."),
    errors.INTERNAL: ("a bug", "a bug"),
}


@pytest.mark.parametrize("code", HOROVODS_WORDS)
def test_the_end_of_a_generation_begins_with_horovods_words(code: int) -> None:
    message, expected = HOROVODS_WORDS[code]
    assert str(errors.translate(code, message)) == expected == str(errors.translate(code, expected))


def test_errors_of_compiled_operations_have_the_texts_of_python() -> None:
    """Compiled operations of TensorFlow and JAX report errors without Python."""
    header = Path(farandole.__file__).with_name("bindings").joinpath("compiled", "farandole_words.h").read_text()
    joined = re.sub(r'"\s+"', "", header)  # as C++ joins two literals
    assert f'kShutDown = "{errors.OVER}"' in joined
    assert f'"NotInitialized: {errors.NOT_INITIALIZED}"' in joined


def test_calls_before_init_and_wrong_calls_raise_horovods_texts() -> None:
    for call in (farandole.rank, farandole.size, farandole.local_rank, farandole.cross_size, farandole.join):
        with pytest.raises(ValueError, match=r"^Horovod has not been initialized; use hvd.init\(\)\."):
            call()
    with pytest.raises(ValueError, match=r"^Horovod MPI is not enabled"):
        farandole.mpi_threads_supported()
    farandole.init()
    try:
        with pytest.raises(ValueError, match=r"^The op parameter supersedes average\. Please provide only one of them"):
            farandole.allreduce(np.ones(1), average=True, op=farandole.Sum)
        with pytest.raises(ValueError, match=r"^Handle 77 was not created or has been cleared"):
            farandole.poll(77)
    finally:
        farandole.shutdown()
