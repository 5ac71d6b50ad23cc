"""Reading views upwards and emitting layouts, judged by ONNX Runtime on random chains of operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_attnfuse.attention.axes.factors import Axes, Factor, length, new_axes, refined
from onnx_attnfuse.attention.axes.rearrange import arrange, cost
from onnx_attnfuse.attention.axes.views import IndexedValue, downward, upward
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.reasons import Refused
from tests.support.bundled import Array, run

OPSET = 18


class Chain:
    """Operators one after another on one input; shapes are those of the run, some axes of the input being dynamic."""

    def __init__(self, shape: Sequence[int], dynamic: Sequence[bool]) -> None:
        self.array: Array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        dims = [f"d{axis}" if is_dynamic else size for axis, (size, is_dynamic) in enumerate(zip(shape, dynamic, strict=True))]
        self.graph = onnx.GraphProto(name="chain")
        self.graph.input.append(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, dims))
        self.name = "x"
        self.shape = list(shape)
        self.dynamic = list(dynamic)

    def add(self, op: str, *constants: Sequence[int] | int, outputs: int = 1, take: int = 0, **attributes: object) -> None:
        """Appends an operator; its further inputs are constants."""
        count = len(self.graph.node)
        inputs = [self.name]
        for index, constant in enumerate(constants):
            inputs.append(f"c{count}_{index}")
            self.graph.initializer.append(onnx.numpy_helper.from_array(np.array(constant, np.int64), inputs[-1]))
        names = [f"y{count}_{index}" for index in range(outputs)]
        self.graph.node.append(onnx.helper.make_node(op, inputs, names, **attributes))
        self.name = names[take]

    def model(self) -> onnx.ModelProto:
        """The chain as a model, ending in a node that new ones can be put before."""
        self.graph.node.append(onnx.helper.make_node("Identity", [self.name], ["end"]))
        self.graph.output.append(onnx.ValueInfoProto(name="end"))
        return onnx.helper.make_model(self.graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=9)


def transpose(draw: st.DrawFn, chain: Chain) -> None:
    perm = draw(st.permutations(range(len(chain.shape))))
    chain.add("Transpose", perm=perm)
    chain.shape = [chain.shape[axis] for axis in perm]
    chain.dynamic = [chain.dynamic[axis] for axis in perm]


def merge(draw: st.DrawFn, chain: Chain) -> None:
    if len(chain.shape) < 2 or sum(chain.dynamic) > 1:
        return
    axis = draw(st.integers(0, len(chain.shape) - 2))
    shape = [*chain.shape[:axis], chain.shape[axis] * chain.shape[axis + 1], *chain.shape[axis + 2 :]]
    chain.dynamic[axis : axis + 2] = [any(chain.dynamic[axis : axis + 2])]
    chain.shape = shape
    chain.add("Reshape", [-1 if dynamic else size for size, dynamic in zip(shape, chain.dynamic, strict=True)])


def split_axis(draw: st.DrawFn, chain: Chain) -> None:
    fitting = [axis for axis, size in enumerate(chain.shape) if size > 1 and not chain.dynamic[axis]]
    if not fitting or sum(chain.dynamic) > 1:
        return
    axis = draw(st.sampled_from(fitting))
    outer = draw(st.sampled_from([part for part in range(1, chain.shape[axis] + 1) if chain.shape[axis] % part == 0]))
    chain.shape[axis : axis + 1] = [outer, chain.shape[axis] // outer]
    chain.dynamic[axis : axis + 1] = [False, False]
    chain.add("Reshape", [-1 if dynamic else size for size, dynamic in zip(chain.shape, chain.dynamic, strict=True)])


def unsqueeze(draw: st.DrawFn, chain: Chain) -> None:
    axis = draw(st.integers(0, len(chain.shape)))
    chain.add("Unsqueeze", [axis])
    chain.shape.insert(axis, 1)
    chain.dynamic.insert(axis, False)


def expand(draw: st.DrawFn, chain: Chain) -> None:
    target = [draw(st.integers(2, 3)) if size == 1 and not chain.dynamic[axis] else 1 for axis, size in enumerate(chain.shape)]
    chain.add("Expand", target)
    chain.shape = [max(pair) for pair in zip(chain.shape, target, strict=True)]


def part(draw: st.DrawFn, chain: Chain) -> tuple[int, int, int] | None:
    """An axis that can be cut into equal parts, their number, and one of them."""
    fitting = [axis for axis, size in enumerate(chain.shape) if size > 1 and not chain.dynamic[axis]]
    if not fitting:
        return None
    axis = draw(st.sampled_from(fitting))
    parts = draw(st.sampled_from([count for count in range(2, chain.shape[axis] + 1) if chain.shape[axis] % count == 0]))
    return axis, parts, draw(st.integers(0, parts - 1))


def slice_part(draw: st.DrawFn, chain: Chain) -> None:
    found = part(draw, chain)
    if found is not None:
        axis, parts, index = found
        size = chain.shape[axis] // parts
        chain.add("Slice", [index * size], [(index + 1) * size], [axis])
        chain.shape[axis] = size


def split_part(draw: st.DrawFn, chain: Chain) -> None:
    found = part(draw, chain)
    if found is not None:
        axis, parts, index = found
        chain.add("Split", outputs=parts, take=index, axis=axis, num_outputs=parts)
        chain.shape[axis] //= parts


def gather_one(draw: st.DrawFn, chain: Chain) -> None:
    fitting = [axis for axis, size in enumerate(chain.shape) if not chain.dynamic[axis]]
    if len(chain.shape) > 1 and fitting:
        axis = draw(st.sampled_from(fitting))
        chain.add("Gather", draw(st.integers(-chain.shape[axis], chain.shape[axis] - 1)), axis=axis)
        del chain.shape[axis], chain.dynamic[axis]


def gather_repeated(draw: st.DrawFn, chain: Chain) -> None:
    fitting = [axis for axis, size in enumerate(chain.shape) if size > 1 and not chain.dynamic[axis]]
    if fitting:
        axis = draw(st.sampled_from(fitting))
        numbers = np.arange(chain.shape[axis])
        chain.add("Gather", draw(st.sampled_from([np.repeat(numbers, 2), np.tile(numbers, 2)])).tolist(), axis=axis)
        chain.shape[axis] *= 2


def tile(draw: st.DrawFn, chain: Chain) -> None:
    repeats = [1] * len(chain.shape)
    axis = draw(st.integers(0, len(chain.shape) - 1))
    repeats[axis] = draw(st.integers(1, 2))
    if not chain.dynamic[axis]:
        chain.add("Tile", repeats)
        chain.shape[axis] *= repeats[axis]


Step = Callable[[st.DrawFn, Chain], None]
VIEWS: list[Step] = [transpose, merge, split_axis, unsqueeze]
SELECTIONS: list[Step] = [expand, slice_part, split_part, gather_one, gather_repeated, tile]


@st.composite
def chains(draw: st.DrawFn, steps: Sequence[Step] = VIEWS + SELECTIONS) -> Chain:
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    dynamic = [draw(st.booleans()) if size > 1 else False for size in shape]
    chain = Chain(shape, dynamic)
    for step in draw(st.lists(st.sampled_from(steps), min_size=1, max_size=6)):
        step(draw, chain)
    return chain


def furthest(value: ir.Value, facts: Facts) -> list[IndexedValue]:
    """The value and everything it is a view of."""
    dims = facts.dims(value)
    assert dims is not None
    found = [IndexedValue(value, new_axes(dims))]
    while (above := upward(found[-1], facts, selecting=True)) is not None:
        found.append(above)
    return found


class Bench:
    """A chain as the engine sees it."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.model = ir.from_proto(proto)
        self.facts = Facts(self.model.graph)
        self.end = self.model.graph.outputs[0]
        node = self.end.producer()
        assert node is not None
        self.builder = Builder(self.model.graph, self.facts, OPSET, set())
        self.builder.at(node)
        assert node.inputs[0] is not None
        self.value = node.inputs[0]

    def run(self, arranged: ir.Value, array: Array) -> tuple[Array, Array]:
        """The result of the chain and the arranged value."""
        renamed = ir.node("Identity", [arranged], num_outputs=1)
        renamed.outputs[0].name = "arranged"
        self.model.graph.append(renamed)
        self.model.graph.outputs.append(renamed.outputs[0])
        results = run(ir.to_proto(self.model), {"x": array})
        return results["end"], results["arranged"]


