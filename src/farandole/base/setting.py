# What a setting is: its declaration, its names in variables, flags and YAML, and how a text becomes its value.
# Touches nothing; config.py declares the settings and reads the environment.
"""`Setting` describes one setting; `SETTINGS` of config.py has them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "FARANDOLE_"


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting."""

    name: str  # attribute of Config; the variable is FARANDOLE_<NAME>
    type: str  # "int", "float", "bool" or "str"; " | None" where it may be absent
    default: Any
    help: str
    unit: str = ""
    aliases: tuple[str, ...] = ()  # HOROVOD_* variables with the same meaning and unit
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float = 1 << 53  # the largest number that the core accepts
    flag: str = ""  # "" derives --name-with-dashes
    yaml: str = ""  # "section.key" in Horovod's configuration file
    scale: float = 1.0  # one unit of the flag and the YAML key in units of the variable
    inverted: bool = False  # the YAML key says the opposite of the variable
    synonyms: tuple[str, ...] = ()  # more flags with the same meaning
    opposites: tuple[str, ...] = ()  # flags that switch it off; () derives --no-name-with-dashes
    scope: str = "job"  # "worker": set by the launcher for each rank; "test": for tests alone
    forgiving: bool = False  # an unknown choice in a HOROVOD_ variable means the default, as in Horovod
    no_effect: str = ""  # why it is ignored, if it is accepted only for scripts of Horovod

    @property
    def variable(self) -> str:
        """The environment variable of this setting."""
        return PREFIX + self.name.upper()

    @property
    def variables(self) -> tuple[str, ...]:
        """All its variables; the first one wins."""
        return (self.variable, *self.aliases)

    @property
    def flags(self) -> tuple[str, ...]:
        """What sets it on the command line; a switch is set to 1."""
        return (self.flag or "--" + self.name.replace("_", "-"), *self.synonyms)

    @property
    def off_flags(self) -> tuple[str, ...]:
        """What sets a switch to 0."""
        first = self.flags[0]
        return self.opposites or ("--" + (first[5:] if first.startswith("--no-") else "no-" + first[2:]),)

    @property
    def key(self) -> str:
        """The "section.key" of the configuration file."""
        return self.yaml or f"params.{self.name}"

    @property
    def base(self) -> str:
        """The type without its None."""
        return self.type.partition(" ")[0]

    @property
    def expected(self) -> str:
        """What a value has to be, for messages."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        kind = {"int": "a whole number", "float": "a number", "bool": "0 or 1", "str": "text"}[self.base]
        if self.unit:
            kind += f" of {self.unit}"
        if self.minimum is not None:
            kind += f", at least {self.minimum:g}"
        if self.maximum < 1 << 53:
            kind += f", at most {self.maximum:g}"
        return kind

    def parse(self, text: str, variable: str) -> Any:
        """The value that `text` stands for; ValueError names `variable`, the text and what is expected."""
        text = text.strip()
        try:
            value = _PARSERS[self.base](text)
        except ValueError:
            raise ValueError(f"{variable}={text!r}: expected {self.expected}") from None
        if self.choices:
            value = value.lower()
            if value not in self.choices and self.forgiving and variable in self.aliases:
                return self.default
        self.check(value, variable)
        return value

    def read(self, environ: Mapping[str, str]) -> Any:
        """Its value in these variables; the default where none is set."""
        for variable in self.variables:
            # An empty variable counts as unset: shells often leave one.
            if environ.get(variable, "").strip():
                return self.parse(environ[variable], variable)
        return self.default

    def check(self, value: Any, source: str) -> None:
        """Raises ValueError if the value is out of range; `source` names where it came from."""
        if value is None:
            return
        bad_choice = bool(self.choices) and value not in self.choices
        # Written so that a NaN fails too.
        out_of_range = self.minimum is not None and not self.minimum <= value <= self.maximum
        if bad_choice or out_of_range:
            raise ValueError(f"{source}={value!r}: expected {self.expected}")


def _parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


_PARSERS: dict[str, Any] = {"int": int, "float": float, "bool": _parse_bool, "str": str}


def text_of(value: Any) -> str:
    """A value as the text of a variable. Scripts read `HOROVOD_STALL_CHECK_TIME_SECONDS` with `int`.

    >>> [text_of(value) for value in (True, 60.0, 2.5, "info")]
    ['1', '60', '2.5', 'info']
    """
    whole = isinstance(value, bool) or (isinstance(value, float) and value.is_integer())
    return str(int(value)) if whole else str(value)
