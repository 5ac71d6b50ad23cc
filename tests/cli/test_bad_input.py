"""Models that cannot be used: one line that says what is wrong and what to do, exit status 2, and nothing written."""

from __future__ import annotations

import contextlib
import pathlib
import pickle
import zipfile
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import onnx
import pytest

import onnx_attnfuse_cli.main
from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph import io
from tests.support import small_models

KINDS: dict[str, tuple[Callable[[pathlib.Path], object], str]] = {}
"""Name of each kind of bad input: what puts it at a path, and what the message must say."""


def kind(message: str) -> Callable[[Callable[[pathlib.Path], object]], Callable[[pathlib.Path], object]]:
    """Register what writes one kind of bad input."""

    def register(write: Callable[[pathlib.Path], object]) -> Callable[[pathlib.Path], object]:
        KINDS[write.__name__] = write, message
        return write

    return register


def changed(change: Callable[[onnx.ModelProto], object]) -> Callable[[pathlib.Path], object]:
    """What writes `LINEAR` after a change."""

    def write(path: pathlib.Path) -> None:
        model = small_models.parsed(small_models.LINEAR)
        change(model)
        small_models.written(model, path)

    write.__name__ = change.__name__
    return write


@kind("does not exist; check the path")
def missing(path: pathlib.Path) -> None:
    del path


@kind("is a folder; it holds no .onnx file; check the path")
def folder(path: pathlib.Path) -> None:
    path.mkdir()


@kind("is empty; export or download")
def empty(path: pathlib.Path) -> None:
    path.touch()


@kind("is not an ONNX model; pass a file")
def random_bytes(path: pathlib.Path) -> None:
    path.write_bytes(bytes(range(255, 0, -1)))


@kind("is not an ONNX model; pass a file")
def text(path: pathlib.Path) -> None:
    path.write_text("model: not this one\n")


@kind("is not an ONNX model: it has no graph or no IR version")
def other_protobuf(path: pathlib.Path) -> None:
    path.write_bytes(onnx.OperatorSetIdProto(version=18).SerializeToString())


@kind("a zip archive, perhaps a PyTorch checkpoint; export it")
def checkpoint(path: pathlib.Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"weights")


@kind("a Python pickle, perhaps a PyTorch checkpoint; export it")
def old_checkpoint(path: pathlib.Path) -> None:
    path.write_bytes(pickle.dumps({"weight": [1.0]}, protocol=2))


