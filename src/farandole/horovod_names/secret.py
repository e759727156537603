# horovod.runner.common.util.secret: the key of a job, and digests that use it.
# Pure, except for random bytes.
"""This is only for programs that import it. Farandole makes the secrets of its jobs elsewhere."""

from __future__ import annotations

import hashlib
import hmac

from farandole.bindings.compat import make_secret_key as make_secret_key

SECRET_LENGTH = 32
DIGEST_LENGTH = 32
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"  # the variable with the key in base64


def compute_digest(key: bytes, message: bytes) -> bytes:
    """The HMAC-SHA256 of a message."""
    return hmac.digest(key, message, hashlib.sha256)


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Whether `digest` is the digest of the message."""
    return hmac.compare_digest(compute_digest(key, message), digest)
