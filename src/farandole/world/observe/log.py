# The log: one logger, "farandole", that writes to stderr unless the program has its own handlers.
# Touches config.
"""`configure(config)` sets the logger's level, and adds a handler if the program has none."""

from __future__ import annotations

import logging

from farandole.base.config import Config

_LEVELS = {
    "trace": 5,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


def configure(config: Config) -> None:
    """Sets the level; adds a handler for stderr when neither this logger nor the root has one."""
    logger = logging.getLogger("farandole")
    logger.setLevel(_LEVELS[config.log_level])
    if not logger.hasHandlers():
        time = "" if config.log_hide_time else "%(asctime)s "
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"[{config.rank}] {time}farandole %(levelname)s: %(message)s"))
        logger.addHandler(handler)
