"""A timeline that all ranks start with one path, in a folder that rank 0 makes; the script reads it while it grows.
Ends with the events of one rank alone in the file."""

import json
import os
import shutil
import tempfile
import time

import torch

import horovod.torch as hvd


def events_of(path):
    with open(path) as file:
        return json.load(file)


hvd.init()
folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, root_rank=0)
path = os.path.join(folder, "timeline.json")
for life in range(3):
    hvd.start_timeline(path, mark_cycles=life == 1)
    hvd.barrier()
    for step in range(5):
        hvd.allreduce(torch.ones(5), name="life.%d.step.%d" % (life, step))
    if hvd.rank() == 0:
        began = time.time()
        while not any("life.%d.step.4" % life in str(event) for event in events_of(path)):
            assert time.time() - began < 20
    hvd.barrier()
    hvd.stop_timeline()
    hvd.barrier()
    events = events_of(path)  # the same file for all of this host
    names = {event.get("name") for event in events}
    tensors = {event["args"]["name"] for event in events if "name" in event.get("args", {})}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= names, names
    assert ("CYCLE_START" in names) == (life == 1)
    assert {"allreduce.life.%d.step.%d" % (life, step) for step in range(5)} <= tensors, tensors
    assert not any("life.%d" % other in tensor for tensor in tensors for other in range(3) if other != life)
    ticks = {event["name"] for event in events if event["ph"] == "X"}
    assert ticks == {str(rank) for rank in range(hvd.size())}, ticks  # what rank 0 knows
    hvd.barrier()
if hvd.rank() == 0:
    shutil.rmtree(folder)
hvd.barrier()
hvd.start_timeline(path if hvd.rank() else os.devnull)  # the folder is gone: only rank 0 opens the file
hvd.allreduce(torch.ones(1))
hvd.stop_timeline()
hvd.shutdown()
os.environ["HOROVOD_TIMELINE"] = path  # still without its folder: the job goes on without a timeline
hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size() and not os.path.exists(path)
