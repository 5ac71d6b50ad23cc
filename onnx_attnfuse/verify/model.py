"""Judging whole models: before and after on the same inputs, chosen by what each input is, ONNX Runtime's optimisations off.

    verdict = judge_models("model.onnx", "model.attnfuse.onnx")

Slower than judging sites, and blunter: rounding adds up over layers. It sees what sites cannot: that the new nodes are connected.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np
import onnx
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph import io, sizes
from onnx_attnfuse.graph.facts import Dims, Facts
from onnx_attnfuse.graph.tensors import external_tensors
from onnx_attnfuse.verify.binding import Equalities
from onnx_attnfuse.verify.compare import compare
from onnx_attnfuse.verify.inputs import LARGE, Array, Case, Slot, case_groups, describe, feeds
from onnx_attnfuse.verify.runtime import Operators, Reference, RuntimeRefusal, Session, available, load
from onnx_attnfuse.verify.verdict import Evidence, Verdict, undecided

Source: TypeAlias = "str | os.PathLike[str] | onnx.ModelProto | ir.Model"

_TOLERANCE = 1e-3
"""Ten times that of one site: errors of a site go through normalisations, which may enlarge them, and add up."""
_HALF_TOLERANCE = 5e-2
_HALVES = frozenset([ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
_TOKENS = 10
"""Token ids are below this."""
_FEW = 3
_CHOICES = 8


def judge_models(before: Source, after: Source, operators: Operators = ()) -> Verdict:
    """Whether two models with the same inputs give the same outputs.

    Args:
        before: A file, `onnx.ModelProto` or `onnx_ir.Model`; a file if it has 2 GB of weights or more inside.
        after: The same; its outputs are called and ordered alike.
        operators: Operators of other domains in NumPy; models with such are run by ONNX's reference implementation.

    Returns:
        The verdict; undecided if `before` does not run on anything that was tried.

    Raises:
        ModelError: A model cannot be read.
    """
    if not available():
        return undecided("onnxruntime is not installed")
    model = _read(before)
    try:
        original = _session(before, operators)
    except RuntimeRefusal as refusal:
        return undecided(f"the original does not load: {refusal}")
    try:
        rewritten = _session(after, operators)
    except RuntimeRefusal as refusal:
        return Verdict(False, 0.0, 0, f"the new model does not load: {refusal}")
    if original.outputs() != rewritten.outputs():
        return Verdict(False, 0.0, 0, f"the outputs {original.outputs()} became {rewritten.outputs()}")
    return _Models(model, original, rewritten).verdict()


def _read(source: Source) -> ir.Model:
    if isinstance(source, ir.Model):
        return source
    return ir.from_proto(source) if isinstance(source, onnx.ModelProto) else io.load(source)


def _session(source: Source, operators: Operators) -> Session | Reference:
    if operators and not isinstance(source, (str, os.PathLike)):
        found = load(ir.to_proto(source) if isinstance(source, ir.Model) else source, operators)
        if isinstance(found, Reference):
            return found
    if isinstance(source, (str, os.PathLike)):
        return Session(str(source))
    proto = ir.to_proto(source) if isinstance(source, ir.Model) else source
    try:
        serialized = proto.SerializeToString()
    except ValueError as error:
        raise ModelError("the model is larger than one protobuf can be; save it and pass the path") from error
    return Session(serialized, _data_folder(source) if isinstance(source, ir.Model) else None)


def _data_folder(model: ir.Model) -> pathlib.Path | None:
    for tensor in external_tensors(model):
        return pathlib.Path(cast("str | os.PathLike[str]", tensor.base_dir))
    return None


class _Models:
    """Two models and the inputs to run them on."""

    def __init__(self, model: ir.Model, original: Session | Reference, rewritten: Session | Reference) -> None:
        self._original = original
        self._rewritten = rewritten
        facts = Facts(model.graph)
        inputs = [value for value in model.graph.inputs if value.const_value is None]
        self._known = all(facts.dims(value) is not None and facts.dtype(value) is not None for value in inputs)
        self._dims = [facts.dims(value) or () for value in inputs]
        self._slots = [_slot(value, facts) for value in inputs]
        self._inner = _made_of(self._dims, model.graph, facts)
        self._equalities = Equalities(facts.equalities)
        dtypes = {facts.dtype(value) for node in model.graph for value in node.outputs}
        self._tolerance = _HALF_TOLERANCE if dtypes & _HALVES else _TOLERANCE
        self._cases = 0
        self._max_abs_error = 0.0
        self._refusal = "no sizes fit together"

    def verdict(self) -> Verdict:
        """Runs the cases; the first that differs decides."""
        if not self._known:
            return undecided("the shape or the element type of an input is unknown")
        groups = case_groups(self._slots)
        fitting = 0
        for index, shapes in enumerate(self._shapes()):
            if index == _CHOICES or fitting == len(groups) or (fitting and index >= _FEW):
                break
            before = self._cases
            for case in groups[fitting]:
                found = None if case.factor == LARGE else self._differing(shapes, case)
                if found is not None:
                    return found
            fitting += self._cases > before
        if not self._cases:
            return undecided(f"the original ran on no input: {self._refusal}")
        return Verdict(True, self._max_abs_error, self._cases, f"equal in {self._cases} cases")

    def _shapes(self) -> Iterable[tuple[tuple[int, ...], ...]]:
        seen: set[tuple[tuple[int, ...], ...]] = set()
        for values in self._equalities.assignments([*self._dims, self._inner]):
            shapes = tuple(tuple(sizes.evaluate(dim, values) for dim in dims) for dims in self._dims)
            if shapes not in seen and all(length >= 1 for shape in shapes for length in shape):
                seen.add(shapes)
                yield shapes

    def _differing(self, shapes: Sequence[Sequence[int]], case: Case) -> Verdict | None:
        inputs = feeds(self._slots, shapes, case)
        for slot in self._slots:
            inputs[slot.name] = _as_its_kind(slot, inputs[slot.name], case)
        try:
            old = self._original.run(None, inputs)
        except RuntimeRefusal as refusal:
            self._refusal = str(refusal)
            return None
        self._cases += 1
        names = self._original.outputs()
        where = f"case: {case}; sizes: {describe({slot.name: shape for slot, shape in zip(self._slots, shapes, strict=True)})}"
        try:
            new = self._rewritten.run(None, inputs)
        except RuntimeRefusal as refusal:
            return self._verdict(
                f"the new model does not run: {refusal}; {where}", inputs, dict(zip(names, old, strict=True)), {}
            )
        for name, left, right in zip(names, old, new, strict=True):
            result = compare(left, right, self._tolerance)
            if not result.equal:
                return self._verdict(f"output '{name}' {result.detail}; {where}", inputs, {name: left}, {name: right})
            self._max_abs_error = max(self._max_abs_error, result.max_abs_error)
        return None

    def _verdict(self, detail: str, inputs: Mapping[str, Array], old: Mapping[str, Array], new: Mapping[str, Array]) -> Verdict:
        return Verdict(False, self._max_abs_error, self._cases, detail, None, Evidence(None, inputs, old, new))


def _made_of(shapes: Iterable[Dims], graph: ir.Graph, facts: Facts) -> Dims:
    """The lengths of inner values that are computed from those of the inputs, which they have to be large enough for."""
    known = {name for shape in shapes for dim in shape for name in sizes.symbols(dim)}
    found = {
        dim: None for node in graph for value in node.outputs for dim in facts.dims(value) or () if isinstance(dim, sizes.Size)
    }
    return tuple(dim for dim in found if sizes.symbols(dim) <= known)


def _slot(value: ir.Value, facts: Facts) -> Slot:
    name, dtype, rank = value.name or "", facts.dtype(value) or ir.DataType.FLOAT, facts.rank(value) or 0
    masklike = "mask" in name or "bias" in name or not dtype.is_floating_point()
    return Slot(name, "given" if masklike else "activation", dtype, rank, blank=False)


def _as_its_kind(slot: Slot, array: Array, case: Case) -> Array:
    """Token ids differ from each other, positions count up; whatever else, masks above all, stays as the case has it."""
    if slot.rank < 2 or not slot.dtype.is_integer() or "mask" in slot.name:
        return array
    if "position" in slot.name:
        return np.arange(array.shape[-1], dtype=array.dtype) + np.zeros(array.shape, array.dtype)
    if "type" in slot.name or "segment" in slot.name:
        return array
    return np.random.default_rng(len(case.pattern)).integers(1, _TOKENS, array.shape).astype(array.dtype)
