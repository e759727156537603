# The description of a training stack, which `farandole fit` reads, checks and explains.
# Pure, except that it reads Lightning's source. It does not run it.
"""There are three sections, one for each layer: `communication`, `orchestration`, `application`."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

COMMUNICATION = ("farandole", "gloo", "nccl")
ORCHESTRATION = ("local", "hosts", "ray", "slurm")
SECTIONS = {
    "communication": ("backend", "strategy", "compression", "scale_lr"),
    "orchestration": ("kind", "ranks", "min_ranks", "hosts", "use_gpu"),
    "application": ("module", "datamodule", "trainer", "seed", "ckpt_path"),
}
COMPRESSIONS = ("none", "fp16", "bf16")
# Strategies of Lightning that run on the backend of the stack.
STRATEGIES = {"ddp": "DDPStrategy", "fsdp": "FSDPStrategy", "model_parallel": "ModelParallelStrategy"}

# For each option of the Trainer: the module of lightning.pytorch in which Lightning's command line searches for a class
# without a package name.
MODULES = {"callbacks": "callbacks", "logger": "loggers", "plugins": "plugins", "profiler": "profilers"}


class StackError(ValueError):
    """The file is wrong. The text says where, and what is expected."""


@dataclass(frozen=True)
class Stack:
    """A whole stack."""

    backend: str = "farandole"
    strategy: dict[str, Any] | None = None  # class_path, init_args; None: our strategy
    compression: str = "none"
    scale_lr: bool = False
    kind: str = "local"
    ranks: int = 1
    min_ranks: int | None = None
    hosts: str | None = None
    use_gpu: bool = False
    module: dict[str, Any] = field(default_factory=dict)  # class_path, init_args
    datamodule: dict[str, Any] | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    seed: int | bool = True
    ckpt_path: str | None = None


def checked(document: Any, where: str = "stack.yaml") -> Stack:
    """The stack that a document describes.

    >>> checked({"application": {"module": "digits.Digits"}, "orchestration": "local"}).module
    {'class_path': 'digits.Digits', 'init_args': {}}
    """
    if not isinstance(document, dict):
        raise StackError(f"{where}: expected the sections {', '.join(SECTIONS)}")
    _known(document, SECTIONS, where)
    found: dict[str, Any] = {}
    for section, keys in SECTIONS.items():
        content = document.get(section, {})
        if isinstance(content, str) and section != "application":
            content = {keys[0]: content}  # one word is enough
        if not isinstance(content, dict):
            raise StackError(f"{where}: {section}: expected a mapping with {', '.join(keys)}")
        _known(content, keys, f"{where}: {section}")
        found.update(content)
    if "module" not in found:
        raise StackError(f"{where}: application: module is missing: the LightningModule, as package.Class")
    _choice(found, "backend", COMMUNICATION, where)
    _choice(found, "kind", ORCHESTRATION, where)
    _choice(found, "compression", COMPRESSIONS, where)
    for name in ("module", "datamodule"):
        if found.get(name) is not None:
            found[name] = _class(found[name], f"{where}: application: {name}")
    if found.get("strategy") is not None or found.get("backend", "farandole") != "farandole":
        found["strategy"] = _strategy(found, where)
    options = found.setdefault("trainer", {})
    if not isinstance(options, dict):
        raise StackError(f"{where}: application: trainer: expected options of Lightning's Trainer")
    _known(options, trainer_options() or options, f"{where}: application: trainer")
    stack = Stack(**found)
    _check_combinations(stack, where)
    return stack


def _check_combinations(stack: Stack, where: str) -> None:
    for name in ("ranks", "min_ranks"):
        value = getattr(stack, name)
        if value is not None and (type(value) is not int or value < 1):
            raise StackError(f"{where}: orchestration: {name}: {value!r} is not a number of ranks")
    if stack.kind == "hosts" and not stack.hosts:
        raise StackError(f'{where}: orchestration: hosts is missing, such as "host1:4,host2:4"')
    if stack.kind != "hosts" and stack.hosts:
        raise StackError(f"{where}: orchestration: hosts is for kind: hosts, not for {stack.kind}")
    if stack.min_ranks is not None and (stack.strategy is not None or stack.kind == "slurm"):
        raise StackError(
            f"{where}: min_ranks needs communication: farandole, and no slurm: other jobs cannot "
            f"continue after a lost rank"
        )
    if stack.strategy is not None and (stack.scale_lr or stack.compression != "none"):
        class_name = stack.strategy["class_path"].rpartition(".")[2]
        raise StackError(f"{where}: communication: compression and scale_lr are for farandole, not for {class_name}")
    taken = [name for name in ("strategy", "devices", "num_nodes") if name in stack.trainer]
    if taken:
        raise StackError(
            f"{where}: application: trainer: {', '.join(taken)}: set this in the sections communication and "
            f"orchestration"
        )


def _known(found: dict[str, Any], expected: Collection[str], where: str) -> None:
    for name in found:
        if name not in expected:
            close = difflib.get_close_matches(str(name), expected, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(expected)}"
            raise StackError(f"{where}: unknown key {name!r}; {hint}")


def _choice(found: dict[str, Any], name: str, choices: tuple[str, ...], where: str) -> None:
    value = found.get(name, choices[0])
    if value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(choices)}"
        raise StackError(f"{where}: {name}: {value!r} is unknown; {hint}")


def _class(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        value = {"class_path": value}
    if not isinstance(value, dict):
        raise StackError(f"{where}: expected package.Class, or a mapping with class_path and init_args")
    _known(value, ("class_path", "init_args"), where)
    if "." not in str(value.get("class_path", "")):
        raise StackError(f"{where}: class_path: expected package.Class, not {value.get('class_path')!r}")
    return {"class_path": value["class_path"], "init_args": dict(value.get("init_args") or {})}


def _strategy(found: dict[str, Any], where: str) -> dict[str, Any]:
    """A strategy of Lightning on the backend of the stack."""
    strategy, backend = found.get("strategy") or "ddp", found.get("backend", "farandole")
    if isinstance(strategy, str) and "." not in strategy:
        _choice({"strategy": strategy}, "strategy", tuple(STRATEGIES), where)
        strategy = f"lightning.pytorch.strategies.{STRATEGIES[strategy]}"
    made = _class(strategy, f"{where}: communication: strategy")
    made["init_args"] = {"process_group_backend": backend, **made["init_args"]}
    return made


def trainer_options() -> list[str]:
    """The options of Lightning's Trainer, read from its source, because its import takes seconds; [] if not found."""
    package = importlib.util.find_spec("lightning")
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        path = os.path.join(folder, "pytorch", "trainer", "trainer.py")
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                tree = ast.parse(file.read())
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and node.name == "Trainer":
                    [make] = [
                        item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"
                    ]
                    return [argument.arg for argument in (*make.args.args[1:], *make.args.kwonlyargs)]
    return []


