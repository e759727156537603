# Which link is named as slow, and which is not, for loads that jobs show; and what the kernel says of real streams.
# Touches TCP sockets of this host.
"""rendezvous/slow_links.py and rendezvous/rates.py."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from farandole.rendezvous.rates import Rates
from farandole.rendezvous.slow_links import SlowLinks

Row = tuple[int, int, int, int, int]  # rank, peer, two times in ms of 2000, kB
FAST, SLOW = (60, 6, 2400), (1900, 1800, 2400)


def named(ranks: int, *judgements: list[Row], hosts: list[str] | None = None) -> list[str]:
    """What is said when all ranks report these rows, one list after the other."""
    watch = SlowLinks(hosts or [f"h{rank}" for rank in range(ranks)])
    warnings = []
    for rows in judgements:
        for rank in range(ranks):
            flat = [number for row in rows if row[0] == rank for number in row[1:]]
            warnings.append(watch.add_report(rank, 2000, flat))
    return [text for text in warnings if text is not None]


def test_the_slow_link_among_others_is_named_once() -> None:
    rows: list[Row] = [(0, 1, *FAST), (1, 2, *SLOW), (2, 0, *FAST), (2, 1, *FAST)]
    assert named(3, rows) == []  # once may be chance
    sentence = (
        "the link between rank 1 on h1 and rank 2 on h2 is slow: 1.3 MB/s, and sending takes 95% of the time; "
        "others carry 40.0 MB/s"
    )
    assert named(3, rows, rows, rows) == [sentence]
    quick: list[Row] = [(0, 1, *FAST), (1, 2, *FAST), (2, 0, *FAST)]
    assert named(3, rows, rows, quick, quick, rows, rows) == [sentence, sentence]


def test_the_links_of_a_slow_host_are_named_together() -> None:
    rows: list[Row] = [(0, 1, *SLOW), (1, 2, *SLOW), (2, 0, *FAST)]
    [text] = named(3, rows, rows, rows)
    assert text.startswith("the links between rank 0 on h0 and rank 1 on h1, rank 1 on h1 and rank 2 on h2")
    assert "(all of them of h1) are slow: 1.3 MB/s" in text


def test_a_link_without_another_to_compare_is_not_named_slow() -> None:
    text = named(2, *[[(0, 1, *SLOW), (1, 0, *SLOW)]] * 3)
    assert text == [
        "the link between rank 0 on h0 and rank 1 on h1 is what the ranks wait for: "
        "it carries 1.3 MB/s, and sending takes 95% of the time"
    ]


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1, *SLOW), (1, 2, *SLOW), (2, 0, *SLOW)],  # a network at its limit
        [(0, 1, 300, 300, 360), (1, 2, *FAST), (2, 0, *FAST)],  # slow, and nobody waits for it
        [(0, 1, 1100, 10, 17_000), (1, 2, 900, 9, 17_000), (2, 0, 400, 9, 17_000)],  # late acknowledgements
        [(0, 1, 1900, 10, 2400), (1, 2, *FAST[:2], 20)],  # nothing to compare with, and quick by the kernel's rate
        [],
        [(0, 7, *SLOW), (1, 1, *SLOW), (2, -1, *SLOW), (0, 1, -5, -5, -5)],  # what no rank would say
    ],
)
def test_no_link_is_named(rows: list[Row]) -> None:
    assert named(3, rows, rows, rows) == []


def test_statistics_of_a_stream_from_the_kernel() -> None:
    """Bytes that arrived count; a stream that was closed, or is none, is forgotten."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    rates = Rates()
    rates.add(3, one.fileno())
    with one, other:
        reader = threading.Thread(target=lambda: [other.recv(1 << 16, socket.MSG_WAITALL) for _ in range(64)])
        reader.start()
        one.sendall(bytes(1 << 22))
        reader.join()
        carried = 0
        while carried < 4190:  # the last acknowledgement may be under way
            peer, busy_ms, least_ms, more = rates.report(2.0)
            carried += more
            assert peer == 3 and 0 <= least_ms <= busy_ms <= 2000
        assert carried <= 4195
    assert rates.report(2.0) == ()
    with open(os.devnull) as file:  # no stream at all
        rates.add(4, file.fileno())
        assert rates.report(2.0) == ()
