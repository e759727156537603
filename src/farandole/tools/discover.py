# `farandole discover`: prints the current hosts of a cluster, in the form of a discovery script.
# Reads the environment through config.py, files, and, for `k8s`, the Kubernetes API.
"""`farandole discover slurm|k8s|hostfile|mpijob` prints a line `host:slots` for each host.

As a script for elastic jobs, a file of two lines that may be executed: `#!/bin/sh`, `exec farandole discover slurm`;
then `horovodrun --host-discovery-script ./that-file ...`.
"""

from __future__ import annotations

import argparse
import json
import re
import ssl
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farandole.base.config import environment
from farandole.clusters.schedulers import tasks_per_node
from farandole.launch import hosts
from farandole.launch.hosts import Host

MPIJOB = Path("/etc/mpi")
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API_SECONDS = 10.0
LARGEST_ANSWER = 64 << 20
MAX_NODES = 1 << 16


class NotFound(Exception):
    """The hosts cannot be found; the text says why and what to do."""


def from_slurm(environ: Mapping[str, str], slots: int | None) -> list[Host]:
    """The nodes of the SLURM job that this process is in."""
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        raise NotFound("SLURM_JOB_NODELIST is not set: this is no job of SLURM")
    names = expand(nodes)
    tasks = environ.get("SLURM_TASKS_PER_NODE") or environ.get("SLURM_JOB_CPUS_PER_NODE") or "1"
    counts = tasks_per_node(tasks) if slots is None else [slots] * len(names)
    if len(counts) != len(names):
        raise NotFound(f"SLURM names {len(names)} nodes ({nodes}) but {len(counts)} counts of tasks ({tasks})")
    return [Host(name, count) for name, count in zip(names, counts, strict=True)]


def expand(text: str) -> list[str]:
    """A list of nodes as SLURM writes it.

    >>> expand("a[1-3,07],b")
    ['a1', 'a2', 'a3', 'a07', 'b']
    """
    found: list[str] = []
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        names = [""]
        for plain, inner in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", entry):
            parts = [plain] if plain else [number for part in inner.split(",") for number in _range(part, text)]
            names = [name + part for name in names for part in parts]
            if len(names) > MAX_NODES:
                raise NotFound(f"{text[:80]}: more than {MAX_NODES} nodes")
        found += names
    return found


def _range(text: str, whole: str) -> list[str]:
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        raise NotFound(f"{whole[:80]}: {text!r} is not a number or range of numbers")
    if not dash:
        return [first]
    if int(last) - int(first) >= MAX_NODES:
        raise NotFound(f"{whole[:80]}: more than {MAX_NODES} nodes")
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def from_hostfile(path: Path, slots: int | None) -> list[Host]:
    """The hosts that a hostfile has now."""
    try:
        found = hosts.read(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound(f"cannot read {path}: {getattr(error, 'strerror', error)}") from None
    except ValueError as error:
        raise NotFound(str(error)) from None
    return found if slots is None else [Host(host.name, slots) for host in found]


def from_mpijob(folder: Path, slots: int | None) -> list[Host]:
    """The running workers of a Kubeflow MPIJob. Its launcher pod has their names in a script or in a hostfile.

    The script is read, not run.
    """
    script = folder / "discover_hosts.sh"
    if not script.exists():
        return from_hostfile(folder / "hostfile", slots)
    lines = [line.strip()[len("echo ") :].strip("\"' ") for line in script.read_text().splitlines() if "echo " in line]
    try:
        found = hosts.read("\n".join(lines), str(script)) if lines else []
    except ValueError as error:
        raise NotFound(str(error)) from None
    return found if slots is None else [Host(host.name, slots) for host in found]


def pods(answer: Any, slots: int) -> list[Host]:
    """The ready pods in an answer of the Kubernetes API, by their addresses."""
    found = []
    for pod in answer.get("items", []):
        status = pod.get("status", {})
        ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in status.get("conditions", []))
        leaving = pod.get("metadata", {}).get("deletionTimestamp") is not None
        if ready and not leaving and status.get("podIP"):
            found.append(Host(status["podIP"], slots))
    return sorted(found, key=lambda host: host.name)


def from_kubernetes(
    environ: Mapping[str, str], selector: str, slots: int, account: Path, api: str | None
) -> list[Host]:
    """The ready pods with these labels in the namespace of this pod. Its service account must be allowed to list."""
    if api is None:
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise NotFound("KUBERNETES_SERVICE_HOST is not set: this is no pod of Kubernetes")
        api = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    try:
        token = (account / "token").read_text().strip()
        namespace = (account / "namespace").read_text().strip()
        context = ssl.create_default_context(cafile=str(account / "ca.crt")) if api.startswith("https") else None
    except OSError as error:
        raise NotFound(f"cannot read the service account of this pod: {error}") from None
    query = urllib.parse.urlencode({"labelSelector": selector})
    address = f"{api}/api/v1/namespaces/{urllib.parse.quote(namespace)}/pods?{query}"
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=API_SECONDS, context=context) as answer:
            return pods(json.loads(answer.read(LARGEST_ANSWER)), slots)
    except urllib.error.HTTPError as error:
        hint = "; let the service account list pods" if error.code == 403 else ""
        raise NotFound(f"the Kubernetes API answered {error.code} {error.reason}{hint}") from None
    except (OSError, ValueError) as error:
        raise NotFound(f"the Kubernetes API at {api} cannot be asked: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the hosts. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="farandole discover", description="Print the current hosts.")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="slurm|k8s|hostfile|mpijob")
    slurm = kinds.add_parser("slurm", help="the nodes of this SLURM job")
    k8s = kinds.add_parser("k8s", help="the ready pods with some labels")
    k8s.add_argument("--selector", required=True, help="labels, such as app=train,role=worker")
    k8s.add_argument("--api", help="address of the API (default: as pods find it)")
    k8s.add_argument("--account", type=Path, default=ACCOUNT, help="folder with token, namespace and ca.crt")
    hostfile = kinds.add_parser("hostfile", help="a hostfile that may be edited")
    hostfile.add_argument("file", type=Path)
    mpijob = kinds.add_parser("mpijob", help="the workers of a Kubeflow MPIJob, in its launcher pod")
    mpijob.add_argument("--folder", type=Path, default=MPIJOB, help="where the job's files are (default: /etc/mpi)")
    for kind in (slurm, k8s, hostfile, mpijob):
        kind.add_argument("--slots", type=int, help="slots of each host; replaces all other numbers of slots")
    parsed = parser.parse_args(arguments)
    if parsed.slots is not None and parsed.slots < 1:
        parser.error(f"--slots {parsed.slots}: expected at least 1")
    try:
        if parsed.kind == "slurm":
            found = from_slurm(environment(), parsed.slots)
        elif parsed.kind == "k8s":
            found = from_kubernetes(environment(), parsed.selector, parsed.slots or 1, parsed.account, parsed.api)
        elif parsed.kind == "hostfile":
            found = from_hostfile(parsed.file, parsed.slots)
        else:
            found = from_mpijob(parsed.folder, parsed.slots)
    except NotFound as error:
        print(f"farandole discover: {error}", file=sys.stderr)
        return 1
    for host in found:
        print(f"{host.name}:{host.slots}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
