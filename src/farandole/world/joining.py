# How this process joins the other ranks: the session with its links, the engine on them, and the world around both.
# Touches the rooms base, clusters, engine and rendezvous; the files membership and world.
"""`connect()` gives a `World` that has started; `wire_version()` is what all ranks must have in common."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.config import Config, environment
from ..engine.interface import Engine
from ..engine.library import load
from ..engine.native import NativeEngine
from .membership import Membership
from .world import World

if TYPE_CHECKING:
    from ..clusters import ClusterRank
    from ..clusters.join import ClusterSession

RANK_NUMBERS = (
    "rank",
    "size",
    "local_rank",
    "local_size",
    "cross_rank",
    "cross_size",
)  # these change with the generation
PYTHON_ENGINE = Path(__file__).parents[1] / "engine"
# The files that define the messages of the engine in Python.
PYTHON_WIRE = ("interface.py", "reference.py", "reference_links.py", "specification.py")


def connect(config: Config, found: ClusterRank | None, commit: int, membership: Membership) -> World:
    """Joins the other ranks and starts the engine; closes what it opened if something fails."""
    cluster: ClusterSession | None = None
    wire = wire_version(config)
    if found is None:
        from ..rendezvous.mesh import join  # keeps `import farandole` fast

        session = join(config, commit=commit, wire=wire)
    else:
        from ..clusters.join import join_cluster

        cluster = join_cluster(config, found, environment(), wire)
        session = cluster.session
    engine: Engine | None = None
    try:
        config = dataclasses.replace(config if cluster is None else cluster.config, tcp_streams=session.streams)
        if session.numbers:
            numbers: dict[str, Any] = dict(zip(RANK_NUMBERS, session.numbers, strict=True))
            config = dataclasses.replace(config, **numbers)
        engine = _make_engine(config, session.rank, session.hosts, session.generation)
        session.hand_over(engine)
        lost = cluster.hub_lost if cluster is not None else None
        if session.numbers:
            lost = functools.partial(membership.hub_lost, engine)
        waited = functools.partial(engine.counter, "waited_ns")
        notifications = membership.notifications
        session.serve(engine, lost, notifications.add_update, notifications.count_loss, waited)
        engine.start(config.start_timeout)
        return World(config, engine, session, cluster)
    except BaseException:
        if engine is not None:
            engine.close()
        session.close(int(config.worker >= 0))
        if cluster is not None:
            cluster.close()
        raise


def wire_version(config: Config) -> str:
    """The protocol version that all ranks must share: the core's number, or a hash of the Python engine."""
    if config.engine != "python":
        return f"{load(config.library).wire:016x}"
    texts = [hashlib.sha256((PYTHON_ENGINE / name).read_bytes()).digest() for name in PYTHON_WIRE]
    return f"python-{hashlib.sha256(b''.join(texts)).hexdigest()[:16]}"


def _make_engine(config: Config, rank: int, hosts: Sequence[int], generation: int) -> Engine:
    if config.engine == "python":
        from ..engine.reference import ReferenceEngine  # imported only when it is selected

        return ReferenceEngine(config, rank, hosts, generation)
    return NativeEngine(config, rank, hosts, generation)
