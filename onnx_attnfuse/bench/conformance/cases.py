"""The forms of an operator that are tried, a node of each with random inputs, and its two models.

Forms, attributes and inputs are read off the operator's record and its schema, so that a new operator needs nothing here. The
models are the operator alone, and its body, as of an attention that is not fused.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from ml_dtypes import finfo
from onnx import helper
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnx_attnfuse.bodies.table import body_of
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.kernels.conditions import MaskForm
from onnx_attnfuse.kernels.conformance import BiasForm, Form
from onnx_attnfuse.kernels.operators import OpInfo, records
from onnx_attnfuse.verify.references import node_on

Array = npt.NDArray[Any]
Inputs = list[Array | None]
_WIDTH = 24
"""Channels of the projected values."""
_CAPPED_AT, _WINDOW_OF = 1.5, 3
USUAL_DTYPES = ("float32", "float16")
RARE_DTYPE = "bfloat16"
"""The forms tried, with one head size, where an execution provider is known to have a kernel for it, or where it is asked for."""
HEAD_SIZE, ODD_HEAD_SIZE = 64, 15
"""The forms of every kind of attention: kernels that load vectors of channels take the first, others the second."""
HEAD_SIZES = (8, 12, 16, 20, 32, 40, 72, 80, 96, 128, 256)
"""Additional forms of plain attention."""
TRIANGLES: Mapping[str, int] = {"unidirectional": 0, "is_causal": 0, "causal": 1}
"""The names that schemas have for the causal attribute, and its default."""
WINDOW, CAP = "local_window_size", "softcap"
_MASKS: tuple[tuple[MaskForm, BiasForm], ...] = (
    ("none", ""),
    *(("bias", spread) for spread in ("full", "broadcast", "holes")),
    ("lengths", ""),
    ("ranges", ""),
    ("raw", ""),
)
_LONG = 264
ODD_HEADS, ODD_GROUPED_HEADS = 5, 9
"""Heads whose number is odd: each with keys of its own, and three sharing one."""
_PAST = 6
_IR_VERSION, _OPSET = 10, 18
_WEIGHTS = frozenset(["weights", "projection bias"])


class Draw:
    """Random inputs of one element type."""

    def __init__(self, seed: int, dtype: Any) -> None:
        self._random = np.random.default_rng(seed)
        self.dtype = np.dtype(dtype)

    def normal(self, *shape: int, factor: float = 1.0) -> Array:
        """Normally distributed numbers, `factor` their deviation."""
        return self.cast(self._random.standard_normal(shape) * factor)

    def cast(self, array: Any) -> Array:
        """An array in the type of the inputs."""
        return np.asarray(array).astype(self.dtype)

    def lowest(self, *shape: int) -> Array:
        """The lowest number of the type, everywhere."""
        return np.full(shape, finfo(self.dtype).min, self.dtype)

    def kept(self, *shape: int) -> npt.NDArray[np.bool_]:
        """Random truth values; the first key is always seen, as a triangle leaves the first row no other."""
        found = self._random.random(shape) < 0.7
        found[..., 0] = True
        return found


@dataclasses.dataclass(frozen=True)
class Case:
    """A node and how to fill its inputs."""

    op: str
    name: str
    attributes: Mapping[str, Any]
    make: Callable[[Draw], Inputs]
    outputs: int = 1
    domain: str = CONTRIB
    opset: int = 23

    def inputs(self, dtype: Any = np.float32) -> Inputs:
        """Its inputs, the same every time."""
        found = self.make(Draw(sum(map(ord, self.name)), dtype))
        while found[-1] is None:  # an older version of the operator may have fewer
            found.pop()
        return found


def int32(values: Any) -> Array:
    """Integers as ONNX Runtime's operators take them."""
    return np.asarray(values, np.int32)


def lengths_of(batch: int, longest: int) -> Array:
    """Lengths that differ, the first being the longest."""
    return int32([max(1, longest - 2 * entry) for entry in range(batch)])


