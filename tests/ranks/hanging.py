# A training script whose ranks hang, each in its own way: `hanging.py FAULT RANK PLACE`.
# Started by tests/ranks/test_hangs.py; touches the package as users see it.
from __future__ import annotations

import fcntl
import importlib
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

import farandole as hvd

FAULT, CULPRIT, PLACE = sys.argv[1], int(sys.argv[2]), sys.argv[3]
AT = 6  # the step of the fault; before it the steps repeat, so that they follow a plan
NAMES = ("a", "b", "c")
torch: Any = None  # loaded where a fault needs it


def compute_for_ever() -> None:
    while True:
        pass


def take_a_lock_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    with lock:
        pass


def wait_for_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    threading.enumerate()[-1].join()


def lock_a_file_twice() -> None:
    for _ in range(2):
        fcntl.flock(os.open(PLACE, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)


def read_a_file_that_does_not_come() -> None:
    os.mkfifo(PLACE)
    with open(PLACE) as file:
        file.read()


def load_data() -> None:
    class Slow(torch.utils.data.Dataset):  # type: ignore[misc]  # torch is loaded by name
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            time.sleep(600 if index else 0)  # sleep: the fault, until the job is killed
            return index

    for _ in torch.utils.data.DataLoader(Slow(), batch_size=1, num_workers=1 if FAULT == "loader" else 0):
        pass


FAULTS = {
    "computes": compute_for_ever,
    "sleeps": lambda: time.sleep(600),  # sleep: the fault, until the job is killed
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "lock": take_a_lock_twice,
    "thread": wait_for_a_thread,
    "file lock": lock_a_file_twice,
    "file": read_a_file_that_does_not_come,
    "loader": load_data,
    "loader without workers": load_data,
}


def main() -> None:
    global torch
    if FAULT.startswith("loader"):
        torch = importlib.import_module("torch")  # not in the fault: it takes longer than others wait here
    hvd.init()
    mine = hvd.rank() == CULPRIT
    for step in range(200):
        names: tuple[str, ...] = NAMES
        if FAULT == "order" and mine:
            names = ("a", "c", "b")
        if mine and step == AT:
            if FAULT == "left out":
                names = ("a", "c")
            elif FAULT in FAULTS:
                FAULTS[FAULT]()
        if FAULT == "slow" and mine:
            time.sleep(0.2)  # sleep: the fault, a slow backward pass
        for name in names:
            rows = 5 if FAULT == "shape" and mine and step == AT and name == "b" else 4
            hvd.allreduce(np.ones((rows, 3), np.float32), name=name)
        if FAULT in ("none", "slow"):
            time.sleep(0.02)  # sleep: a backward pass
        if FAULT == "ends early" and mine and step == AT:
            time.sleep(600)  # sleep: what comes after the loop of a rank with less data
    hvd.shutdown()


main()
