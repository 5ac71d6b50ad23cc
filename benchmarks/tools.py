"""The commands that are compared, and what they ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.decoders import SIZES

HERE = Path(__file__).parent
PACKAGES = ("onnx-attnfuse", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "torch", "transformers", "numpy")


@dataclass(frozen=True)
class Case:
    """One model that every tool is given."""

    exporter: str
    layers: int
    size: str

    @property
    def name(self) -> str:
        """Name of the model's file, without suffix."""
        return f"decoder_{self.size}_{self.layers}_{self.exporter}"


@dataclass(frozen=True)
class Tool:
    """A tool and its command line.

    Attributes:
        name: What it is called in the tables.
        arguments: What follows the interpreter, from the case, the model's path and the output's.
    """

    name: str
    arguments: Callable[[Case, str, str], list[str]]

    def command(self, case: Case, model: Path, output: Path) -> list[str]:
        """The command line for one model."""
        return [sys.executable, *self.arguments(case, str(model), str(output))]

    @property
    def shown(self) -> str:
        """The command line for readers."""
        case = Case("dyn", 12, "small")
        return " ".join(
            ["python", *(text.replace(f"{HERE}/", "benchmarks/") for text in self.arguments(case, "MODEL", "OUTPUT"))]
        )


def _onnxruntime(model_type: str) -> Tool:
    def arguments(case: Case, model: str, output: str) -> list[str]:
        size = SIZES[case.size]
        shape = ["--num_heads", str(size.heads), "--hidden_size", str(size.hidden)]
        large = ["--use_external_data_format"] if case.size == "large" else []
        kind = ["--model_type", model_type, *shape, *large]
        return ["-m", "onnxruntime.transformers.optimizer", "--input", model, "--output", output, *kind]

    return Tool(f"onnxruntime {model_type}", arguments)


OURS = Tool(
    "attnfuse", lambda case, model, output: ["-m", "onnx_attnfuse_cli", "optimize", model, "-o", output, "--verify", "none"]
)
PEERS = (
    Tool("onnxscript", lambda case, model, output: [str(HERE / "onnxscript_command.py"), model, output]),
    _onnxruntime("qwen3"),
    _onnxruntime("gpt2"),
)


def environment() -> dict[str, str]:
    """Versions and machine."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    machine = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "processors": str(os.cpu_count()),
        "load at the start": load,
    }
    return machine | versions


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
