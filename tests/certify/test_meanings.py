"""What operators mean in certificates, held against ONNX Runtime element by element."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper

from onnx_attnfuse.certify.arrays import Array
from onnx_attnfuse.certify.execution import Execution
from onnx_attnfuse.certify.terms import index, number
from onnx_attnfuse.graph.scopes import scopes
from onnx_attnfuse.verify.model_session import in_front
from tests.support.term_values import Values

F, INT64, B = np.float32, np.int64, np.bool_
_RANDOM = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return _RANDOM.standard_normal(shape).astype(F)


def ints(*shape: int, below: int = 5) -> np.ndarray:
    return _RANDOM.integers(0, below, shape).astype(INT64)


def truths(*shape: int) -> np.ndarray:
    found = _RANDOM.integers(0, 2, shape).astype(B)
    found[..., :1] = True
    return found


def listed(*items: int) -> np.ndarray:
    return np.array(items, INT64)


def array_in(
    name: str, domain: str, inputs: Sequence[np.ndarray | None], attributes: Mapping[str, Any], fixed: Sequence[int], outputs: int
):
    """One node as a model whose inputs at `fixed` are constants, and all sizes else symbols."""
    given = {f"in{place}": item for place, item in enumerate(inputs) if item is not None}
    node = helper.make_node(
        name, [f"in{place}" if item is not None else "" for place, item in enumerate(inputs)],
        [f"out{place}" if place not in UNTOLD.get(name, ()) else "" for place in range(outputs)], domain=domain, **attributes,
    )  # fmt: skip
    constants = [f"in{place}" for place in fixed]
    infos = [
        helper.make_tensor_value_info(
            key,
            helper.np_dtype_to_tensor_dtype(item.dtype),
            [f"{key}_{axis}" if length > 1 else 1 for axis, length in enumerate(item.shape)],
        )
        if key not in constants and not domain and name not in FIXED
        else helper.make_tensor_value_info(key, helper.np_dtype_to_tensor_dtype(item.dtype), item.shape)
        for key, item in given.items()
        if key not in constants
    ]
    outs = [onnx.ValueInfoProto(name=output) for output in node.output if output]
    tensors = [onnx.numpy_helper.from_array(given[key], key) for key in constants]
    graph = helper.make_graph([node], "one", infos, outs, tensors)
    opsets = [helper.make_opsetid("", 24 if name == "Attention" and not domain else 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), given, constants


FIXED = {"GatherND", "Pad", "RotaryEmbedding", "Attention", "Flatten", "InstanceNormalization", "GroupNormalization"}
UNTOLD = {"SkipLayerNormalization": (1, 2), "SkipSimplifiedLayerNormalization": (1, 2)}
"""Outputs that are statistics, which ONNX Runtime does not give on the CPU."""
# ruff: noqa: E501
CASES: dict[str, tuple[Any, ...]] = {
    "Add": ([normal(2, 3), normal(3)],), "Sub": ([normal(2, 3), normal(2, 1)],), "Mul": ([normal(2, 3), normal(1)],),
    "Div": ([normal(2, 3), normal(2, 3) + 3],),
    "Mod": ([listed(-3, 4, 7), listed(3)], {}, [1]), "Neg": ([normal(2)],), "Abs": ([normal(5)],), "Sign": ([normal(5)],),
    "Max": ([normal(4), normal(4)],), "Min": ([normal(4), normal(4)],), "Sum": ([normal(4), normal(4), normal(1)],),
    "Pow": ([np.abs(normal(4)), np.array(2, F)], {}, [1]), "Pow by a half": ([np.abs(normal(4)), np.array(0.5, F)], {}, [1]),
    "Reciprocal": ([normal(4)],), "Sqrt": ([np.abs(normal(4))],), "Exp": ([normal(4)],), "Tanh": ([normal(4)],),
    "Sigmoid": ([normal(4)],), "Erf": ([normal(4)],), "Sin": ([normal(4)],), "Cos": ([normal(4)],),
    "Equal": ([ints(6), ints(6)],), "Less": ([ints(6), ints(6)],), "LessOrEqual": ([ints(6), ints(6)],),
    "Greater": ([normal(6), normal(6)],), "GreaterOrEqual": ([ints(6), ints(6)],), "And": ([truths(6), truths(6)],),
    "Or": ([truths(6), truths(6)],), "Xor": ([truths(6), truths(6)],), "Not": ([truths(6)],),
    "Where": ([truths(2, 3), normal(2, 3), normal(1)],), "Clip": ([normal(6), np.array(-0.5, F), np.array(0.5, F)], {}, [1, 2]),
    "Cast": ([truths(4)], {"to": 1}), "Cast to truth": ([ints(6, below=2)], {"to": 9}), "IsNaN": ([normal(3)],),
    "Cast of integers": ([ints(4)], {"to": 1}),
    "Identity": ([normal(3)],), "Shape": ([normal(2, 3)], {"start": 1}), "Size": ([normal(2, 3)],),
    "Reshape": ([normal(2, 3, 8), listed(0, 0, 2, 4)], {}, [1]), "Reshape with -1": ([normal(2, 3, 8), listed(0, -1, 4)], {}, [1]),
    "Reshape over three": ([normal(2, 3, 8), listed(-1, 8)], {}, [1]), "Flatten": ([normal(2, 3, 4)], {"axis": 2}),
    "Squeeze": ([normal(2, 1, 3), listed(1)], {}, [1]), "Unsqueeze": ([normal(2, 3), listed(0, 2)], {}, [1]),
    "Transpose": ([normal(2, 3, 4)], {"perm": [2, 0, 1]}), "Expand": ([normal(2, 1), listed(2, 3)], {}, [1]),
    "Concat": ([normal(2, 3), normal(2, 1), normal(2, 2)], {"axis": 1}),
    "Slice": ([normal(4, 6), listed(1, -4), listed(3, 1 << 40), listed(0, 1), listed(1, 2)], {}, [1, 2, 3, 4]),
    "Slice backwards": ([normal(5), listed(-1), listed(-(1 << 62)), listed(0), listed(-1)], {}, [1, 2, 3, 4]),
    "Slice beyond": ([normal(3), listed(1), listed(9), listed(0)], {}, [1, 2, 3]),
    "Split": ([normal(2, 6), listed(4, 2)], {"axis": 1}, [1], 2), "Split evenly": ([normal(2, 6)], {"axis": 1, "num_outputs": 3}, [], 3),
    "Gather": ([normal(4, 3), ints(2, 2, below=4)], {"axis": 0}), "Gather from the end": ([normal(4, 3), listed(-1, 0)], {"axis": 0}),
    "GatherElements": ([normal(3, 4), ints(3, 2, below=4)], {"axis": 1}),
    "GatherND": ([normal(3, 4, 2), ints(5, 2, below=3)], {}, []),
    "ScatterND": ([normal(5, 3), np.arange(1, 4, dtype=INT64)[:, None], normal(3, 3)], {}, [1]),
    "ScatterND at one place": ([normal(4, 5, 2), np.array([[1, 3]], INT64), normal(1, 2)], {}, [1]),
    "ScatterND into a square": ([normal(4, 5), np.stack([np.arange(1, 3).repeat(3), np.tile(np.arange(2, 5), 2)], 1).reshape(2, 3, 2), normal(2, 3)], {}, [1]),
    "Tile": ([normal(2, 3), listed(2, 2)], {}, [1]),
    "Range": ([np.array(2, INT64), np.array(6, INT64), np.array(1, INT64)], {}, [2]),
    "Range by steps": ([np.array(2, INT64), np.array(9, INT64), np.array(3, INT64)], {}, [2]),
    "Range backwards": ([np.array(9, INT64), np.array(2, INT64), np.array(-3, INT64)], {}, [2]),
    "Range of nothing": ([np.array(9, INT64), np.array(2, INT64), np.array(3, INT64)], {}, [2]),
    "Range of floats": ([np.array(1.5, F), np.array(5.25, F), np.array(0.5, F)], {}, [0, 1, 2]),
    "BitwiseAnd": ([ints(6, below=9), ints(6, below=9)], {}, [0, 1]), "BitwiseOr": ([ints(6, below=9), ints(6, below=9)], {}, [0, 1]),
    "BitwiseXor": ([ints(6, below=9), ints(6, below=9)], {}, [0, 1]), "BitwiseNot": ([ints(6, below=9)],),
    "BitwiseNot without a sign": ([ints(6, below=9).astype(np.uint8)],),
    "Abs of integers": ([listed(-3, 0, 4)],), "Max of integers": ([ints(6), ints(6)],),
    "Max of a choice": ([np.array([0, -5, 2], F), np.array(-1, F)], {}, [0, 1]),
    "Clip of a choice": ([np.array([0, -5, 2], F), np.array(-1, F), np.array([1], F)], {}, [0, 1, 2]),
    "ConstantOfShape": ([listed(2, 3)], {"value": onnx.numpy_helper.from_array(np.array([4.0], F))}, [0]),
    "Pad by numbers at run time": ([normal(2, 3), listed(1, 0, 0, 2)],), "Pad": ([normal(2, 3), listed(1, 0, 0, 2)], {}, [1]), "Trilu": ([normal(4, 5), np.array(1, INT64)], {}, [1]),
    "Trilu below": ([normal(4, 5), np.array(0, INT64)], {"upper": 0}, [1]), "EyeLike": ([normal(3, 4)], {"k": 1}),
    "OneHot": ([listed(2, -1, 7), np.array(5, INT64), listed(1, 3)], {}, [1]),
    "MatMul": ([normal(2, 3, 4), normal(4, 2)],), "MatMul of vectors": ([normal(4), normal(4)],),
    "Gemm": ([normal(3, 4), normal(2, 4), normal(2)], {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    "Conv of each channel": ([normal(2, 6, 5), normal(6, 1, 3), normal(6)], {"group": 6, "dilations": [2]}, [1]),
    "Conv of each channel between zeros": ([normal(2, 6, 5), normal(6, 1, 3)], {"group": 6, "pads": [2, 1]}, [1]),
    "Softplus": ([normal(2, 3)],),
    "Einsum": ([normal(2, 3, 4), normal(2, 5, 4)], {"equation": "bic,bjc->bij"}), "Softmax": ([normal(2, 5)],),
    "Softmax along another axis": ([normal(2, 5)], {"axis": 0}), "ReduceSum": ([normal(2, 3), listed(1)], {"keepdims": 0}, [1]),
    "ReduceMean": ([normal(2, 3), listed(1)], {}, [1]), "ReduceMax": ([normal(2, 3), listed(0)], {}, [1]),
    "ReduceMin": ([normal(2, 3), listed(1)], {}, [1]), "ReduceL1": ([normal(2, 3), listed(1)], {}, [1]), "CumSum": ([ints(2, 5), np.array(1, INT64)], {}, [1]),
    "CumSum from the end": ([ints(2, 5), np.array(1, INT64)], {"reverse": 1}, [1]),
    "CumSum of ones": ([np.ones((2, 5), INT64), np.array(1, INT64)], {}, [0, 1]),
    "CumSum of halves": ([np.full((2, 5), 0.5, F), np.array(0, INT64)], {}, [0, 1]),
    "CumSum of ones before": ([np.ones((2, 5), INT64), np.array(1, INT64)], {"exclusive": 1}, [0, 1]),
    "CumSum of ones from the end": ([np.ones((2, 5), INT64), np.array(1, INT64)], {"reverse": 1}, [0, 1]),
    "CumSum of ones behind": ([np.ones((2, 5), INT64), np.array(1, INT64)], {"reverse": 1, "exclusive": 1}, [0, 1]),
    "CumSum before": ([ints(2, 5), np.array(1, INT64)], {"exclusive": 1}, [1]),
    "RotaryEmbedding": ([normal(2, 2, 3, 8), normal(5, 4), normal(5, 4), ints(2, 3)],),
    "RotaryEmbedding interleaved": ([normal(2, 3, 16), normal(2, 3, 4), normal(2, 3, 4)], {"num_heads": 2, "interleaved": 1}),
    "RotaryEmbedding of a part": (
        [normal(2, 2, 3, 8), normal(5, 2), normal(5, 2), ints(2, 3)], {"rotary_embedding_dim": 4},
    ),
    "Attention": ([normal(1, 4, 3, 4), normal(1, 2, 3, 4), normal(1, 2, 3, 5)], {"is_causal": 1, "softcap": 2.0}),
    "Attention with a mask": ([normal(2, 3, 8), normal(2, 4, 8), normal(2, 4, 8), truths(2, 1, 3, 4)], {"q_num_heads": 2, "kv_num_heads": 2}),
    "Attention with a bias": ([normal(1, 2, 3, 4), normal(1, 2, 4, 4), normal(1, 2, 4, 4), normal(1, 2, 3, 4)], {"scale": 0.3}),
    "Attention with a past": (
        [normal(1, 2, 2, 4), normal(1, 2, 2, 4), normal(1, 2, 2, 4), None, normal(1, 2, 3, 4), normal(1, 2, 3, 4)],
        {"is_causal": 1}, [], 3,
    ),
    "Attention with rows that see nothing": (
        [normal(1, 1, 2, 4), normal(1, 1, 2, 4), normal(1, 1, 2, 4), np.array([[[[True, False], [False, False]]]])],
    ),
    "LayerNormalization": ([normal(2, 3, 4), normal(4), normal(4)], {"epsilon": 0.1}),
    "LayerNormalization without a shift": ([normal(2, 4), normal(4)],),
    "RMSNormalization": ([normal(2, 3, 4), normal(4)], {"epsilon": 0.1}),
    "InstanceNormalization": ([normal(2, 3, 4), normal(3), normal(3)], {"epsilon": 0.1}),
    "InstanceNormalization of images": ([normal(2, 3, 4, 2), normal(3), normal(3)],),
    "GroupNormalization": ([normal(2, 4, 3), normal(4), normal(4)], {"num_groups": 2, "epsilon": 0.1}),
    "GroupNormalization of images": ([normal(2, 4, 3, 2), normal(4), normal(4)], {"num_groups": 4}),
    "Gelu": ([normal(2, 3)],), "Gelu by tanh": ([normal(2, 3)], {"approximate": "tanh"}),
}  # fmt: skip
CONTRIB: dict[str, tuple[Any, ...]] = {
    "SkipLayerNormalization": ([normal(2, 3, 4), normal(2, 3, 4), normal(4), normal(4), normal(4)], {"epsilon": 0.1}, [], 4),
    "SkipLayerNormalization without a shift": ([normal(2, 3, 4), normal(2, 3, 4), normal(4), None, normal(4)], {}, [], 4),
    "SkipSimplifiedLayerNormalization": ([normal(2, 3, 4), normal(2, 3, 4), normal(4), normal(4)], {"epsilon": 0.1}, [], 4),
    "SkipSimplifiedLayerNormalization without a bias": ([normal(2, 3, 4), normal(2, 3, 4), normal(4)], {}, [], 4),
    "UnfoldTensor": ([normal(2, 11)], {"size": 4, "step": 3}), "UnfoldTensor of a vector": ([normal(6)], {"dim": 0, "size": 2, "step": 3}),
    "Gelu": ([normal(2, 3)],), "BiasGelu": ([normal(2, 3), normal(3)],), "FastGelu": ([normal(2, 3), normal(3)],),
    "FastGelu without a bias": ([normal(2, 3)],), "QuickGelu": ([normal(2, 3)], {"alpha": 1.5}),
    "MultiHeadAttention": ([normal(2, 3, 8), normal(2, 4, 8), normal(2, 4, 12)], {"num_heads": 2}),
    "MultiHeadAttention with biases": (
        [normal(2, 3, 8), normal(2, 4, 8), normal(2, 4, 8), normal(24), None, normal(1, 2, 3, 4)], {"num_heads": 2, "scale": 0.4},
    ),
    "MultiHeadAttention with lengths": (
        [normal(2, 3, 8), normal(2, 4, 8), normal(2, 4, 8), None, np.array([2, 4], np.int32)], {"num_heads": 2},
    ),
    "MultiHeadAttention with a key mask": (
        [normal(2, 3, 8), normal(2, 4, 8), normal(2, 4, 8), None, np.array([[1, 0, 1, 1], [0, 1, 1, 0]], np.int32)],
        {"num_heads": 2, "mask_filter_value": -1e4},
    ),
    "MultiHeadAttention with a triangle and a past": (
        [normal(1, 2, 8), normal(1, 2, 8), normal(1, 2, 8), None, None, None, normal(1, 2, 3, 4), normal(1, 2, 3, 4)],
        {"num_heads": 2, "unidirectional": 1}, [], 3,
    ),
    "MultiHeadAttention of split keys": ([normal(2, 3, 8), normal(2, 2, 4, 4), normal(2, 2, 4, 4)], {"num_heads": 2}),
    "Attention": ([normal(2, 3, 6), normal(6, 24), normal(24)], {"num_heads": 2, "unidirectional": 1}),
    "Attention with a past": ([normal(1, 3, 6), normal(6, 24), normal(24), None, normal(2, 1, 2, 2, 4)], {"num_heads": 2}, [], 2),
    "RotaryEmbedding": ([normal(2, 3, 16), np.array([[0, 1, 2], [2, 3, 4]], INT64), normal(6, 4), normal(6, 4)], {"num_heads": 2}),
    "RotaryEmbedding from an offset": ([normal(2, 2, 3, 8), np.array([2], INT64), normal(6, 4), normal(6, 4)], {"interleaved": 1}),
    "GroupQueryAttention": (
        [normal(2, 3, 16), normal(2, 3, 8), normal(2, 3, 8), None, None, np.array([2, 2], np.int32), np.array(3, np.int32)],
        {"num_heads": 2, "kv_num_heads": 1}, [6], 3,
    ),
    "GroupQueryAttention with a past, a window and a cap": (
        [normal(1, 1, 16), normal(1, 1, 8), normal(1, 1, 8), normal(1, 1, 4, 8), normal(1, 1, 4, 8),
         np.array([4], np.int32), np.array(5, np.int32)],
        {"num_heads": 2, "kv_num_heads": 1, "local_window_size": 3, "softcap": 1.5}, [6], 3,
    ),
    "GroupQueryAttention with rotary embeddings": (
        [normal(2, 3, 32), normal(2, 3, 16), normal(2, 3, 16), None, None, np.array([2, 2], np.int32), np.array(3, np.int32),
         normal(6, 8), normal(6, 8)],
        {"num_heads": 2, "kv_num_heads": 1, "do_rotary": 1}, [6], 3,
    ),
    "GroupQueryAttention with sinks": (
        [normal(1, 3, 16), normal(1, 3, 16), normal(1, 3, 16), None, None, np.array([2], np.int32), np.array(3, np.int32),
         None, None, None, None, normal(2)],
        {"num_heads": 2, "kv_num_heads": 2}, [6], 3,
    ),
}  # fmt: skip


def symbolic(model: onnx.ModelProto, given: Mapping[str, np.ndarray], outputs: int) -> tuple[list[Array], Values]:
    loaded = ir.serde.deserialize_model(model)
    scope = next(scopes(loaded))
    node = next(iter(scope.graph))
    execution = Execution(scope.facts, lambda value: value.name or "", {}, lambda _: False, scope.opset, _size)
    found = [execution.array(node.outputs[place]) for place in range(outputs) if node.outputs[place].name]
    sizes = {f"{key}_{axis}": length for key, item in given.items() for axis, length in enumerate(item.shape)}
    return found, Values(sizes, given)


def _size(name: str):
    from onnx_attnfuse.certify.terms import size

    return size(name)


def compare(
    model: onnx.ModelProto,
    given: Mapping[str, np.ndarray],
    constants: Sequence[str],
    outputs: int,
    run: onnx.ModelProto | None = None,
) -> None:
    """Holds the meaning of a model against what ONNX Runtime computes of it, or of `run`, where it lacks a kernel."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession((run or model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    truth = session.run(None, {key: item for key, item in given.items() if key not in constants})
    found, values = symbolic(model, given, outputs)
    for expected, array in zip(truth, found, strict=True):
        lengths = [values.of(length) for length in array.shape]
        assert lengths == list(expected.shape)
        places = [index(f"x{axis}", number(length)) for axis, length in enumerate(lengths)]
        term = array.at(*places)
        assert not any(item.op == "element" and item.data.startswith("out") for item in _walk(term)), "the meaning is not known"
        for at in itertools.product(*map(range, lengths)):
            number_here = values.of(term, dict(zip(places, at, strict=True)))
            np.testing.assert_allclose(float(number_here), float(expected[at]), rtol=2e-4, atol=2e-5)


