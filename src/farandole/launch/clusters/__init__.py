# Jobs that another launcher started, like mpirun, srun or torchrun: this process's place in them, and the meeting.
# Gets the environment as an argument; touches the rendezvous room, and the file that carries the secret.
"""`detect` says who started this process and which rank it is; `meeting.meet` then brings the ranks together."""

from __future__ import annotations

from farandole.launch.clusters.detection import detect, settle
from farandole.launch.clusters.found import ClusterError, Found

__all__ = ["ClusterError", "Found", "detect", "settle"]
