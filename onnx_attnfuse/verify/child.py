"""Runs models in a process that may die: `python child.py`, spoken to by `onnx_attnfuse.verify.subprocess_runner`.

It imports nothing of this library, so that it starts in the time that ONNX Runtime takes. A message is a pickle after its
length.
"""

from __future__ import annotations

import importlib
import os
import pickle
import struct
import sys
from collections.abc import Callable
from typing import IO, Any

LENGTH = struct.Struct("<Q")
_MEMORY = 8 << 30
"""Bytes that a model may take besides what the process has once it is started."""


def read(stream: IO[bytes]) -> Any:
    """The next message.

    Raises:
        EOFError: The other side has ended.
    """
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    if len(body) < length:
        raise EOFError
    return pickle.loads(body)


def write(message: object, stream: IO[bytes]) -> None:
    """Sends a message."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def serve(start: Callable[[], Callable[[Any], Any]]) -> int:
    """Answers messages until stdin ends; whatever else the process prints goes to stderr, and does not come between.

    Args:
        start: Gives the function that answers.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answer = start()
    while True:
        try:
            message = read(sys.stdin.buffer)
        except EOFError:
            return 0
        write(answer(message), answers)


def complaint(error: Exception) -> str:
    """An error in a line."""
    return " ".join(str(error).split())[:300]


def _started() -> Callable[[Any], Any]:
    """Answers with results, or with the line of an error."""
    onnxruntime: Any = importlib.import_module("onnxruntime")
    _limit_memory()
    known: dict[object, Any] = {}

    def answer(message: Any) -> Any:
        model, folder, outputs, feeds = message
        try:
            if (model, folder) not in known:
                known.clear()
                known[model, folder] = session(onnxruntime, model, folder)
            return known[model, folder].run(outputs, feeds), None
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            return None, complaint(error)

    return answer


def session(onnxruntime: Any, model: bytes | str, folder: str | None) -> Any:
    """A session on the CPU with nothing optimised, of a serialized model with data files in a folder, or of a file."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _limit_memory() -> None:
    """Lets an allocation fail before the machine is out of memory, where the system can."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - as quick as can be
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY, taken + _MEMORY))
    except (ImportError, OSError, ValueError):
        return


if __name__ == "__main__":
    sys.exit(serve(_started))
