# An attacker without the job's secret: python wire_attacker.py RECORDED ADDRESS... ; or: python wire_attacker.py record
# Touches sockets; runs alone in a host of the bed, until its input ends.
"""Tries every attack on every address, in rounds; prints its counters as JSON after the first round and at the end.

`record` captures the packets of its host and prints, as hex, what a caller sent in a complete handshake: its greeting
and its proof. The attacker replays them (RECORDED; - for none).
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import socket
import struct
import sys
import time

from attacks import attacks, greeting

from farandole.rendezvous.handshake import GREETING_BYTES, MAGIC, PROOF_BYTES

SLOW_CONNECTIONS = 40  # connections to each address that send one byte and stay open
CONNECT_TIMEOUT_S = 0.2  # a rank that waits for others has a listening socket and does not answer yet
FLOOD = 100  # connections one after the other, each round
ALL_IP = 0x0800
ANSWER_BYTES = GREETING_BYTES + PROOF_BYTES  # a connection that receives more than that was accepted
counts: collections.Counter[str] = collections.Counter()


def connect(address: str) -> socket.socket | None:
    host, _, port = address.rpartition(":")
    try:
        return socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
    except OSError:
        counts["nobody listens"] += 1
        return None


def attack(address: str, name: str, data: bytes, later: bytes = b"") -> None:
    """Sends `data`, and `later` after the answer; reads until the end, and counts whether it was accepted."""
    sock = connect(address)
    if sock is None:
        return
    with sock:
        received = b""
        with contextlib.suppress(OSError):
            sock.sendall(data)
            while later and len(received) < ANSWER_BYTES and (part := sock.recv(4096)):
                received += part
            sock.sendall(later)
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(4096):
                received += part
    counts[name] += 1
    if len(received) > ANSWER_BYTES:
        counts["accepted"] += 1


def reflect(address: str) -> None:
    """Two connections: what the listener sends on one is sent back to it on the other."""
    one, two = connect(address), connect(address)
    if one is None or two is None:
        return
    with one, two:
        received = b""
        with contextlib.suppress(OSError):
            one.sendall(greeting())
            answer = one.recv(4096)
            two.sendall(answer[:GREETING_BYTES])
            two.recv(4096)
            two.sendall(answer[GREETING_BYTES:])
            received = two.recv(4096)
        counts["reflection"] += 1
        counts["accepted"] += bool(received)


def attack_in_rounds(recorded: bytes, addresses: list[str]) -> None:
    """Rounds until the input ends."""
    slow_connections: list[socket.socket] = []
    first = True
    while first or not select.select([0], [], [], 0)[0]:
        for address in addresses:
            for name, data in attacks("/run/bomb").items():
                attack(address, name, data)
            if recorded:  # the bytes of a rank that was accepted, in the same order
                attack(address, "replay", recorded[:GREETING_BYTES], recorded[GREETING_BYTES:])
            reflect(address)
            for _ in range(FLOOD):
                if (sock := connect(address)) is None:
                    break
                sock.close()
                counts["flood"] += 1
            if first:
                for _ in range(SLOW_CONNECTIONS):
                    if sock := connect(address):
                        with contextlib.suppress(OSError):
                            sock.sendall(b"F")
                        slow_connections.append(sock)
                        counts["slow-loris"] += 1
        if first:
            print(json.dumps(counts), flush=True)
            first = False
        time.sleep(0.02)  # sleep: the job needs the processors too
    print(json.dumps(counts), flush=True)
    for sock in slow_connections:
        sock.close()


def record() -> None:
    """Prints the first whole handshake that passes: the caller's greeting, and the proof that followed it."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ALL_IP)) as packets:
        print("ready", flush=True)
        greetings: dict[bytes, bytes] = {}
        while True:
            packet = packets.recv(65536)
            length = (packet[0] & 15) * 4
            if packet[9] != socket.IPPROTO_TCP:
                continue
            total = struct.unpack("!H", packet[2:4])[0]
            tcp = packet[length:total]
            flow, data = packet[12:20] + tcp[:4], tcp[(tcp[12] >> 4) * 4 :]
            if len(data) == GREETING_BYTES and data.startswith(MAGIC):
                greetings[flow] = data
            elif len(data) == PROOF_BYTES and flow in greetings:
                print((greetings[flow] + data).hex(), flush=True)
                return


if __name__ == "__main__":
    if sys.argv[1] == "record":
        record()
    else:
        attack_in_rounds(bytes.fromhex(sys.argv[1].strip("-")), sys.argv[2:])
    os._exit(0)
