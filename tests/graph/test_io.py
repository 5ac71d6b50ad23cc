"""Loading and saving: what comes out is what went in, and what a caller handed in stays as it was."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnx_attnfuse.errors import ModelError, OptionError
from onnx_attnfuse.graph import external, io
from tests.support import small_models

RICH = """<ir_version: 10, opset_import: ["" : 18, "com.example" : 1], producer_name: "pytest", doc_string: "top",
           metadata_props: ["author" : "someone", "license" : "mit"]>
rich (float[batch, n_tokens, 2] second, bool flag, float[batch, 2] first) => (float[a] z, float[batch, ?, 2] y)
<float[2] w = {1, 2}, int64[0] none = {}, float[batch, 2] h>
{
    h = com.example.twice<gain = 2.0>(first)
    [branch] y = If (flag) <
        then_branch = g1 () => (float[a] t) <float[2] inner = {3, 4}> { t = Add(second, inner) },
        else_branch = g2 () => (float[a] e) { e = Identity(second) }
    >
    z, unused = Split<num_outputs = 2>(w)
}
<domain: "com.example", opset_import: ["" : 18]>
twice <gain> (x) => (y) { c = Constant<value_float: float = @gain>() y = Mul(x, c) }
"""


def rich() -> onnx.ModelProto:
    """A model with everything a round trip could lose."""
    model = small_models.parsed(RICH)
    model.graph.node[0].name = "/layer.0/Twice"
    model.graph.node[0].doc_string = "a node's doc"
    model.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layer.0']")
    model.graph.initializer[0].metadata_props.add(key="origin", value="checkpoint")
    model.graph.initializer[0].doc_string = "a weight's doc"
    model.graph.input[0].doc_string = "an input's doc"
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "n_tokens + 1"
    model.graph.doc_string = "the graph's doc"
    return model


def plain(graph: onnx.GraphProto) -> None:
    """Take out what onnx-ir writes differently: the empty domain of nodes."""
    for node in graph.node:
        if not node.domain:
            node.ClearField("domain")
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                plain(attribute.g)


def test_an_untouched_model_stays_as_it_is(tmp_path: pathlib.Path) -> None:
    model = rich()
    io.save(io.load(small_models.written(model, tmp_path / "in.onnx")), tmp_path / "out.onnx")
    again = onnx.load_model(tmp_path / "out.onnx")
    plain(model.graph)
    plain(again.graph)
    for node in model.functions[0].node:
        node.ClearField("domain")
    assert again == model


def test_a_written_model_has_no_second_type_of_an_initializer(tmp_path: pathlib.Path) -> None:
    model = rich()
    types = {value.name for value in model.graph.value_info}
    weights = {tensor.name for tensor in model.graph.initializer}
    assert types - weights
    model.graph.value_info.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in model.graph.initializer
    )
    io.save(io.load(small_models.written(model, tmp_path / "in.onnx")), tmp_path / "out.onnx")
    again = onnx.load_model(tmp_path / "out.onnx").graph
    assert {value.name for value in again.value_info} == types - weights


def test_saving_twice_gives_the_same_bytes(tmp_path: pathlib.Path) -> None:
    io.save(io.load(small_models.written(rich(), tmp_path / "in.onnx")), tmp_path / "one.onnx")
    io.save(io.load(tmp_path / "one.onnx"), tmp_path / "two.onnx")
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()


def test_an_unsorted_graph_is_put_in_order(tmp_path: pathlib.Path) -> None:
    model = small_models.parsed(small_models.ATTENTION)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    assert [node.name for node in io.load(small_models.written(model, tmp_path / "m.onnx")).graph] == [
        node.name for node in nodes
    ]


def test_the_long_name_of_the_default_domain(tmp_path: pathlib.Path) -> None:
    model = small_models.parsed(small_models.LINEAR)
    model.opset_import[0].domain = "ai.onnx"
    assert io.load(small_models.written(model, tmp_path / "m.onnx")).opset_imports == {"": 18}


def test_numbers_in_every_field_are_accepted(tmp_path: pathlib.Path) -> None:
    model = small_models.parsed(small_models.LINEAR)
    kinds = [
        kind for kind in onnx.TensorProto.DataType.values() if kind not in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)
    ]
    for kind in kinds:
        model.graph.initializer.append(onnx.helper.make_tensor(f"w{kind}", kind, [3], [1, 0, 1]))
    model.graph.initializer.append(onnx.helper.make_tensor("text", onnx.TensorProto.STRING, [2], ["a", "b"]))
    assert len(io.load(small_models.written(model, tmp_path / "m.onnx")).graph.initializers) == len(kinds) + 3


@pytest.mark.parametrize("target", ["model.onnx", "./model.onnx", "link.onnx"])
def test_the_input_is_never_written_over(target: str, tmp_path: pathlib.Path) -> None:
    source = small_models.written(small_models.LINEAR, tmp_path / "model.onnx")
    (tmp_path / "link.onnx").symlink_to(source)
    before = small_models.contents(tmp_path)
    with pytest.raises(OptionError, match="is the model being optimized; write the result to another file"):
        io.save(io.load(source), tmp_path / target)
    assert small_models.contents(tmp_path) == before


def test_an_older_output_is_replaced(tmp_path: pathlib.Path) -> None:
    (tmp_path / "out.onnx").write_text("old")
    io.save(io.load(small_models.written(small_models.LINEAR, tmp_path / "m.onnx")), tmp_path / "out.onnx")
    assert len(io.load(tmp_path / "out.onnx").graph) == 2


def test_a_failed_save_leaves_the_old_file(tmp_path: pathlib.Path) -> None:
    model = io.load(small_models.written(small_models.LINEAR, tmp_path / "m.onnx"))
    (tmp_path / "out.onnx").write_text("old")
    before = small_models.contents(tmp_path)
    model.metadata_props["broken"] = "\udcff"
    with pytest.raises(ModelError, match="cannot be written"):
        io.save(model, tmp_path / "out.onnx")
    assert small_models.contents(tmp_path) == before


@pytest.mark.parametrize(
    ("target", "message"), [("missing/out.onnx", "does not exist; make it first"), ("", "is a folder; give the name")]
)
def test_a_folder_that_is_not_there_and_one_that_is_are_refused(target: str, message: str, tmp_path: pathlib.Path) -> None:
    model = io.load(small_models.written(small_models.LINEAR, tmp_path / "m.onnx"))
    with pytest.raises(OptionError, match=message):
        io.save(model, tmp_path / target)


if hasattr(os, "mkfifo"):  # devices, which root could replace, are tried by a pipe, which Windows has not among its files

    def test_what_is_no_regular_file_is_not_replaced(tmp_path: pathlib.Path) -> None:
        model = io.load(small_models.written(small_models.LINEAR, tmp_path / "m.onnx"))
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(OptionError, match="pipe: it is there and no regular file; choose another place"):
            io.save(model, tmp_path / "pipe")
        assert (tmp_path / "pipe").is_fifo()
        assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_is_reported(tmp_path: pathlib.Path) -> None:
    model = io.load(small_models.written(small_models.LINEAR, tmp_path / "m.onnx"))
    with pytest.raises(OptionError, match=r"cannot write .*: File name too long; choose another place"):
        io.save(model, tmp_path / ("n" * 250))


def test_weights_too_large_for_one_file_move_out(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "_INLINE_LIMIT", 4000)
    model = io.load(small_models.written(small_models.LINEAR, tmp_path / "m.onnx"))
    large = ir.Tensor(np.arange(1024, dtype=np.float32), name="large")
    model.graph.register_initializer(
        ir.Value(name="large", const_value=large, type=ir.TensorType(large.dtype), shape=large.shape)
    )
    io.save(model, tmp_path / "out.onnx")
    assert model.graph.initializers["large"].const_value is large
    assert (tmp_path / "out.onnx.data").stat().st_size == large.nbytes
    again = io.load(tmp_path / "out.onnx")
    inline = [name for name, value in again.graph.initializers.items() if not isinstance(value.const_value, ir.ExternalTensor)]
    assert inline == ["weight", "bias"]
    moved = again.graph.initializers["large"].const_value
    assert moved is not None
    np.testing.assert_array_equal(moved.numpy(), large.numpy())


def test_moved_weights_do_not_take_the_place_of_a_data_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "_INLINE_LIMIT", 0)
    monkeypatch.setattr(external, "_MIN_MOVED_BYTES", 1)
    model = io.load(small_models.linear_with_data(tmp_path, "out.onnx.data"))
    extra = ir.tensor(np.ones(2, np.float32), name="extra")
    model.graph.register_initializer(
        ir.Value(name="extra", const_value=extra, type=ir.TensorType(extra.dtype), shape=extra.shape)
    )
    before = (tmp_path / "out.onnx.data").read_bytes()
    io.save(model, tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx.data").read_bytes() == before
    assert (tmp_path / "out.onnx.2.data").read_bytes() == extra.tobytes()


class Program:
    """Stands where torch's `ONNXProgram` would."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.released = False

    def release(self) -> None:
        """What torch calls to drop a session on the old model."""
        self.released = True


