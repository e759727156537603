"""The rules of the repository as tables: rooms and what they may use, and every exception with its reason.
Only data; scripts/house.py applies it."""

from __future__ import annotations

# Core: a room and the rooms it may include. Includes only go down.
CORE_ROOMS: dict[str, set[str]] = {
    "base": set(),
    "os": {"base"},
    "wire": {"base"},
    "trace": {"base", "os"},
    "kernel": {"base"},
    "cuda": {"base", "os"},
    "link": {"base", "os", "wire", "trace"},
    "group": {"base", "os", "wire", "trace", "link"},
    "collective": {"base", "os", "wire", "trace", "link", "group", "kernel", "cuda"},
    "negotiate": {"base", "wire"},
    "engine": {"base", "os", "wire", "trace", "link", "group", "kernel", "cuda", "collective", "negotiate"},
    "api": {"base", "os", "wire", "trace", "link", "group", "kernel", "collective", "negotiate", "engine", "cuda"},
    "python": {"api"},  # a separate extension module, which opens the core at run time
}

# Headers that declare system calls.
SYSTEM_HEADERS = (
    r"(sys|linux|netinet|arpa|net|asm)/.*|unistd\.h|fcntl\.h|poll\.h|signal\.h|csignal|pthread\.h|sched\.h|dlfcn\.h"
    r"|netdb\.h|spawn\.h|termios\.h"
)

# A pattern that is forbidden in the core's code, and the reason.
FORBIDDEN_CALLS: dict[str, str] = {
    # Our own functions may have the same short names. System functions are called with a leading ::.
    r"(?<![\w.>:])((::)?(socket|accept4|getaddrinfo)|::(connect|accept|bind|listen))\s*\(": "the core opens no socket",
    r"(?<!\w)(getenv|setenv|secure_getenv)\s*\(": "the core reads no environment",
    r"(?<![\w.>:])(::)?(fork|vfork|system|popen|execve?|execvp|posix_spawn)\s*\(": "the core starts no process",
    r"(?<!\w)(std::cerr|std::cout|stderr|stdout)(?!\w)": "the core writes nothing for people; it posts events",
    r"(?<![\w.>:])(::)?(abort|exit|_exit|terminate)\s*\(": "the core never ends the process",
}

# Python: a room (a folder or a file of src/farandole, or one inside a room) and the rooms it may import. A line for
# something inside a room is a separate room: "engine" does not mean "engine/interface". Not import-linter: its layers
# are one order. A set for each room would need as many contracts, each with all the rooms that are not in the set.
_TYPES = {"base", "engine/interface"}
_WORLD = _TYPES | {"engine", "rendezvous", "world", "world/groups"}
_OPERATIONS = _WORLD | {"operations"}
_FRAMEWORK = _OPERATIONS | {"operations/arrays", "bindings", "bindings/private", "elastic"}
# Files of Keras's binding that TensorFlow's binding uses too. Keras's binding is above it and uses all frameworks.
_OF_KERAS = {"keras/compression", "keras/elastic_bodies", "keras/framework", "keras/values"}
_ESTIMATOR = {"base", "launch", "spark/common"}
PYTHON_ROOMS: dict[str, set[str]] = {
    "base": set(),
    "data": set(),
    "autoload": set(),  # the import of torch runs it, and it loads no other file of the package
    "observe": set(),
    "engine/interface": {"base"},
    "engine/specification": _TYPES,
    "engine": _TYPES | {"engine/specification", "observe"},
    "engine/cuda": {"base", "engine"},
    "rendezvous": {"base"},
    "rendezvous/elastic": {"base", "rendezvous"},
    "clusters": {"base", "rendezvous"},
    "world/groups": _TYPES,
    "world/observe": _TYPES,
    "world/tuning": _TYPES,
    "world": _WORLD | {"engine/cuda", "observe", "world/observe", "world/tuning", "rendezvous/elastic", "clusters"},
    "operations/arrays": _TYPES,
    "operations": _OPERATIONS | {"operations/arrays"},
    # Shared by the framework bindings. Only the files for private names know frameworks.
    "bindings/private": {"base"},
    "bindings": _OPERATIONS,
    "elastic": _OPERATIONS,
    "launch": {"base", "observe", "rendezvous", "rendezvous/elastic", "clusters", "launch/build"},
    "launch/build": {"base", "engine/cuda"},  # it prints what is here, and no job follows
    "__init__": _OPERATIONS | {"launch"},
    "__main__": {"launch"},
    "torch": _FRAMEWORK | {"clusters", "autoload", "engine/cuda"},
    **dict.fromkeys(_OF_KERAS, _FRAMEWORK | _OF_KERAS),
    "tensorflow": _FRAMEWORK | _OF_KERAS,
    "jax": _FRAMEWORK,
    "mxnet": _FRAMEWORK | {"autoload"},
    "keras": _FRAMEWORK | _OF_KERAS | {"torch", "tensorflow", "jax"},
    "tensorflow/keras": _FRAMEWORK | _OF_KERAS | {"keras", "tensorflow"},
    "keras/inner": _FRAMEWORK | _OF_KERAS | {"keras", "tensorflow/keras"},  # Horovod's functions of both Keras packages
    # It wraps any optimizer, also those of Keras.
    "tensorflow/optimizer": _FRAMEWORK | {"tensorflow", "tensorflow/keras"},
    "tensorflow/__init__": _FRAMEWORK | {"tensorflow", "tensorflow/keras", "tensorflow/optimizer"},
    "lightning": _FRAMEWORK | {"launch", "clusters", "autoload", "torch"},
    "ray": _WORLD | {"bindings", "bindings/private", "launch", "rendezvous/elastic", "lightning", "autoload"},
    "lightning/fit": {"base", "launch", "clusters", "lightning", "ray"},  # a program: with Ray it starts ranks there
    "spark": _WORLD | {"bindings/private", "launch", "rendezvous/elastic"},
    "spark/common": {"base", "bindings/private", "launch", "spark"},
    "spark/torch": _ESTIMATOR | {"torch"},
    "spark/lightning": _ESTIMATOR | {"spark/torch", "lightning", "torch"},
    "spark/data_loaders": {"data"},
    "spark/tensorflow": _OPERATIONS | {"spark", "tensorflow"},
    "spark/keras": _ESTIMATOR | {"bindings", "bindings/private", "keras", "tensorflow/keras", *_OF_KERAS},
    "tools": _OPERATIONS | {"engine/cuda", "bindings/private", "launch", "clusters", "__init__", "elastic"},
    # Names that other programs import from Horovod's launcher; nothing of ours imports them.
    "horovod_names": {
        "base",
        "rendezvous",
        "rendezvous/elastic",
        "launch",
        "launch/build",
        "clusters",
        "bindings",
        "elastic",
    },
}

