# Hosts and slots from texts, right ones and wrong ones; the place of each rank.
# Touches only farandole.launch.
from __future__ import annotations

import pytest

from farandole.launch import hosts
from farandole.launch.hosts import Host


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a", [("a", 1)]),
        ("a:4,b:2", [("a", 4), ("b", 2)]),
        ("me@a:2", [("me@a", 2)]),
        ("10.0.0.1:3", [("10.0.0.1", 3)]),
        ("[fd00::1]:3,fd00::2", [("fd00::1", 3), ("fd00::2", 1)]),
        ("a:1,b:1,a:2", [("a", 3), ("b", 1)]),
    ],
)
def test_hosts_given_on_the_command_line(text: str, found: list[tuple[str, int]]) -> None:
    assert hosts.parse(text) == [Host(*one) for one in found]


HOSTILE = [
    "-oProxyCommand=x",
    "a;rm",
    "a b",
    "a\nb",
    "a\0b",
    "$(x)",
    "`x`",
    "",
    "a" * 300,
    "a:0",
    "a:-1",
    "a:x",
    "a:99999",
]


@pytest.mark.parametrize("text", [*HOSTILE, "a,,b", ",", "a:1e3"])
def test_bad_hosts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"-H .*"):
        hosts.parse(text)


def test_hostfiles() -> None:
    text = "# a cluster\n\nnode1 slots=4\nnode2   slots = 2 # two\nnode3\nnode4:3\n"
    assert hosts.read(text, "f") == [Host("node1", 4), Host("node2", 2), Host("node3", 1), Host("node4", 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=4\nb slots=x\n", "f, line 2: 'x' is not a number"),
        ("a slots=0", "f, line 1"),
        ("a max_slots=4 slots=2", "expected `host slots=n`"),
        ("\n-x slots=2", "f, line 2: '-x' is not a host name"),
        ("# nothing\n", "f names no host"),
    ],
)
def test_bad_hostfiles_are_refused_with_the_line(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        hosts.read(text, "f")
    assert message in str(caught.value)


def test_a_million_lines_are_refused() -> None:
    with pytest.raises(ValueError, match="more than"):
        hosts.read("a\n" * 1_000_000, "f")


def test_ranks_fill_hosts_in_their_order_and_np_is_respected() -> None:
    found = [Host("a", 2), Host("b", 1), Host("c", 4)]
    assert hosts.assign(found, 4) == ["a", "a", "b", "c"]
    with pytest.raises(ValueError, match=r"-np 8, but the hosts have only 7 slots \(a:2, b:1, c:4\).* write a:3,"):
        hosts.assign(found, 8)
