"""Gradient graphs: a generated graph with its backward part behind it, spelled as ONNX Runtime's training builds it.

Every float input has a gradient. What operators there are no rules for makes a recipe impossible; so do float16 and symbolic
lengths, which ORTModule's graphs have too, but not these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_attnfuse.kernels.policy import Policy
from onnx_attnfuse.training.kernels import TrainingDevice
from onnx_attnfuse.training.ortmodule import pipeline
from onnx_attnfuse.verify.runtime import RuntimeRefusal, one_line
from tests.fuzz.recipe import Recipe
from tests.fuzz.writer import Given
from tests.support.bundled import Array

Gradients = dict[str, list[str]]
OPSET = 17
_PLAIN = frozenset(
    ["Shape", "Range", "Greater", "Less", "LessOrEqual", "GreaterOrEqual", "Equal", "Not", "And", "Or", "Xor", "IsNaN"]
)


class Impossible(Exception):
    """There is no gradient of this graph."""


def differentiated(model: onnx.ModelProto, inputs: Mapping[str, Given]) -> onnx.ModelProto:
    """The model with gradients of its float inputs as its outputs."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise Impossible(one_line(error)) from error
    return _Backward(inferred, [name for name, given in inputs.items() if given.role == "normal"]).model()


class _Backward:
    """Writes the backward part, from the result up."""

    def __init__(self, model: onnx.ModelProto, wanted: list[str]) -> None:
        self._graph = model.graph
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._shapes: dict[str, list[int]] = {}
        self._floats: set[str] = set()
        for entry in (*self._graph.input, *self._graph.value_info, *self._graph.output):
            kind = entry.type.tensor_type
            self._shapes[entry.name] = [dim.dim_value for dim in kind.shape.dim]
            if kind.elem_type == onnx.TensorProto.FLOAT:
                self._floats.add(entry.name)
        for tensor in self._graph.initializer:
            self._shapes[tensor.name] = list(tensor.dims)
        self._wanted = wanted
        self._needed = self._depending(wanted)

    def _depending(self, names: list[str]) -> set[str]:
        """Values through which a gradient flows."""
        found = set(names)
        for node in self._graph.node:
            if node.op_type not in _PLAIN and found & set(node.input):
                found |= set(node.output)
        return found & (self._floats | set(names))

    def model(self) -> onnx.ModelProto:
        """Forward part, yield, backward part."""
        (output,) = self._graph.output[-1:]
        if len(self._graph.output) > 1:
            raise Impossible("several results")
        self._op("YieldOp", [output.name], [f"{output.name}_grad"], domain="com.microsoft", full_shape_outputs=[0])
        gradients: Gradients = {output.name: [f"{output.name}_grad"]}
        for node in reversed(self._graph.node):
            arriving = [self._sum(gradients.pop(name)) if name in gradients else None for name in node.output]
            if arriving[0] is None and not any(arriving):
                continue
            rule = getattr(self, f"_{node.op_type.lower()}", None)
            if rule is None or None in arriving:
                raise Impossible(f"no gradient of {node.op_type}")
            for name, gradient in rule(node, *arriving):
                if name in self._needed:
                    gradients.setdefault(name, []).append(gradient)
        results = [name for name in self._wanted if name in gradients]
        if not results:
            raise Impossible("no input has a gradient")
        for name in results:
            self._op("Identity", [self._sum(gradients[name])], [f"{name}_grad_out"])
        outputs = [onnx.helper.make_tensor_value_info(f"{name}_grad_out", 1, self._shapes[name]) for name in results]
        graph = onnx.helper.make_graph(
            [*self._graph.node, *self._nodes], "gradients", self._graph.input, outputs,
            [*self._graph.initializer, *self._constants], value_info=self._graph.value_info,
        )  # fmt: skip
        imports = [onnx.helper.make_opsetid(domain, version) for domain, version in _IMPORTS.items()]
        return onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)

    def _op(self, kind: str, inputs: list[str], outputs: list[str] | None = None, domain: str = "", **attributes: Any) -> str:
        outputs = outputs or [f"{kind}_grad_{len(self._nodes)}"]
        self._nodes.append(
            onnx.helper.make_node(kind, inputs, outputs, domain=domain, name=f"back_{len(self._nodes)}", **attributes)
        )
        return outputs[0]

    def _constant(self, array: Array) -> str:
        name = f"grad_constant_{len(self._constants)}"
        self._constants.append(onnx.numpy_helper.from_array(array, name))
        return name

    def _sum(self, gradients: list[str]) -> str:
        return gradients[0] if len(gradients) == 1 else self._op("Sum", gradients)

    def _reduced(self, gradient: str, shape: list[int], name: str) -> str:
        """A gradient summed over the axes along which the operand was broadcast."""
        own = self._shapes[name]
        if own == shape:
            return gradient
        lead = len(shape) - len(own)
        axes = [axis for axis in range(len(shape)) if axis < lead or (own[axis - lead] == 1 and shape[axis] != 1)]
        if axes:
            gradient = self._op("ReduceSum", [gradient, self._constant(np.asarray(axes))], keepdims=1)
        return self._op("Reshape", [gradient, self._constant(np.asarray(own, np.int64))])

    # Rules

    def _matmul(self, node: onnx.NodeProto, gradient: str) -> list[tuple[str, str]]:
        left, right = node.input
        shape = self._shapes[node.output[0]]
        found: list[tuple[str, str]] = []
        if len(self._shapes[left]) < 2 or len(self._shapes[right]) < 2:
            raise Impossible("a product with a vector")
        if left in self._needed:
            product = self._op("FusedMatMul", [gradient, right], domain="com.microsoft", transB=1)
            found.append((left, self._reduced(product, [*shape[:-1], self._shapes[left][-1]], left)))
        if right in self._needed:
            product = self._op("FusedMatMul", [left, gradient], domain="com.microsoft", transA=1)
            found.append((right, self._reduced(product, [*shape[:-2], *self._shapes[right][-2:]], right)))
        return found

    def _add(self, node: onnx.NodeProto, gradient: str) -> list[tuple[str, str]]:
        shape = self._shapes[node.output[0]]
        return [
            (name, self._reduced(self._op("Identity", [gradient]), shape, name)) for name in node.input if name in self._needed
        ]

    def _sub(self, node: onnx.NodeProto, gradient: str) -> list[tuple[str, str]]:
        shape, (left, right) = self._shapes[node.output[0]], node.input
        found = [(left, self._reduced(self._op("Identity", [gradient]), shape, left))] if left in self._needed else []
        return found + ([(right, self._reduced(self._op("Neg", [gradient]), shape, right))] if right in self._needed else [])

    def _mul(self, node: onnx.NodeProto, gradient: str) -> list[tuple[str, str]]:
        shape, (left, right) = self._shapes[node.output[0]], node.input
        pairs = ((left, right), (right, left))
        return [
            (name, self._reduced(self._op("Mul", [gradient, other]), shape, name))
            for name, other in pairs
            if name in self._needed
        ]

    def _div(self, node: onnx.NodeProto, gradient: str) -> list[tuple[str, str]]:
        left, right = node.input
        if right in self._needed:
            raise Impossible("a divisor with a gradient")
        return [(left, self._reduced(self._op("Div", [gradient, right]), self._shapes[node.output[0]], left))]

    def _where(self, node: onnx.NodeProto, gradient: str) -> list[tuple[str, str]]:
        condition, yes, no = node.input
        zero, shape = self._constant(np.asarray(0, np.float32)), self._shapes[node.output[0]]
        found: list[tuple[str, str]] = []
        if yes in self._needed:
            found.append((yes, self._reduced(self._op("Where", [condition, gradient, zero]), shape, yes)))
        if no in self._needed:
            found.append((no, self._reduced(self._op("Where", [condition, zero, gradient]), shape, no)))
        return found

    def _softmax(self, node: onnx.NodeProto, gradient: str) -> list[tuple[str, str]]:
        axis = next((item.i for item in node.attribute if item.name == "axis"), -1)
        found = self._op("SoftmaxGrad_13", [gradient, node.output[0]], domain="com.microsoft", axis=axis)
        return [(node.input[0], found)]

    def _tanh(self, node: onnx.NodeProto, gradient: str) -> list[tuple[str, str]]:
        return [(node.input[0], self._op("TanhGrad", [gradient, node.output[0]], domain="com.microsoft"))]

    def _transpose(self, node: onnx.NodeProto, gradient: str) -> list[tuple[str, str]]:
        return [
            (node.input[0], self._op("Transpose", [gradient], perm=[int(item) for item in np.argsort(node.attribute[0].ints)]))
        ]

    def _reshape(self, node: onnx.NodeProto, gradient: str) -> list[tuple[str, str]]:
        shape = self._constant(np.asarray(self._shapes[node.input[0]], np.int64))
        return [(node.input[0], self._op("Reshape", [gradient, shape]))]

    _unsqueeze = _squeeze = _reshape

    def _identity(self, node: onnx.NodeProto, gradient: str) -> list[tuple[str, str]]:
        return [(node.input[0], self._op("Identity", [gradient]))]

    def _neg(self, node: onnx.NodeProto, gradient: str) -> list[tuple[str, str]]:
        return [(node.input[0], self._op("Neg", [gradient]))]

    def _expand(self, node: onnx.NodeProto, gradient: str) -> list[tuple[str, str]]:
        return [(node.input[0], self._reduced(gradient, self._shapes[node.output[0]], node.input[0]))]

    def _split(self, node: onnx.NodeProto, *gradients: str) -> list[tuple[str, str]]:
        axis = next(item.i for item in node.attribute if item.name == "axis")
        return [(node.input[0], self._op("Concat", list(gradients), axis=axis))]


