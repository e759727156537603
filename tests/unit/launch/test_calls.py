# Exceptions of ranks that come back to the process that started them.
# Touches farandole.launch.calls.
"""launch/calls.py."""

from __future__ import annotations

import threading

import pytest

from farandole.base.errors import RankFailed
from farandole.launch import calls


class TwoArguments(Exception):
    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@pytest.mark.parametrize("error", [KeyError("mine"), TwoArguments("no", 4)], ids=["plain", "two arguments"])
def test_an_exception_of_a_rank_is_raised_unchanged(error: Exception) -> None:
    found = calls.unpack_error(1, calls.pack_error(error)).error
    assert type(found) is type(error) and found.args == error.args and vars(found) == vars(error)
    assert isinstance(found.__cause__, calls.RemoteTraceback)


@pytest.mark.parametrize("error", [ValueError(threading.Lock()), SystemExit(3)], ids=["a lock", "SystemExit"])
def test_an_exception_that_cannot_be_pickled_is_raised_with_its_text(error: BaseException) -> None:
    found = calls.unpack_error(1, calls.pack_error(error)).error
    assert isinstance(found, RankFailed) and f"rank 1: {type(error).__name__}" in str(found)