# --- explanation -----------------------------------------------------------------------------------------------------


def start_of(stack: Stack, command: str) -> str:
    """The command that starts the ranks."""
    least = f" --min-np {stack.min_ranks}" if stack.min_ranks else ""
    if stack.kind == "ray":
        return f"farandole.ray.RayExecutor with {stack.ranks} workers"
    if stack.kind == "slurm":
        return f"srun -n {stack.ranks} {command}"
    hosts = f" -H {stack.hosts}" if stack.kind == "hosts" else ""
    return f"farandole run -np {stack.ranks}{least}{hosts} {command}"


def options_of(stack: Stack) -> dict[str, Any]:
    """The Trainer's options, with the additions of the other two sections."""
    options = dict(stack.trainer)
    if stack.strategy is None and stack.min_ranks is not None:
        added, added_class = "callbacks", "farandole.lightning.ElasticCallback"
    elif stack.strategy is not None and stack.backend == "farandole":
        added, added_class = "plugins", "farandole.lightning.FarandoleEnvironment"
    else:
        return options
    present = options.get(added)  # Lightning accepts one object or a list
    options[added] = [
        *(present if isinstance(present, list) else [present] if present else []),
        {"class_path": added_class},
    ]
    return options


def strategy_of(stack: Stack, writer: SourceWriter) -> str:
    """The Trainer's strategy as Python source."""
    if stack.strategy is not None:
        return writer.of(stack.strategy)
    options: dict[str, Any] = {}
    if stack.compression != "none":
        options["compression"] = stack.compression
    if stack.scale_lr:
        options["scale_lr"] = True
    if not options and stack.kind != "slurm":
        return '"farandole"'
    return writer.of({"class_path": "farandole.lightning.FarandoleStrategy", "init_args": options})


