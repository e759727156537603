# The job's secret: 32 random bytes, made by the launcher, inherited by the workers in a sealed memory file.
# Touches memory files only; never argv, the environment or a log.
"""The secret and the keys that are derived from it."""

from __future__ import annotations

import fcntl
import hmac
import os
import tempfile
from dataclasses import dataclass, field

SECRET_BYTES = 32


@dataclass(frozen=True)
class Secret:
    """The 32 bytes; they never appear in a repr or in the local variables of a traceback."""

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) != SECRET_BYTES:
            raise ValueError(f"the job's secret must have {SECRET_BYTES} bytes, not {len(self.key)}")

    @classmethod
    def create(cls) -> Secret:
        """A new secret for a new job."""
        return cls(os.urandom(SECRET_BYTES))

    @classmethod
    def read(cls, fd: int) -> Secret:
        """The secret behind an inherited descriptor. Reads by position, so that a second process may read it again."""
        try:
            return cls(os.pread(fd, SECRET_BYTES + 1, 0))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"FARANDOLE_SECRET_FD={fd} does not hold this job's secret ({error}); "
                "start the process with `farandole run` and let it inherit its descriptors"
            ) from None

    def to_descriptor(self) -> int:
        """A read-only memory file that workers inherit; the caller closes it."""
        try:
            fd = os.memfd_create("farandole", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return self._to_unnamed_file()
        os.write(fd, self.key)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd

    def _to_unnamed_file(self) -> int:
        # For kernels and sandboxes without memory files: a file whose name is removed before the secret is written.
        fd, path = tempfile.mkstemp(prefix="farandole-")
        try:
            reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.unlink(path)
        with os.fdopen(fd, "wb") as writer:
            writer.write(self.key)
        return reader

    def mac(self, *parts: bytes) -> bytes:
        """HMAC-SHA256 over the parts."""
        return _mac(self.key, *parts)

    def job(self) -> bytes:
        """Eight public bytes that tell jobs apart."""
        return self.mac(b"farandole job id")[:8]

    def derive(self, salt: bytes, purpose: bytes) -> bytes:
        """A key for one purpose (HKDF-SHA256, one block)."""
        return _mac(_mac(salt, self.key), purpose, b"\x01")


def _mac(key: bytes, *parts: bytes) -> bytes:
    code = hmac.new(key, digestmod="sha256")
    for part in parts:
        code.update(part)
    return code.digest()
