"""Nothing that a node says is ignored: operators of the installed schemas, changed in one thing each, are refused or read.

Each case of the tables of certificates is a node that ONNX Runtime runs. Every attribute of its schema is set to other values,
every optional input is left out or given, every version and element type is tried. What ONNX Runtime still runs must be what our
engines say of it, as far as they say anything: proofs, facts, masks, and what is spelled out. `-s` prints what was tried.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import faulthandler
import itertools
import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper

import onnx_attnfuse
from onnx_attnfuse.attention.axes.factors import leaves, new_axes
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.mask_terms import position
from onnx_attnfuse.certify.arrays import Unsupported
from onnx_attnfuse.certify.certificate import certify
from onnx_attnfuse.certify.execution import Execution
from onnx_attnfuse.certify.terms import index, number, size, walk
from onnx_attnfuse.graph.io import from_any
from onnx_attnfuse.graph.schemas import table, why_unknown
from onnx_attnfuse.graph.scopes import Scope, scopes
from onnx_attnfuse.verify.mask_check import Evaluator, NotEvaluated
from tests.certify.test_meanings import CASES, CONTRIB, UNTOLD, _filled
from tests.support.operator_schemas import default_of, schemas
from tests.support.sampling import sample
from tests.support.term_values import Values

Feeds: TypeAlias = dict[str, np.ndarray]

SCHEMAS = schemas()
_NAMES = [*((name, "") for name in CASES), *((name, "com.microsoft") for name in CONTRIB)]
_KEPT = set(sample([name for name, _ in _NAMES], every=4)) | {"IsInf", "Cast", "Attention with a past", "RotaryEmbedding"}
_OTHER = {
    "INT": [0, 1, 2, 3, -1, -2, 8, 16],
    "FLOAT": [0.0, 0.5, 2.0, -1.0],
    "STRING": ["tanh", "none", "reflect", "edge", "wrap", "nearest", "PER_TENSOR", "down", "linear"],
    "INTS": [[0], [1], [1, 0], [0, 1]],
}
"""Values that attributes are set to, by their kind."""
_TYPES = (np.float16, np.float64, np.int32, np.int64, np.uint8, np.bool_)
_COUNTS: collections.Counter[str] = collections.Counter()


def _node(name: str, domain: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A case as a model of fixed sizes, and what goes in."""
    inputs, attributes, fixed, outputs = _filled((CONTRIB if domain else CASES)[name])
    op = name.partition(" ")[0]
    given = {f"in{place}": item for place, item in enumerate(inputs) if item is not None}
    made = helper.make_node(
        op,
        [f"in{place}" if item is not None else "" for place, item in enumerate(inputs)],
        [f"out{place}" if place not in UNTOLD.get(op, ()) else "" for place in range(outputs)],
        domain=domain,
        **attributes,
    )
    return _model(made, given, {f"in{place}" for place in fixed}, 24 if op == "Attention" else 23), given


def _model(made: onnx.NodeProto, given: Mapping[str, np.ndarray], fixed: set[str], opset: int) -> onnx.ModelProto:
    infos = [
        helper.make_tensor_value_info(key, helper.np_dtype_to_tensor_dtype(item.dtype), item.shape)
        for key, item in given.items()
        if key not in fixed
    ]
    tensors = [onnx.numpy_helper.from_array(given[key], key) for key in given if key in fixed]
    outs = [onnx.ValueInfoProto(name=output) for output in made.output if output]
    graph = helper.make_graph([made], "one", infos, outs, tensors)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _changes(
    model: onnx.ModelProto, given: dict[str, np.ndarray]
) -> Iterator[tuple[str, onnx.ModelProto, dict[str, np.ndarray]]]:
    """The model with one thing of its node changed each, what that is, and what goes in."""
    (node,) = model.graph.node
    versions = SCHEMAS[node.domain, node.op_type]
    fixed = {tensor.name for tensor in model.graph.initializer}
    opset = model.opset_import[0].version

    def changed(**other: Any) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        made, feeds = copy.deepcopy(other.get("node", node)), other.get("given", given)
        feeds = {key: item for key, item in feeds.items() if key in made.input}
        return _model(made, feeds, fixed & set(feeds), other.get("opset", opset)), feeds

    for name, attribute in sorted(versions[-1].attributes.items()):
        kind = str(attribute.type).rpartition(".")[2]
        for value in _OTHER.get(kind, []):
            other = copy.deepcopy(node)
            kept = [item for item in other.attribute if item.name != name]
            del other.attribute[:]
            other.attribute.extend([*kept, helper.make_attribute(name, value)])
            yield f"attribute {name}={value}", *changed(node=other)
    for place, key in enumerate(node.input):
        if key:
            other = copy.deepcopy(node)
            other.input[place] = ""
            yield f"input {place} left out", *changed(node=other)
    for place in range(len(versions[-1].inputs)):
        if place < len(node.input) and node.input[place]:
            continue
        for like, offset in itertools.product([*given.values(), *_SMALL], (0, 1)):
            other = copy.deepcopy(node)
            other.input.extend([""] * (place + 1 - len(other.input)))
            other.input[place] = "more"
            extra = like + np.asarray(offset, like.dtype) if like.dtype != np.bool_ else like
            yield f"input {place} given", *changed(node=other, given={**given, "more": extra})
    for version in {item.since_version for item in versions} - {opset} if not node.domain else ():
        yield f"version {version}", *changed(opset=version)
    for dtype in _TYPES:
        floats = [key for key, item in given.items() if item.dtype == next(iter(given.values())).dtype]
        yield f"type {dtype.__name__}", *changed(given={**given, **{key: given[key].astype(dtype) for key in floats}})


