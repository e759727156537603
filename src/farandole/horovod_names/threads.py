# horovod.runner.util.threads: runs functions in threads.
# Starts threads.
"""`in_thread`, `on_event` and `execute_function_multithreaded`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts a thread. `silent`: errors of the function are ignored."""
    if not isinstance(args, tuple):
        raise ValueError(f"args={args!r}: expected a tuple")

    def body() -> None:
        try:
            target(*args)
        except Exception:
            if not silent:
                raise

    thread = threading.Thread(target=body, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Calls `func(*args)` in a thread when the event is set; not if `stop` is set before."""
    if event is None:
        raise ValueError("event=None: expected a threading.Event")

    def body() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        func(*args)

    return in_thread(body, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Calls `fn` with each list of arguments, many at a time. Returns results by index; None if it does not wait."""
    if not args_list:
        return {}
    pool = ThreadPoolExecutor(min(len(args_list), max_concurrent_executions), "horovod-calls")
    futures = [pool.submit(fn, *args) for args in args_list]
    pool.shutdown(wait=block_until_all_done)
    return {index: future.result() for index, future in enumerate(futures)} if block_until_all_done else None