@kind("a Git LFS pointer, not the model itself; run `git lfs pull`")
def lfs_pointer(path: pathlib.Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")


@kind("is cut off or damaged; export or download")
def truncated(path: pathlib.Path) -> None:
    data = small_models.parsed(small_models.LINEAR).SerializeToString()
    path.write_bytes(data[: len(data) // 2])


@kind(f"knows versions up to {onnx.IR_VERSION}; update onnx")
@changed
def new_ir_version(model: onnx.ModelProto) -> None:
    model.ir_version = onnx.IR_VERSION + 1


@kind(f"opset 999, but onnx {onnx.__version__} knows opsets up to {onnx.defs.onnx_opset_version()}; update onnx")
@changed
def new_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 999


@kind("does not say which ai.onnx opset it uses;")
@changed
def no_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].domain = "com.example"


@kind("the graph has a cycle, MatMul 'product' reads 'y' before it can be computed;")
@changed
def cycle(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "y"


@kind("Add 'sum' reads 'nowhere', which nothing computes;")
@changed
def undefined_input(model: onnx.ModelProto) -> None:
    model.graph.node[1].input[1] = "nowhere"


@kind("nothing computes the graph output 'nowhere';")
@changed
def undefined_output(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "nowhere"


@kind("the name 'y' is given to a node output twice;")
@changed
def duplicate_result(model: onnx.ModelProto) -> None:
    model.graph.node[0].output[0] = "y"


@kind("the name 'weight' is given to an initializer twice;")
@changed
def duplicate_weight(model: onnx.ModelProto) -> None:
    model.graph.initializer[1].name = "weight"


@kind("'bias' is computed by a node and is an input or initializer too;")
@changed
def computed_weight(model: onnx.ModelProto) -> None:
    model.graph.node[0].output[0] = "bias"


@kind("an initializer has no name;")
@changed
def nameless_weight(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].name = ""


@kind("attribute 'axis' of Softmax 'norm' is of kind STRING, not INT;")
@changed
def attribute_kind(model: onnx.ModelProto) -> None:
    model.graph.node.append(onnx.helper.make_node("Softmax", ["h"], ["p"], name="norm", axis="last"))


@kind("attribute 'axis' of the Softmax of 'p' does not say its kind;")
@changed
def attribute_without_kind(model: onnx.ModelProto) -> None:
    model.graph.node.append(onnx.helper.make_node("Softmax", ["h"], ["p"], axis=1))
    model.graph.node[-1].attribute[0].ClearField("type")


@kind("Constant 'c' holds a sparse tensor, which cannot be kept; make it dense first")
@changed
def sparse_attribute(model: onnx.ModelProto) -> None:
    sparse = onnx.helper.make_sparse_tensor(
        onnx.helper.make_tensor("v", onnx.TensorProto.FLOAT, [1], [1.0]),
        onnx.helper.make_tensor("i", onnx.TensorProto.INT64, [1], [0]),
        [4],
    )
    model.graph.node.append(onnx.helper.make_node("Constant", [], ["p"], name="c", sparse_value=sparse))


@kind("the If of 'p' has 1 outputs, and its else_branch 0;")
@changed
def branch_without_result(model: onnx.ModelProto) -> None:
    empty = onnx.GraphProto()
    model.graph.node.append(onnx.helper.make_node("If", ["h"], ["p"], then_branch=empty, else_branch=empty))


@kind("defines two functions of one name;")
@changed
def functions_of_one_name(model: onnx.ModelProto) -> None:
    body = onnx.helper.make_node("Relu", ["x"], ["y"])
    opset = onnx.helper.make_opsetid("", 18)
    model.functions.extend([onnx.helper.make_function("own", "f", ["x"], ["y"], [body], [opset])] * 2)


@kind("the function 'g' calls itself;")
@changed
def recursive_functions(model: onnx.ModelProto) -> None:
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("own", 1)]
    condition = onnx.helper.make_node("Cast", ["x"], ["c"], to=onnx.TensorProto.BOOL)
    inner = onnx.helper.make_node("g", ["x"], ["z"], domain="own")
    branch = onnx.helper.make_graph([inner], "branch", [], [onnx.helper.make_tensor_value_info("z", 1, None)])
    within = onnx.helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    model.functions.append(onnx.helper.make_function("own", "g", ["x"], ["y"], [condition, within], opsets))


@kind("the node that computes 'y' has no operator;")
@changed
def node_without_operator(model: onnx.ModelProto) -> None:
    model.graph.node[1].op_type = ""


@kind("the name 'axis' is given to an attribute of Softmax 'norm' twice;")
@changed
def attribute_given_twice(model: onnx.ModelProto) -> None:
    node = onnx.helper.make_node("Softmax", ["h"], ["p"], name="norm", axis=1)
    node.attribute.append(onnx.helper.make_attribute("axis", 0))
    model.graph.node.append(node)


@kind("cannot be read: Too many levels of symbolic links; check the file")
def link_to_itself(path: pathlib.Path) -> None:
    path.symlink_to(path.name)


@kind("export the model again")
@changed
def negative_length(model: onnx.ModelProto) -> None:
    small_models.point_to(model.graph.initializer[0], "weights.bin", offset=0, length=-4)


@kind("takes 1208925819614629174706176;")
@changed
def huge_dimensions(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[:] = [2**40, 2**40]


@kind("an input has no name;")
@changed
def nameless_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].name = ""


@kind("the name 'x' is given to an input twice;")
@changed
def duplicate_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(model.graph.input[0])


@kind("uses ai.onnx opset -5,")
@changed
def negative_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = -5


@kind("is not UTF-8;")
def name_in_other_bytes(path: pathlib.Path) -> None:
    path.write_bytes(small_models.parsed(small_models.LINEAR).SerializeToString().replace(b"product", b"pr\xff\xfeuct"))


@kind("keeps weights in data, which is not in")
def data_is_a_folder(path: pathlib.Path) -> None:
    model = small_models.parsed(small_models.LINEAR)
    small_models.point_to(model.graph.initializer[0], "data")
    path.with_name("data").mkdir()
    small_models.written(model, path)


@kind("is not an ONNX model; pass a file")
def zeros(path: pathlib.Path) -> None:
    path.write_bytes(bytes(4096))


@kind("is cut off or damaged; export or download")
def rubbish_at_the_end(path: pathlib.Path) -> None:
    path.write_bytes(small_models.parsed(small_models.LINEAR).SerializeToString() + b"\xff" * 4)


@kind("has sparse initializers, which would be lost; make them dense first")
@changed
def sparse_weight(model: onnx.ModelProto) -> None:
    model.graph.sparse_initializer.add()


@kind("carries training information, which would be lost;")
@changed
def training_info(model: onnx.ModelProto) -> None:
    model.training_info.add()


@kind("tensor 'weight' has 3 numbers of data where FLOAT [2, 2] takes 4;")
@changed
def short_numbers(model: onnx.ModelProto) -> None:
    del model.graph.initializer[0].float_data[3:]


@kind("tensor 'weight' has 15 bytes of data where FLOAT [2, 2] takes 16;")
@changed
def short_bytes(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].raw_data = bytes(15)


@kind("tensor 'weight' has a negative dimension in its shape [2, -2];")
@changed
def negative_dimension(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[1] = -2


@kind("has no element type;")
@changed
def untyped_weight(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_type = onnx.TensorProto.UNDEFINED


@kind("cannot be read: 99 is not a valid DataType;")
@changed
def unknown_type(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_type = 99


@kind("Map types are not supported")
@changed
def map_input(model: onnx.ModelProto) -> None:
    model.graph.input.add(name="m").type.map_type.key_type = onnx.TensorProto.INT64


@kind("keeps weights in weights.bin, which is not in")
@changed
def data_missing(model: onnx.ModelProto) -> None:
    small_models.point_to(model.graph.initializer[0], "weights.bin")


@kind("tensor 'bias' ends at byte 24 of weights.bin, which has only 23; the file is cut off")
def data_short(path: pathlib.Path) -> None:
    small_models.linear_with_data(path.parent).rename(path)
    with path.with_name("weights.bin").open("r+b") as file:
        file.truncate(23)


@kind("tensor 'weight' has 12 bytes of data where FLOAT [2, 2] takes 16;")
@changed
def data_length(model: onnx.ModelProto) -> None:
    small_models.point_to(model.graph.initializer[0], "weights.bin", offset=0, length=12)


@kind("cannot be read: External data offset must be non-negative")
@changed
def data_offset(model: onnx.ModelProto) -> None:
    small_models.point_to(model.graph.initializer[0], "weights.bin", offset=-4)


@kind("MatMul 'product' takes operands of one type, and has float32 'x' and int64 'weight'; export the model again")
@changed
def mixed_types(model: onnx.ModelProto) -> None:
    weight = onnx.numpy_helper.to_array(model.graph.initializer[0])
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weight.astype("int64"), "weight"))


@kind("takes weights from ../weights.bin, which is outside of its folder;")
@changed
def data_above(model: onnx.ModelProto) -> None:
    small_models.point_to(model.graph.initializer[0], "../weights.bin")


@kind("takes weights from /etc/hostname, which is outside of its folder;")
@changed
def data_absolute(model: onnx.ModelProto) -> None:
    small_models.point_to(model.graph.initializer[0], "/etc/hostname")


@kind("does not say where its data is;")
@changed
def data_nowhere(model: onnx.ModelProto) -> None:
    small_models.point_to(model.graph.initializer[0], "")


@pytest.mark.parametrize("name", KINDS)
def test_is_refused_in_one_line(
    name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, message = KINDS[name]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.onnx"
    write(path)
    before = small_models.contents(tmp_path)
    with pytest.raises(ModelError) as caught:
        io.load(path)
    assert message in str(caught.value)
    assert "; " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert onnx_attnfuse_cli.main.main(["optimize", str(path)]) == 2
    assert capsys.readouterr() == ("", f"Error: {caught.value}\n")
    assert small_models.contents(tmp_path) == before


def test_every_cut_is_refused(tmp_path: pathlib.Path) -> None:
    data = small_models.parsed(small_models.LINEAR).SerializeToString()
    path = tmp_path / "model.onnx"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError):
            io.load(path)


@hypothesis.settings(derandomize=True, max_examples=300, deadline=None)
@hypothesis.given(position=st.integers(0, 2**16), byte=st.integers(0, 255))
def test_a_damaged_byte_is_refused_or_harmless(position: int, byte: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    data = bytearray(small_models.parsed(small_models.ATTENTION).SerializeToString())
    data[position % len(data)] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.onnx"
    path.write_bytes(data)
    with contextlib.suppress(ModelError):
        io.load(path)
