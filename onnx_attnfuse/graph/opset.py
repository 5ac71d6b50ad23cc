"""Raising the opset of a model in place, where no operator in it changes its meaning on the way.

From opset 13 to 23 most operators only take more types. Reductions and Split say differently what they said before and are
rewritten; a node whose meaning changed prevents it, with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, has_unknown_attribute
from onnx_attnfuse.graph.ops import REDUCTIONS, STANDARD
from onnx_attnfuse.graph.tensors import bodies
from onnx_attnfuse.reasons import Reason

_OLDEST, _IR_VERSION = 13, 11
CHANGED = {
    "AveragePool": 22,
    "BatchNormalization": 15,
    "DFT": 20,
    "GridSample": 20,
    "GroupNormalization": 21,
    "LpPool": 22,
    "OptionalGetElement": 18,
    "OptionalHasElement": 18,
    "Resize": 19,
    "RoiAlign": 16,
}
"""Operators that compute something else from an opset on."""
_AXES_BECAME_INPUT = 18
_REDUCTIONS = REDUCTIONS - {"ReduceSum"}
"""The operators whose axes became an input then; those of ReduceSum are one since opset 13."""


class Opset:
    """The opset of a model, which may be raised."""

    def __init__(self, model: ir.Model, *, asked: bool = False) -> None:
        """Looks at a model.

        Args:
            model: The model.
            asked: The caller wants operators of a later opset.
        """
        self._model = model
        self.asked = asked
        self._refusals: dict[int, Reason | None] = {}
        self.raised_from: int | None = None

    @property
    def version(self) -> int:
        """The opset version of the standard's operators now, in the oldest part of the model."""
        imports = (graph.opset_imports for graph in bodies(self._model))
        found = [item.get("", item.get("ai.onnx", 0)) for item in imports]
        return min(version for version in found if version or found == [0])

    def refuse(self, version: int) -> Reason | None:
        """Why the model's opset cannot become `version`, or None if it can, or is that already."""
        if version not in self._refusals:
            self._refusals[version] = None if self.version >= version else self._refusal(version)
        return self._refusals[version]

    def _refusal(self, version: int) -> Reason | None:
        if self.version < _OLDEST:
            return Reason("old-opset", f"opset {self.version} cannot be raised to {version}; export with {_OLDEST} or later")
        for node in self._nodes():
            if self.version < CHANGED.get(node.op_type, 0) <= version:
                return Reason("old-opset", f"{node.op_type} has another meaning in opset {version}", node.name)
            if self.version < _AXES_BECAME_INPUT and node.op_type in _REDUCTIONS and has_unknown_attribute(node):
                return Reason("old-opset", f"the axes of {node.op_type} are a parameter of the function", node.name)
        return None

    def raise_to(self, version: int) -> None:
        """Makes it `version`, which `refuse` must have nothing against."""
        before = self.version
        if before >= version:
            return
        if before < _AXES_BECAME_INPUT:
            for node in list(self._nodes()):
                _say_anew(node)
        self._import(version)
        self._model.ir_version = max(self._model.ir_version, _IR_VERSION)
        self.raised_from = before

    def restore(self) -> None:
        """Restores the opset, if nothing but the number was changed."""
        if self.raised_from is None or self.raised_from < _AXES_BECAME_INPUT:
            return
        self._import(self.raised_from)
        self.raised_from = None

    def _import(self, version: int) -> None:
        for imports in (graph.opset_imports for graph in bodies(self._model)):
            if not imports.keys().isdisjoint(STANDARD):
                imports.pop("ai.onnx", None)
                imports[""] = version

    def _nodes(self) -> Iterator[ir.Node]:
        for graph in bodies(self._model):
            yield from (node for node in graph.all_nodes() if node.domain in STANDARD)


def _say_anew(node: ir.Node) -> None:
    """Axes of a reduction as an input, the number of parts of a Split by name."""
    if node.op_type == "Split" and len(node.inputs) < 2:
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))
    axes = attribute(node, "axes") if node.op_type in _REDUCTIONS else None
    if axes is None or node.graph is None:
        return
    constant = ir.node("Constant", [], {"value_ints": list(axes)}, name=f"{node.name}/axes")
    constant.outputs[0].name = f"{node.outputs[0].name}_axes"
    node.graph.insert_before(node, constant)
    del node.attributes["axes"]
    node.resize_inputs(2)
    node.replace_input_with(1, constant.outputs[0])