_SMALL = (np.ones(1, np.int32), np.ones(2, np.int32), np.zeros((), np.int64), np.ones(4, np.float32))


def _run(model: onnx.ModelProto, given: Mapping[str, np.ndarray]) -> list[np.ndarray] | None:
    """What ONNX Runtime computes, in a process of its own as kernels may end it; None: it does not run this."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            faulthandler.disable()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            found = _computed(model, {item.name: given[item.name] for item in model.graph.input})
            with os.fdopen(writing, "wb") as file:
                pickle.dump(found, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return pickle.loads(data) if data else None


def _computed(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def _same(found: Any, wanted: np.ndarray) -> bool:
    tolerance = 2e-2 if wanted.dtype == np.float16 else 2e-4
    left, right = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return left.shape == right.shape and np.allclose(left, right, rtol=tolerance, atol=tolerance / 4, equal_nan=True)


def _proof(scope: Scope, given: Mapping[str, np.ndarray], truth: Sequence[np.ndarray]) -> str | None:
    """What proofs take the outputs for, if that is something else; `refused` where they take them for nothing."""
    execution = Execution(scope.facts, lambda value: value.name or "", {}, lambda _: False, scope.opset, size)
    values, answers = Values({}, given), list[str | None]()
    for value, wanted in zip(list(scope.graph.outputs), truth, strict=True):
        try:
            array = execution.array(value)
            lengths = [int(values.of(length)) for length in array.shape]
            places = [index(f"x{axis}", number(length)) for axis, length in enumerate(lengths)]
            term = array.at(*places)
        except (Unsupported, KeyError, TypeError):
            answers.append("refused")
            continue
        if any(item.op == "element" and item.data not in given for item in walk(term)):
            answers.append("refused")
            continue
        found = np.zeros(lengths)
        try:
            for at in itertools.product(*map(range, lengths)):
                found[at] = float(values.of(term, dict(zip(places, at, strict=True))))
        except (ArithmeticError, IndexError, ValueError):  # terms are evaluated on both sides of a choice
            answers.append("refused")
            continue
        answers.append(None if _same(found, wanted) else f"proofs: {value.name} is {found.ravel()[:4]}, not {wanted.ravel()[:4]}")
    return next((item for item in answers if item is not None), None)


def _facts(scope: Scope, truth: Sequence[np.ndarray]) -> str | None:
    """What is known of the outputs and not so."""
    for value, wanted in zip(scope.graph.outputs, truth, strict=True):
        dims, dtype, content = scope.facts.dims(value), scope.facts.dtype(value), scope.facts.content(value)
        if dims is not None and (
            len(dims) != wanted.ndim or any(isinstance(a, int) and a != b for a, b in zip(dims, wanted.shape, strict=True))
        ):
            return f"facts: the shape is {dims}, not {wanted.shape}"
        if dtype is not None and dtype.numpy() != wanted.dtype:
            return f"facts: the type is {dtype}, not {wanted.dtype}"
        told = [item for item in np.ravel(np.array(content, object)) if content is not None]
        for item, right in zip(told, wanted.ravel().tolist(), strict=False):
            if isinstance(item, (int, float, bool)) and not np.isclose(item, right, rtol=1e-5):
                return f"facts: the content is {content}, not {wanted}"
    return None


def _mask(scope: Scope, given: Mapping[str, np.ndarray], truth: Sequence[np.ndarray]) -> str | None:
    """What masks take the first output for, if that is something else; numbers that are read are integers or truths in masks."""
    if any(item.dtype.kind == "f" for item in given.values()):
        return None
    value, wanted = scope.graph.outputs[0], truth[0]
    axes = new_axes(list(wanted.shape))
    read = Reader(scope.facts).element(value, map(position, axes))
    factors = [leaf for axis in axes for leaf in leaves(axis)]
    shapes = [[leaf.size if other is place else 1 for other in range(len(factors))] for place, leaf in enumerate(factors)]
    indices = {leaf: np.arange(leaf.size).reshape(shape) for leaf, shape in zip(factors, shapes, strict=True)}
    known = {item: given[item.name] for item in [*scope.graph.inputs, *scope.graph.initializers.values()] if item.name in given}
    try:
        found = Evaluator({}, indices, known).evaluate(read)
    except (NotEvaluated, KeyError):
        return None
    with contextlib.suppress(ValueError):
        found = np.broadcast_to(found, [leaf.size for leaf in factors]).reshape(wanted.shape)
    return None if _same(found, wanted) else f"masks: {np.ravel(found)[:4]}, not {wanted.ravel()[:4]}"


def _spelled(model: onnx.ModelProto, given: Mapping[str, np.ndarray], truth: Sequence[np.ndarray]) -> str | None:
    """What the node is spelled out as, if that is something else."""
    result = onnx_attnfuse.unfuse(model, verify="none")
    if not any(site.status == "unfused" for site in result.report.sites):
        return None
    found = _run(result.model, given)
    equal = found is not None and all(_same(left, right) for left, right in zip(found, truth, strict=True))
    return None if equal else "spelled out as something else"


def _cases() -> list[Any]:
    return [
        pytest.param(name, domain, id=f"{domain} {name}".strip(), marks=[] if name in _KEPT else [pytest.mark.exhaustive])
        for name, domain in _NAMES
    ]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("name", "domain"), _cases())
def test_what_a_node_says_is_read_or_refused(name: str, domain: str) -> None:
    model, given = _node(name, domain)
    base = _run(model, given)
    wrong: list[str] = []
    for what, other, feeds in _changes(model, given):
        kind = what.partition(" ")[0]
        truth = _run(other, feeds)
        _COUNTS[f"{kind}s tried"] += 1
        if truth is None:
            _COUNTS[f"{kind}s that no kernel runs"] += 1
            continue
        scope = next(scopes(from_any(other)[0]))
        proof = _proof(scope, feeds, truth)
        found = [proof if proof != "refused" else None, _facts(scope, truth), _mask(scope, feeds, truth)]
        found.append(_spelled(other, feeds, truth) if domain or name.startswith(("Attention", "Rotary")) else None)
        wrong += [f"{what}: {item}" for item in found if item is not None]
        _COUNTS[f"{kind}s {'refused' if proof == 'refused' else 'read'}"] += 1
        if base is not None and feeds.keys() == given.keys() and kind == "attribute":
            differs = len(base) != len(truth) or not all(_same(left, right) for left, right in zip(truth, base, strict=True))
            if differs and certify(from_any(model)[0], from_any(other)[0]).is_complete:
                wrong.append(f"{what}: proved equal, and is not")
            _COUNTS["mutants held against their source by proofs"] += differs
    print(name, dict(_COUNTS), file=sys.stderr)
    assert wrong == []


def test_every_operator_of_the_schemas_is_refused_in_what_the_table_does_not_read() -> None:
    """Counts what is tried of the installed schemas."""
    counts: collections.Counter[str] = collections.Counter()
    for (domain, op), versions in SCHEMAS.items():
        schema = table()[domain, op]
        counts["operators"] += 1
        counts["versions"] += len(versions)
        counts["versions refused"] += sum(not schema.versions[item.since_version] for item in versions)
        newest = versions[-1]
        plain = helper.make_node(op, ["x"] * newest.min_input, ["y"] * max(1, newest.min_output), domain=domain)
        for name, attribute in newest.attributes.items():
            kind, default = str(attribute.type).rpartition(".")[2], default_of(attribute)
            for value in [item for item in _OTHER.get(kind, []) if item != default][:2]:
                other = copy.deepcopy(plain)
                other.attribute.append(helper.make_attribute(name, value))
                known = schema.attributes[name]
                is_read = known.takes(ir.from_proto(other.attribute[-1]))
                assert (_unknown(other) is None) == is_read, (op, name)
                assert is_read or value != known.default
                counts["attributes read" if is_read else "attributes refused"] += 1
        other = copy.deepcopy(plain)
        other.attribute.append(helper.make_attribute("of_a_newer_schema", 1))
        assert _unknown(other) == f"of_a_newer_schema of {op} is not read"
        if newest.max_input < 100:
            longer = helper.make_node(op, ["x"] * (newest.max_input + 1), ["y"], domain=domain)
            assert _unknown(longer) is not None or len(schema.inputs) > newest.max_input, op
        counts["inputs"] += len(newest.inputs)
        counts["inputs refused"] += sum(not is_read for is_read in schema.inputs.values())
    print(dict(counts), file=sys.stderr)
    assert counts["operators"] > 300


def _unknown(node: onnx.NodeProto) -> str | None:
    values = [ir.Value(name=name) for name in node.input]
    attributes = [ir.from_proto(item) for item in node.attribute]
    return why_unknown(ir.Node(node.domain, node.op_type, values, attributes, num_outputs=len(node.output)))
