"""The benchmark of whole models on a CPU, tried out."""

from __future__ import annotations

import pathlib

from click.testing import CliRunner

from benchmarks.on_cpu.__main__ import main as on_cpu


def test_whole_models_are_tried_out_on_a_cpu(tmp_path: pathlib.Path) -> None:
    flags = ["--provider", "cpu", "--quick", "--folder", str(tmp_path), "--only", "bert-base-int8", "--columns", "ours;plain"]
    done = CliRunner().invoke(on_cpu, ["whole", *flags])
    assert done.exit_code == 0, done.output
    assert done.stdout.count("| bert-base-int8, ") == 2
    assert "failed" not in done.stdout