@given(chains(), st.data())
def test_what_was_read_upwards_can_be_brought_into_any_order_again(chain: Chain, data: st.DataObject) -> None:
    bench = Bench(chain.model())
    found = furthest(bench.value, bench.facts)
    source = found[data.draw(st.integers(0, len(found) - 1))]
    perm = data.draw(st.permutations(range(len(found[0].axes))))
    target = tuple(found[0].axes[axis] for axis in perm)
    assert cost(source, target) < float("inf")
    expected, arranged = bench.run(arrange(bench.builder, source, target), chain.array)
    np.testing.assert_array_equal(arranged, expected.transpose(perm))


@given(chains([transpose, split_axis, unsqueeze]))
def test_a_chain_of_views_that_only_part_axes_is_read_to_its_beginning(chain: Chain) -> None:
    bench = Bench(chain.model())
    assert furthest(bench.value, bench.facts)[-1].value is bench.model.graph.inputs[0]


@given(chains(VIEWS))
def test_downward_and_upward_are_each_others_inverse(chain: Chain) -> None:
    bench = Bench(chain.model())
    for node in bench.model.graph:
        value = node.inputs[0]
        assert value is not None
        axes = new_axes(bench.facts.dims(value) or ())
        below = downward(node, axes, bench.facts)
        assert below is not None
        above = upward(below, bench.facts)
        assert above is not None
        assert above.value is value
        assert refined(above.axes) == refined(axes)