class SourceWriter:
    """Writes values of the file as Python source, and the imports that this source needs."""

    def __init__(self) -> None:
        self.imports: dict[str, str] = {}  # name -> its package
        self.whole: dict[str, None] = {}  # packages of classes whose name another package has too

    def of(self, value: Any, option: str = "") -> str:
        """An expression. `option`: the Trainer's option of the value; it gives the package of classes without one.

        >>> SourceWriter().of([{"class_path": "a.B", "init_args": {"c": {"class_path": "d.E"}}}, 1])
        '[B(c=E()), 1]'
        """
        if isinstance(value, list):
            return f"[{', '.join(self.of(one, option) for one in value)}]"
        if not isinstance(value, dict):
            return repr(value)
        if "class_path" not in value:
            return f"{{{', '.join(f'{name!r}: {self.of(one)}' for name, one in value.items())}}}"
        values = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
        arguments = ", ".join(f"{name}={self.of(one)}" for name, one in values.items())
        return f"{self._class(value['class_path'], option)}({arguments})"

    def _class(self, path: str, option: str) -> str:
        package, _, name = path.rpartition(".")
        if not package:
            package = f"lightning.pytorch.{MODULES[option]}" if option in MODULES else "lightning.pytorch"
        if self.imports.setdefault(name, package) == package:
            return name
        self.whole[package] = None
        return f"{package}.{name}"

    def lines(self) -> list[str]:
        """The import statements."""
        names: dict[str, list[str]] = {}
        for name, package in self.imports.items():
            names.setdefault(package, []).append(name)
        some = [f"from {package} import {', '.join(found)}" for package, found in names.items()]
        return some + [f"import {package}" for package in self.whole]


def explain(stack: Stack) -> str:
    """Describes the three layers, and the same as a Python script."""
    where = {"local": "on this host", "hosts": f"on {stack.hosts}", "ray": "as actors of Ray", "slurm": "by SLURM"}
    many = f"{stack.min_ranks} to {stack.ranks}" if stack.min_ranks else str(stack.ranks)
    trained = stack.module["class_path"]
    data = f" on {stack.datamodule['class_path']}" if stack.datamodule else ""
    lines = [
        f"communication  {stack.backend}: strategy={strategy_of(stack, SourceWriter())}",
        f"orchestration  {stack.kind}: {many} ranks {where[stack.kind]}",
        f"application    lightning: {trained}{data}",
        "",
        f"# train.py, started by: {start_of(stack, 'python train.py')}",
        *_script(stack),
    ]
    return "\n".join(lines) + "\n"


def _script(stack: Stack) -> list[str]:
    writer = SourceWriter()
    writer.of({"class_path": "lightning.pytorch.Trainer"})
    body = []
    if stack.seed is not False:
        seed = {} if stack.seed is True else {"seed": stack.seed}
        body.append(writer.of({"class_path": "lightning.pytorch.seed_everything", "init_args": seed}))
    options = {**options_of(stack), "devices": 1 if stack.strategy is None else stack.ranks}
    parameters = [f"strategy={strategy_of(stack, writer)}"]
    parameters += [f"{name}={writer.of(value, name)}" for name, value in options.items()]
    body.append(f"trainer = Trainer({', '.join(parameters)})")
    fit_arguments = [writer.of(stack.module)]
    fit_arguments += [f"datamodule={writer.of(stack.datamodule)}"] if stack.datamodule else []
    fit_arguments += [f"ckpt_path={stack.ckpt_path!r}"] if stack.ckpt_path else []
    return [*writer.lines(), "", *body, f"trainer.fit({', '.join(fit_arguments)})"]
