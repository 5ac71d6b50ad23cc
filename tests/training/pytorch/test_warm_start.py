"""What PyTorch keeps on disk of a fused module, from process to process."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from torch._dynamo.utils import counters
from onnx_attnfuse.training import fuse
from onnx_attnfuse.training.pytorch import backend
from tests.training.pytorch import masked
from tests.training.pytorch.masked import Masked, given

functions = backend._traced_functions()
assert functions
backend._traced_functions = lambda: {name: sys.argv[1] for name in functions}
torch.manual_seed(0)
module, inputs = fuse(Masked(masked.documents)), given("documents")
module(**inputs).sum().backward()
assert module.attention_reports[0].fused == 1
print(*(counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("hit", "miss", "bypass")))
"""


@pytest.mark.exhaustive
def test_a_second_process_compiles_nothing_until_a_function_in_the_graph_changes(tmp_path: pathlib.Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ATTNFUSE_DEBUG": "0"}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT, version], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for version in ("first", "first", "second")
    ]
    assert [output.split() for output in outputs] == [["0", "1", "0"], ["1", "0", "0"], ["0", "1", "0"]]