def ranges_of(lengths: Array, rows: int, columns: int) -> Array:
    """Lengths, and where queries and keys of each entry start."""
    count = np.arange(len(lengths) + 1)
    return np.concatenate([lengths, int32(count * rows), int32(count * columns)])


def case_of(form: Form, info: OpInfo, attributes: frozenset[str]) -> Case:
    """The case of a form; its inputs are those of the operator, in order.

    Args:
        form: The form.
        info: The record of its operator.
        attributes: The names of its attributes, as its schema has them.
    """
    given = _attributes(form, attributes)
    outputs = 1 + list(info.inputs.values()).count("past") if form.cached or "last" in info.inputs.values() else 1
    return Case(info.name, form.name, given, lambda draw: _inputs(form, info, draw), outputs, info.domain, max(23, info.since))


def _kv_heads(form: Form) -> int:
    """How many heads keys and values have."""
    if not form.grouped:
        return form.heads
    return form.heads // (3 if form.heads % 2 else 2)


def _attributes(form: Form, names: frozenset[str]) -> dict[str, Any]:
    heads = {"num_heads": form.heads, "q_num_heads": form.heads, "kv_num_heads": _kv_heads(form)}
    given: dict[str, Any] = {name: number for name, number in heads.items() if name in names}
    given |= {name: int(form.causal) for name, default in TRIANGLES.items() if name in names and form.causal != bool(default)}
    given |= {WINDOW: _WINDOW_OF} if form.windowed else {}
    return given | ({CAP: _CAPPED_AT} if form.capped else {})


def _inputs(form: Form, info: OpInfo, draw: Draw) -> Inputs:
    """Arrays by the roles of the inputs; those of a role that comes twice in turn."""
    roles, head, channels, inner = list(info.inputs.values()), form.head_size, form.heads * form.head_size, _kv_heads(form)
    counts = lengths_of(form.batch, form.rows)
    rows = (int(counts.sum()),) if info.packed else (form.batch, form.rows)
    keys = rows if info.packed else (form.batch, form.columns - form.past)
    past = (*([2] if roles.count("past") == 1 else []), form.batch, inner, form.past, head)
    offsets = iter(_offsets(form, counts))
    makers: Mapping[str, Callable[[], Array | None]] = {
        "input": lambda: draw.normal(*rows, _WIDTH),
        "weights": lambda: draw.normal(_WIDTH, 3 * channels, factor=0.3),
        "projection bias": lambda: draw.normal(3 * channels, factor=0.3) if "weights" in roles else None,
        "query": lambda: draw.normal(*rows, channels),
        "key": lambda: draw.normal(*keys, inner * head),
        "value": lambda: draw.normal(*keys, inner * head),
        "mask": lambda: _mask(form, draw),
        "bias": lambda: _bias(form, draw) if form.mask == "bias" else None,
        "last": lambda: int32(np.full(form.batch, form.columns - 1)),
        "total": lambda: int32(form.columns),
        "past": lambda: draw.normal(*past) if form.cached else None,
        "offsets": lambda: next(offsets),
    }
    return [makers[role]() if role in makers else None for role in roles]


def _mask(form: Form, draw: Draw) -> Array | None:
    """A mask of integers."""
    lengths = lengths_of(form.batch, form.columns)
    if form.mask == "raw":
        return int32(draw.kept(form.batch, form.columns))
    return {"lengths": lengths, "ranges": ranges_of(lengths, form.rows, form.columns)}.get(form.mask)


def _bias(form: Form, draw: Draw) -> Array:
    """An additive mask; every row but the last of an empty one sees the last key that a triangle leaves it."""
    sizes = (form.rows, form.columns)
    if form.bias == "full":
        return draw.normal(form.batch, form.heads, *sizes)
    kept = draw.kept(1, 1, *sizes) | np.eye(*sizes, form.columns - form.rows, dtype=np.bool_)
    if form.bias == "empty":
        kept[..., -1, :] = False
    return np.where(kept, draw.normal(1, 1, *sizes), draw.cast(-np.inf) if form.bias == "holes" else draw.lowest(1))


