"""The folder of a model as exporters write it: models are fused, all else is copied, and what cannot be fused stays usable."""

from __future__ import annotations

import json
import pathlib
import shutil
import sys
import types

import onnx
import pytest

from onnx_attnfuse_cli.main import main
from tests.support import small_models
from tests.support.bundled import BUNDLED

Captured = pytest.CaptureFixture[str]
DECODER = next(path for path in BUNDLED if path.stem == "llama_past__dyn18__sdpa")


@pytest.fixture
def exported(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A pipeline's folder: two models in folders of their own, one with data beside it, configuration and a tokenizer."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "exported"
    for name in ("encoder", "head"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
    small_models.written(small_models.ATTENTION, folder / "encoder" / "model.onnx")
    small_models.linear_with_data(folder / "head", "model.onnx_data")
    (folder / "model_index.json").write_text("{}")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "merges.txt").write_text("a b")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("")
    return folder


VISIBLE = {
    "encoder/config.json", "encoder/model.onnx", "head/config.json", "head/model.onnx", "head/model.onnx_data",
    "model_index.json", "tokenizer/merges.txt",
}  # fmt: skip


def names(folder: pathlib.Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("again", [False, True])
def test_a_folder_comes_out_whole(again: bool, exported: pathlib.Path, capsys: Captured) -> None:
    if again:
        assert main(["optimize", "exported", "-o", "out", "-q"]) == 0
    assert main(["optimize", "exported", "-o", "out"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "exported/encoder/model.onnx: fused 1 of 1 attention site, wrote out/encoder/model.onnx"
    assert lines[1].startswith("exported/head/model.onnx: ")
    assert lines[2].startswith("2 of 2 models done: fused 1 of 1 ")
    assert lines[3].startswith("no other file" if again else "copied 4 other files to out: encoder/config.json, ")
    assert err == ""
    assert names(exported.with_name("out")) == VISIBLE
    ops = {node.op_type for node in onnx.load("out/encoder/model.onnx").graph.node}
    assert "Softmax" not in ops
    assert pathlib.Path("out/head/model.onnx_data").read_bytes() == (exported / "head/model.onnx_data").read_bytes()


def test_a_model_that_cannot_be_fused_is_copied_with_its_data(exported: pathlib.Path, capsys: Captured) -> None:
    broken = onnx.load(exported / "head" / "model.onnx", load_external_data=False)
    broken.graph.node[0].op_type = "Unheard"
    onnx.save(broken, exported / "head" / "model.onnx")
    (exported / "broken.onnx").write_text("no model")
    assert main(["optimize", "exported", "-o", "out", "--require-all"]) == 2
    err = capsys.readouterr().err
    assert "Error: exported/broken.onnx: broken.onnx is not an ONNX model" in err
    assert names(exported.with_name("out")) == VISIBLE | {"broken.onnx"}
    assert pathlib.Path("out/broken.onnx").read_text() == "no model"


def test_a_folder_is_converted_whole_and_fused_after_that(exported: pathlib.Path, capsys: Captured) -> None:
    assert main(["convert", "exported", "-o", "half"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("copied 4 other files to half: encoder/config.json, ")
    assert err.splitlines() == ["wrote half/encoder/model.onnx", "wrote half/head/model.onnx"]
    assert names(exported.with_name("half")) == VISIBLE - {"head/model.onnx_data"}  # a few weights are in the model
    assert onnx.load("half/encoder/model.onnx").graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    assert main(["optimize", "half", "-o", "fused", "-q"]) == 0
    assert names(exported.with_name("fused")) == VISIBLE - {"head/model.onnx_data"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "half", "--json"], "--json reports on one model, and exported is a folder; leave it out"),
        (["-o", "exported/half"], "-o is exported/half, inside of exported, whose files are copied; choose "),
        (["-o", "taken"], "taken/model_index.json exists and differs from exported/model_index.json; choose "),
    ],
)
def test_a_folder_that_cannot_be_converted_is_refused_first(
    arguments: list[str], message: str, exported: pathlib.Path, capsys: Captured
) -> None:
    (exported.with_name("taken")).mkdir()
    exported.with_name("taken").joinpath("model_index.json").write_text("mine")
    assert main(["convert", "exported", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"Error: {message}")
    assert not exported.with_name("half").exists()
    assert names(exported) == VISIBLE | {".cache/lock"}


def test_folders_without_a_configuration_are_models_only(exported: pathlib.Path) -> None:
    (exported / "model_index.json").unlink()
    assert main(["optimize", "exported", "-o", "out", "-q"]) == 0
    assert names(exported.with_name("out")) == {f"{name}/model.attnfuse.onnx" for name in ("encoder", "head")} | {
        "head/model.attnfuse.onnx_data"
    }


def test_nothing_is_written_where_no_model_can_be_fused(exported: pathlib.Path, capsys: Captured) -> None:
    assert main(["optimize", "exported", "-o", "out", "-q"]) == 0
    before = small_models.contents(exported.with_name("out"))
    for model in exported.rglob("*.onnx"):
        model.write_text("no model")
    assert main(["optimize", "exported", "-o", "out"]) == 2
    assert small_models.contents(exported.with_name("out")) == before
    assert "copied" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("Qwen/Qwen3-0.6B", "run optimum-cli export onnx --model Qwen/Qwen3-0.6B exported first"),
        ("bert-base-uncased", "run optimum-cli export onnx --model bert-base-uncased exported first"),
        ("exported/absent", "exported/absent does not exist; check the path"),
        ("absent.onnx", "absent.onnx does not exist; check the path"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(given: str, message: str, exported: pathlib.Path, capsys: Captured) -> None:
    assert main(["optimize", given]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_commands_for_one_model_name_those_of_a_folder(exported: pathlib.Path, capsys: Captured) -> None:
    assert main(["explain", "exported/encoder"]) == 2
    assert capsys.readouterr().err.endswith("exported/encoder is a folder; pass its .onnx file: model.onnx\n")


@pytest.mark.parametrize("output", ["exported", "exported/fused"])
def test_the_folder_itself_is_no_output(output: str, exported: pathlib.Path, capsys: Captured) -> None:
    before = small_models.contents(exported)
    assert main(["optimize", "exported", "-o", output]) == 2
    assert capsys.readouterr().err.startswith(f"Error: -o is {output}, inside of exported, ")
    assert small_models.contents(exported) == before


def test_another_file_in_the_output_is_kept(exported: pathlib.Path, capsys: Captured) -> None:
    pathlib.Path("out").mkdir()
    pathlib.Path("out/model_index.json").write_text("mine")
    assert main(["optimize", "exported", "-o", "out"]) == 2
    assert "out/model_index.json exists and differs from exported/model_index.json; " in capsys.readouterr().err
    assert names(exported.with_name("out")) == {"model_index.json"}


def test_a_dry_run_copies_nothing(exported: pathlib.Path) -> None:
    assert main(["optimize", "exported", "-o", "out", "--dry-run", "-q"]) == 0
    assert not exported.with_name("out").exists()


def test_a_decoder_and_its_tokenizer_are_what_genai_loads(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "exported"
    folder.mkdir()
    shutil.copy(DECODER, folder / "model.onnx")
    (folder / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 99}')
    (folder / "tokenizer.json").write_text("{}")
    options = ["--cache", "shared", "--ep", "cpu", "--verify", "none", "-q"]
    assert main(["optimize", "exported", "-o", "served", *options]) == 0
    assert names(tmp_path / "served") == {"model.onnx", "config.json", "tokenizer.json", "genai_config.json"}
    written = json.loads(pathlib.Path("served/genai_config.json").read_text())["model"]
    assert (written["decoder"]["filename"], written["eos_token_id"], written["vocab_size"]) == ("model.onnx", [2], 99)


def test_a_model_in_the_cache_of_the_hub_is_its_folder(
    exported: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (exported / "config.json").write_text("{}")
    asked: list[tuple[str, bool]] = []

    def snapshot(name: str, *, local_files_only: bool) -> str:
        asked.append((name, local_files_only))
        if name != "org/pipeline":
            raise FileNotFoundError(name)
        return str(exported)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot))
    assert main(["optimize", "org/pipeline"]) == 2
    assert "in the cache of Hugging Face, where no result belongs; give a folder with -o" in capsys.readouterr().err
    assert main(["optimize", "org/pipeline", "-o", "made", "--verify", "none"]) == 0
    assert pathlib.Path("made/tokenizer/merges.txt").read_text() == "a b"
    assert main(["optimize", "org/other", "-o", "made"]) == 2
    assert "run optimum-cli export onnx --model org/other exported first" in capsys.readouterr().err
    assert {local for _, local in asked} == {True}


def test_without_the_hub_s_package_an_id_says_what_to_export(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["optimize", "org/pipeline"]) == 2
    assert "for a model of that name on Hugging Face, run optimum-cli" in capsys.readouterr().err
