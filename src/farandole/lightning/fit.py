# `farandole fit stack.yaml`: starts the ranks that the file describes, and trains in each of them.
# Touches stack, launch/cli and launch/spawn; farandole.ray and Lightning only if the stack needs them.
"""`python -m farandole.lightning.fit stack.yaml` is the same. Each rank runs it with `--rank`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from ..base.config import environment
from ..base.errors import RankFailed
from ..clusters import detect
from ..launch import cli, spawn
from .stack import Stack, StackError, checked, explain, options_of

USAGE = """usage: farandole fit STACK.yaml [--explain]

  Trains what the file describes: communication, orchestration, application (docs/stack.md).
  --explain   print the stack and the same in Python, and start nothing
"""


def read(path: str) -> Stack:
    """Reads the stack from a file."""
    try:
        with open(path, encoding="utf-8") as file:
            return checked(yaml.safe_load(file), path)
    except OSError as error:
        raise StackError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise StackError(f"{path}: {error}") from None


def main(arguments: Sequence[str]) -> int:
    """Runs a command line. Returns the exit code."""
    options = [word for word in arguments if word.startswith("-")]
    paths = [word for word in arguments if not word.startswith("-")]
    if "-h" in options or "--help" in options:
        print(USAGE, end="")
        return 0
    unknown = [option for option in options if option not in ("--explain", "--rank")]
    if unknown or len(paths) != 1:
        problem = f"unknown option {unknown[0]}" if unknown else "expected one file"
        print(f"farandole fit: {problem}\n{USAGE}", end="", file=sys.stderr)
        return 2
    try:
        stack = read(paths[0])
        if "--explain" in options:
            print(explain(stack), end="")
            return 0
        if "--rank" in options:
            train(stack, os.path.dirname(os.path.abspath(paths[0])))
            return 0
        return start(stack, os.path.abspath(paths[0]))
    except (StackError, ImportError) as error:
        print(f"farandole fit: {error}", file=sys.stderr)
        return 2


def start(stack: Stack, path: str) -> int:
    """Starts the ranks and waits for them."""
    command = [sys.executable, "-m", "farandole.lightning.fit", path, "--rank"]
    if stack.kind == "ray":
        return _with_ray(stack, os.path.dirname(path))
    if stack.kind == "slurm":
        if shutil.which("srun") is None:
            raise StackError("orchestration: slurm: there is no srun on the path of this host")
        return spawn.become_program(["srun", "-n", str(stack.ranks), *command], environment())
    arguments = ["run", "-np", str(stack.ranks)]
    arguments += ["--min-np", str(stack.min_ranks)] if stack.min_ranks else []
    arguments += ["-H", stack.hosts] if stack.hosts else []
    return cli.main([*arguments, *command])


def _with_ray(stack: Stack, folder: str) -> int:
    try:
        from ..ray import RayExecutor
    except (ImportError, AttributeError) as error:
        raise ImportError(f"orchestration: ray needs Ray: pip install 'farandole[ray]' ({error})") from None
    settings = RayExecutor.create_settings()
    fixed, least = {"num_workers": stack.ranks}, {"min_workers": stack.min_ranks, "max_workers": stack.ranks}
    executor = RayExecutor(settings, use_gpu=stack.use_gpu, **(least if stack.min_ranks else fixed))
    try:
        executor.start()
    except (TimeoutError, ConnectionError) as error:  # the cluster is full or missing: no code of the user has run
        return _failed(error)
    try:
        executor.run(train, args=[stack, folder])
    except RankFailed as error:  # too few ranks are left, or an actor has died; errors of ranks have their own types
        return _failed(error)
    finally:
        executor.shutdown()
    return 0


def _failed(error: Exception) -> int:
    print(f"farandole fit: orchestration: ray: {error}", file=sys.stderr)
    return 1


# --- in each rank ----------------------------------------------------------------------------------------------------


def train(stack: Stack, folder: str) -> None:
    """Trains in this rank, with the classes of Lightning's own command line."""
    _check_devices(stack)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # modules may be in the same folder as the file
    try:
        from lightning.pytorch.cli import LightningCLI
    except ModuleNotFoundError as error:
        raise ImportError(f"farandole fit needs Lightning: pip install 'farandole[lightning]' ({error})") from None
    arguments: dict[str, Any] = {"model": stack.module, "trainer": _trainer(stack), "seed_everything": stack.seed}
    if stack.datamodule is not None:
        arguments["data"] = stack.datamodule
    made = LightningCLI(
        run=False,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=None,
        parser_kwargs={"prog": "farandole fit"},
        args=arguments,
    )
    made.trainer.fit(made.model, datamodule=made.datamodule, ckpt_path=stack.ckpt_path)


def _trainer(stack: Stack) -> dict[str, Any]:
    """The Trainer's options, with those from the other two sections."""
    options = options_of(stack)
    if stack.strategy is not None:
        size, local = _place(stack)
        return {**options, "strategy": stack.strategy, "devices": local, "num_nodes": max(1, size // local)}
    return {**options, "strategy": _strategy(stack), "devices": 1}


def _place(stack: Stack) -> tuple[int, int]:
    """The number of ranks, and of ranks on this host, from the launcher of this process."""
    variables = environment()
    found = detect(variables)
    if found is not None:
        return found.size, found.local_size or found.size
    return int(variables.get("WORLD_SIZE", stack.ranks)), int(variables.get("LOCAL_WORLD_SIZE", stack.ranks))


def _check_devices(stack: Stack) -> None:
    """Raises StackError for NCCL without GPUs. NCCL's own error would come later, on all ranks, and is less clear."""
    import torch

    if stack.backend == "nccl" and not torch.cuda.is_available():
        raise StackError(
            f"communication: nccl needs a CUDA GPU for each rank, and {os.uname().nodename} has none that torch can "
            "use; farandole and gloo run on CPUs"
        )


def _strategy(stack: Stack) -> Any:
    options = {"compression": stack.compression, "scale_lr": stack.scale_lr}
    return {"class_path": "farandole.lightning.FarandoleStrategy", "init_args": options}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
