# Frames and messages after the handshake: only the next frame of the right sender is accepted.
# Touches nothing but memory.
from __future__ import annotations

import dataclasses
import os
import struct
import tracemalloc
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.rendezvous import agent_messages, messages
from farandole.rendezvous.agent_messages import AgentMessage
from farandole.rendezvous.channel import HEADER_BYTES, MAX_PAYLOAD, ChannelError, Opener, Sealer
from farandole.rendezvous.messages import Leave, LinkRequest, Message, MessageError, Rejected, decode, encode

KEY = bytes(range(32))
PARTS = {
    "int": st.integers(-(2**63), 2**63 - 1),
    "str": st.text(max_size=50),
    "bytes": st.binary(max_size=50),
    "tuple[bytes, ...]": st.lists(st.binary(max_size=9), max_size=9).map(tuple),
    "tuple[int, ...]": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9).map(tuple),
    "tuple[str, ...]": st.lists(st.text(max_size=9), max_size=9).map(tuple),
}


@st.composite
def any_message(draw: st.DrawFn) -> Message:
    kind = draw(st.sampled_from([*get_args(Message), *get_args(AgentMessage)]))
    message: Message = kind(*(draw(PARTS[str(field.type)]) for field in dataclasses.fields(kind)))
    return message


def codec_of(message: object) -> Any:
    return messages if isinstance(message, Message) else agent_messages


@given(any_message())
def test_decoding_gives_what_was_encoded(message: Message) -> None:
    text = repr(message).encode(errors="replace").decode()
    codec = codec_of(message)
    back = codec.decode(*codec.encode(message))
    assert repr(back) == text or back == message


@pytest.mark.security
@settings(max_examples=500)
@given(st.integers(0, 20), st.binary(max_size=300))
def test_row_30_random_bytes_are_a_message_or_an_error(number: int, data: bytes) -> None:
    for codec in (messages, agent_messages):
        try:
            message = codec.decode(number, data)
        except MessageError:
            continue
        assert codec.encode(message) == (number, data), "two encodings of one message"


@pytest.mark.security
@given(any_message(), st.data())
def test_row_30_cut_or_stretched_messages_are_errors(message: Message, data: st.DataObject) -> None:
    codec = codec_of(message)
    number, good = codec.encode(message)
    with pytest.raises(MessageError):
        codec.decode(number, good + b"\0")
    if good:
        with pytest.raises(MessageError):
            codec.decode(number, good[: data.draw(st.integers(0, len(good) - 1))])


@pytest.mark.security
@pytest.mark.parametrize("number", [-1, 0, 20, 255, 65535])
def test_row_30_unknown_types(number: int) -> None:
    with pytest.raises(MessageError, match="unknown"):
        decode(number, b"")


@pytest.mark.security
def test_row_30_a_length_allocates_nothing() -> None:
    number, _ = encode(Rejected(""))
    welcome = get_args(Message).index(messages.Welcome) + 1
    bad = [
        (number, struct.pack("!I", 0xFFFFFFFF)),
        (number, struct.pack("!i", -1) + b"abc"),
        (welcome, struct.pack("!qI", 1, 0x20000000)),
        (welcome, struct.pack("!qI", 1, 10**6) + bytes(100)),
    ]
    for kind, data in bad:
        tracemalloc.start()
        with pytest.raises(MessageError):
            decode(kind, data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak <= 4096 + 2048, peak  # the exception itself is about 1 KiB


def test_frames_arrive_however_they_are_cut() -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    sent: list[Message] = [LinkRequest(1, 2), Rejected("x" * 5000), Leave(3)]
    data = b"".join(sealer.seal(message) for message in sent)
    found = [message for index in range(len(data)) for message in opener.feed(data[index : index + 1])]
    assert found == sent
    assert Opener(KEY).feed(data) == sent


@pytest.mark.security
def test_row_29_repeated_reordered_and_missing_frames_are_refused() -> None:
    sealer = Sealer(KEY)
    one, two, three = (sealer.seal(LinkRequest(1, peer)) for peer in range(3))
    for order in ([one, one], [two], [one, three], [one, two, one], [two, one]):
        opener = Opener(KEY)
        with pytest.raises(ChannelError, match="out of order"):
            for frame in order:
                opener.feed(frame)


@pytest.mark.security
def test_row_29_frames_of_the_other_direction_are_refused() -> None:
    with pytest.raises(ChannelError):
        Opener(KEY).feed(Sealer(bytes(32)).seal(LinkRequest(1, 2)))


@pytest.mark.security
def test_row_29_every_flipped_bit_is_detected() -> None:
    good = Sealer(KEY).seal(LinkRequest(1, 2))
    for index in range(len(good) * 8):
        bad = bytearray(good)
        bad[index // 8] ^= 1 << index % 8
        with pytest.raises(ChannelError):
            Opener(KEY).feed(bytes(bad))


@pytest.mark.security
def test_row_30_too_long_is_refused_at_the_header() -> None:
    frame = Sealer(KEY).seal_bytes(1, bytes(MAX_PAYLOAD + 1))
    with pytest.raises(ChannelError, match="above the limit"):
        Opener(KEY).feed(frame[:HEADER_BYTES])
    forged = struct.pack("!IHH", 0xFFFFFFFF, 1, 0) + os.urandom(16)
    with pytest.raises(ChannelError):
        Opener(KEY).feed(forged)
    with pytest.raises(ChannelError, match="above the limit"):
        Sealer(KEY).seal(Rejected("x" * MAX_PAYLOAD))
