# The control channel between a rank and the hub: frames with a length, a type and a numbered MAC.
# Touches the authenticated socket it is given.
"""Frames after the handshake.

A frame is a header (length, type) with its own tag, the payload, and a tag over all of it. Both tags cover the number
of the frame in its direction, so a frame that is repeated, left out, moved or sent back is refused. The header is
checked before the payload is read. A payload is at most 1 MiB.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from typing import Any, Protocol

from farandole.rendezvous.flow import READ, WRITE, Loop, Stream
from farandole.rendezvous.handshake import Proven

MAX_PAYLOAD = 1 << 20
MAX_BACKLOG = 16 << 20  # bytes that may wait for a reader; with more the channel is closed
_TAG = 16
_HEADER = struct.Struct("!IHH")
_COUNTER = struct.Struct("!Q")
HEADER_BYTES = _HEADER.size + _TAG
_READ_BYTES = 64 << 10


class Codec(Protocol):
    """The messages of a channel: those between ranks and hub, or those between launcher and agent."""

    def encode(self, message: Any) -> tuple[int, bytes]:
        """The type's number and the bytes."""
        ...

    def decode(self, number: int, data: bytes) -> Any:
        """The message. Raises ValueError if the bytes are not one."""
        ...


class ChannelError(Exception):
    """A frame is invalid; the channel is closed."""


def _tag(key: bytes, part: bytes, counter: int, *data: bytes) -> bytes:
    code = hmac.new(key, part + _COUNTER.pack(counter), "sha256")
    for piece in data:
        code.update(piece)
    return code.digest()[:_TAG]


def _between_ranks_and_hub() -> Codec:
    from farandole.rendezvous import messages  # agents do not need these messages and should start quickly

    return messages


class Sealer:
    """Turns messages into frames of one direction."""

    def __init__(self, key: bytes, codec: Codec | None = None) -> None:
        self._key = key
        self._codec = codec or _between_ranks_and_hub()
        self._counter = 0

    def seal(self, message: Any) -> bytes:
        """The next frame."""
        number, payload = self._codec.encode(message)
        if len(payload) > MAX_PAYLOAD:
            raise ChannelError(f"a message of {len(payload)} bytes is above the limit of {MAX_PAYLOAD} bytes")
        return self.seal_bytes(number, payload)

    def seal_bytes(self, number: int, payload: bytes) -> bytes:
        """The next frame with any payload."""
        header = _HEADER.pack(len(payload), number, 0)
        first = _tag(self._key, b"head", self._counter, header)
        last = _tag(self._key, b"body", self._counter, header, payload)
        self._counter += 1
        return header + first + payload + last


class Opener:
    """Turns bytes of one direction into messages. Keeps at most one incomplete frame."""

    def __init__(self, key: bytes, codec: Codec | None = None) -> None:
        self._key = key
        self._codec = codec or _between_ranks_and_hub()
        self._counter = 0
        self._bytes = bytearray()
        self._header: tuple[int, int] | None = None  # length and type, after the check of the tag

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are complete now; a ChannelError or MessageError closes the channel."""
        self._bytes += data
        found: list[Any] = []
        while True:
            if self._header is None:
                if len(self._bytes) < HEADER_BYTES:
                    return found
                self._header = self._open_header()
            length, number = self._header
            whole = HEADER_BYTES + length + _TAG
            if len(self._bytes) < whole:
                return found
            payload = bytes(self._bytes[HEADER_BYTES : HEADER_BYTES + length])
            tag = _tag(self._key, b"body", self._counter, bytes(self._bytes[: _HEADER.size]), payload)
            if not hmac.compare_digest(tag, bytes(self._bytes[whole - _TAG : whole])):
                raise ChannelError("a frame has a wrong checksum")
            del self._bytes[:whole]
            self._counter += 1
            self._header = None
            found.append(self._codec.decode(number, payload))

    def _open_header(self) -> tuple[int, int]:
        header = bytes(self._bytes[: _HEADER.size])
        tag = _tag(self._key, b"head", self._counter, header)
        length, number, zero = _HEADER.unpack(header)
        if not hmac.compare_digest(tag, bytes(self._bytes[_HEADER.size : HEADER_BYTES])) or zero:
            raise ChannelError("the header of a frame has a wrong checksum: it is damaged, repeated or out of order")
        if length > MAX_PAYLOAD:
            raise ChannelError(f"a frame of {length} bytes is above the limit of {MAX_PAYLOAD} bytes")
        return length, number


class Channel:
    """An authenticated connection in a loop: `on_message` for each message, `on_end(reason)` once at its end."""

    def __init__(
        self,
        loop: Loop,
        sock: Stream,
        proven: Proven,
        on_message: Callable[[Any], None],
        on_end: Callable[[str], None],
        codec: Codec | None = None,
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._sealer = Sealer(proven.send_key, codec)
        self._opener = Opener(proven.receive_key, codec)
        self._out = bytearray()
        self._on_message = on_message
        self._on_end = on_end
        self._drained: list[Callable[[], None]] = []
        self._paused = False
        self.open = True
        loop.watch(sock, READ, self._ready)

    @property
    def sock(self) -> Stream:
        """The connection underneath."""
        return self._sock

    @property
    def backlog(self) -> int:
        """How many bytes the other side has not read yet."""
        return len(self._out)

    def when_drained(self, act: Callable[[], None]) -> None:
        """Calls `act` once when all queued bytes have been sent; something must be queued."""
        self._drained.append(act)

    def pause(self) -> None:
        """Stops reading, so that the other side has to wait."""
        self._paused = True
        self._watch()

    def resume(self) -> None:
        """Starts reading again."""
        self._paused = False
        self._watch()

    def send(self, message: Any) -> None:
        """Queues a message and sends what the kernel takes now. Does nothing on a closed channel."""
        if not self.open:
            return
        self._out += self._sealer.seal(message)
        self._write()
        if len(self._out) > MAX_BACKLOG:
            self._end(f"it does not read: more than {MAX_BACKLOG} bytes wait for it")

    def close(self) -> None:
        """Closes without calling `on_end`. The kernel still delivers what it has taken."""
        if self.open:
            self.open = False
            self._loop.forget(self._sock)
            self._sock.close()

    def _end(self, reason: str) -> None:
        if self.open:
            self.close()
            self._on_end(reason)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._write()
        if events & READ and self.open:
            self._read()

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
            messages = self._opener.feed(data)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ChannelError, ValueError) as error:
            self._end(str(error))
            return
        if not data:
            self._end("the connection was closed")
            return
        for message in messages:
            if self.open:  # an earlier one may have closed it
                self._on_message(message)

    def _write(self) -> None:
        try:
            while self._out:
                sent = self._sock.send(self._out)
                del self._out[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            # The reading side reports the end, after the last words of the other side have been read.
            self._out.clear()
        self._watch()
        if not self._out and self._drained:
            acts, self._drained = self._drained, []
            for act in acts:
                act()

    def _watch(self) -> None:
        if self.open:
            events = (0 if self._paused else READ) | (WRITE if self._out else 0)
            self._loop.watch(self._sock, events, self._ready)
