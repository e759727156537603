# Jobs that another launcher started, like mpirun, srun or torchrun: this process's rank in them, and their rendezvous.
# Gets the environment as an argument; touches the rendezvous room and the file with the secret.
"""`detect` says who started this process and which rank it is; `join.join_cluster` then brings the ranks together."""

from __future__ import annotations

from farandole.clusters.cluster_rank import ClusterError, ClusterRank
from farandole.clusters.detection import detect, with_numbers

__all__ = ["ClusterError", "ClusterRank", "detect", "with_numbers"]