def renamed(model: ir.Model) -> ir.Model:
    """The model with every name in it changed."""
    for value in model.graph.initializers.copy().values():
        value.name = f"{value.name}.renamed"
    for node in model.graph:
        node.name = f"{node.name}.renamed"
    return model


def test_a_proto_gives_a_proto_and_stays_as_it_is() -> None:
    given = rich()
    before = given.SerializeToString(deterministic=True)
    model, kind = io.from_any(given)
    result = io.to_kind(renamed(model), kind)
    assert isinstance(result, onnx.ModelProto)
    assert result.graph.node[1].name == "branch.renamed"
    assert given.SerializeToString(deterministic=True) == before


def test_an_ir_model_gives_an_ir_model_and_stays_as_it_is() -> None:
    given = ir.from_proto(rich())
    before = ir.to_proto(given)
    model, kind = io.from_any(given)
    assert ir.to_proto(model) == before
    assert io.to_kind(model, kind) is model
    for node in model.graph:
        node.name = "other"
    assert ir.to_proto(given) == before


def test_a_program_gets_a_new_model() -> None:
    given = ir.from_proto(small_models.parsed(small_models.LINEAR))
    program = Program(given)
    model, kind = io.from_any(program)
    assert model is not given
    assert io.to_kind(model, kind) is program
    assert program.model is model
    assert program.released


