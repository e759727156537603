"""The rules of the house as tables: rooms and what they may use, and every exception with its reason.
Data alone; scripts/house.py applies it."""

from __future__ import annotations

# Core: a room and the rooms it may include. Downwards only; trace stands beside link.
CORE_ROOMS: dict[str, set[str]] = {
    "base": set(),
    "os": {"base"},
    "wire": {"base"},
    "trace": {"base", "os"},
    "kernel": {"base"},
    "link": {"base", "os", "wire", "trace"},
    "group": {"base", "os", "wire", "trace", "link"},
    "collective": {"base", "os", "wire", "trace", "link", "group", "kernel"},
    "negotiate": {"base", "wire"},
    "engine": {"base", "os", "wire", "trace", "link", "group", "kernel", "collective", "negotiate"},
    "api": {"base", "os", "wire", "trace", "link", "group", "kernel", "collective", "negotiate", "engine"},
    "python": {"api"},  # an extension module of its own, which opens the core at run time
}

# Headers that declare system calls.
SYSTEM_HEADERS = (
    r"(sys|linux|netinet|arpa|net|asm)/.*|unistd\.h|fcntl\.h|poll\.h|signal\.h|csignal|pthread\.h|sched\.h|dlfcn\.h"
    r"|netdb\.h|spawn\.h|termios\.h"
)

# A pattern in the core's code, and why it is not there.
FORBIDDEN_CALLS: dict[str, str] = {
    # Short names are also those of our own functions; the system's are called with a leading ::.
    r"(?<![\w.>:])((::)?(socket|accept4|getaddrinfo)|::(connect|accept|bind|listen))\s*\(": "the core opens no socket",
    r"(?<!\w)(getenv|setenv|secure_getenv)\s*\(": "the core knows no environment",
    r"(?<![\w.>:])(::)?(fork|vfork|system|popen|execve?|execvp|posix_spawn)\s*\(": "the core starts no process",
    r"(?<!\w)(std::cerr|std::cout|stderr|stdout)(?!\w)": "the core writes nothing for people; it posts events",
    r"(?<![\w.>:])(::)?(abort|exit|_exit|terminate)\s*\(": "the core never ends the process",
}

# Python: a room (a file or a folder of src/farandole) and the rooms it may import.
_WORDS = {"version", "errors", "tested", "private"}
_BASE = _WORDS | {"config", "engine"}
_RUNTIME = _BASE | {"rendezvous", "native", "reference", "observe"}
_ARRAYS = _RUNTIME | {"runtime", "groups", "arrays", "pending", "reductions", "ops", "objects"}
PYTHON_ROOMS: dict[str, set[str]] = {
    "version": set(),
    "tested": set(),
    "private": set(),
    "errors": {"version"},
    "config": _WORDS,
    "engine": _WORDS | {"config"},
    "rendezvous": _BASE,
    "native": _BASE,
    "specification": _BASE,
    "reference": _BASE | {"rendezvous", "specification"},
    "observe": _BASE,
    "groups": _BASE,
    "tuning": _BASE,
    "runtime": _RUNTIME | {"groups", "tuning", "launch/clusters", "elastic/policy"},
    "arrays": _BASE,
    "pending": _RUNTIME | {"runtime", "groups", "arrays"},
    "reductions": _RUNTIME | {"runtime", "groups", "arrays", "pending"},
    "ops": _RUNTIME | {"runtime", "groups", "arrays", "pending", "reductions"},
    "objects": _RUNTIME | {"runtime", "groups", "arrays", "pending", "reductions", "ops"},
    "__init__": _RUNTIME | {"runtime", "groups", "arrays", "pending", "reductions", "ops", "objects", "launch"},
    "autoload": set(),
    "elastic": _RUNTIME | {"runtime", "groups", "arrays", "pending", "reductions", "ops", "objects"},
    "torch": _RUNTIME
    | {
        "runtime",
        "groups",
        "arrays",
        "pending",
        "reductions",
        "ops",
        "objects",
        "launch/clusters",
        "autoload",
        "elastic",
    },
    "lightning": _RUNTIME
    | {
        "runtime",
        "groups",
        "pending",
        "reductions",
        "objects",
        "launch",
        "launch/clusters",
        "autoload",
        "elastic",
        "torch",
    },
    "ray": _RUNTIME
    | {
        "runtime",
        "compat",
        "launch",
        "elastic/coordinator",
        "elastic/members",
        "elastic/policy",
        "lightning",
        "autoload",
    },
    "spark": _RUNTIME | {"launch", "elastic/policy"},
    "spark/common": _WORDS | {"launch", "spark"},
    "spark/torch": _WORDS | {"launch", "spark/common", "torch"},
    "spark/lightning": _WORDS | {"launch", "spark/common", "spark/torch", "lightning", "torch"},
    "spark/tensorflow": _RUNTIME | {"runtime", "ops", "spark", "tensorflow"},
    "spark/keras": _WORDS | {"launch", "spark/common", "compat", "keras"},
    "data": set(),
    # What bindings with graphs share: a call as data, and compiled operations.
    "work": _RUNTIME | {"runtime", "groups", "arrays", "pending", "reductions", "ops"},
    "compiled": _RUNTIME | {"runtime", "groups", "pending", "reductions", "ops"},
    "tensorflow": _ARRAYS | {"compat", "elastic", "keras", "work", "compiled"},
    "jax": _ARRAYS | {"compat", "elastic", "work", "compiled"},
    "tensorflow/keras": _ARRAYS | {"compat", "elastic", "keras", "tensorflow"},
    "mxnet": _ARRAYS | {"compat", "autoload"},
    # Keras runs on other frameworks: each backend's gradients are reduced by that framework's own binding.
    "keras": _ARRAYS | {"compat", "elastic"},
    "compat": _RUNTIME | {"runtime", "groups", "arrays", "pending", "reductions"},
    "elastic/policy": _BASE,
    "elastic/members": _BASE | {"rendezvous"},
    "elastic/places": _BASE | {"rendezvous", "elastic/policy", "elastic/members"},
    "elastic/coordinator": _BASE | {"rendezvous", "elastic/policy", "elastic/members", "elastic/places"},
    "launch": _BASE
    | {"rendezvous", "observe", "tools", "launch/clusters", "elastic/coordinator", "elastic/members", "elastic/policy"},
    "launch/clusters": _BASE | {"rendezvous", "observe"},
    "__main__": {"launch"},
    "tools": _RUNTIME | {"runtime", "groups", "ops", "launch", "launch/clusters", "__init__", "elastic"},
}

