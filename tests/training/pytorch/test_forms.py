"""Attention as today's models have it, in training: each form as eager PyTorch has it, beside one that differs in one thing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.nn import functional

from tests.training.pytorch import masked
from tests.training.pytorch.comparing import check, compiled, outcome, same
from tests.training.pytorch.masked import HEADS, SIZE, WIDTH, given

Tensor = torch.Tensor
Attend = Callable[["Formed", Tensor, Tensor, Tensor], Tensor]


class Formed(torch.nn.Module):
    """Projections, and an attention that a function computes from queries, keys and values of heads, with what it trains."""

    def __init__(self, attend: Attend, shape: Sequence[int] = (), *, trained: bool = True) -> None:
        super().__init__()
        self.parts, self.attend = torch.nn.Linear(WIDTH, 3 * WIDTH), attend
        self.extra = torch.nn.Parameter(torch.rand(tuple(shape)), requires_grad=trained)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.mask = mask
        query, key, value = self.parts(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.attend(self, query, key, value).transpose(1, 2).flatten(2)


def formed(attend: Attend, shape: Sequence[int] = (), *, mask: str | None = None, trained: bool = True, **options: object):
    """The report on an attention that was held against eager PyTorch in float64."""
    inputs = given("x", *(["mask"] if mask else []), padding=mask or "none", length=36)
    module = Formed(attend, shape, trained=trained).double()
    (site,) = check(module, {**inputs, "x": inputs["x"].double()}, **options).sites
    return site


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.mT * SIZE**-0.5


def hidden(scores: Tensor) -> Tensor:
    place = torch.arange(scores.shape[-1])
    return place > place[:, None]


def padded(module: Formed) -> Tensor:
    assert module.mask is not None
    return module.mask[:, None, None] == 0


def with_sink(module: Formed, scores: Tensor, *, first: bool = False, less_largest: bool = False) -> Tensor:
    """The weights beside a sink for each head."""
    sink = module.extra.view(-1, 1, 1).expand(*scores.shape[:3], 1)
    joined = torch.cat([sink, scores] if first else [scores, sink], -1)
    if less_largest:
        joined = joined - joined.max(-1, keepdim=True).values
    weights = joined.softmax(-1)
    return weights[..., 1:] if first else weights[..., :-1]


@pytest.mark.parametrize("fill", [None, -math.inf, masked.LOWEST])
@pytest.mark.parametrize(("first", "less_largest"), [(False, False), (False, True), (True, False)])
def test_a_sink_is_one_more_key(fill, first, less_largest) -> None:
    def attend(module, query, key, value):
        scores = scores_of(query, key)
        if fill is not None:
            scores = scores.masked_fill(hidden(scores), fill)
        return with_sink(module, scores, first=first, less_largest=less_largest) @ value

    site = formed(attend, [HEADS])
    assert (site.kernel, site.handed) == ("flash (CPU)", "without a mask" if fill is None else "causal by attribute")


@pytest.mark.parametrize("padding", ["right", "left", "all"])
@pytest.mark.parametrize(("fill", "trained", "codes"), [(-math.inf, True, []), (-1e9, True, []), (-1e9, False, ["sink"])])
def test_rows_without_a_key_give_a_sink_their_weight_unless_it_may_be_as_low_as_they_are(padding, fill, trained, codes) -> None:
    def attend(module, query, key, value):
        return with_sink(module, scores_of(query, key).masked_fill(padded(module), fill)) @ value

    site = formed(attend, [HEADS], mask=padding, trained=trained)
    assert [reason.code for reason in site.reasons] == codes


def test_a_sink_whose_weight_is_looked_at_stays() -> None:
    def attend(module, query, key, value):
        scores = scores_of(query, key)
        weights = torch.cat([scores, module.extra.view(-1, 1, 1).expand(*scores.shape[:3], 1)], -1).softmax(-1)
        return weights[..., :-1] @ value + weights[..., -1:]

    assert not formed(attend, [HEADS]).fused


@pytest.mark.parametrize("shape", [(), (HEADS, 1, 1), (36, 1)])
@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("padding", ["right", "all"])
def test_trained_temperatures_are_factors_of_queries(shape, divide, padding) -> None:
    def attend(module, query, key, value):
        scores = query @ key.mT / (1 + module.extra) if divide else query @ key.mT * module.extra
        return scores.masked_fill(padded(module), masked.LOWEST).softmax(-1) @ value

    site = formed(attend, shape, mask=padding)
    assert (site.kernel, site.handed) == ("flash (CPU)", "its mask as truth values, rows without a key apart")


@pytest.mark.parametrize(("shape", "code"), [((36,), "scale-by-key"), ((), "scaled-fill")])
def test_temperatures_of_keys_and_of_masked_scores_stay(shape, code) -> None:
    def attend(module, query, key, value):
        scores = query @ key.mT
        return (scores.masked_fill(hidden(scores), -math.inf) * module.extra).softmax(-1) @ value

    assert [reason.code for reason in formed(attend, shape).reasons] == [code]


@pytest.mark.parametrize("padding", [None, "right"])
def test_a_bias_of_pairs_is_repeated_along_the_entries_that_share_it(padding) -> None:
    """As triangles of pairs have it: each row of a square is an entry, and the bias of a pair is that of all rows."""

    def attend(module, query, key, value):
        query, key, value = (item.unflatten(2, (6, 6)).transpose(1, 2) for item in (query, key, value))
        bias = (query.mean(-1) * module.extra).permute(0, 2, 1, 3)  # (b, n, i, j), whichever the entry is
        scores = scores_of(query, key) + bias[:, None]
        if padding is not None:
            scores = scores + (module.mask.unflatten(1, (6, 6))[:, :, None, None].double() - 1) * 1e30
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2, 3)

    site = formed(attend, mask=padding)
    assert (site.kernel, site.handed.startswith("its mask as a bias")) == ("math", True)


def test_positions_of_rows_and_columns_of_an_image_are_repeated_along_the_other() -> None:
    def attend(module, query, key, value):
        scores, sides = scores_of(query, key), query.unflatten(2, (6, 6))
        high, wide = (torch.einsum(f"bnhwc,{side}kc->bnhwk", sides, module.extra) for side in "hw")
        scores = scores.view(*scores.shape[:2], 6, 6, 6, 6) + high[..., None] + wide[..., None, :]
        return scores.flatten(4).flatten(2, 3).softmax(-1) @ value

    assert formed(attend, [6, 6, SIZE]).handed == "its mask as a bias"


@pytest.mark.parametrize(("apart", "handed"), [(False, "causal by attribute"), (True, "its mask as truth values")])
def test_queries_that_share_a_key_are_heads_where_no_mask_tells_them_apart(apart, handed) -> None:
    def attend(module, query, key, value):
        query = query.unflatten(1, (2, 2)).permute(0, 3, 1, 2, 4)
        scores = torch.einsum("bqgrd,bkgd->bgrqk", query, key[:, ::2].transpose(1, 2)) * 0.3
        kept = ~hidden(scores)
        if apart:
            kept = torch.stack([kept, torch.ones_like(kept)])
        weights = scores.masked_fill(~kept, -math.inf).softmax(-1)
        return torch.einsum("bgrqk,bkgd->bqgrd", weights, value[:, ::2].transpose(1, 2)).flatten(2, 3).transpose(1, 2)

    assert formed(attend).handed.startswith(handed)


def slopes(module: Formed, scores: Tensor) -> Tensor:
    place = torch.arange(scores.shape[-1])
    return scores + module.extra.view(-1, 1, 1) * (place - place[:, None])


@pytest.mark.parametrize("fill", [None, -math.inf, masked.LOWEST])
def test_trained_slopes_leave_each_row_its_own_key(fill) -> None:
    def attend(module, query, key, value):
        scores = slopes(module, scores_of(query, key))
        return (scores if fill is None else scores.masked_fill(hidden(scores), fill)).softmax(-1) @ value

    assert formed(attend, [HEADS]).handed == "its mask as a bias"


@pytest.mark.parametrize("padding", ["right", "left", "all"])
@pytest.mark.parametrize(("added", "codes"), [(False, []), (True, ["rounded-mask"])])
def test_padding_beside_trained_slopes_lies_below_them_where_it_replaces_scores(padding, added, codes) -> None:
    def attend(module, query, key, value):
        scores = slopes(module, scores_of(query, key))
        hides = padded(module)
        return (scores + hides * -1e9 if added else scores.masked_fill(hides, -1e9)).softmax(-1) @ value

    site = formed(attend, [HEADS], mask=padding)
    assert [reason.code for reason in site.reasons] == codes


@pytest.mark.parametrize(("less", "fused"), [(True, True), (False, False)])
def test_gates_that_forget_are_differences_which_are_nothing_at_a_rows_own_key(less, fused) -> None:
    def attend(module, query, key, value):
        kept = functional.logsigmoid(query.mean(-1)).cumsum(-1) * 1e3
        scores = scores_of(query, key) + (kept[..., :, None] - kept[..., None, :] if less else kept[..., None, :] * 1e6)
        return scores.masked_fill(hidden(scores), -1e9).softmax(-1) @ value

    assert formed(attend).fused == fused


@torch.no_grad()
def _entropy(weights: Tensor) -> Tensor:
    return -(weights * (weights + 1e-9).log()).sum(-1)


@pytest.mark.parametrize("look", [lambda weights: weights.detach().mean(1), _entropy])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_weights_that_are_looked_at_without_a_gradient_are_computed_beside_unless_they_are_drawn(look, dropout) -> None:
    def attend(module, query, key, value):
        scores = scores_of(query, key)
        weights = functional.dropout(scores.masked_fill(hidden(scores), -math.inf).softmax(-1), dropout)
        module.seen = look(weights)
        return weights @ value

    module, inputs = Formed(attend).double(), {"x": given()["x"].double()}
    call, reports = compiled(module)
    results, seen = [], []
    for run in (module, call):
        torch.manual_seed(1)
        results.append(outcome(module, run, inputs))
        seen.append(module.seen)
    same(*results)
    torch.testing.assert_close(*seen)
    (site,) = reports[-1].sites
    assert site.handed == ("" if dropout else "causal by attribute, its weights computed apart")
    assert [reason.code for reason in site.reasons] == ["inner-value-used"] * bool(dropout)


def test_weights_that_a_gradient_comes_back_from_stay() -> None:
    def attend(module, query, key, value):
        weights = scores_of(query, key).softmax(-1)
        return weights @ value + weights.square().sum(-1, keepdim=True)

    assert [reason.code for reason in formed(attend).reasons] == ["inner-value-used"]


@pytest.mark.parametrize(("rest", "codes"), [("eager", []), ("aot_eager", ["unfused-faster"])])
def test_a_cpu_computes_rows_without_a_key_as_the_module_where_it_can_look_for_them(rest, codes) -> None:
    def attend(module, query, key, value):
        bias = module.extra + padded(module) * torch.finfo(query.dtype).min
        return (scores_of(query, key) + bias).softmax(-1) @ value

    site = formed(attend, [HEADS, 36, 36], mask="all", rest=rest)
    assert [reason.code for reason in site.reasons] == codes


@pytest.mark.parametrize(("columns", "fused"), [(1, True), (2, False)])
def test_a_column_of_zeros_is_a_sink_and_several_are_none(columns, fused) -> None:
    """Softmax of zero or more, as some call it."""

    def attend(module, query, key, value):
        return functional.pad(scores_of(query, key), (0, columns)).softmax(-1)[..., :-columns] @ value

    site = formed(attend)
    assert (site.kernel is not None, [reason.code for reason in site.reasons]) == (fused, [] if fused else ["extra-column"])


@pytest.mark.parametrize(("number", "fused"), [(0.0, True), (1.0, False)])
def test_nan_becomes_0_after_the_softmax_or_the_attention_stays(number, fused) -> None:
    def attend(module, query, key, value):
        return scores_of(query, key).masked_fill(padded(module), -math.inf).softmax(-1).nan_to_num(number) @ value

    inputs = {**given("mask", padding="all", length=36), "x": given(length=36)["x"].double()}
    assert check(Formed(attend).double(), inputs).fused == fused


@pytest.mark.parametrize(("times", "apart"), [(1.0, ""), (1e9, ", rows without a key apart")])
def test_a_bias_times_a_gate_is_computed_like_either_unless_it_is_made_to_mask(times, apart) -> None:
    def attend(module, query, key, value):
        gate = query.mean(-1, keepdim=True).sigmoid() * 2 + 1
        return (scores_of(query, key) + gate * module.extra * times).softmax(-1) @ value

    assert formed(attend, [HEADS, 36, 36]).handed == "its mask as a bias" + apart