def _offsets(form: Form, counts: Array) -> tuple[Array, Array]:
    """The source of each token, padding last, and the number of tokens before each entry."""
    places = np.arange(form.batch * form.rows).reshape(form.batch, form.rows)
    kept = np.arange(form.rows) < counts[:, None]
    order = np.concatenate([places[kept], places[~kept]]).reshape(form.batch, form.rows)
    return int32(order), int32(np.cumsum([0, *counts]))


def operators() -> list[OpInfo]:
    """The operators that are tried: those of attention."""
    return [info for info in records().values() if info.kind == "attention"]


def forms(info: OpInfo, attributes: frozenset[str], dtypes: Sequence[str] = USUAL_DTYPES) -> Iterator[Form]:
    """All forms of an operator, so that the first few are those that tell most.

    Args:
        info: Its record.
        attributes: The names of its attributes, as its schema has them.
        dtypes: The element types.
    """
    roles = set(info.inputs.values())
    own_keys = info.packed or "weights" in roles or "last" in roles  # keys are those of the tokens of the queries
    short = [
        dataclasses.replace(kind, columns=5 if own_keys or kind.causal else 7, dtype=dtype)
        for dtype, kind in itertools.product(dtypes, list(_kinds(info, attributes)))
    ]
    yield from short
    yield from _unusual(short)
    usual = [form for form in short if form.dtype != RARE_DTYPE]
    yield from (dataclasses.replace(form, head_size=ODD_HEAD_SIZE) for form in usual)
    if "past" in roles:
        pasts = [form for form in short if not ("weights" in roles and form.mask == "bias")]
        cached = [dataclasses.replace(form, past=_PAST, cached=True) for form in pasts]
        yield from (dataclasses.replace(form, rows=1, columns=_PAST + 1) for form in cached)
        yield from (dataclasses.replace(form, batch=1, rows=4, columns=_PAST + 4) for form in cached)
    yield from (dataclasses.replace(form, batch=1, rows=_LONG, columns=_LONG) for form in short)
    for form, size in itertools.product(filter(_is_plain, usual), HEAD_SIZES):
        yield dataclasses.replace(form, head_size=size)


def _unusual(short: Sequence[Form]) -> Iterator[Form]:
    """Forms that see no key in a row, and forms with an odd number of heads.

    A float16 score plus the lowest float16 is kept or not by how a provider rounds, so that no result is the right one.
    """
    plain = [form for form in short if form.bias in {"", "broadcast"} and not (form.windowed or form.capped)]
    absorbing = [form for form in plain if form.mask == "bias" and form.dtype != "float16"]
    empty = [dataclasses.replace(form, bias="empty") for form in absorbing]
    yield from empty
    yield from (dataclasses.replace(form, batch=1, rows=_LONG, columns=_LONG) for form in empty if not form.grouped)
    odd = [form for form in plain if form.mask in {"none", "bias"}]
    yield from (dataclasses.replace(form, heads=ODD_GROUPED_HEADS if form.grouped else ODD_HEADS) for form in odd)


def _kinds(info: OpInfo, attributes: frozenset[str]) -> Iterator[Form]:
    """Every combination of what an operator may be asked for, sizes and element types aside; the plainest first."""
    roles, is_grouped = set(info.inputs.values()), "kv_num_heads" in attributes
    for capped, grouped, (mask, bias), (causal, windowed) in itertools.product(
        _both(CAP in attributes), _both(is_grouped), _MASKS, _triangles(attributes)
    ):
        if mask == "none" or ("bias" if mask == "bias" else "mask") in roles:
            yield Form(info.key, "", mask, bias, causal, windowed, grouped=grouped, capped=capped, head_size=HEAD_SIZE)


def _is_plain(form: Form) -> bool:
    return (form.mask == "none" or form.bias == "broadcast") and not (form.windowed or form.grouped or form.capped)


def _both(exists: bool) -> tuple[bool, ...]:
    return (False, True) if exists else (False,)


