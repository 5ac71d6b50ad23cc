"""`attnfuse conformance` in onnxruntime-web, in node: `python -m benchmarks.on_providers.conformance FOLDER --json OUT.json`.

FOLDER has onnxruntime-web in its `node_modules`.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from benchmarks.on_providers import tensors
from benchmarks.on_providers.children import Child
from onnx_attnfuse.bench.conformance.installed import Installed
from onnx_attnfuse.bench.conformance.run import failures, lines, run
from onnx_attnfuse.kernels.conformance import to_json

RUNNER = pathlib.Path(__file__).with_name("runner.js")
_BROKEN = ("abort", "memory access", "unreachable", "null function", "table index")
"""Words of errors after which a module of WebAssembly is of no more use."""
_SECONDS = 60.0


class Node:
    """onnxruntime-web in node, asked as the process of a conformance run is."""

    def __init__(self, web: pathlib.Path) -> None:
        """A process that is not started yet.

        Args:
            web: The folder whose `node_modules` has onnxruntime-web.
        """
        self._child = Child(["node", str(RUNNER), str(web)], seconds=_SECONDS)

    @property
    def versions(self) -> dict[str, str]:
        """The versions of onnxruntime-web and node."""
        return self._child.ask({})["versions"]

    def ask(self, question: Mapping[str, Any], /) -> dict[str, Any]:
        """The results and times of two models, or their errors.

        Raises:
            ProcessDied: The process ended.
        """
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            apart: dict[str, Any] = {}
            for key in ("fused", "decomposed"):
                (folder / f"{key}.onnx").write_bytes(question[key])
                feeds = tensors.save(question[f"{key} feeds"], folder / f"{key} feeds")
                apart[key] = {"model": str(folder / f"{key}.onnx"), "feeds": feeds}
            task = {"apart": apart, "out": name, "runs": question["runs"], "seconds": question["seconds"]}
            answer = self._child.ask(task)
            return {key: _read(answer[key]) for key in apart}

    def end(self) -> None:
        """Ends the process."""
        self._child.end()


def _read(answer: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        return {"on cpu": False, "final": not any(word in answer["error"] for word in _BROKEN), "error": answer["error"]}
    found: dict[str, Any] = {"results": list(tensors.load(answer["outputs"]).values())}
    return {**found, "ms": answer["ms"]} if answer["ms"] else found


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("web", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--json", type=pathlib.Path, metavar="OUT.json", required=True)
    parser.add_argument("--dtype")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    node = Node(options.web)
    table = run(Installed("wasm", "wasm", versions=node.versions), dtype=options.dtype, limit=options.limit, process=node)
    options.json.write_text(to_json(table), encoding="utf-8")
    for line in [*("  ".join(line) for line in lines(table)), *failures(table)]:
        print(line)
    return 3 if any(case.verdict == "wrong" for case in table.cases) else 0


if __name__ == "__main__":
    sys.exit(main())