_IMPORTS = {"": OPSET, "com.microsoft": 1, "org.pytorch.aten": 1}


def fused(recipe: Recipe, model: onnx.ModelProto, level: str) -> tuple[onnx.ModelProto, Any]:
    """The gradient graph with fused attention, and the report."""
    efficient = recipe.ep == "cuda"
    device = TrainingDevice("cuda", 90) if efficient else TrainingDevice("cpu")
    policy = Policy(flash=False, efficient=True) if efficient else Policy()
    found = ir.from_proto(model)
    report = pipeline.fuse_graph(found.graph, device, policy, check_masks=level != "none")
    return ir.to_proto(found), report


class Runs:
    """A gradient graph in the reference implementation: what it yields, then every gradient."""

    def __init__(self, model: onnx.ModelProto) -> None:
        from tests.training import evaluating, kernels_in_torch

        kernels_in_torch._seeds = lambda: (np.int64(evaluating.SEED), np.int64(0))
        self._model, self._run = model, evaluating.run
        self._inputs = {entry.name for entry in model.graph.input}

    def run(self, outputs: None, feeds: Mapping[str, Array]) -> list[Array]:
        """All results."""
        try:
            yielded, gradients = self._run(self._model, {name: feeds[name] for name in self._inputs})
        except Exception as error:
            raise RuntimeRefusal(one_line(error)) from error
        return [np.asarray(item) for item in (*yielded, *gradients)]
