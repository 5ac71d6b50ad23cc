"""Who looks at a value: at its elements, or at its shape only."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import TypeGuard, TypeVar

import onnx_ir as ir

from onnx_attnfuse.graph.constants import is_standard, reads, subgraphs
from onnx_attnfuse.graph.ops import ASKS_SHAPE, CASTS, REARRANGES
from onnx_attnfuse.reasons import Refused

_VIEWS = REARRANGES | CASTS
_Item = TypeVar("_Item", bound=Hashable)


def label(node: ir.Node) -> str:
    """The name of a node for people: its own, or that of its first result where it has none."""
    return node.name or node.outputs[0].name or ""


def module_of(node: ir.Node) -> str | None:
    """The path of the torch module that a node was exported from, for people; None if the exporter wrote none."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    if scopes is not None:
        paths = re.findall(r"'([^']*)'", scopes)
    else:
        paths = [part.partition(":")[0] for part in node.metadata_props.get("namespace", "").split("/")]
    return next(filter(None, reversed(paths[:-1])), None)  # the last one names the node itself


def producer_of(value: ir.Value) -> ir.Node:
    """The node that computes a value, which is no input and no initializer."""
    node = value.producer()
    assert node is not None
    return node


def only_reader(value: ir.Value) -> ir.Node | None:
    """The one node that reads a value, in one place; None where there are others, or a graph gives it out."""
    users = [node for node, _ in value.uses()]
    return users[0] if len(users) == 1 and not value.is_graph_output() else None


def is_read_once(value: ir.Value) -> bool:
    """Whether one node reads a value, in one place, and no graph gives it out."""
    return only_reader(value) is not None


def is_fed(value: ir.Value | None) -> TypeGuard[ir.Value]:
    """Whether a value is an input of a graph, without a default."""
    return value is not None and value.is_graph_input() and value.const_value is None


def is_copy(node: ir.Node) -> bool:
    """Whether a node gives its only input."""
    return len(node.inputs) == 1 and is_standard(node, "Identity", "Concat", "Max", "Min", "Sum")


def viewers(value: ir.Value) -> list[ir.Node]:
    """The nodes that look at the elements of a value; not those that ask for its shape, themselves or through views."""
    return [node for node, _ in value.uses() if not _asks_for_shape(node)]


def check_inner_uses(nodes: Collection[ir.Node], result: ir.Value, may_use: Callable[[ir.Node], bool] = lambda _: False) -> None:
    """Checks that nothing but some nodes looks at the values that they give, apart from their result.

    Args:
        nodes: The nodes.
        result: Their result.
        may_use: Whether another node may, which keeps what it reads.

    Raises:
        Refused: Something else does.
    """
    inside, inner = set(nodes), [(node, value) for node in nodes for value in node.outputs if value is not result]
    for node, value in inner:
        others = (user for user in viewers(value) if user not in inside and not may_use(user))
        outside = next((f"also used by {user.op_type} '{user.name}'" for user in others), None)
        if value.is_graph_output() or outside is not None:
            why = "an output of the graph" if value.is_graph_output() else outside
            remedy = "--keep-outputs computes it a second time"
            raise Refused("inner-value-used", f"the intermediate value '{value.name}' is {why}; {remedy}", node.name)


def reads_input(value: ir.Value) -> bool:
    """Whether the elements of a value depend on inputs of the graph at run time, and not on shapes and constants alone."""
    made_of = (item for item in sources([value], lambda _, node: not is_standard(node, *ASKS_SHAPE)) if item.producer() is None)
    return any(item.const_value is None or item.is_graph_input() for item in made_of)


def sources(values: Iterable[ir.Value], follows: Callable[[ir.Value, ir.Node], bool] = lambda _, __: True) -> Iterator[ir.Value]:
    """Values, and all that they are computed from, each once, nearest first.

    Args:
        values: The values.
        follows: Whether to go on from a value to the inputs of its producer.
    """

    def above(value: ir.Value) -> Iterable[ir.Value]:
        node = value.producer()
        return reads(node) if node is not None and follows(value, node) else ()

    return reached(values, above)


def dependents(values: Iterable[ir.Value]) -> Iterator[ir.Value]:
    """Values, and all that are computed from their elements, each once, nearest first."""
    return reached(
        values,
        lambda value: (output for node, _ in value.uses() if not is_standard(node, *ASKS_SHAPE) for output in node.outputs),
    )


def reached(starts: Iterable[_Item], after: Callable[[_Item], Iterable[_Item]]) -> Iterator[_Item]:
    """Items, and all that come after them or after others that do, each once, nearest first."""
    pending = list(dict.fromkeys(starts))
    seen = set(pending)
    for item in pending:
        yield item
        fresh = [other for other in dict.fromkeys(after(item)) if other not in seen]
        seen.update(fresh)
        pending += fresh


def origin(value: ir.Value | None, *names: str) -> ir.Value | None:
    """The first input of the standard operator of one of some names that makes a value; None if something else makes it."""
    node = None if value is None else value.producer()
    return node.inputs[0] if is_standard(node, *names) else None


def before(value: ir.Value, *names: str) -> ir.Value:
    """The value that standard operators of some names, one after the other, make a value of."""
    while (source := origin(value, *names)) is not None:
        value = source
    return value


def live(graph: ir.Graph, follows: Callable[[ir.Value, ir.Node], bool] = lambda _, __: True) -> set[ir.Node]:
    """The nodes that the outputs of a graph need, those in branches and bodies too; `follows` is that of `sources`."""
    found = {node for value in sources(graph.outputs, follows) if (node := value.producer()) is not None}
    return {*found, *(inner for node in found for nested in subgraphs(node) for inner in nested.all_nodes())}


def shape_nodes(value: ir.Value) -> Iterator[ir.Node]:
    """The Shape nodes that ask for the shape of a value, or of a view of it that nothing else looks at."""
    for node, _ in value.uses():
        if node.op_type == "Shape":
            yield node
        elif _asks_for_shape(node):
            yield from shape_nodes(node.outputs[0])


def _asks_for_shape(node: ir.Node) -> bool:
    if is_standard(node, "Shape"):
        return True
    if not is_standard(node, *_VIEWS):
        return False
    output = node.outputs[0]
    return not output.is_graph_output() and bool(output.uses()) and all(_asks_for_shape(user) for user, _ in output.uses())
