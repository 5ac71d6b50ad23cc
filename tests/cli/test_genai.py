"""genai_config.json beside a decoder with a shared cache: what is written, what is told, and what is refused before any work."""

from __future__ import annotations

import json
import pathlib
import shutil

import onnx
import pytest

import onnx_attnfuse
from onnx_attnfuse.serving.genai_config import FILE
from onnx_attnfuse_cli.main import main
from tests.support.bundled import BUNDLED
from tests.support.decoders import decoder

DECODER = next(path for path in BUNDLED if path.stem == "llama_past__dyn18__sdpa")

(WHISPER,) = (pathlib.Path(__file__).parents[1] / "fusion/shared_cache/exports/encoder_decoder").glob("whisper*.onnx")


@pytest.fixture
def model(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An export with a growing cache in a folder of its own, and an empty folder `made` beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").mkdir()
    return pathlib.Path(shutil.copy(DECODER, tmp_path / "model.onnx"))


def config(model: pathlib.Path, text: str = '{"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 99}') -> str:
    """A Hugging Face config beside the model."""
    path = model.with_name("config.json")
    path.write_text(text)
    return str(path)


def optimized(*options: str) -> int:
    return main(["optimize", "model.onnx", "-o", "made/model.onnx", "--ep", "cpu", "--verify", "none", *options])


def made() -> set[str]:
    return {path.name for path in pathlib.Path("made").iterdir()}


def test_a_decoder_with_a_shared_cache_has_its_config_beside_it(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert optimized("--cache", "shared", "--hf-config", config(model)) == 0
    written = json.loads(pathlib.Path("made", FILE).read_text())["model"]
    assert (written["type"], written["eos_token_id"], written["vocab_size"]) == ("decoder", [2], 99)
    assert written["decoder"]["filename"] == "model.onnx"
    assert written["decoder"]["inputs"]["past_key_names"] == "past_key_values.%d.key"
    assert made() == {"model.onnx", FILE}
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == f"wrote {pathlib.Path('made', 'model.onnx')}"
    assert err.splitlines()[1] == f"wrote {pathlib.Path('made', FILE)}"
    assert "eos_token_id" not in out + err


CAPTURED = ["--dim", "b=1", "--dim", "s=1", "--dim", "total=24", "--dim", "max_sequence_length=24", "--cuda-graph"]


@pytest.mark.parametrize("padding", ["assume-right", "exact"])
def test_a_decoder_of_captured_steps_has_a_config_where_its_mask_may_end_anywhere(
    model: pathlib.Path, capsys: pytest.CaptureFixture[str], padding: str
) -> None:
    onnx.save(decoder(dtype="float16"), "model.onnx")
    options = ["--ep", "cuda", "--arch", "sm90", "--cache", "shared", "--padding", padding, "--hf-config", config(model)]
    assert optimized(*options, *CAPTURED) == 0
    if padding == "exact":
        assert made() == {"model.onnx"}
        assert f"no {FILE}: its mask has zeros after the text where steps are captured" in capsys.readouterr().err
        return
    written = json.loads(pathlib.Path("made", FILE).read_text())
    assert written["model"]["decoder"]["session_options"]["provider_options"] == [{"cuda": {"enable_cuda_graph": "1"}}]
    assert (written["search"]["max_length"], written["search"]["chunk_size"]) == (24, 1)


def test_a_decoder_with_inputs_of_an_encoder_gets_no_config(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoded = decoder(
        inputs=", float[b, source, 64] encoded", between="sums = ReduceSum<keepdims=1>(encoded, first) next = Add(y0, sums)"
    )
    onnx.save(encoded, "model.onnx")
    assert optimized("--cache", "shared", "--hf-config", config(model)) == 0
    assert made() == {"model.onnx"}
    assert f"no {FILE}: onnxruntime-genai has nothing to pass as 'encoded'" in capsys.readouterr().err


@pytest.mark.parametrize("options", [("--past-length",), ()], ids=["asked for", "by the config"])
def test_whisper_s_decoder_gets_a_config_with_an_encoder(
    options: tuple[str, ...], model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(WHISPER, model)
    kind = {} if options else {"model_type": "whisper"}
    assert optimized("--cache", "shared", "--hf-config", config(model, json.dumps({"eos_token_id": 1, **kind})), *options) == 0
    written = json.loads(pathlib.Path("made", FILE).read_text())["model"]
    assert (written["type"], written["encoder"]["filename"]) == ("whisper", "encoder.onnx")
    assert "past_sequence_length" in {item.name for item in onnx.load("made/model.onnx").graph.input}
    assert "put it there as encoder.onnx" in capsys.readouterr().err


def test_a_decoder_with_an_encoder_that_is_not_known_to_be_whisper_s_gets_no_config(
    model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(WHISPER, model)
    assert optimized("--cache", "shared", "--hf-config", config(model, '{"eos_token_id": 1, "model_type": "bart"}')) == 0
    assert made() == {"model.onnx"}
    assert "runs Whisper's alone, without a mask; name Whisper's config.json" in capsys.readouterr().err
    assert optimized("--past-length") == 2
    assert "past_length needs a cache in one buffer" in capsys.readouterr().err


def test_what_nobody_tells_is_a_line_with_what_to_add(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert optimized("--cache", "shared") == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eos_token_id")]
    assert "set to 98" in line
    assert "--hf-config" in line


@pytest.mark.parametrize(
    ("options", "wanted"),
    [((), 40), (("--context-length", "20"), 20), (("--context-length", "60"), 40)],
    ids=["as the config says", "fewer", "more than the config says"],
)
def test_the_most_positions_are_those_of_the_config_and_make_tables(
    options: tuple[str, ...], wanted: int, model: pathlib.Path
) -> None:
    text = '{"eos_token_id": 2, "max_position_embeddings": 40}'
    assert optimized("--cache", "shared", "--hf-config", config(model, text), *options) == 0
    written = json.loads(pathlib.Path("made", FILE).read_text())
    assert written["model"]["context_length"] == wanted
    assert "Range" in {node.op_type for node in onnx.load("made/model.onnx").graph.node}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--context-length", "20"), "context_length needs a cache in one buffer; choose cache 'shared'"),
        (("--context-length", "0", "--cache", "shared"), "0 is not in the range x>=1"),
        (("--context-length", "many", "--cache", "shared"), "'many' is not a valid integer"),
    ],
)
def test_a_context_length_that_cannot_be_ends_the_run_before_anything_is_written(
    options: tuple[str, ...], message: str, model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optimized(*options) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("Error: ") == 1
    assert made() == set()


_ACROSS = "most = ReduceMax(y0, first) next = Sub(y0, most) "


@pytest.mark.parametrize(("padding", "status"), [("auto", 3), ("assume-none", 0)])
def test_a_decoder_that_is_found_to_differ_ends_in_three_with_its_cache_as_it_was(
    padding: str, status: int, model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens look at padding, in a maximum over the whole text, so a buffer without padding gives something else."""
    onnx.save(decoder(between=_ACROSS), model)
    assert optimized("--cache", "shared", "--verify", "sites", "--padding", padding, "-q") == status
    told = "Error: 1 rewrite differed in verification and was undone; that leaves 0 of 2 attentions unfused\n"
    assert capsys.readouterr().err == (told if status else "")
    assert made() == ({"model.onnx"} if status else {"model.onnx", FILE})


def test_a_cache_that_grows_has_no_config(model: pathlib.Path) -> None:
    assert optimized() == 0
    assert made() == {"model.onnx"}


def test_nothing_is_written_beside_a_model_that_is_not(model: pathlib.Path) -> None:
    assert optimized("--cache", "shared", "--dry-run") == 0
    assert made() == set()


def test_models_of_one_run_have_no_config_as_they_would_share_it(model: pathlib.Path) -> None:
    shutil.copy(model, "other.onnx")
    options = ["-o", "made", "--ep", "cpu", "--verify", "none", "--cache", "shared"]
    assert main(["optimize", "model.onnx", "other.onnx", *options]) == 0
    assert not list(pathlib.Path("made").rglob(FILE))


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("{}", ("--cache", "shared"), "has none of bos_token_id"),
        ("{", ("--cache", "shared"), "is no JSON"),
        (
            '{"eos_token_id": 99}',
            ("--cache", "shared"),
            "eos_token_id of the Hugging Face config is 99 and the model has 99 tokens",
        ),
        ('{"eos_token_id": 1, "vocab_size": 98}', ("--cache", "shared"), "vocabulary of 98 and the model one of 99"),
        ('{"eos_token_id": 1}', (), "goes with --cache shared or paged; add one"),
        ('{"eos_token_id": 1}', ("--cache", "shared", "model.onnx"), "of one model, and there are several; give one model"),
    ],
    ids=["says nothing", "broken", "of another model", "of another vocabulary", "for nothing", "for several"],
)
def test_a_config_that_cannot_be_used_ends_the_run_before_anything_is_written(
    model: pathlib.Path, capsys: pytest.CaptureFixture[str], text: str, options: tuple[str, ...], message: str
) -> None:
    assert optimized("--hf-config", config(model, text), *options) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("Error: ") == 1
    assert made() == set()


def test_a_missing_config_is_told_before_the_model_is_read(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.write_bytes(b"")
    assert optimized("--cache", "shared", "--hf-config", "none.json") == 2
    assert "cannot read none.json" in capsys.readouterr().err


def test_a_config_of_somebody_else_ends_the_run_before_the_model_is_read(
    model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.write_bytes(b"")
    path = pathlib.Path("made", FILE)
    path.write_text("{}")
    assert optimized("--cache", "shared") == 2
    assert "was not written by attnfuse" in capsys.readouterr().err
    assert path.read_text() == "{}"


def test_the_same_from_python(model: pathlib.Path) -> None:
    result = onnx_attnfuse.optimize(model, ep="cpu", cache="shared", verify="none")
    result.save("made/fused.onnx")
    eos, length = onnx_attnfuse.write_genai_config(result, "made/fused.onnx")
    assert eos.startswith("eos_token_id is not in the model")
    assert length.startswith("context_length is not in the model")
    assert json.loads(pathlib.Path("made", FILE).read_text())["model"]["decoder"]["filename"] == "fused.onnx"
    assert onnx_attnfuse.write_genai_config(result.report, "made/fused.onnx", config(model)) == (length,)


def test_python_refuses_a_config_where_the_cache_grows(model: pathlib.Path) -> None:
    result = onnx_attnfuse.optimize(model, ep="cpu", verify="none")
    with pytest.raises(onnx_attnfuse.OptionError, match="no cache of this model is a buffer"):
        onnx_attnfuse.write_genai_config(result, "made/fused.onnx")
