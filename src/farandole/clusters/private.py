# A private directory, which only this user can enter, and small files in it that no other user can read or replace.
# Touches the file system.
"""Every check is made on an open descriptor, so that the file cannot be replaced between the check and its use."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile

from farandole.clusters.cluster_rank import ClusterError, Environ, value

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 20  # another job that ends may remove the empty directory while we write


def on_this_host(environ: Environ) -> str:
    """Where ranks of one host meet: the user's runtime directory, or one in the directory of temporary files."""
    runtime = value(environ, "XDG_RUNTIME_DIR")
    if runtime:
        with contextlib.suppress(OSError):
            if os.stat(runtime).st_uid == os.geteuid() and os.access(runtime, os.W_OK | os.X_OK):
                return os.path.join(runtime, "farandole")
    return os.path.join(tempfile.gettempdir(), f"farandole-{os.geteuid()}")


def at_home(environ: Environ) -> str:
    """Where ranks of several hosts meet by default."""
    return os.path.join(value(environ, "HOME") or os.path.expanduser("~"), ".farandole")


class PrivateDirectory:
    """A directory of mode 0700 of this user; it is made when something is written and removed when it is empty."""

    def __init__(self, path: str) -> None:
        self.path = path

    def write(self, name: str, data: bytes) -> None:
        """Writes a file of mode 0600 under a temporary name and renames it. It replaces an older file."""
        for attempt in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):
                self._write(name, data)
                return
            if attempt == _TRIES - 1:
                raise ClusterError(
                    f"{self.path} was removed {_TRIES} times while a file was being written to it: "
                    "does another program clean up there?"
                )

    def read(self, name: str, largest: int) -> bytes | None:
        """The file's bytes; None if there is no file. Raises ClusterError if others could have written or read it."""
        try:
            directory = self._open(make=False)
        except FileNotFoundError:
            return None
        try:
            fd = os.open(name, _READ, dir_fd=directory)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ClusterError(f"{self.path}/{name} cannot be trusted: {error.strerror}") from None
        finally:
            os.close(directory)
        try:
            state = os.fstat(fd)
            if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
                raise ClusterError(
                    f"{self.path}/{name} cannot be trusted: it must be a file of mode 0600 that belongs to user "
                    f"{os.geteuid()}, but has mode {stat.S_IMODE(state.st_mode):04o} and belongs to {state.st_uid}"
                )
            return os.read(fd, largest + 1)
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """Removes the file, and the directory when nothing else is in it."""
        with contextlib.suppress(OSError, ClusterError):
            directory = self._open(make=False)
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
            finally:
                os.close(directory)
        self.remove_if_empty()

    def remove_if_empty(self) -> None:
        """Removes the directory if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(self.path)

    def names(self) -> list[str]:
        """The names of its files."""
        try:
            directory = self._open(make=False)
        except FileNotFoundError:
            return []
        try:
            return os.listdir(directory)
        finally:
            os.close(directory)

    def refresh(self) -> None:
        """Makes a network file system read this directory again."""
        name = f"look-{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):
            directory = self._open(make=False)
            try:
                os.close(os.open(name, _CREATE, 0o600, dir_fd=directory))
                os.unlink(name, dir_fd=directory)
            finally:
                os.close(directory)

    def _write(self, name: str, data: bytes) -> None:
        directory = self._open(make=True)
        try:
            temporary = f"new-{secrets.token_hex(8)}"
            fd = os.open(temporary, _CREATE, 0o600, dir_fd=directory)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())  # a full disk or quota causes an error here
                os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=directory)
                raise
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ClusterError(f"the ranks cannot use the directory {self.path}: {error.strerror}") from None
        finally:
            os.close(directory)

    def _open(self, make: bool) -> int:
        """A descriptor of the directory, checked. Raises FileNotFoundError if it is not there."""
        if make:
            try:
                os.mkdir(self.path, 0o700)
            except FileExistsError:
                pass
            except OSError as error:
                raise ClusterError(f"the ranks cannot use the directory {self.path}: {error.strerror}") from None
        try:
            directory = os.open(self.path, _DIRECTORY)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ClusterError(f"{self.path} cannot be trusted with the job's secret: {error.strerror}") from None
        state = os.fstat(directory)
        if state.st_uid != os.geteuid() or state.st_mode & 0o077:
            os.close(directory)
            raise ClusterError(
                f"{self.path} cannot be trusted with the job's secret: it must belong to user {os.geteuid()} with mode "
                f"0700, but belongs to {state.st_uid} with mode {stat.S_IMODE(state.st_mode):04o}; remove it, or name "
                "another directory with FARANDOLE_MEET_AT=dir:PATH"
            )
        return directory
