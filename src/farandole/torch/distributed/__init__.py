# The torch.distributed backend. Importing this registers it, unless torch's import has done so (see autoload.py).
# Only re-exports names.
"""`torch.distributed.init_process_group("farandole")`: for DDP, FSDP2 and everything else that uses torch.distributed.

>>> import torch, farandole.torch.distributed, torch.distributed as dist
>>> dist.init_process_group("farandole", store=dist.HashStore(), rank=0, world_size=1)
>>> tensor = torch.ones(2)
>>> dist.all_reduce(tensor)
>>> tensor
tensor([1., 1.])
>>> dist.destroy_process_group()
"""

from __future__ import annotations

from ...autoload import announce
from .group import Group
from .work import Work

__all__ = ["Group", "Work"]

announce()
