"""Whether a model can be captured: what prevents it is named, and what differs from it in one thing is let through."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.capture import capture_blockers
from onnx_attnfuse.kernels.execution_provider import Capture
from onnx_attnfuse.kernels.kernel_table import read_table
from onnx_attnfuse.reasons import Reason

HEADER = '<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1, "local" : 1]>'
BRANCHES = "then_branch = yes () => (float[b, s] r) { r = Relu(x) }, else_branch = no () => (float[b, s] r) { r = Neg(x) }"
BODY = "body = step (int64 i, bool go, float[b, s] v) => (bool on, float[b, s] w) { on = Identity(go) w = Relu(v) }"
CODES: dict[str, tuple[str, str, str]] = {
    "NonZero waits": ("waits-for-device", "found", "[found] at = NonZero(x) y = Cast<to = 1>(at)"),
    "Compress waits": ("waits-for-device", "chosen", "[chosen] y = Compress<axis = 0>(x, mask)"),
    "RemovePadding waits": (
        "waits-for-device",
        "removed",
        "[removed] y, offsets, cumulated, longest = com.microsoft.RemovePadding(x3, lengths)",
    ),
    "a Loop": ("branches-on-host", "round", f"[round] y = Loop<{BODY}>(three, , x)"),
    "an If on data": (
        "branches-on-host",
        "choice",
        f"m = ReduceMax<keepdims = 0>(n) w = Equal(m, three) [choice] y = If<{BRANCHES}>(w)",
    ),
    "an operator without a kernel": ("runs-on-host", "hard", "[hard] y = Hardmax(x)"),
    "an element type without a kernel": (
        "runs-on-host",
        "chosen",
        "l = Not(mask) [chosen] w = Where(mask, l, mask) y = Cast<to = 1>(w)",
    ),
    "a domain without kernels": ("runs-on-host", "strange", "[strange] y = com.example.Strange(x)"),
    "an attribute that cuDNN cannot do": (
        "runs-on-host",
        "last",
        "[last] at = ArgMax<select_last_index = 1>(x) y = Cast<to = 1>(at)",
    ),
    "a Range to a number from data": (
        "read-on-host",
        "count",
        "m = ReduceMax<keepdims = 0>(n) [count] r = Range(zero, m, one) y = Cast<to = 1>(r)",
    ),
    "a Reshape to an input": ("read-on-host", "formed", "[formed] y = Reshape(x, n)"),
    "a Slice to a number from data": (
        "read-on-host",
        "cut",
        "m = ReduceMax<keepdims = 1>(n) [cut] y = Slice(x, start, m, start)",
    ),
}
"""What prevents a capture: its code, the node, and the model's nodes."""
NEAR: dict[str, str] = {
    "comparing in the place of NonZero": "at = Not(mask) y = Cast<to = 1>(at)",
    "gathering in the place of Compress": "y = Gather<axis = 0>(x, n)",
    "the size of what is found": "k = Shape(x) at = NonZero(k) y = Cast<to = 1>(at)",
    "an If on sizes": f"k = Size(x) w = Equal(k, three) y = If<{BRANCHES}>(w)",
    "an operator with a kernel": "y = Softmax(x)",
    "an element type with a kernel": "y = Where(mask, x, x)",
    "the first of equal maxima": "at = ArgMax(x) y = Cast<to = 1>(at)",
    "a Range to a number from a size": "k = Size(x) r = Range(zero, k, one) y = Cast<to = 1>(r)",
    "a Reshape to sizes": "k = Shape(x) y = Reshape(x, k)",
    "a Slice to a size": "k = Shape<start = 0, end = 1>(x) y = Slice(x, start, k, start)",
    "an operator without a kernel on constants": "h = Hardmax(table) y = Add(x, h)",
}
"""What differs from it in one thing."""


@pytest.fixture
def capture() -> Capture:
    found = providers.provider("cuda").capture
    assert found is not None
    return found


def model(nodes: str, functions: str = "") -> ir.Model:
    inputs = "float[b, s] x, float[b, s, 8] x3, bool[b, s] mask, int64[2] n, int32[b] lengths"
    constants = "int64 zero = {0}, int64 one = {1}, int64 three = {3}, int64[1] start = {0}, float[2, 2] table = {1, 2, 3, 4}"
    return ir.from_onnx_text(f"{HEADER} main ({inputs}) => (float[d, e] y) <{constants}> {{ {nodes} }} {functions}")


