# Both sides of the data service: what compute workers run, and how a training job finds and uses them.
# Touches tf.data's service; the rooms bindings.private, operations, rendezvous and world.
"""Replaces `horovod.tensorflow.data.compute_service` in scripts."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...bindings.private.tensorflow_names import check_servers, stop_server
from ...operations.ops import barrier
from ...rendezvous import interfaces
from ...rendezvous.key_value import KeyValueClient, KeyValueServer
from ...world import basics
from ..framework import tf

__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]

SIDES = ("compute", "training")
HEARTBEAT_MS = 1000
LONG_S = 3600.0
_shared = itertools.count(1)
check_servers(tf.data.experimental.service.DispatchServer, tf.data.experimental.service.WorkerServer)


class ComputeService:
    """A server where dispatchers, workers and training processes register; one process of the compute job runs it."""

    def __init__(self, key: bytes) -> None:
        self._server = KeyValueServer(key)

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """Its addresses, by network interface."""
        found: dict[str, list[tuple[str, int]]] = {}
        for one in interfaces.interfaces():
            if ":" not in one.address:
                found.setdefault(one.name, []).append((one.address, self._server.port))
        return found

    def shutdown(self) -> None:
        """Stops the server."""
        self._server.close()


class ComputeClient:
    """The messages between the parts of a data service."""

    def __init__(self, addresses: dict[str, list[tuple[str, int]]], key: bytes) -> None:
        known = [(host, port) for found in addresses.values() for host, port in found]
        # Loopback comes last: on another host, another program may listen there.
        self._client = KeyValueClient(sorted(known, key=lambda address: address[0].startswith("127.")), key)

    def register_dispatcher(self, dispatcher_id: int, address: str) -> None:
        """Registers the address of a running dispatcher."""
        self._client.put(f"dispatcher {dispatcher_id}", address)

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """The address of a dispatcher, as soon as it runs; TimeoutError."""
        return str(self._client.wait(f"dispatcher {dispatcher_id}", timeout))

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Registers a worker of a dispatcher; `worker_id` counts from 0 for each dispatcher."""
        self._client.put(f"worker {worker_id} of {dispatcher_id}", True)

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, workers: int, timeout: float) -> None:
        """Returns when this many workers serve the dispatcher; TimeoutError."""
        deadline = time.monotonic() + timeout
        for worker in range(workers):
            self._client.wait(f"worker {worker} of {dispatcher_id}", max(0.0, deadline - time.monotonic()))

    def shutdown(self) -> None:
        """Tells the compute workers to end."""
        self._client.put("shutdown", True)

    def wait_for_shutdown(self) -> None:
        """Returns after `shutdown` was called, or when the server has ended."""
        with contextlib.suppress(OSError):  # the server has ended
            while True:
                with contextlib.suppress(TimeoutError):
                    self._client.wait("shutdown", LONG_S)
                    return


@dataclass(frozen=True)
class TfDataServiceConfig:
    """What both jobs must know about a data service. `key` proves that they belong together."""

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: dict[str, list[tuple[str, int]]]
    key: bytes
    timeout: float = 60

    def __post_init__(self) -> None:
        if self.dispatcher_side not in SIDES:
            raise ValueError(f"dispatcher_side={self.dispatcher_side!r}: expected one of {', '.join(SIDES)}")
        if self.dispatchers < 1 or self.workers_per_dispatcher < 1:
            raise ValueError("a data service has at least one dispatcher, and one worker for each")

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """A client of the service; `verbose` is accepted for compatibility."""
        return ComputeClient(self.addresses, self.key)

    def to_dict(self) -> dict[str, Any]:
        """Its fields as plain values, for JSON."""
        return {**asdict(self), "key": base64.b64encode(self.key).decode()}

    @staticmethod
    def from_dict(config: dict[str, Any]) -> TfDataServiceConfig:
        """The opposite of `to_dict`."""
        found = TfDataServiceConfig(**{**config, "key": base64.b64decode(config["key"])})
        known = {name: [(str(host), int(port)) for host, port in rows] for name, rows in found.addresses.items()}
        return replace(found, addresses=known)

    def write(self, filename: str) -> None:
        """Writes it to a file that only this user can read, because it contains the key."""
        folder = os.path.dirname(os.path.abspath(filename))
        handle, temporary = tempfile.mkstemp(dir=folder)  # mode 0600
        with os.fdopen(handle, "w") as file:
            json.dump(self.to_dict(), file)
        os.replace(temporary, filename)

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        """Reads it from a file; can wait until the file exists."""
        while wait_for_file_creation and not os.path.exists(filename):
            time.sleep(0.1)
        with open(filename) as file:
            return TfDataServiceConfig.from_dict(json.load(file))


