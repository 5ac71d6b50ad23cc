"""What a fused operator gives is never read by what it is computed from, and a graph stays one that can be run."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

import onnx_attnfuse
from onnx_attnfuse.graph.order import NodeOrder
from onnx_attnfuse.reasons import Refused

_SIZES = ({"B": 2, "S": 3, "P": 4, "M": 7}, {"B": 1, "S": 1, "P": 0, "M": 1}, {"B": 2, "S": 1, "P": 5, "M": 6})
_GIVEN = (
    "float[B,2,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, float[B,2,P,8] pk, float[B,2,P,8] pv, float[B,2,P,8] pk2, "
    "float[B,2,P,8] pv2, float[B,1,S,M] m, bool cond"
)
_CONSTANTS = (
    "<float half = {0.5}, int64[1] i0 = {0}, int64[1] i2 = {2}, int64[1] i3 = {3}, int64[1] one = {1}, int64[2] twice = {2, 2}, "
    "int64[1] four = {4}, int64[1] eight = {8}>"
)


def _cache(tag: str, past: str = "") -> str:
    return f"nk{tag} = Concat<axis=2>(pk{past}, k) nv{tag} = Concat<axis=2>(pv{past}, v)\n"


def _plain(tag: str, key: str = "k", value: str = "v") -> str:
    return f"nk{tag} = Identity({key}) nv{tag} = Identity({value})\n"


def _site(tag: str, query: str = "q", mask: str = "m", keys: str = "", values: str = "") -> str:
    return f"""t{tag} = Transpose<perm=[0, 1, 3, 2]>({keys or f"nk{tag}"}) s{tag} = MatMul({query}, t{tag})
    c{tag} = Mul(s{tag}, half) a{tag} = Add(c{tag}, {mask})
    w{tag} = Softmax<axis=-1>(a{tag}) y{tag} = MatMul(w{tag}, {values or f"nv{tag}"})
    """


def _if(result: str, then: str, given: str, otherwise: str) -> str:
    return f"""{result} = If (cond) <then_branch = then () => (float[a,b,c,d] {given}) {{ {then} }},
    else_branch = else () => (float[a,b,c,d] other) {{ other = Identity({otherwise}) }}>
    """


def _repeated(value: str) -> str:
    """Heads twice each, by lengths asked of what is repeated, as transformers spells it."""
    return f"""shape_{value} = Shape({value}) b_{value} = Gather<axis=0>(shape_{value}, i0)
    l_{value} = Gather<axis=0>(shape_{value}, i2)
    u_{value} = Unsqueeze({value}, i2) to_{value} = Concat<axis=0>(b_{value}, twice, l_{value}, eight)
    e_{value} = Expand(u_{value}, to_{value}) as_{value} = Concat<axis=0>(b_{value}, four, l_{value}, eight)
    r_{value} = Reshape(e_{value}, as_{value})
    """


def _model(body: str, gives: str, query_heads: int = 2) -> onnx.ModelProto:
    outputs = ", ".join(f"float[a,b,c,d] {name}" for name in gives.split())
    given = _GIVEN.replace("float[B,2,S,8] q", f"float[B,{query_heads},S,8] q")
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 18]> g ({given}) => ({outputs}) {_CONSTANTS} {{ {body} }}"""
    )