@pytest.mark.parametrize("name", CODES)
def test_what_prevents_a_capture_is_named_with_its_node(name: str, capture: Capture) -> None:
    code, node, nodes = CODES[name]
    blockers = capture_blockers(model(nodes), capture)
    assert [(reason.code, reason.node) for reason in blockers] == [(code, node)]


@pytest.mark.parametrize("nodes", NEAR.values(), ids=NEAR)
def test_what_differs_in_one_thing_can_be_captured(nodes: str, capture: Capture) -> None:
    assert not capture_blockers(model(nodes), capture)


def test_an_input_that_is_read_on_the_host_would_be_the_same_in_every_replay(capture: Capture) -> None:
    (reason,) = capture_blockers(model("y = Reshape(x, n)"), capture)
    assert "'n' on the host, which is an input, and would be the same in every replay" in reason.message


def test_branches_that_sizes_choose_are_looked_into(capture: Capture) -> None:
    branches = BRANCHES.replace("r = Neg(x)", "[hard] r = Hardmax(x)")
    nodes = f"k = Size(x) w = Equal(k, three) y = If<{branches}>(w)"
    assert [reason.node for reason in capture_blockers(model(nodes), capture)] == ["hard"]


def test_functions_are_looked_into_with_what_each_call_hands_over(capture: Capture) -> None:
    function = '<opset_import: ["" : 18], domain: "local"> shaped (v, k) => (w) { [inside] w = Reshape(v, k) }'
    by_size = model("k = Shape(x) y = local.shaped(x, k)", function)
    by_data = model("k = Shape(x) z = local.shaped(x, k) y = local.shaped(z, n)", function)
    assert not capture_blockers(by_size, capture)
    assert [(reason.code, reason.node) for reason in capture_blockers(by_data, capture)] == [("read-on-host", "inside")]


def test_once_all_is_folded_a_size_that_is_asked_for_is_not_known(capture: Capture) -> None:
    asked = model("[asked] k = Shape(x) y = Reshape(x, k)")
    assert not capture_blockers(asked, capture)
    assert [(reason.code, reason.node) for reason in capture_blockers(asked, capture, folded=True)] == [("open-size", "asked")]


def test_once_all_is_folded_an_if_is_control_flow_whatever_chooses(capture: Capture) -> None:
    blockers = capture_blockers(model(f"w = Equal(zero, one) [choice] y = If<{BRANCHES}>(w)"), capture, folded=True)
    assert blockers == (Reason("branches-on-host", "If is control flow", "choice"),)


def test_a_kernel_is_for_its_own_version_or_for_a_range_with_an_end() -> None:
    table = read_table("cuda_kernels.txt")
    float_ = [(0, ir.DataType.FLOAT)]
    assert table.refusal("", "Softmax", 13, float_, float_) is None
    assert table.refusal("", "Softmax", 12, float_, float_) is None
    assert table.refusal("", "Softmax", 99, float_, float_) == "Softmax of version 99 has no kernel there"
    assert table.refusal("", "Softmax", 13, [(0, ir.DataType.INT8)], []) == "Softmax has no kernel for int8 there"


def test_operators_of_the_newest_opset_have_their_kernels() -> None:
    """What is written into a static cache; the kernel takes no float8."""
    table = read_table("cuda_kernels.txt")
    kinds = ir.DataType.FLOAT16, ir.DataType.FLOAT8E4M3FN
    half, eighth = (table.refusal("", "TensorScatter", 24, [(0, kind), (1, kind)], [(0, kind)]) for kind in kinds)
    assert half is None
    assert eighth == "TensorScatter has no kernel for float8e4m3fn there"


def test_every_operator_with_inputs_on_the_host_has_kernels(capture: Capture) -> None:
    assert set(capture.host_inputs) <= set(capture.kernels().kernels)
    assert "onnxruntime" in capture.kernels().known_from


def test_fused_operators_have_kernels_for_the_types_that_their_records_say(capture: Capture) -> None:
    cuda = providers.provider("cuda")
    table = capture.kernels()
    for name, found in cuda.operators.items():
        domain, op, version = ("", "Attention", 23) if name.startswith("onnx.") else ("com.microsoft", name, 1)
        for dtype in () if found is None else found.runs:
            assert table.refusal(domain, op, version, [(0, dtype)], [(0, dtype)]) is None, (name, dtype)


def test_providers_that_capture_nothing_have_no_record() -> None:
    assert providers.provider("cpu").capture is None