def _walk(term):
    from onnx_attnfuse.certify.terms import walk

    return walk(term)


@pytest.mark.parametrize("case", CASES)
def test_an_operator_of_the_standard_means_what_onnx_runtime_computes(case: str) -> None:
    inputs, attributes, fixed, outputs = _filled(CASES[case])
    model, given, constants = array_in(case.partition(" ")[0], "", inputs, attributes, fixed, outputs)
    compare(model, given, constants, outputs)


@pytest.mark.parametrize("case", CONTRIB)
def test_an_operator_of_microsoft_means_what_onnx_runtime_computes(case: str) -> None:
    inputs, attributes, fixed, outputs = _filled(CONTRIB[case])
    model, given, constants = array_in(case.partition(" ")[0], "com.microsoft", inputs, attributes, fixed, outputs)
    compare(model, given, constants, outputs)


EVEN = np.add.outer(3 * np.arange(9), np.arange(10)).astype(INT64) + 7
GAPS = np.arange(10) - np.arange(9)[:, None]
TABLES = {
    "counted along both axes": (EVEN, True), "counted backwards": (-EVEN, True), "one number off": (EVEN + (GAPS == 9), False),
    "a triangle": (GAPS <= 2, True), "a band": ((GAPS >= -3) & (GAPS <= 2), True), "what is beside a band": (abs(GAPS) > 2, True),
    "a triangle of numbers, for each head": (np.where(np.stack([GAPS, GAPS]) <= 0, F(0), F(-1e4)), True),
    "a row of a band missing": ((GAPS <= 2) & (np.arange(9)[:, None] != 4), False),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLES)