@given(chains())
def test_a_layout_that_is_there_already_costs_nothing(chain: Chain) -> None:
    bench = Bench(chain.model())
    indexed = furthest(bench.value, bench.facts)[0]
    assert cost(indexed, indexed.axes) == 0
    assert arrange(bench.builder, indexed, indexed.axes) is bench.value
    assert not bench.builder.added


def chain_of(shape: Sequence[int], op: str, *constants: Sequence[int] | int, **attributes: object) -> Bench:
    chain = Chain(shape, [False] * len(shape))
    chain.add(op, *constants, **attributes)
    return Bench(chain.model())


NO_VIEWS = [
    pytest.param(("Slice", [1], [3], [1]), {}, id="slice-of-no-equal-part"),
    pytest.param(("Slice", [0], [6], [1], [2]), {}, id="slice-with-steps"),
    pytest.param(("Gather", [1, 0, 3, 2, 5, 4]), {"axis": 1}, id="gather-in-another-order"),
    pytest.param(("Gather", [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 4]), {"axis": 1}, id="gather-repeating-unevenly"),
    pytest.param(("Reshape", [3, 4]), {}, id="reshape-across-borders"),
    pytest.param(("Split", [2, 4]), {"axis": 1, "outputs": 2}, id="split-into-unequal-parts"),
    pytest.param(("Relu",), {}, id="no-view-at-all"),
]


@pytest.mark.parametrize(("operator", "attributes"), NO_VIEWS)
def test_what_is_no_view_is_not_read(operator: tuple[str, ...], attributes: dict[str, int]) -> None:
    bench = chain_of([2, 6], *operator, **attributes)
    assert len(furthest(bench.value, bench.facts)) == 1


SELECTING = [
    pytest.param(("Slice", [2], [4], [1]), {}, id="slice-of-a-third"),
    pytest.param(("Gather", [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]), {"axis": 1}, id="gather-repeating-each"),
    pytest.param(("Split", [2, 2, 2]), {"axis": 1, "outputs": 3}, id="split-into-thirds"),
]


@pytest.mark.parametrize(("operator", "attributes"), SELECTING)
def test_selections_are_read_only_on_request(operator: tuple[str, ...], attributes: dict[str, int]) -> None:
    bench = chain_of([2, 6], *operator, **attributes)
    indexed = IndexedValue(bench.value, new_axes(bench.facts.dims(bench.value) or ()))
    assert upward(indexed, bench.facts) is None
    assert upward(indexed, bench.facts, selecting=True) is not None


def test_a_factor_without_a_place_is_refused() -> None:
    bench = chain_of([2, 6], "Identity")
    indexed = IndexedValue(bench.value, new_axes([2, 6]))
    target: Axes = (indexed.axes[0],)
    assert cost(indexed, target) == float("inf")
    with pytest.raises(Refused) as refused:
        arrange(bench.builder, indexed, target)
    assert refused.value.reason.code == "foreign-axis"


def test_a_factor_that_is_lacking_is_repeated() -> None:
    bench = chain_of([2, 6], "Identity")
    indexed = IndexedValue(bench.value, new_axes([2, 6]))
    target: Axes = (indexed.axes[0], (Factor(5),), indexed.axes[1])
    value = arrange(bench.builder, indexed, target)
    assert bench.facts.dims(value) == tuple(length(axis) for axis in target)
    expected, arranged = bench.run(value, np.arange(12, dtype=np.float32).reshape(2, 6))
    np.testing.assert_array_equal(arranged, np.repeat(expected[:, None], 5, 1))
