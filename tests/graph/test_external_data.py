"""Weights in data files: never read into memory, never changed, never overwritten."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from onnx_attnfuse.errors import ModelError, OptionError
from onnx_attnfuse.graph import external, io
from onnx_attnfuse_cli.main import main
from tests.support import small_models


def weights_of(path: pathlib.Path) -> list[list[float]]:
    """The weights of a saved `LINEAR`, read the way onnx reads them."""
    model = onnx.load_model(path)
    return [onnx.numpy_helper.to_array(tensor).flatten().tolist() for tensor in model.graph.initializer]


def test_in_the_same_folder_the_file_is_shared(tmp_path: pathlib.Path) -> None:
    source = small_models.linear_with_data(tmp_path, "data/weights.bin")
    before = small_models.contents(tmp_path)
    io.save(io.load(source), tmp_path / "out.onnx")
    assert {name: data for name, data in small_models.contents(tmp_path).items() if name != "out.onnx"} == before
    assert weights_of(tmp_path / "out.onnx") == [[1, 2, 3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("weights.bin", "out.onnx.data"),
        ("deep/er/weights.bin", "out.onnx.data"),
        ("out.onnx.data", "out.onnx.data"),
        ("model.onnx.data", "out.onnx.data"),
        ("model.onnx_data", "out.onnx_data"),
        ("model.onnx_data_1", "out.onnx_data_1"),
        ("model.onnx_data/1", "out.onnx.data"),
    ],
)
def test_in_another_folder_there_is_a_copy_named_after_the_model(location: str, name: str, tmp_path: pathlib.Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    source = small_models.linear_with_data(tmp_path / "here", location)
    model = io.load(source)
    io.save(model, there / "out.onnx")
    assert sorted(small_models.contents(there)) == sorted(["out.onnx", name])
    assert weights_of(there / "out.onnx") == [[1, 2, 3, 4], [5, 6]]
    copied = (there / name).stat()
    assert io.save(model, there / "out.onnx") == ()
    assert (there / name).stat().st_ino == copied.st_ino


def test_two_results_in_one_folder_share_nothing(tmp_path: pathlib.Path) -> None:
    there = tmp_path / "there"
    for folder in ("one", "two", "there"):
        (tmp_path / folder).mkdir()
    sources = [small_models.linear_with_data(tmp_path / folder) for folder in ("one", "two")]
    (tmp_path / "two" / "weights.bin").write_bytes(np.arange(6, dtype=np.float32).tobytes())
    for name, source in zip(("a.onnx", "b.onnx", "c.onnx"), (*sources, sources[0]), strict=True):
        io.save(io.load(source), there / name)
    assert sorted(small_models.contents(there)) == [f"{name}.onnx{end}" for name in "abc" for end in ("", ".data")]
    assert weights_of(there / "a.onnx") == weights_of(there / "c.onnx") == [[1, 2, 3, 4], [5, 6]]
    assert weights_of(there / "b.onnx") == [[0, 1, 2, 3], [4, 5]]
    io.save(io.load(sources[1]), there / "a.onnx")
    assert weights_of(there / "a.onnx") == [[0, 1, 2, 3], [4, 5]]
    assert weights_of(there / "c.onnx") == [[1, 2, 3, 4], [5, 6]]


def test_each_data_file_has_a_copy(tmp_path: pathlib.Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    source = small_models.linear_with_data(tmp_path)
    proto = onnx.load_model(source, load_external_data=False)
    (tmp_path / "biases.bin").write_bytes((tmp_path / "weights.bin").read_bytes()[16:])
    small_models.point_to(proto.graph.initializer[1], "biases.bin", offset=0, length=8)
    small_models.written(proto, source)
    io.save(io.load(source), there / "out.onnx")
    assert sorted(small_models.contents(there)) == ["out.onnx", "out.onnx.2.data", "out.onnx.data"]
    assert weights_of(there / "out.onnx") == [[1, 2, 3, 4], [5, 6]]


def test_a_hard_link_is_replaced_by_a_copy(tmp_path: pathlib.Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    model = io.load(small_models.linear_with_data(tmp_path))
    io.save(model, there / "out.onnx")
    (there / "out.onnx.data").unlink()
    (there / "out.onnx.data").hardlink_to(tmp_path / "weights.bin")
    io.save(model, there / "out.onnx")
    assert not (there / "out.onnx.data").samefile(tmp_path / "weights.bin")
    with (tmp_path / "weights.bin").open("r+b") as file:
        file.write(bytes(24))
    assert weights_of(there / "out.onnx") == [[1, 2, 3, 4], [5, 6]]


def test_the_data_files_that_must_be_kept_are_told(tmp_path: pathlib.Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    source = small_models.linear_with_data(tmp_path, "data/weights.bin")
    assert io.save(io.load(source), tmp_path / "out.onnx") == (tmp_path / "data" / "weights.bin",)
    assert io.save(io.load(source), there / "out.onnx") == ()
    source.unlink()
    assert weights_of(tmp_path / "out.onnx") == [[1, 2, 3, 4], [5, 6]]


def test_a_copy_is_no_link_so_that_a_later_export_in_place_does_not_change_it(tmp_path: pathlib.Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    io.save(io.load(small_models.linear_with_data(tmp_path)), there / "out.onnx")
    with (tmp_path / "weights.bin").open("r+b") as file:
        file.write(bytes(24))
    assert weights_of(there / "out.onnx") == [[1, 2, 3, 4], [5, 6]]


@pytest.mark.parametrize("linked", ["data/weights.bin", "data"])
def test_a_link_out_of_the_folder_is_refused(linked: str, tmp_path: pathlib.Path) -> None:
    inside, outside = tmp_path / "model", tmp_path / "outside"
    inside.mkdir()
    source = small_models.linear_with_data(inside, "data/weights.bin")
    (inside / linked).rename(outside)
    (inside / linked).symlink_to(outside)
    with pytest.raises(ModelError, match=r"takes weights from data/weights\.bin, a link to a file outside of its folder"):
        io.load(source)


def test_a_link_inside_of_the_folder_is_followed(tmp_path: pathlib.Path) -> None:
    source = small_models.linear_with_data(tmp_path)
    (tmp_path / "weights.bin").rename(tmp_path / "kept.bin")
    (tmp_path / "weights.bin").symlink_to("kept.bin")
    io.save(io.load(source), tmp_path / "out.onnx")


def test_a_model_that_is_a_link_may_have_its_data_beside_its_target(tmp_path: pathlib.Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    source = small_models.linear_with_data(blobs)
    for file in (source.name, "weights.bin"):
        (blobs / file).rename(blobs / f"hash of {file}")
        (snapshot / file).symlink_to(blobs / f"hash of {file}")
    io.save(io.load(snapshot / source.name), tmp_path / "out.onnx")
    assert weights_of(tmp_path / "out.onnx") == [[1, 2, 3, 4], [5, 6]]


def with_room(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """A disk with so many bytes left."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 40, used=0, free=free))