_REPEATED = _cache("1") + _repeated("nk1") + _repeated("nv1")
_LENGTH_OF_VIEW = "seen = Shape(r_nk1) l = Gather<axis=0>(seen, i2) cut = Slice(m, i0, l, i3)\n"
_CASES = {
    "a mask as long as keys that are repeated": (
        _REPEATED + _LENGTH_OF_VIEW + _site("1", mask="cut", keys="r_nk1", values="r_nv1"),
        "y1 nk1 nv1",
        ("Attention",),
    ),
    "a mask made of the keys": (
        _cache("1") + "x = ReduceMax<keepdims=1>(nk1) m1 = Add(m, x)\n" + _site("1", mask="m1"),
        "y1 nk1 nv1",
        ("Attention",),
    ),
    "a mask as long as what is computed from the keys": (
        _cache("1") + "r = Relu(nk1) sh = Shape(r) l = Gather<axis=0>(sh, i2) m1 = Slice(m, i0, l, i3)\n" + _site("1", mask="m1"),
        "y1 nk1 nv1",
        ("Attention",),
    ),
    "queries made of the values": (
        _cache("1") + "mean = ReduceMean<keepdims=1>(nv1, i2) q1 = Add(q, mean)\n" + _site("1", query="q1"),
        "y1 nk1 nv1",
        ("Attention",),
    ),
    "one attention's keys in the mask of another, whose result is in the mask of the first": (
        _cache("1")
        + _cache("2", "2")
        + "u = ReduceMax<keepdims=1>(nk1) m2 = Add(m, u)\n"
        + _site("2", mask="m2")
        + "o = ReduceMax<keepdims=1>(y2) m1 = Add(m, o)\n"
        + _site("1", mask="m1"),
        "y1 y2 nk1 nk2 nv1 nv2",
        ("Attention", "Attention"),
    ),
    "each one's keys in the mask of the other": (
        _cache("1")
        + _cache("2", "2")
        + "u = ReduceMax<keepdims=1>(nk1) m2 = Add(m, u) o = ReduceMax<keepdims=1>(nk2) m1 = Add(m, o)\n"
        + _site("2", mask="m2")
        + _site("1", mask="m1"),
        "y1 y2 nk1 nk2 nv1 nv2",
        ("Attention", "Attention"),
    ),
    "keys read in a branch that makes the mask": (
        _cache("1") + _if("m1", "r = ReduceMax<keepdims=1>(nk1) then_m = Add(m, r)", "then_m", "m") + _site("1", mask="m1"),
        "y1 nk1 nv1",
        ("Attention",),
    ),
    "the length of keys asked in a branch that makes the mask": (
        _cache("1")
        + _if("m1", "sh = Shape(nk1) l = Gather<axis=0>(sh, i2) then_m = Slice(m, i0, l, i3)", "then_m", "m")
        + _site("1", mask="m1"),
        "y1 nk1 nv1",
        ("Attention",),
    ),
    "keys read in a branch that has nothing to do with it": (
        _cache("1") + _if("z", "r = ReduceMax<keepdims=1>(nk1) then_m = Add(m, r)", "then_m", "m") + _site("1"),
        "y1 z nk1 nv1",
        ("Attention",),
    ),
    "the shape of weights asked in a branch": (
        _cache("1") + _site("1") + _if("z", "sh = Shape(w1) u = ConstantOfShape(sh)", "u", "m"),
        "y1 z",
        ("Attention",),
    ),
    "an attention in a branch that reads the result of one outside": (
        _cache("1") + _site("1", query="q") + _if("z", _plain("2", "nk1", "nv1") + _site("2", query="y1"), "y2", "y1"),
        "z nk1 nv1",
        ("Attention", "MultiHeadAttention"),
    ),
    "two attentions of the same keys, one's result in the mask of the other": (
        _cache("2")
        + _plain("1", "nk2", "nv2")
        + _site("1")
        + "o = ReduceMax<keepdims=1>(y1) m2 = Add(m, o)\n"
        + _site("2", mask="m2"),
        "y1 y2 nk2 nv2",
        ("Attention", "MultiHeadAttention"),
    ),
}


def _run(model: onnx.ModelProto, size: dict[str, int], heads: int) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    rng = np.random.default_rng(sum(size.values()))
    b, s, p, m = size.values()
    given = {name: rng.standard_normal((b, 2, p, 8)) for name in ("pk", "pv", "pk2", "pv2")}
    given |= {name: rng.standard_normal((b, 2, s, 8)) for name in "kv"}
    given |= {"q": rng.standard_normal((b, heads, s, 8)), "m": rng.standard_normal((b, 1, s, m)), "cond": np.asarray(True)}
    names = {item.name for item in session.get_inputs()}
    return session.run(
        None, {name: value if name == "cond" else value.astype(np.float32) for name, value in given.items() if name in names}
    )


def _same(before: onnx.ModelProto, after: onnx.ModelProto, heads: int = 2) -> None:
    onnx.checker.check_model(after)
    for size in _SIZES:
        for old, new in zip(_run(before, size, heads), _run(after, size, heads), strict=True):
            np.testing.assert_allclose(new, old, atol=1e-5)


@pytest.mark.parametrize("case", _CASES)
def test_a_graph_in_which_much_hangs_together_is_fused_and_runs(case: str) -> None:
    body, gives, operators = _CASES[case]
    heads = 4 if body.startswith(_REPEATED) else 2
    model = _model(body, gives, heads)
    result = onnx_attnfuse.optimize(model, ep="cpu", verify="none")
    assert sorted(site.op or "" for site in result.report.sites) == sorted(operators)
    _same(model, result.model, heads)


