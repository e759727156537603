# A rank on one of several hosts that runs cases of distributed_mesh_cases.py by name.
# Touches torch.distributed as users see it.
"""`python distributed_hosts_job.py CASE ...`; it calls init_process_group as a user's script does."""

from __future__ import annotations

import os
import sys
import warnings

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import distributed_job
import distributed_mesh_cases  # noqa: F401
import torch
import torch.distributed as dist

import farandole.torch.distributed  # noqa: F401

warnings.simplefilter("ignore")
torch.set_num_threads(1)
dist.init_process_group("farandole")
for name in sys.argv[1:]:
    distributed_job.CASES[name](dist.get_rank(), dist.get_world_size())
    dist.barrier()
    os.write(1, f"{name} is done\n".encode())
dist.destroy_process_group()