def _triangles(attributes: frozenset[str]) -> tuple[tuple[bool, bool], ...]:
    """Neither triangle nor window, a triangle, and a window in it; a window without a causal attribute is always causal."""
    named, has_window = bool(attributes & set(TRIANGLES)), WINDOW in attributes
    free = [(False, False)] if named or not has_window else []
    return (*free, *([(True, False)] if named or has_window else []), *([(True, True)] if has_window else []))


def model_of(case: Case, inputs: Inputs) -> onnx.ModelProto:
    """A model of the one node, whose inputs are `x0`, `x1`, ... and whose outputs `y0`, `y1`, ..."""
    names = ["" if array is None else f"x{place}" for place, array in enumerate(inputs)]
    results = [f"y{place}" for place in range(case.outputs)]
    node = helper.make_node(case.op, names, results, domain=case.domain, **dict(case.attributes))
    given = [
        helper.make_tensor_value_info(name, ir.DataType.from_numpy(array.dtype).value, array.shape)
        for name, array in zip(names, inputs, strict=True)
        if array is not None
    ]
    kind = given[0].type.tensor_type.elem_type
    kinds = [onnx.TensorProto.INT32 if case.op == "RemovePadding" and place else kind for place in range(case.outputs)]
    found = [helper.make_tensor_value_info(name, item, None) for name, item in zip(results, kinds, strict=True)]
    graph = helper.make_graph([node], "case", given, found)
    imports = [helper.make_opsetid("", case.opset), helper.make_opsetid(CONTRIB, 1)]
    return _fed_in_float32(helper.make_model(graph, opset_imports=imports, ir_version=_IR_VERSION))


def feeds_of(inputs: Inputs) -> dict[str, Array]:
    """The inputs of a case's model, by name."""
    return {f"x{place}": _plain(array) for place, array in enumerate(inputs) if array is not None}


def decomposed(case: Case, info: OpInfo, inputs: Inputs) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """The body of the operator, with its first output, and its feeds; weights, lengths and masks of integers are constants.

    Raises:
        Refused: The body cannot be written.
    """
    fused = node_on((case.domain, case.op), inputs, case.attributes, case.outputs, _OPSET)
    graph, feeds = fused.build.graph, dict[str, Array]()
    for value, array, role in zip(fused.inputs, inputs, info.inputs.values(), strict=False):
        if value is None or array is None:
            continue
        if array.dtype.kind in "fV" and role not in _WEIGHTS:
            feeds[str(value.name)] = _plain(array)
            continue
        value.const_value = ir.tensor(array, name=value.name)
        graph.inputs.remove(value)
        graph.register_initializer(value)
    graph.outputs[:] = [value for value in body_of(fused).values[:1] if value is not None]
    graph.remove(fused.node)
    model = ir.Model(graph, ir_version=_IR_VERSION)
    RemoveUnusedNodesPass()(model)
    return _fed_in_float32(ir.to_proto(model)), feeds


def _fed_in_float32(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, in place, with float32 outside where it has bfloat16, which sessions are not fed."""
    graph, narrow = model.graph, onnx.TensorProto.BFLOAT16
    casts: list[onnx.NodeProto] = []
    for values, name in ((graph.input, "input"), (graph.output, "output")):
        for value in values:
            if value.type.tensor_type.elem_type != narrow:
                continue
            value.type.tensor_type.elem_type, inner = onnx.TensorProto.FLOAT, f"{value.name} narrow"
            for node in graph.node:
                names = getattr(node, name)
                names[:] = [inner if item == value.name else item for item in names]
            sides, to = ((value.name, inner), narrow) if name == "input" else ((inner, value.name), onnx.TensorProto.FLOAT)
            casts.append(helper.make_node("Cast", [sides[0]], [sides[1]], to=to))
    nodes = [*(node for node in casts if node.attribute[0].i == narrow), *graph.node]
    nodes += [node for node in casts if node.attribute[0].i != narrow]
    del graph.node[:]
    graph.node.extend(nodes)
    return model


def _plain(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