def test_a_constant_that_follows_a_formula_is_that_formula(case: str) -> None:
    table, follows = TABLES[case]
    model, given, constants = array_in("Identity", "", [table], {}, [0], 1)
    compare(model, given, constants, 1)
    (array,), _ = symbolic(model, given, 1)
    term = array.at(*(index(f"x{axis}", number(length)) for axis, length in enumerate(table.shape)))
    assert follows == all(item.op != "element" for item in _walk(term))


@pytest.mark.exhaustive
def test_heads_that_an_operator_normalizes_mean_what_onnx_runtime_computes_in_front_of_it() -> None:
    inputs = [
        normal(2, 3, 64), None, None, None, None, np.array([2, 2], np.int32), np.array(3, np.int32), normal(6, 8), normal(6, 8),
        *[None] * 5, normal(16), normal(16),
    ]  # fmt: skip
    settings = {"num_heads": 2, "kv_num_heads": 1, "do_rotary": 1, "qk_norm_epsilon": 0.1}
    model, given, constants = array_in("GroupQueryAttention", "com.microsoft", inputs, settings, [6], 3)
    compare(model, given, constants, 3, ir.to_proto(in_front(ir.from_proto(model), rotations=False)))


@pytest.mark.parametrize("scale", [None, normal(4)], ids=["without factors", "with factors"])
def test_one_branch_means_what_onnx_runtime_computes_of_a_plain_normalization(scale: np.ndarray | None) -> None:
    x, setting = normal(2, 3, 4), {"epsilon": 0.1}
    model, given, constants = array_in("BranchwiseRMSNorm", "com.microsoft", [x, scale], {"num_branches": 1, **setting}, [], 1)
    factors = np.ones(4, F) if scale is None else scale
    plain = array_in("RMSNormalization", "", [x, factors], setting, [1] * (scale is None), 1)[0]
    compare(model, given, constants, 1, plain)


def _filled(case: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*case, *({}, [], 1)[len(case) - 1 :])
