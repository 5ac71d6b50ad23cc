"""Records the gradient graphs of all cases with the real ORTModule, or of those named; they are read by the ordinary tests.

make record-training
"""

from __future__ import annotations

import contextlib
import gzip
import os
import pathlib
import sys

os.environ["ORTMODULE_FALLBACK_POLICY"] = "FALLBACK_DISABLE"

import onnx
import torch

from onnx_attnfuse.training import ORTModule
from onnx_attnfuse.training.ortmodule.newer_torch import ortmodule
from onnx_attnfuse.training.ortmodule.symbolics import gives_zeros
from tests.training.modules import CASES, Case

FOLDER = pathlib.Path(__file__).parent / "recorded"
_OPSET = 17


class Recorder:
    """Keeps the last graph that ORTModule built."""

    def __init__(self) -> None:
        self.graph = onnx.GraphProto()
        ortmodule().register_graph_optimizer(priority=2)(self)  # before what fuses it

    def __call__(self, graph: onnx.GraphProto) -> None:
        self.graph = onnx.GraphProto()
        self.graph.CopyFrom(graph)

    def record(self, case: Case) -> onnx.ModelProto:
        """The gradient graph of a case, without what only tells where its nodes came from."""
        self.graph = onnx.GraphProto()
        module = ORTModule(case.module())
        with torch.autocast("cpu", torch.float16, enabled=case.autocast), contextlib.suppress(Exception if case.autocast else ()):
            module(**case.inputs())  # of float16 it makes the graph, and fails afterwards
        assert self.graph.node
        for node in self.graph.node:
            node.ClearField("doc_string")
        model = onnx.helper.make_model(self.graph, opset_imports=[onnx.helper.make_opsetid("", _OPSET)], ir_version=8)
        for domain in ("com.microsoft", "org.pytorch.aten"):
            model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
        return model


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    recorder = Recorder()
    for name in sys.argv[1:] or [name for name, case in CASES.items() if case.zeroed == gives_zeros()]:
        model = recorder.record(CASES[name])
        (FOLDER / f"{name}.onnx.gz").write_bytes(gzip.compress(model.SerializeToString(), mtime=0))


if __name__ == "__main__":
    main()
