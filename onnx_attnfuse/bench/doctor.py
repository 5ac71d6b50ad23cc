"""The state of this installation: versions, missing packages, and attention in ORTModule and in this tool: `examine()`.

torch and Triton are looked up, never imported; onnxruntime is, as only it knows its execution providers.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from onnx_attnfuse.kernels import gpus
from onnx_attnfuse.kernels.gpus import Gpu
from onnx_attnfuse.kernels.policy import Environment, read_environment
from onnx_attnfuse.kernels.providers import __file__ as folder
from onnx_attnfuse.kernels.providers import names

_PACKAGES = (
    *("onnx-attnfuse", "onnx", "onnx-ir", "onnxscript", "numpy"),
    *("onnxruntime", "onnxruntime-gpu", "onnxruntime-training", "torch", "triton", "transformers"),
)
_TRY_CUDA = """
import onnx, onnxruntime
from onnx import TensorProto, helper
if hasattr(onnxruntime, "preload_dlls"):
    onnxruntime.preload_dlls()
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "try", [x], [y])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
print(session.get_providers()[0])
"""
_CUDA_SECONDS = 120.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_KERNEL_VARIABLES = ("ORT_DISABLE_", "ORT_ENABLE_", "ORT_MIN_SEQ_LEN_", "ORT_GQA_")
_NO_GPU = "there is no NVIDIA GPU"
_FLASH_FROM = 80
_EFFICIENT_FROM, _EFFICIENT_IN_CODE = (2, 1, 1), (2, 3, 0)
"""The version of torch that ORTModule's guidelines ask for, and the one that its code asks for in 1.19.2."""


@dataclasses.dataclass(frozen=True)
class Missing:
    """Something that would be of use here."""

    what: str
    line: str
    """The command that installs it."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One question of ORTModule's decision tree."""

    name: Literal["flash", "efficient", "sdpa_fallback"]
    question: str
    holds: bool
    because: str
    exports: tuple[str, ...]
    """The variables that ask ORTModule for it."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The packages, execution providers and GPUs of a machine."""

    system: str
    python: str
    versions: Mapping[str, str | None]
    """Versions by package; None: not installed."""
    providers: tuple[str, ...]
    """Execution providers of the installed onnxruntime; none where it is absent or broken."""
    broken: str | None
    """Why onnxruntime cannot be imported, if it is installed."""
    gpus: tuple[Gpu, ...]
    cuda_fails: str | None = None
    """Why a session on CUDA does not start, where onnxruntime was built for it and there is a GPU."""

    @property
    def best_arch(self) -> int | None:
        """The highest compute capability, times ten; None without a GPU."""
        return max((gpu.arch for gpu in self.gpus), default=None)

    def has(self, package: str) -> bool:
        """Whether a package is installed."""
        return self.versions.get(package) is not None


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The doctor's answer: the machine, missing packages, and the steps towards its best kernels."""

    machine: Machine
    missing: tuple[Missing, ...]
    steps: tuple[Step, ...]
    environment: Environment
    kernel_variables: Mapping[str, str]
    """Variables of ONNX Runtime itself that are set and change which kernels it chooses."""
    records: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """The operators written for the installed execution providers, by the name that `--ep` takes."""
    tables: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """The outcomes of the forms tried on those of them that have a table."""

    @property
    def chosen(self) -> Step | None:
        """The first step that holds."""
        return next((step for step in self.steps if step.holds), None)

    @property
    def exports(self) -> tuple[str, ...]:
        """The variables by which this tool fuses only what runs the best kernels of this machine; on a CPU there are none."""
        best = self.machine.best_arch
        if best is None:
            return ()
        return (f"ATTNFUSE_USE_{'FLASH' if best >= _FLASH_FROM else 'EFFICIENT'}_ATTENTION=1",)


def examine(environ: Mapping[str, str] | None = None) -> Diagnosis:
    """Looks around.

    Args:
        environ: Variables by name; by default those of this process.

    Raises:
        OptionError: A variable of a policy is neither 0 nor 1.
    """
    environ = os.environ if environ is None else environ
    machine = _machine()
    variables = {name: value for name, value in environ.items() if name.startswith(_KERNEL_VARIABLES) and "ATT" in name}
    known = records(machine)
    policy = read_environment(environ)
    return Diagnosis(machine, missing(machine), steps(machine), policy, variables, known, tables(known))