def test_a_path_gives_an_ir_model(tmp_path: pathlib.Path) -> None:
    path = small_models.written(small_models.LINEAR, tmp_path / "m.onnx")
    for given in (path, str(path)):
        model, kind = io.from_any(given)
        assert io.to_kind(model, kind) is model


def test_anything_else_is_refused() -> None:
    with pytest.raises(ModelError, match="a dict is not a model; pass a path"):
        io.from_any({"graph": []})


_OLD = """<ir_version: {version}, opset_import: ["" : 18]>
g (float[b,2] x, float[2] w) => (float[b,2] y) <float[2] w = {{3, 4}}> {{ y = Mul(x, w) }}"""


@pytest.mark.parametrize(("version", "inputs"), [(3, ["x"]), (4, ["x", "w"]), (8, ["x", "w"])])
def test_an_initializer_is_an_input_that_a_caller_sets_from_ir_version_4_on(
    version: int, inputs: list[str], tmp_path: pathlib.Path
) -> None:
    model = small_models.parsed(_OLD.format(version=version))
    for loaded in (io.from_any(model)[0], io.from_any(ir.from_proto(model))[0]):
        assert [value.name for value in loaded.graph.inputs] == inputs
        io.save(loaded, tmp_path / "out.onnx")
        written = onnx.load(tmp_path / "out.onnx")
        assert written.ir_version == max(version, 4)
        assert [value.name for value in written.graph.input] == inputs
        assert [tensor.name for tensor in written.graph.initializer] == ["w"]


@pytest.mark.parametrize("kind", ["proto", "ir"])
def test_a_negative_size_is_an_unknown_one(kind: str) -> None:
    given = small_models.parsed(small_models.LINEAR)
    for value in (*given.graph.input, *given.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    model, _ = io.from_any(given if kind == "proto" else ir.from_proto(given))
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.shape is not None
        assert value.shape == ir.Shape([None, 2])
