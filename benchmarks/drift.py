"""The same models over versions of what makes and runs them.

    python -m benchmarks.drift [--newest] [--to PAGE]

Every row has an environment of its own, made by pip. Exports are made once for each pair of transformers and onnxscript, at
several opsets; each ONNX Runtime and onnx then optimises and verifies all of them, and the bundled models. `make drift` writes
the page.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
BUNDLED = REPOSITORY / "models" / "bundled"
MAKERS = (
    ("transformers==5.0.0", "onnxscript==0.6.0", "onnx==1.20.1", "diffusers==0.37.0", "torch==2.13.0"),
    ("transformers==5.24.0", "onnxscript==0.7.2", "onnx==1.23.2", "diffusers==0.42.1", "torch==2.13.0"),
)
"""What exports are made with; onnxruntime is not needed for that."""
RUNNERS = (
    ("onnxruntime==1.28.0", "onnx==1.19.0", "onnxscript==0.6.0", "onnx-ir==0.2.0"),
    ("onnxruntime==1.29.0", "onnx==1.20.1", "onnxscript==0.6.2"),
    ("onnxruntime==1.30.0", "onnx==1.21.0", "onnxscript==0.7.0"),
    ("onnxruntime==1.31.1", "onnx==1.22.0", "onnxscript==0.7.1"),
    ("onnxruntime==1.32.0", "onnx==1.23.2", "onnxscript==0.7.2"),
)
"""What models are optimised, verified and run with."""
FAMILIES = "bert,gpt2,llama_past,t5,vit,swin,whisper_decoder"
EXPORTERS = "dyn18,dyn19,dyn20,dyn21,dyn22,dyn23,dyn24,dyn25,dyn26,ts17"


@dataclasses.dataclass(frozen=True)
class Environment:
    """Packages that are installed together."""

    packages: tuple[str, ...]
    """Requirements; without a version the newest."""
    folder: pathlib.Path

    @property
    def python(self) -> pathlib.Path:
        """The interpreter."""
        return self.folder / ("Scripts" if os.name == "nt" else "bin") / "python"

    def make(self) -> str:
        """Installs everything anew, the project too; returns why it cannot be done, or nothing."""
        shutil.rmtree(self.folder, ignore_errors=True)
        commands = [[sys.executable, "-m", "venv", self.folder]]
        commands.append([self.python, "-m", "pip", "install", "--quiet", "--upgrade", "--editable", REPOSITORY, *self.packages])
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200]
        return ""

    def versions(self) -> str:
        """What was installed of the packages that the row names."""
        names = [package.partition("==")[0] for package in self.packages]
        code = f"from importlib.metadata import version; print(', '.join(n + ' ' + version(n).split('+')[0] for n in {names!r}))"
        return self.run("-c", code).stdout.strip()

    def run(self, *arguments: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
        """Runs its interpreter on the project."""
        return subprocess.run(
            [self.python, *arguments], capture_output=True, text=True, check=False, cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """What one environment makes of the models of one other."""

    maker: str
    runner: str
    models: tuple[dict[str, Any], ...]
    """Rows of `models.coverage`, one for each model."""
    failure: str = ""
    """Why there are none."""

    @property
    def problems(self) -> list[str]:
        """What is not as it should be, a line for each model."""
        if self.failure:
            return [self.failure]
        lines = [(item["name"], item["crash"] or "; ".join(item["comparison"]["wrong"])) for item in self.models]
        return [f"{name}: {said}" for name, said in lines if said]

    @property
    def cells(self) -> list[str]:
        """Its cells in the table."""
        fused, sites = (sum(item[key] or 0 for item in self.models) for key in ("fused", "sites"))
        compared = [item["comparison"] or {} for item in self.models]
        wrong = sum(bool(item.get("wrong")) for item in compared)
        ended = sum(bool(item["crash"]) for item in self.models)
        run = sum(item.get("cases", 0) > 0 for item in compared)
        status = "-" if self.failure else str(int(bool(self.problems)))
        return [self.maker, self.runner, str(len(self.models)), f"{fused}/{sites}", str(run), str(wrong), str(ended), status]

    def counts(self) -> dict[str, tuple[str, str]]:
        """For each model that has a report its sites, and why some stay."""
        told = [item for item in self.models if item["sites"] is not None]
        return {item["name"]: (f"{item['fused']}/{item['sites']}", "; ".join(item["reasons"])) for item in told}


def drifted(rows: Sequence[Row]) -> Iterator[str]:
    """Lines about models of which one row fuses more than the last row of the same exports."""
    last = {row.maker: row for row in rows if row.models}
    for row in rows:
        newest = last[row.maker].counts() if row.models else {}
        for name, (count, reasons) in row.counts().items():
            other, why = newest.get(name, (count, ""))
            if count != other:
                yield f"{name} ({row.maker}): {count} with {row.runner}, {other} with {last[row.maker].runner}: {reasons or why}"


def page(rows: Sequence[Row], unmade: Sequence[str], machine: str) -> str:
    """The page."""
    problems = [f"{row.maker}, {row.runner}: {line}" for row in rows for line in row.problems]
    names = sorted({item["name"] for row in rows for item in row.models})
    head = ["made with", "run with", "models", "sites fused", "run", "wrong", "ended with an error", "exit status"]
    table = [head, ["---"] * len(head), *(row.cells for row in rows)]
    parts = [
        "# The same models over versions",
        "Written by `python -m benchmarks.drift`: exports of small recipes at several opsets, and the bundled models. Each is "
        f"optimised and verified, and held against its export and against torch. {machine}. Models are not run where ONNX "
        "Runtime does not run the export itself.",
        "\n".join(f"| {' | '.join(line)} |" for line in table),
        f"The models: {', '.join(names)}.",
        f"## What is not as it should be\n\n{_listed(problems)}",
        f"## Sites that differ from those of the last row\n\n{_listed(list(drifted(rows)))}",
        f"## What could not be exported\n\n{_listed(unmade)}",
    ]
    return "\n\n".join(parts) + "\n"


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) or "Nothing."


class Drift:
    """One run over all rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder: pathlib.Path = options.folder.resolve()
        self.rows: list[Row] = []
        self.unmade: list[str] = []

    def run(self, makers: Sequence[tuple[str, ...]], runners: Sequence[tuple[str, ...]]) -> None:
        """Fills the rows, and writes the page after each."""
        exports = {"the bundled models": BUNDLED}
        for number, packages in enumerate(makers):
            folder = self._folder / f"exports{number}"
            if name := self._exported(packages, folder):
                exports[name] = folder
        for packages in runners:
            self._ran(packages, exports)

    def _exported(self, packages: tuple[str, ...], folder: pathlib.Path) -> str:
        """Makes the exports of one row; returns what they were made with, or nothing."""
        environment = Environment(packages, self._folder / "environment")
        if failure := environment.make():
            self.unmade.append(f"{', '.join(packages)}: {failure}")
            return ""
        options = self._options
        wanted = ["--out", folder, "--only", options.only, "--exporters", options.exporters]
        wanted += ["--every", str(options.every), "--jobs", str(options.jobs)]
        done = environment.run("-m", "models.export", *wanted)
        versions = environment.versions()
        log = folder / "exports.jsonl"
        records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        self.unmade += [f"{versions}: {item['name']}: {item['reason']}" for item in records if item["status"] != "ok"]
        if not records:
            self.unmade.append(f"{versions}: {(done.stderr.strip().splitlines() or ['nothing was exported'])[-1][:200]}")
        print(f"{len(records)} exports with {versions}", flush=True)
        shutil.rmtree(environment.folder)
        return versions if any(item["status"] == "ok" for item in records) else ""

    def _ran(self, packages: tuple[str, ...], exports: dict[str, pathlib.Path]) -> None:
        environment = Environment(packages, self._folder / "environment")
        failure = environment.make()
        versions = ", ".join(packages) if failure else environment.versions()
        for maker, folder in exports.items():
            models, said = ((), failure) if failure else self._covered(environment, folder)
            self.rows.append(Row(maker, versions, models, said))
            print(" | ".join(self.rows[-1].cells), *self.rows[-1].problems, sep="\n  ", flush=True)
            if self._options.to is not None:
                self._options.to.write_text(page(self.rows, self.unmade, _machine()), encoding="utf-8")
        shutil.rmtree(environment.folder, ignore_errors=True)

    def _covered(self, environment: Environment, folder: pathlib.Path) -> tuple[tuple[dict[str, Any], ...], str]:
        """What `models.coverage` says of each model in a folder, or why it says nothing."""
        found = self._folder / "coverage.json"
        found.unlink(missing_ok=True)
        command = f"{environment.python} -m onnx_attnfuse_cli optimize {{m}} -o {{o}} --ep cpu --report {{r}} -q"
        done = environment.run(
            "-m", "models.coverage", folder, "--json", found, "--cmd", command, "--jobs", str(self._options.jobs)
        )  # fmt: skip
        if not found.exists():
            return (), (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200]
        return tuple(json.loads(found.read_text())), ""


def _machine() -> str:
    return f"{platform.system()} on {platform.machine()}, Python {platform.python_version()}"


def newest(packages: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The last row without versions."""
    return [tuple(package.partition("==")[0] for package in packages[-1])]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 1 if anything is wrong, or a row could not be filled."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drift", description=__doc__)
    parser.add_argument("--newest", action="store_true", help="one row, with the newest of everything")
    parser.add_argument("--only", default=FAMILIES, help="families of the zoo, with commas")
    parser.add_argument("--exporters", default=EXPORTERS, help="dyn or ts with an opset each, with commas")
    parser.add_argument("--every", type=int, default=5, help="make the first of every so many exports; 1 takes hours")
    parser.add_argument(
        "--folder", type=pathlib.Path, default=pathlib.Path("build", "drift"), help="for environments and exports"
    )
    parser.add_argument("--to", type=pathlib.Path, help="write the page here")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="models at a time")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    drift = Drift(options)
    drift.run(*(newest(packages) if options.newest else packages for packages in (MAKERS, RUNNERS)))
    return int(any(row.problems for row in drift.rows) or not drift.rows)


if __name__ == "__main__":
    sys.exit(main())
