"""Calls a function in a process of its own, so that a crash or a hang stays there."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Crash:
    """A call that gave no result.

    Attributes:
        reason: What happened, in one line.
    """

    reason: str


def call(function: Callable[..., Any], *arguments: Any, seconds: float, preload: tuple[str, ...] = ()) -> Any | Crash:
    """Calls a function in a new process.

    Args:
        function: A function at the top of a module.
        *arguments: Its arguments; they and the result must pickle.
        seconds: The time limit.
        preload: Slow modules, imported once in the server that all processes are forked from. The
            first call decides.

    Returns:
        What the function returns, or why it did not.
    """
    context = _context(preload)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(seconds):
            return receiver.recv()
        process.kill()
        return Crash(f"timed out after {seconds:.0f} s")
    except EOFError:
        process.join()
        return Crash(f"the process ended with exit code {process.exitcode}")
    finally:
        process.join()
        receiver.close()


def _send(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Runs in the new process; what the function prints is dropped, also from native code."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        sender.send(function(*arguments))
    except Exception as error:  # noqa: BLE001 - a crash of the call is its result
        sender.send(Crash(f"{type(error).__name__}: {error}"))


def _context(preload: tuple[str, ...]) -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context
