# Jobs that another launcher started, like mpirun, srun or torchrun: this process's place in them, and the meeting.
# Gets the environment as an argument; touches the rendezvous room, and the file that carries the secret.
"""`detect` says who started this process and which rank it is; `meet` brings the ranks together."""

from __future__ import annotations

from farandole.launch.clusters.detection import detect
from farandole.launch.clusters.found import ClusterError, Found
from farandole.launch.clusters.meeting import Meeting, meet, settle

__all__ = ["ClusterError", "Found", "Meeting", "detect", "meet", "settle"]
