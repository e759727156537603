# The stored result of a measurement, for one number and kind of hosts: a small file in the user's cache directory.
# Touches search, and files in the directory that it is given.
"""`load` and `store`. A damaged file, or one of another program, is ignored with one line in the log."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from .search import Values

LARGEST_FILE = 4096
_FIELDS = tuple(field.name for field in fields(Values))
_HIGHEST = {"fusion_threshold": 1 << 53, "flush_us": 10**12, "spin_us": 10**12, "chunk_bytes": 1 << 30, "streams": 64}

_log = logging.getLogger("farandole")


def load(directory: str, key: Mapping[str, Any]) -> Values | None:
    """The values that were stored; None if there are none, or if the file cannot be trusted."""
    try:
        with _opened(directory, make=False) as folder:
            descriptor = os.open(_name(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            with open(descriptor, "rb") as file:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                    raise ValueError("it is not a file of this user that nobody else can write")
                text = file.read(LARGEST_FILE + 1)
        return _parsed(text, key)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("the stored tuning result in %s is not used: %s", os.path.join(directory, _name(key)), error)
        return None


def store(directory: str, key: Mapping[str, Any], values: Values) -> None:
    """Stores the values; if that fails, one line of the log says why."""
    text = json.dumps({"shape": dict(key), "values": asdict(values)}, indent=1) + "\n"
    try:
        with _opened(directory, make=True) as folder:
            name = _name(key)
            fresh = f".{name}.{os.getpid()}"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fresh, dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(fresh, flags, 0o600, dir_fd=folder), "w", encoding="ascii") as file:
                file.write(text)
            os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)  # a reader sees the old file or the new one
    except (OSError, ValueError) as error:
        _log.warning("the tuning result could not be stored in %s: %s", directory, error)


@contextlib.contextmanager
def _opened(directory: str, make: bool) -> Any:
    if make:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise ValueError(f"{directory} is not a directory of this user that nobody else can write")
        yield folder
    finally:
        os.close(folder)


def _name(key: Mapping[str, Any]) -> str:
    text = json.dumps(dict(key), sort_keys=True)
    return f"tuning-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _parsed(text: bytes, key: Mapping[str, Any]) -> Values:
    if len(text) > LARGEST_FILE:
        raise ValueError(f"it is above the limit of {LARGEST_FILE} bytes")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(found, dict) or found.get("shape") != dict(key):
        raise ValueError("it is for other hosts, settings or another version")
    values = found.get("values")
    if not isinstance(values, dict) or set(values) != set(_FIELDS):
        raise ValueError(f"expected the values {', '.join(_FIELDS)}")
    for name, value in values.items():
        if type(value) is not int or not 0 <= value <= _HIGHEST[name]:
            raise ValueError(f"{name}={value!r} is out of range")
    if values["chunk_bytes"] < 64 or values["chunk_bytes"] % 64 or values["streams"] < 1:
        raise ValueError("chunk_bytes or streams are out of range")
    return Values(**values)