# Only the room that is named after a framework may import that framework. If a framework is built on another one, its
# room may import the other one too.
BUILT_ON = {
    "bindings/private": {"torch", "pyspark"},
    "keras": {"torch"},
    "lightning": {"torch"},
    "lightning/fit": {"torch", "lightning"},
    "spark": {"pyspark"},
    "spark/common": {"pyspark"},
    "spark/tensorflow": {"pyspark"},
    "spark/data_loaders": {"torch"},
    "spark/torch": {"torch"},
    "spark/lightning": {"torch", "lightning"},
    "spark/keras": {"keras", "tensorflow", "torch"},
}
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "mxnet", "lightning", "pytorch_lightning", "ray", "pyspark"}

# Tests must wait for events. A sleep needs its reason on the same line: `# sleep: why` (`// sleep: why` in C++).
# This is also a rule for shell commands, except for processes that only have to exist for a time ("sleep 60").
SLEEPS = r"\b(?:u|nano)?sleep(?:_for|_until)?(?:\s*\(| [0-9](?![0-9]))"
SLEEP_REASON = r"(?:#|//) sleep: \w"

# Paths and settings of one machine. They are split here, so that this file itself does not break the rule.
FORBIDDEN_WORDS = ["/wo" + "rk/", "index" + "-url", "find" + "-links", "/opt/" + "pypi", "/root" + "/"]

# By rule, the files that may break it and the reason. A broken rule without a line here is an error, and so is a line
# that is not needed.
EXCEPTIONS: dict[str, dict[str, str]] = {
    "core-arrow": {
        "core/link/chaos.cc": "the test-only library: defines the chaos functions of the C interface",
    },
    "ctypes": {
        "src/farandole/jax/compiled/__init__.py": "JAX's own way to register a compiled function",
        "src/farandole/launch/spawn.py": "workers die with their launcher; only ctypes can call prctl",
        "src/farandole/mxnet/access.py": "only MXNet's C interface tells where an array lies",
    },
    "environment": {
        "src/farandole/autoload.py": "runs in every import of torch: the settings would cost too much",
        "src/farandole/bindings/compat.py": "Horovod's `env`: sets what its caller asks for, and reads no setting",
        "src/farandole/horovod_names/env.py": "Horovod's `env`: its callers ask what variables say",
        "src/farandole/horovod_names/http_server.py": "the key of ranks that its caller starts",
        "src/farandole/horovod_names/launch.py": "the command line gets it as an argument",
        "src/farandole/horovod_names/safe_shell_exec.py": "passes variables to commands; it reads no setting",
        "src/farandole/ray/worker.py": "an actor is a rank: sets the variables that ranks read",
        "src/farandole/spark/task.py": "passes the variables of Spark's worker to ranks; it reads no setting",
        "src/farandole/tools/bench/processes.py": "passes variables to programs as a job would; it reads no setting",
        "src/farandole/tools/doctor.py": "passes variables to its probes as a job would; it reads no setting",
    },
    "framework": {
        "src/farandole/clusters/torch_store.py": "torchrun's own store; loaded only in a job of torchrun",
    },
    "import-by-name": {
        "src/farandole/autoload.py": "the module of a name is loaded when the name is used",
        "src/farandole/base/named.py": "the only file that does",
        "src/farandole/tools/bench/inside/libraries.py": "runs where this package may not be",
    },
    "pickle": {
        "src/farandole/launch/calls.py": "functions that users ask to run, over channels that have proven the secret",
        "src/farandole/observe/flight.py": "writes what torch's analyser reads, and reads none",
        "src/farandole/operations/objects.py": "objects that users ask to send, over links that have proven the secret",
    },
    "process": {
        "src/farandole/bindings/compiled/__init__.py": "the compiler, once per framework; ends before the call returns",
        "src/farandole/tools/bench/processes.py": "other libraries must not run under the launcher that is measured",
    },
    "socket": {
        "src/farandole/engine/reference_links.py": "wraps the descriptors that rendezvous/ connected; opens none",
        "src/farandole/tools/bench/inside/stream.py": "plain TCP, for comparison; runs only in a measurement",
    },
    "system-call": {
        "core/link/chaos.cc": "the test-only library: stops and kills its own process on purpose",
        "core/python/engine.cc": "has a callback for forks; copies and closes descriptors that Python hands over",
        "core/python/heartbeat.cc": "copies descriptors that Python hands over; ends nothing in a child",
        "core/python/library.cc": "opens the core, which is no part of the extension",
        "core/python/operations.cc": "finds the operations that a framework has loaded",
        "core/wire/crc32c.cc": "asks once which instructions the processor has; no other effect",
    },
}
