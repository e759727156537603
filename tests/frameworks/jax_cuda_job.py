# A rank whose JAX arrays are on a GPU, which all ranks may share.
# Touches JAX and CUDA.
"""Asserts by itself, and prints what it has shown."""

from __future__ import annotations

import os

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # there are several

import jax
import jax.numpy as jnp

import farandole.jax as hvd


def shown(what: str, found: jax.Array, wanted: list[float]) -> None:
    assert found.tolist() == wanted and {one.platform for one in found.devices()} == {"gpu"}, (what, found)
    print(what, flush=True)


def main() -> None:
    """Sums and means, at once and compiled."""
    hvd.init()
    ranks = hvd.size()
    local = jnp.arange(3.0) + hvd.rank()
    total = [sum(float(index + rank) for rank in range(ranks)) for index in range(3)]
    mean = [value / ranks for value in total]
    shown("at once", hvd.allreduce(local, op=hvd.Sum), total)
    shown("jit", jax.jit(lambda x: hvd.allreduce(2 * x) + 1)(local), [2 * value + 1 for value in mean])
    shown("grad", jax.grad(lambda x: hvd.allreduce(x, op=hvd.Sum).sum())(local), [float(ranks)] * 3)
    repeated = jax.jit(lambda x: jax.lax.scan(lambda kept, _: (hvd.allreduce(kept), None), x, None, length=3)[0])
    shown("scan", repeated(local), mean)
    tree = hvd.allreduce({"a": local, "b": (local.astype(jnp.bfloat16),)})
    shown("tree", tree["b"][0].astype(jnp.float32), mean)


if __name__ == "__main__":
    main()
