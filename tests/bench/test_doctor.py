"""The doctor: what it finds, what it says is missing, and the way through the decision tree."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

import pytest

from onnx_attnfuse.bench.doctor import Diagnosis, Machine, cuda_failure, examine, missing, numbers, records, steps, tables
from onnx_attnfuse.kernels import gpus
from onnx_attnfuse.kernels.conformance import known
from onnx_attnfuse.kernels.device import resolve
from onnx_attnfuse.kernels.gpus import Gpu
from onnx_attnfuse.kernels.policy import read_environment
from onnx_attnfuse_cli.main import main
from tests.test_public_api import in_a_process_of_its_own

T4, A100, H200 = (
    Gpu(name, arch, "580.65", "81559 MiB") for name, arch in (("Tesla T4", 75), ("NVIDIA A100", 80), ("NVIDIA H200", 90))
)
ALL = {"onnxruntime-gpu": "1.31.1", "torch": "2.13.0", "triton": "3.5.0"}
CUDA = ("CUDAExecutionProvider", "CPUExecutionProvider")


def machine(*found: Gpu, versions: dict[str, str] | None = None, providers: tuple[str, ...] = CUDA, broken: str | None = None):
    return Machine("Linux", "3.11", dict(ALL if versions is None else versions), providers, broken, found)


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        (machine(H200), "flash"),
        (machine(A100), "flash"),
        (machine(T4, A100), "flash"),
        (machine(T4), "efficient"),
        (machine(A100, versions={"torch": "2.13.0"}), "efficient"),
        (machine(A100, versions={"torch": "2.1.1+cu121"}), "efficient"),
        (machine(A100, versions={"torch": "2.1.0"}), "sdpa_fallback"),
        (machine(T4, versions={}), "sdpa_fallback"),
        (machine(), None),
    ],
)
def test_the_first_step_that_holds(found: Machine, chosen: str | None) -> None:
    diagnosis = Diagnosis(found, (), steps(found), read_environment({}), {})
    assert (diagnosis.chosen.name if diagnosis.chosen else None) == chosen


def test_between_the_guidelines_and_the_code() -> None:
    assert "asks for 2.3" in steps(machine(T4, versions={"torch": "2.2.0"}))[1].because
    assert "asks for 2.3" not in steps(machine(T4, versions={"torch": "2.3.0"}))[1].because


@pytest.mark.parametrize(("arch", "exports"), [((T4,), "EFFICIENT"), ((H200,), "FLASH"), ((), "")])
def test_what_to_export_for_us(arch: tuple[Gpu, ...], exports: str) -> None:
    diagnosis = Diagnosis(machine(*arch), (), (), read_environment({}), {})
    assert diagnosis.exports == ((f"ATTNFUSE_USE_{exports}_ATTENTION=1",) if exports else ())


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        (machine(H200), []),
        (machine(versions={}, providers=()), ["pip install 'onnx-attnfuse[cpu]'", "pip install 'onnx-attnfuse[torch]'"]),
        (machine(H200, versions=ALL | {"onnxruntime-gpu": "1"}, providers=()), ["pip install 'onnx-attnfuse[gpu]'"]),
        (
            machine(H200, versions={"onnxruntime": "1.31.1", "torch": "2.13.0"}, providers=("CPUExecutionProvider",)),
            [
                "pip uninstall -y onnxruntime onnxruntime-gpu && pip install --force-reinstall 'onnx-attnfuse[gpu]'",
                "pip install triton",
            ],
        ),
        (
            machine(H200, versions={**ALL, "onnxruntime": "1.31.1"}),
            ["pip uninstall -y onnxruntime onnxruntime-gpu && pip install --force-reinstall onnxruntime-gpu"],
        ),
        (
            machine(H200, providers=(), broken="ImportError: libcudart.so.13"),
            ["pip install --force-reinstall 'onnx-attnfuse[gpu]'"],
        ),
    ],
)
def test_what_is_missing_has_a_line_to_install_it(found: Machine, lines: list[str]) -> None:
    assert [item.line for item in missing(found)] == lines


def test_cuda_that_does_not_start_is_missing() -> None:
    """The CPU build falls back to the CPU when it is asked for CUDA, as a GPU build without its libraries does."""
    failure = cuda_failure()
    assert failure
    found = dataclasses.replace(machine(H200), cuda_fails="libcudnn.so.9: cannot open shared object file")
    (item,) = missing(found)
    assert item.line == "pip install 'onnxruntime-gpu[cuda,cudnn]'"
    assert "libcudnn.so.9" in item.what


def test_versions_are_compared_as_numbers() -> None:
    assert numbers("2.13.0+cpu") > numbers("2.3") > numbers("2.1.1.post1") >= numbers("2.1.1rc2")


def fake_driver(folder: pathlib.Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts an `nvidia-smi` that answers `text` first on the path."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_driver_tells_what_gpus_there_are(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "NVIDIA H200, 9.0, 580.65.06, 143771 MiB\nTesla T4, 7.5, 580.65.06, 15360 MiB"
    fake_driver(tmp_path, answer, monkeypatch)
    assert [(gpu.name, gpu.arch, gpu.capability) for gpu in gpus.installed()] == [
        ("NVIDIA H200", 90, "9.0"),
        ("Tesla T4", 75, "7.5"),
    ]
    assert resolve("cuda").name == "cuda:sm90"


@pytest.mark.parametrize(
    "answer", ["", "NVIDIA-SMI has failed because it could not reach the driver", "a, b, c, d", "[N/A], [N/A]"]
)
def test_a_driver_that_cannot_tell_is_no_gpu(answer: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(tmp_path, answer, monkeypatch)
    assert gpus.installed() == ()


def test_the_command_tells_of_gpu_variables_and_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    fake_driver(tmp_path, "NVIDIA A100, 8.0, 580.65.06, 81559 MiB", monkeypatch)
    monkeypatch.setenv("ATTNFUSE_USE_EFFICIENT_ATTENTION", "0")
    monkeypatch.setenv("ORT_DISABLE_FLASH_ATTENTION", "1")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA A100, compute capability 8.0, 81559 MiB, driver 580.65.06" in out
    assert "set                  ATTNFUSE_USE_EFFICIENT_ATTENTION=0" in out
    assert "set                  ORT_DISABLE_FLASH_ATTENTION=1" in out
    assert "missing: the GPU build of onnxruntime" in out
    assert "    export ATTNFUSE_USE_FLASH_ATTENTION=1 " in out
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["gpus"][0]["arch"] == 80
    assert found["kernel_variables"] == {"ORT_DISABLE_FLASH_ATTENTION": "1"}
    assert found["chosen"] == next(step["name"] for step in found["steps"] if step["holds"])


def test_a_malformed_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ORTMODULE_USE_TRITON", "true")
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == "Error: ORTMODULE_USE_TRITON is 'true'; set it to 0 or 1, or unset it\n"


def test_nothing_needs_to_be_installed() -> None:
    code = """
        import importlib.metadata
        version = importlib.metadata.version
        def of_others(name):
            if name.startswith(("onnxruntime", "torch", "triton")):
                raise importlib.metadata.PackageNotFoundError(name)
            return version(name)
        importlib.metadata.version = of_others
        from onnx_attnfuse_cli.main import main
        print(main(["doctor"]))
        print(sorted({"numpy", "onnx", "rich"} & {*sys.modules}))
    """
    lines = in_a_process_of_its_own(code).splitlines()
    assert lines[-2:] == ["0", "[]"]
    assert any(line.startswith("missing: onnxruntime") for line in lines)
    assert any(line.startswith("missing: torch") for line in lines)


def test_it_looks_here() -> None:
    found = examine({})
    assert "CPUExecutionProvider" in found.machine.providers
    assert found.machine.versions["onnx"]


def test_the_record_of_each_provider_that_is_here_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "onnx_attnfuse.bench.doctor._version", lambda package: "0.5" if package == "onnxruntime-ep-webgpu" else None
    )
    found = records(machine(providers=("QNNExecutionProvider", "CPUExecutionProvider", "NewExecutionProvider")))
    assert list(found) == ["cpu", "qnn", "webgpu", "NewExecutionProvider"]
    assert found["qnn"].startswith("The QNN provider for Qualcomm's NPU: contrib operators go to the CPU")
    assert found["NewExecutionProvider"] == "there is no record"


def test_a_plugin_counts_as_installed_by_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx_attnfuse.bench.doctor._version", lambda package: "2.7" if package == "onnxruntime-qnn" else None)
    assert list(records(machine(providers=("CPUExecutionProvider",)))) == ["cpu", "qnn"]


def test_what_was_tried_on_a_provider_is_told_where_a_table_comes_along() -> None:
    found = tables(["cpu", "coreml", "NewExecutionProvider"])
    assert list(found) == ["cpu"]
    table = known("cpu")
    assert table is not None
    right = sum(case.verdict == "right" for case in table.cases if case.form.op == "MultiHeadAttention")
    count = sum(case.form.op == "MultiHeadAttention" for case in table.cases)
    assert f"MultiHeadAttention {right} of {count}" in found["cpu"]
    assert found["cpu"].startswith("correct forms with onnxruntime ")