def _own_address(config: TfDataServiceConfig) -> str:
    """The address at which other processes of the service reach this host."""
    addresses = [address for rows in config.addresses.values() for address in rows]
    outside = [address for address in addresses if not address[0].startswith("127.")]
    return interfaces.source_address(*(outside or addresses)[0])


@contextlib.contextmanager
def _dispatcher(config: TfDataServiceConfig, number: int) -> Iterator[str]:
    service = tf.data.experimental.service
    server = service.DispatchServer(service.DispatcherConfig(port=0, protocol="grpc"), start=True)
    try:
        port = server.target.rpartition(":")[2]
        address = f"grpc://{_own_address(config)}:{port}"
        config.compute_client().register_dispatcher(number, address)
        yield address
    finally:
        stop_server(server)


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """The address of this rank's dispatcher, which this process runs if `dispatcher_side` is "training"."""
    number = rank if compute_config.dispatchers > 1 else 0
    if number >= compute_config.dispatchers:
        raise ValueError(f"rank {rank} has no dispatcher: there are {compute_config.dispatchers}; give each rank one")
    client = compute_config.compute_client()
    starts_dispatcher = compute_config.dispatcher_side == "training" and (compute_config.dispatchers > 1 or rank == 0)
    with _dispatcher(compute_config, number) if starts_dispatcher else contextlib.nullcontext():
        address = client.wait_for_dispatcher_registration(number, compute_config.timeout)
        client.wait_for_dispatcher_worker_registration(
            number, compute_config.workers_per_dispatcher, compute_config.timeout
        )
        yield address


def send_to_data_service(
    dataset: Any,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> Any:
    """The dataset, computed by the compute workers. Also a method of tf.data.Dataset.

    `reuse_dataset`: the ranks share one pass over it. With `round_robin` they also take turns (`size` is needed).
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError("the dispatcher runs in the training job: train inside `with tf_data_service(...)`")
    if round_robin and not (reuse_dataset and size):
        raise ValueError("round_robin needs reuse_dataset=True and size")
    turns = {"consumer_index": rank, "num_consumers": size} if round_robin else {}
    with tf_data_service(compute_config, rank) as address:
        # Ranks share the dataset of the same call; each name is for one dataset.
        name = f"job {next(_shared)}" if reuse_dataset else None
        return dataset.apply(
            tf.data.experimental.service.distribute(processing_mode, service=address, job_name=name, **turns)
        )


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Runs in each process of the compute job until `shutdown`: a worker and, in some processes, a dispatcher."""
    basics.init()
    index, per = basics.rank(), compute_config.workers_per_dispatcher
    number, worker = divmod(index, per)
    client = compute_config.compute_client()
    starts_dispatcher = compute_config.dispatcher_side == "compute" and worker == 0
    with _dispatcher(compute_config, number) if starts_dispatcher else contextlib.nullcontext():
        address = client.wait_for_dispatcher_registration(number, compute_config.timeout)
        service = tf.data.experimental.service
        server = service.WorkerServer(
            service.WorkerConfig(
                dispatcher_address=address.partition("://")[2],
                worker_address=f"{_own_address(compute_config)}:%port%",
                heartbeat_interval_ms=HEARTBEAT_MS,
                dispatcher_timeout_ms=int(compute_config.timeout * 1000),
            ),
            start=True,
        )
        try:
            client.register_worker_for_dispatcher(number, worker)
            client.wait_for_shutdown()
        finally:
            stop_server(server)
        barrier()  # dispatchers and the server must end after the workers that use them