def records(machine: Machine) -> Mapping[str, str]:
    """The first lines of the records of the providers that onnxruntime or a plugin of it has here, by the names of the records.

    Records are read as text, as importing them takes what may be missing.
    """
    found, known = dict[str, str](), set[str]()
    for name in names():
        path = pathlib.Path(folder).with_name(f"{name}.py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        record = {key: value for key, value in _constants(tree) if key in {"ort_name", "plugins"}}
        known.add(str(record.get("ort_name", "")))
        if record.get("ort_name") in machine.providers or any(_version(plugin) for plugin in record.get("plugins", ())):
            found[name] = (ast.get_docstring(tree) or "").splitlines()[0]
    return found | {name: "there is no record" for name in machine.providers if name not in known}


def tables(known: Iterable[str]) -> Mapping[str, str]:
    """Lines on the conformance tables that come along: how many forms of which operator are right, and with which version."""
    return {name: tried for name in known if (tried := _tried(pathlib.Path(folder).parents[1] / "conformance" / f"{name}.json"))}


def _tried(path: pathlib.Path) -> str | None:
    """A table in a line, read as plain JSON for the same reason; None: there is none."""
    if not path.exists():
        return None
    table = json.loads(path.read_text(encoding="utf-8"))
    op, verdict = (table["columns"].index(column) for column in ("op", "verdict"))
    tried = Counter(row[op] for row in table["cases"])
    right = Counter(row[op] for row in table["cases"] if row[verdict] == "right")
    counts = ", ".join(f"{name} {right[name]} of {count}" for name, count in tried.items())
    return f"correct forms with {', '.join(map(' '.join, table['versions'].items()))}: {counts}"


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """The constants that calls are handed by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg is not None:
            with contextlib.suppress(ValueError):
                yield node.arg, ast.literal_eval(node.value)


def _machine() -> Machine:
    versions = {package: _version(package) for package in (*_PACKAGES, *_other_runtimes())}
    providers: tuple[str, ...] = ()
    broken: str | None = None
    if importlib.util.find_spec("onnxruntime") is not None:
        try:
            onnxruntime: Any = importlib.import_module("onnxruntime")
            providers = tuple(onnxruntime.get_available_providers())
        except Exception as error:  # noqa: BLE001 - a missing library of CUDA shows as one of many errors
            broken = f"{type(error).__name__}: {' '.join(str(error).split())}"
    found = gpus.installed()
    fails = cuda_failure() if found and "CUDAExecutionProvider" in providers else None
    return Machine(platform.platform(), platform.python_version(), versions, providers, broken, found, fails)


def _other_runtimes() -> list[str]:
    """The distributions of ONNX Runtime that are installed for other execution providers, and its plugins."""
    names = {found.metadata["Name"] for found in importlib.metadata.distributions()}
    return sorted(name for name in names if name and name.startswith("onnxruntime") and name not in _PACKAGES)


def cuda_failure() -> str | None:
    """Why ONNX Runtime cannot start a session on CUDA, tried in a process of its own; it falls back to the CPU in silence."""
    try:
        command = [sys.executable, "-c", _TRY_CUDA]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_CUDA_SECONDS)
    except subprocess.TimeoutExpired:
        return f"it did not start in {_CUDA_SECONDS:g} s"
    if done.returncode == 0 and done.stdout.split() == ["CUDAExecutionProvider"]:
        return None
    lines = [line.strip() for line in _COLOUR.sub("", done.stderr).splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line] or lines or ["it says nothing"]
    return telling[0][:400]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing(machine: Machine) -> tuple[Missing, ...]:
    """Missing packages and drivers, each with how to get it."""
    found: list[Missing] = []
    extra = "gpu" if machine.gpus else "cpu"
    both = machine.has("onnxruntime") and machine.has("onnxruntime-gpu")
    if both:
        problem = "onnxruntime and onnxruntime-gpu are both installed, in one folder: whichever came last is there"
        found.append(Missing(problem, _installing(f"onnxruntime{'-gpu' * bool(machine.gpus)}", remove=True)))
    elif machine.broken:
        found.append(Missing(f"onnxruntime cannot be imported: {machine.broken}", _installing(f"'onnx-attnfuse[{extra}]'")))
    elif not machine.providers:
        found.append(Missing("onnxruntime, to verify and to run models", f"pip install 'onnx-attnfuse[{extra}]'"))
    elif machine.gpus and "CUDAExecutionProvider" not in machine.providers:
        found.append(Missing("the GPU build of onnxruntime", _installing("'onnx-attnfuse[gpu]'", remove=True)))
    if old := _old_runtime(machine):
        found.append(Missing(old, f"pip install --upgrade 'onnx-attnfuse[{extra}]'"))
    if machine.cuda_fails:
        problem = f"CUDA for onnxruntime, which runs on the CPU instead: {machine.cuda_fails}"
        found.append(Missing(problem, "pip install 'onnxruntime-gpu[cuda,cudnn]'"))
    if not machine.has("torch"):
        found.append(Missing("torch, to export models and for ORTModule", "pip install 'onnx-attnfuse[torch]'"))
    if machine.gpus and not machine.has("triton"):
        found.append(Missing("Triton, for the flash attention of ORTModule; nothing else needs it", "pip install triton"))
    return tuple(found)


def _old_runtime(machine: Machine) -> str | None:
    """The complaint about an onnxruntime that is too old to verify with, or None."""
    version = machine.versions.get("onnxruntime") or machine.versions.get("onnxruntime-gpu")
    if version is None:
        return None
    from onnx_attnfuse.verify.runtime import OLDEST, is_old

    wanted = ".".join(map(str, OLDEST))
    problem = f"onnxruntime {wanted} or newer; {version} is too old to verify with, so differences are only called unverified"
    return problem if is_old(version) else None


def _installing(what: str, *, remove: bool = False) -> str:
    removing = "pip uninstall -y onnxruntime onnxruntime-gpu && " if remove else ""
    return f"{removing}pip install --force-reinstall {what}"


def steps(machine: Machine) -> tuple[Step, ...]:
    """ORTModule's decision tree, answered for this machine; the first that holds is to be taken."""
    return (_flash(machine), _efficient(machine), _fallback(machine))


def _flash(machine: Machine) -> Step:
    best = machine.best_arch
    reasons: list[str] = []
    if best is None:
        reasons.append(_NO_GPU)
    elif best < _FLASH_FROM:
        reasons.append(f"the compute capability is {best // 10}.{best % 10}")
    if not machine.has("triton"):
        reasons.append("Triton is not installed")
    because = " and ".join(reasons) or f"compute capability {(best or 0) / 10}, Triton {machine.versions['triton']}"
    exports = ("ORTMODULE_USE_TRITON=1", "ORTMODULE_USE_FLASH_ATTENTION=1")
    return Step("flash", "compute capability 8.0 or more, and Triton?", not reasons, because, exports)


def _efficient(machine: Machine) -> Step:
    version = machine.versions.get("torch")
    holds = version is not None and numbers(version) >= _EFFICIENT_FROM
    because = "torch is not installed" if version is None else f"torch is {version}"
    if version is not None and holds and numbers(version) < _EFFICIENT_IN_CODE:
        because += "; the code of ORTModule 1.19.2 asks for 2.3"
    if not machine.gpus:
        because += f", but {_NO_GPU}"
    question, exports = "torch 2.1.1 or newer?", ("ORTMODULE_USE_EFFICIENT_ATTENTION=1",)
    return Step("efficient", question, holds and bool(machine.gpus), because, exports)


def _fallback(machine: Machine) -> Step:
    because = "if the model is so: `attnfuse explain MODEL` says no_mask at such attention" if machine.gpus else _NO_GPU
    question, exports = "scaled_dot_product_attention without a mask?", ("ORTMODULE_ATEN_SDPA_FALLBACK=1",)
    return Step("sdpa_fallback", question, bool(machine.gpus), because, exports)


def numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version: (2, 1, 1) for `2.1.1+cu121`."""
    found = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    return tuple(int(number or 0) for number in found.groups()) if found else (0, 0, 0)