# Rooms named after a framework may import it; nobody else may.
# Those that are built on another one may import that as well.
BUILT_ON = {
    "private": {"torch", "pyspark"},
    "lightning": {"torch"},
    "spark": {"pyspark"},
    "spark/common": {"pyspark"},
    "spark/tensorflow": {"pyspark"},
    "spark/torch": {"torch"},
    "spark/lightning": {"torch", "lightning"},
}
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "mxnet", "lightning", "pytorch_lightning", "ray", "pyspark"}

# A test waits for events. Whatever sleeps says why on the same line: `# sleep: why` (`// sleep: why` in C++).
# In a shell too, but for processes that are there to last ("sleep 60").
SLEEPS = r"\b(?:u|nano)?sleep(?:_for|_until)?(?:\s*\(| [0-9](?![0-9]))"
SLEEP_REASON = r"(?:#|//) sleep: \w"

# Paths and settings of one machine. Written in halves so that this file keeps its own rule.
FORBIDDEN_WORDS = ["/wo" + "rk/", "index" + "-url", "find" + "-links", "/opt/" + "pypi", "/root" + "/"]

# (rule, file): the reason. A rule that is broken without a line here is an error, and so is a line that nobody needs.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("system-call", "core/wire/crc32c.cc"): "asks once which instructions the processor has; no other effect",
    ("system-call", "core/python/library.cc"): "opens the core, which is no part of the extension",
    ("system-call", "core/python/operations.cc"): "finds the operations that a framework has loaded",
    ("system-call", "core/python/engine.cc"): "is told of forks; copies and closes descriptors that Python hands over",
    ("system-call", "core/python/pulse.cc"): "copies descriptors that Python hands over; ends nothing in a child",
    ("system-call", "core/link/chaos.cc"): "the test-only library: stops and kills its own process on purpose",
    ("core-arrow", "core/link/chaos.cc"): "the test-only library: defines the chaos functions of the C interface",
    ("pickle", "src/farandole/objects.py"): "objects that users ask to send, over links that have proven the secret",
    (
        "pickle",
        "src/farandole/launch/calls.py",
    ): "functions that users ask to run, over channels that have proven the secret",
    ("socket", "src/farandole/reference.py"): "wraps the descriptors that rendezvous/ connected; opens none itself",
    ("environment", "src/farandole/compat.py"): "Horovod's `env`: sets what its caller asks for, and reads no setting",
    ("framework", "src/farandole/launch/clusters/store.py"): "torchrun's own store; loaded only in a job of torchrun",
    ("framework", "src/farandole/autoload.py"): "torch runs it; torch's registries are all that it touches",
    ("environment", "src/farandole/ray/worker.py"): "an actor is a rank: its place is put where ranks look for it",
    ("environment", "src/farandole/spark/task.py"): "Spark's own worker: what it has, ranks get; it reads no setting",
    ("environment", "src/farandole/autoload.py"): "runs in every import of torch: the settings would cost too much",
    ("environment", "src/farandole/tools/doctor.py"): "its probes get what a job would get; it reads no setting",
    ("process", "src/farandole/tools/bench/processes.py"): "peers and yardsticks do not run under what is measured",
    ("environment", "src/farandole/tools/bench/processes.py"): "they get what a job would get; it reads no setting",
    ("socket", "src/farandole/tools/bench/inside/stream.py"): "plain TCP, the yardstick; runs in a measurement alone",
    (
        "process",
        "src/farandole/compiled/__init__.py",
    ): "the compiler, once per version of a framework; it ends before the call returns",
    ("ctypes", "src/farandole/jax/compiled/__init__.py"): "JAX's own way to be told of a compiled function",
    ("ctypes", "src/farandole/mxnet/access.py"): "only MXNet's C interface tells where an array lies",
    ("ctypes", "src/farandole/launch/spawn.py"): "workers die with their launcher: prctl has no other door in Python",
}