def _optimized(body: str, gives: str, heads: int = 2, *, keep_outputs: bool = False) -> onnx_attnfuse.Result:
    """The result, judged, which gives what its source gives."""
    model = _model(body, gives, heads)
    result = onnx_attnfuse.optimize(model, ep="cpu", verify="sites", keep_outputs=keep_outputs)
    _same(model, result.model, heads)
    return result


def _names(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node if not node.name.startswith("attnfuse/")}


def test_nothing_is_left_of_keys_and_values_whose_length_is_all_that_is_asked() -> None:
    result = _optimized(_REPEATED + _LENGTH_OF_VIEW + _site("1", mask="cut", keys="r_nk1", values="r_nv1"), "y1 nk1 nv1", 4)
    assert not _names(result.model) & {"Expand", "MatMul", "Softmax"}
    assert [node.output[1:] for node in result.model.graph.node if node.op_type == "Attention"] == [["nk1", "nv1"]]


def test_keys_that_the_mask_is_made_of_are_put_together_before_the_operator_too() -> None:
    seen = "x = ReduceMax<keepdims=1>(r_nk1) cut = Add(m, x)\n"
    result = _optimized(_REPEATED + seen + _site("1", mask="cut", keys="r_nk1", values="r_nv1"), "y1 nk1 nv1", 4)
    assert "Attention" in _names(result.model)
    assert _names(result.model) >= {"Concat", "Expand"}


def test_scores_that_are_added_to_themselves_are_no_mask() -> None:
    twice = "t1 = Transpose<perm=[0, 1, 3, 2]>(nk1) s1 = MatMul(q, t1) c1 = Mul(s1, half) d1 = Add(s1, c1) a1 = Add(d1, m)"
    body = _cache("1") + f"{twice} w1 = Softmax<axis=-1>(a1) y1 = MatMul(w1, nv1)\n"
    (site,) = _optimized(body, "y1 nk1 nv1", keep_outputs=True).report.sites
    assert (site.status, [reason.code for reason in site.reasons]) == ("skipped", ["inner-value-used"])


def test_scores_that_are_an_output_are_kept_beside_the_operator_where_that_is_asked_for() -> None:
    (site,) = _optimized(_cache("1") + _site("1"), "y1 c1 nk1 nv1", keep_outputs=True).report.sites
    assert site.op == "Attention"
    (left,) = _optimized(_cache("1") + _site("1"), "y1 c1 nk1 nv1").report.sites
    assert [(reason.code, "--keep-outputs" in reason.message) for reason in left.reasons] == [("inner-value-used", True)]
    assert left.mask is None


def _ordered() -> tuple[ir.Graph, dict[str, ir.Node], NodeOrder]:
    model = ir.serde.deserialize_model(_model(_cache("1") + "r = Relu(nk1) e = Exp(m)\n" + _site("1", mask="e"), "y1 r"))
    return model.graph, {node.outputs[0].name or "": node for node in model.graph}, NodeOrder(model.graph)


def _new(nodes: dict[str, ir.Node], reads: str, before: str) -> ir.Node:
    node = ir.node("Neg", [nodes[reads].outputs[0]])
    graph = nodes[before].graph
    assert graph is not None
    graph.insert_before(nodes[before], node)
    return node


def test_what_reads_the_result_cannot_stand_in_its_place() -> None:
    _, nodes, order = _ordered()
    with pytest.raises(Refused) as refused:
        order.add([_new(nodes, "y1", before="y1")], nodes["y1"])
    assert refused.value.reason.code == "circular"


def test_what_reads_anything_before_the_result_can() -> None:
    _, nodes, order = _ordered()
    new = _new(nodes, "w1", before="y1")
    order.add([new], nodes["y1"])
    assert order.place(nodes["w1"]) <= order.place(new) < order.place(nodes["y1"])


def test_only_what_a_new_value_is_not_computed_from_may_read_it() -> None:
    _, nodes, order = _ordered()
    new = _new(nodes, "w1", before="y1")
    assert order.free([nodes["t1"], nodes["r"]], new.outputs[0]) == [nodes["r"]]
    assert order.place(nodes["r"]) == order.place(new)


def test_what_is_computed_from_a_node_is_looked_for_up_to_a_place_only() -> None:
    _, nodes, order = _ordered()
    found = order.leads([nodes["nk1"]], order.place(nodes["a1"]))
    assert {name for name, node in nodes.items() if node in found} == {"nk1", "r", "t1", "s1", "c1", "a1"}
