"""Training on PyTorch itself, without ORTModule: attention in the graphs that Dynamo captures is read and replaced.

    fuse(module)                                   onnx_attnfuse.training.fuse
    torch.compile(module, backend="attnfuse")      the same, as a backend

`backend` is the way in; `trace` writes a captured graph down as ONNX operators, `sites` reads attentions in that, `plan` chooses
the call for each, `rewrite` puts it into the captured graph, and `calls`, `rows` and `flex` run then.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from onnx_attnfuse.errors import MissingDependencyError

OLDEST = (2, 11)
"""The oldest PyTorch that this was tried with."""


def _check_torch() -> None:
    """Checks that PyTorch is there, and new enough, before modules that need its parts are imported.

    Raises:
        MissingDependencyError: It is not.
    """
    needed = f"training on PyTorch needs torch {OLDEST[0]}.{OLDEST[1]} or newer"
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(f"{needed}, which is not installed; run pip install torch")
    torch: Any = importlib.import_module("torch")
    major, minor, *_ = torch.__version__.split(".")
    if (int(major), int(minor)) < OLDEST:
        remedy = "run pip install --upgrade torch, or train with backend='ortmodule'"
        raise MissingDependencyError(f"{needed}, and {torch.__version__} is installed; {remedy}")


_check_torch()