def test_without_room_for_a_copy_nothing_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    source = small_models.linear_with_data(tmp_path)
    with_room(monkeypatch, 23)
    assert main(["optimize", str(source), "-o", str(there / "out.onnx")]) == 2
    message = f"takes 24 bytes of weights, and {there} has 23 bytes free; make room there, or write to {tmp_path}, where"
    assert capsys.readouterr().err == f"Error: {there / 'out.onnx'} {message} the data files are shared\n"
    assert list(there.iterdir()) == []
    assert main(["optimize", str(source), "-o", str(tmp_path / "out.onnx")]) == 0
    assert (
        capsys.readouterr().err == f"wrote {tmp_path / 'out.onnx'}, which needs weights.bin in its folder, as the source does\n"
    )
    with_room(monkeypatch, 24)
    assert main(["optimize", str(source), "-o", str(there / "out.onnx")]) == 0
    assert capsys.readouterr().err == f"wrote {there / 'out.onnx'}\n"


def test_weights_inside_the_model_want_room_too(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_models.parsed(
        f"{small_models.HEADER} g (float[512] x) => (float[512] y) <float[512] w = {{{', '.join(['1'] * 512)}}}> "
        "{ y = Add(x, w) }"
    )
    loaded = io.load(small_models.written(model, tmp_path / "model.onnx"))
    with_room(monkeypatch, 2047)
    with pytest.raises(
        OptionError, match=r"takes 2\.0 kB of weights, .* has 2\.0 kB free; make room there, or choose another disk"
    ):
        io.save(loaded, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_a_copy_that_is_there_wants_no_room(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there"
    there.mkdir()
    model = io.load(small_models.linear_with_data(tmp_path))
    io.save(model, there / "out.onnx")
    with_room(monkeypatch, 0)
    io.save(model, there / "out.onnx")
    with pytest.raises(OptionError, match="takes 24 bytes of weights"):
        io.save(model, there / "again.onnx")


@pytest.mark.parametrize("other", [b"", bytes(24), bytes(25)])
def test_a_file_of_another_model_is_not_overwritten(other: bytes, tmp_path: pathlib.Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "weights.bin").write_bytes(other)
    (there / "out.onnx.data").write_bytes(other)
    model = io.load(small_models.linear_with_data(tmp_path))
    for old in (None, b"", small_models.parsed(small_models.LINEAR).SerializeToString()):
        if old is not None:
            (there / "out.onnx").write_bytes(old)
        before = small_models.contents(there)
        with pytest.raises(OptionError, match=r"out.onnx.data exists and holds no weights of out.onnx; choose another name"):
            io.save(model, there / "out.onnx")
        assert small_models.contents(there) == before
    (there / "out.onnx.data").unlink()
    io.save(model, there / "out.onnx")
    (there / "out.onnx.data").write_bytes(other)
    io.save(model, there / "out.onnx")
    assert weights_of(there / "out.onnx") == [[1, 2, 3, 4], [5, 6]]
    assert (there / "weights.bin").read_bytes() == other


def test_a_renamed_data_file_is_renamed_in_branches_and_functions_too(tmp_path: pathlib.Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 18, "own" : 1]>
    g (float[2] x, bool flag) => (float[2] y) {
      a = own.more(x)
      y = If (flag) <then_branch = yes () => (float[2] t) <float[2] w = {0, 0}> { t = Add(a, w) },
                     else_branch = no () => (float[2] e) { c = Constant<value = float[2] {0, 0}>() e = Add(a, c) }>
    }
    <domain: "own", opset_import: ["" : 18]> more (i) => (o) { k = Constant<value = float[2] {0, 0}>() o = Mul(i, k) }"""
    model, there = small_models.parsed(text), tmp_path / "there"
    (tmp_path / "weights.bin").write_bytes(np.arange(1, 7, dtype=np.float32).tobytes())
    for offset, tensor in enumerate(external.tensors(model)):
        small_models.point_to(tensor, "weights.bin", offset=8 * offset, length=8)
    there.mkdir()
    small_models.written(model, tmp_path / "model.onnx")
    io.save(io.load(tmp_path / "model.onnx"), there / "out.onnx")
    loaded = onnx.load_model(there / "out.onnx", load_external_data=False)
    places = [{item.key: item.value for item in tensor.external_data} for tensor in external.tensors(loaded)]
    assert [place["location"] for place in places] == ["out.onnx.data"] * 3
    assert sorted(int(place["offset"]) for place in places) == [0, 8, 16]


@pytest.mark.parametrize("count", [0, 1, 127, 128, 300])
def test_weights_are_written_one_at_a_time_as_protobuf_writes_them(count: int, tmp_path: pathlib.Path) -> None:
    model = small_models.parsed(f"{small_models.HEADER} g (float[n] x) => (float[n] y) {{ y = Relu(x) }}")
    rows = [np.full(size, size, np.float32) for size in (1, count, 300, 2000)]
    model.graph.initializer.extend(onnx.numpy_helper.from_array(row, f"w{place}") for place, row in enumerate(rows))
    model.graph.initializer.append(onnx.helper.make_tensor("typed", onnx.TensorProto.FLOAT, [400], [1.5] * 400))
    io.save(io.load(small_models.written(model, tmp_path / "model.onnx")), tmp_path / "out.onnx")
    written = onnx.load_model(tmp_path / "out.onnx")
    assert written.graph.initializer == model.graph.initializer
    assert written.SerializeToString() == (tmp_path / "out.onnx").read_bytes()


def test_a_failed_save_takes_the_copies_back(tmp_path: pathlib.Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    model = io.load(small_models.linear_with_data(tmp_path, "deep/er/weights.bin"))
    model.metadata_props["broken"] = "\udcff"
    with pytest.raises(ModelError, match="cannot be written"):
        io.save(model, there / "out.onnx")
    assert list(there.iterdir()) == []


def test_the_data_file_is_no_place_for_the_model(tmp_path: pathlib.Path) -> None:
    model = io.load(small_models.linear_with_data(tmp_path))
    with pytest.raises(OptionError, match="holds the weights of the model; write the result to another file"):
        io.save(model, tmp_path / "weights.bin")


def test_data_that_vanished_is_reported(tmp_path: pathlib.Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    model = io.load(small_models.linear_with_data(tmp_path))
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelError, match=r"weights.bin are gone; put the file back"):
        io.save(model, there / "out.onnx")


def test_a_linked_model_as_download_caches_keep_it(tmp_path: pathlib.Path) -> None:
    """A snapshot folder of links into a folder of blobs: the links are the model's folder, the blobs its bytes."""
    blobs, snapshot, there = (tmp_path / name for name in ("blobs", "snapshot", "there"))
    for folder in (blobs, snapshot, there):
        folder.mkdir()
    small_models.linear_with_data(blobs)
    for name in ("model.onnx", "weights.bin"):
        (blobs / name).rename(blobs / f"{name}.blob")
        (snapshot / name).symlink_to(blobs / f"{name}.blob")
    io.save(io.load(snapshot / "model.onnx"), there / "out.onnx")
    assert not (there / "out.onnx.data").is_symlink()
    assert weights_of(there / "out.onnx") == [[1, 2, 3, 4], [5, 6]]


def test_a_proto_keeps_its_references(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = onnx.load_model(small_models.linear_with_data(tmp_path), load_external_data=False)
    model, kind = io.from_any(given)
    assert io.to_kind(model, kind).graph.initializer == given.graph.initializer
    io.save(model, tmp_path / "beside.onnx")
    assert weights_of(tmp_path / "beside.onnx") == [[1, 2, 3, 4], [5, 6]]
    there = tmp_path / "there"
    there.mkdir()
    with pytest.raises(ModelError, match=r"the weights in weights\.bin are gone"):
        io.save(model, there / "out.onnx")
    monkeypatch.chdir(tmp_path)
    io.save(model, there / "out.onnx")
    assert weights_of(there / "out.onnx") == [[1, 2, 3, 4], [5, 6]]


MEASURED = """
import resource, sys
from onnx_attnfuse.graph import io
from onnx_attnfuse_cli.main import main
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
model = io.load(sys.argv[1])
for target in sys.argv[2:]:
    io.save(model, target)
print(peak() - before)
"""


@pytest.mark.exhaustive
def test_large_weights_are_never_in_memory(tmp_path: pathlib.Path) -> None:
    """2 GB beside the model and a copy of 256 MB elsewhere; the files have holes, so that they take no space."""
    peaks: list[int] = []
    for megabytes, folder in ((2048, "same"), (256, "other")):
        numbers = megabytes * 2**18
        source = tmp_path / str(megabytes)
        source.mkdir()
        (tmp_path / folder).mkdir()
        model = small_models.parsed(
            f"{small_models.HEADER} g (float[{numbers}] x) => (float[{numbers}] y) <float[1] w = {{0}}> {{ y = Add(x, w) }}"
        )
        model.graph.initializer[0].dims[0] = numbers
        small_models.point_to(model.graph.initializer[0], "w.data", length=4 * numbers)
        small_models.written(model, source / "model.onnx")
        with (source / "w.data").open("wb") as file:
            file.truncate(4 * numbers)
        target = (source if folder == "same" else tmp_path / folder) / "out.onnx"
        command = [sys.executable, "-c", MEASURED, str(source / "model.onnx"), str(target)]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    assert max(peaks) < 50
