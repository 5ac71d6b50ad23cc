"""Scores of all golden attentions rewritten in normal form: they compute the same, and are read as the same attention."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.attention.match.candidates import Candidate, find_candidates
from onnx_attnfuse.fusion.enabling.readable import with_plain_scores
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.edit import connect
from onnx_attnfuse.graph.scopes import Scope, all_names, scopes
from onnx_attnfuse.language.registry.discovery import load
from onnx_attnfuse.testing import Case
from tests.support.bundled import run_in, session
from tests.test_cases import CASES, FOUND, inputs

LEAST = 88
"""Golden attentions whose scores are rewritten, of 158 that are read: 56 have no mask, and others round more than once."""


def candidates(scope: Scope) -> list[Candidate]:
    return find_candidates(scope, load(onnx_attnfuse.Options()).readers, keep_outputs=True)


def rewritten(model: ir.Model) -> list[tuple[Candidate, Candidate]]:
    """The attentions of the main graph whose scores are rewritten, before and after that."""
    scope = next(scopes(model))
    builder, pairs = Builder(scope.graph, scope.facts, scope.opset, all_names(model)), list[Candidate]()
    for candidate in candidates(scope):
        node = None if candidate.spec is None or candidate.softmax is None else candidate.softmax.scores.producer()
        if node is None or candidate.softmax is None:
            continue
        builder.at(node)
        change = with_plain_scores(candidate.softmax.scores, builder)
        if change is not None:
            pairs.append(candidate)
            for old, new in change.results:
                connect(old, new, builder, [node for node, _ in old.uses() if node not in builder.added])
    found = {candidate.node: candidate for candidate in candidates(next(scopes(model)))}
    return [(candidate, found[candidate.node]) for candidate in pairs]


@pytest.mark.parametrize("case", CASES)
def test_scores_that_are_read_are_the_same_in_normal_form(case: Case) -> None:
    before = onnx.parser.parse_model(case.text)
    model = ir.serde.deserialize_model(before)
    pairs = rewritten(model)
    for old, new in pairs:
        assert old.spec is not None
        assert new.spec is not None, new.refusal
        assert math.isclose(new.spec.scale, old.spec.scale, rel_tol=1e-6)
        assert (new.spec.softcap, new.spec.cache is None) == (old.spec.softcap, old.spec.cache is None)
    started, changed = session(before), session(ir.serde.serialize_model(model))
    for given in inputs(before) if pairs else ():
        for (name, result), expected in zip(run_in(changed, given).items(), run_in(started, given).values(), strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5, err_msg=name)


def test_most_attentions_with_a_mask_are_read_in_normal_form() -> None:
    models = [ir.serde.deserialize_model(onnx.parser.parse_model(case.text)) for case in FOUND]
    assert sum(map(len, map(rewritten, models))) >= LEAST


@pytest.mark.parametrize(("second", "fused"), [("Identity(chosen)", 1), ("Add(chosen, beside)", 0)])
def test_a_score_that_is_rounded_twice_stays_also_where_it_is_transposed(second: str, fused: int) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 18]>
        g (float[b, 2, s, 4] q, float[b, 2, s, 4] k, float[b, 2, s, 4] v, bool[b, s] m, bool[b, s] other)
        => (float[b, 2, s, 4] y) {{
            turned = Transpose<perm=[0, 1, 3, 2]>(q) product = MatMul(k, turned) scores = Transpose<perm=[0, 1, 3, 2]>(product)
            axes = Constant<value_ints=[1, 2]>() fill = Constant<value_float=-65504.0>() none = Constant<value_float=0.0>()
            lowest = Constant<value_float=-1e9>() kept = Unsqueeze(m, axes) seen = Unsqueeze(other, axes)
            lost = Add(scores, fill) chosen = Where(kept, scores, lost) beside = Where(seen, none, lowest) masked = {second}
            back = Transpose<perm=[0, 1, 3, 2]>(masked) w = Softmax<axis=2>(back)
            weights = Transpose<perm=[0, 1, 3, 2]>(w) y = MatMul(weights, v)
        }}""")
    assert onnx_attnfuse.optimize(model, verify="none").report.fused == fused
