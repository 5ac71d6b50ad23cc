"""What a mask means decides the call: rules, each beside a near miss, with every padding, forward and backward."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from onnx_attnfuse.training.pytorch import flex
from tests.training.pytorch import masked
from tests.training.pytorch.comparing import check
from tests.training.pytorch.masked import LOWEST, Masked, given


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("fill", [LOWEST, -math.inf, -1e4])
@pytest.mark.parametrize("rule", [masked.triangle, masked.buffer])
@pytest.mark.parametrize("added", [False, True])
def test_a_triangle_is_handed_over_by_attribute_however_it_is_spelled(rule, fill, added) -> None:
    (site,) = check(Masked(rule, fill, added=added), given()).sites
    assert (site.kernel, site.handed, site.mask) == ("flash (CPU)", "causal by attribute", "causal")


@pytest.mark.parametrize("fill", [LOWEST, -math.inf])
@pytest.mark.parametrize("added", [False, True])
def test_a_triangle_that_begins_a_key_later_is_handed_over_whole_with_its_row_without_a_key(fill, added) -> None:
    (site,) = check(Masked(masked.shifted, fill, added=added), given()).sites
    assert site.handed == "its mask as truth values, rows without a key apart"


@pytest.mark.parametrize(
    ("rule", "names", "kind"),
    [
        (masked.window, (), "sliding_window + causal"),
        (masked.two_sided, (), "arbitrary"),
        (masked.documents, ("documents",), "causal + segments"),
        (masked.prefix, ("numbers",), "prefix"),
    ],
)
@pytest.mark.parametrize("flex", [None, True])
def test_rules_are_read_and_handed_over_as_rules_where_that_is_wanted(rule, names, kind, flex) -> None:
    (site,) = check(Masked(rule), given(*names), flex=flex).sites
    assert site.fused
    if kind != "arbitrary":
        assert site.mask == kind
        assert (site.kernel == "flex") == (flex is True)


@pytest.mark.parametrize(("names", "kind"), [((), "causal"), (("positions",), "causal + segments")])
@pytest.mark.parametrize("fill", [LOWEST, -math.inf])
def test_positions_that_are_counted_go_on_and_those_that_are_given_may_not(names, kind, fill) -> None:
    """As transformers looks for packed sequences wherever no padding is given."""
    (site,) = check(Masked(masked.begun_anew, fill), given(*names)).sites
    assert (site.mask, site.handed == "causal by attribute") == (kind, kind == "causal")


@pytest.mark.parametrize(("rule", "names"), [(masked.almost_a_window, ()), (masked.almost_documents, ("documents",))])
def test_masks_that_are_almost_a_rule_are_rules_without_a_name(rule, names) -> None:
    for wanted, handed in ((True, "its mask as a rule"), (False, "its mask as truth values")):
        (site,) = check(Masked(rule), given(*names), flex=wanted).sites
        assert site.handed == handed
        assert "arbitrary" in site.mask


def _neighbours(i, j, module, given):
    """Neighbours in an image, 6 pixels wide, which is read row by row."""
    return ((i // 6 - j // 6).abs() <= 1) & ((i % 6 - j % 6).abs() <= 2)


def _scattered(i, j, module, given):
    """A mask with an element for each pair, and the diagonal."""
    return module.triangle[: len(j), : len(j)].roll(3, 0) | (i == j)


@pytest.mark.parametrize(("rule", "handed"), [(_neighbours, "its mask as a rule"), (_scattered, "its mask as truth values")])
@pytest.mark.parametrize("fill", [LOWEST, -math.inf])
def test_neighbours_in_an_image_are_a_rule_and_masks_of_pairs_are_not(rule, handed, fill) -> None:
    (site,) = check(Masked(rule, fill), given(), flex=True).sites
    assert (site.handed.removesuffix(", rows without a key apart"), site.mask) == (handed, "arbitrary")


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("padding", masked.PADDINGS)
@pytest.mark.parametrize("rule", [masked.padding, masked.padded_triangle])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("fill", [LOWEST, -math.inf])
def test_every_padding_gives_what_it_gave_in_rows_without_a_key_too(padding, rule, added, fill) -> None:
    (site,) = check(Masked(rule, fill, added=added), given("mask", padding=padding)).sites
    assert site.handed == "its mask as truth values, rows without a key apart"


@pytest.mark.parametrize("padding", ["right", "left", "all"])
@pytest.mark.parametrize("added", [False, True])
def test_flex_attention_gives_rows_without_a_key_equal_weights(padding, added) -> None:
    (site,) = check(Masked(masked.padded_triangle, added=added), given("mask", padding=padding), flex=True).sites
    assert (site.kernel, site.handed) == ("flex", "its mask as a rule, rows without a key apart")


def test_flex_attention_is_not_taken_where_rows_without_a_key_are_nan() -> None:
    (site,) = check(Masked(masked.padded_triangle, -math.inf), given("mask", padding="left"), flex=True).sites
    assert site.kernel == "flash (CPU)"
    assert ("flex", "mixed-mask") in [(name, reason.code) for name, reason in site.others]


@pytest.mark.parametrize("flex", [None, True])
def test_slopes_are_added_as_numbers_or_by_a_rule(flex) -> None:
    (site,) = check(Masked(masked.triangle, spell=masked.alibi), given(), flex=flex).sites
    assert (site.kernel, site.mask) == ("flex" if flex else "flash (CPU)", "causal + alibi")


@pytest.mark.parametrize(("factor", "first", "apart"), [(None, 0, ""), (2.0, 0, ""), (2.0, 1, ", rows without a key apart")])
def test_slopes_mask_nothing_where_they_are_numbers_or_each_row_sees_its_own_key(factor, first, apart) -> None:
    """A factor from outside may be anything, and a distance that is not 0 at a row's own key masks that, too."""
    inputs = given() if factor is None else {**given(), "factor": torch.tensor(factor)}
    spell = functools.partial(masked.computed_alibi, first=first)
    (site,) = check(Masked(masked.triangle, spell=spell, added=True), inputs).sites
    assert site.handed == "its mask as a bias" + apart


@pytest.mark.parametrize(("length", "kernel"), [(37, "flex"), (300, "flash (CPU)")])
def test_slopes_times_distances_that_half_precision_rounds_are_handed_over_as_numbers(length, kernel) -> None:
    module = Masked(masked.window, -math.inf, spell=masked.alibi).to(torch.bfloat16)
    (site,) = check(module, {"x": given(length=length)["x"].to(torch.bfloat16)}, 5e-3, flex=True).sites
    assert (site.kernel, site.mask) == (kernel, "sliding_window + causal + alibi")
    assert [(name, reason.code) for name, reason in site.others] == ([] if kernel == "flex" else [("flex", "inner-value")])


@pytest.mark.parametrize(("factor", "fused"), [(0.25, True), (2.0, False)])
@pytest.mark.parametrize("rule", [None, masked.triangle])
def test_scores_that_are_made_smaller_after_slopes_are_added_take_the_slopes_with_them(factor, fused, rule) -> None:
    """As Falcon has it; what makes masked scores larger may make them infinite."""

    def spell(scores, i, j, module, given):
        return (scores + given["bias"]) * factor

    bias = torch.linspace(-300, 5, masked.BATCH * masked.LENGTH).view(masked.BATCH, 1, 1, -1)
    (site,) = check(Masked(rule, spell=spell, added=True), {**given(), "bias": bias}).sites
    assert (site.fused, [reason.code for reason in site.reasons]) == (fused, [] if fused else ["scaled-mask"])


@pytest.mark.parametrize("padding", ["right", "all"])
@pytest.mark.parametrize("fill", [LOWEST, -math.inf])
def test_rows_without_a_key_that_are_made_smaller_afterwards_are_what_they_were(fill, padding) -> None:
    def spell(scores, i, j, module, given):
        return (scores + torch.where(masked.padding(i, j, module, given), 0.0, fill)) * 0.25

    (site,) = check(Masked(None, spell=spell), given("mask", padding=padding)).sites
    assert site.handed == "its mask as a bias, rows without a key apart"


def test_a_soft_cap_stays_where_flex_attention_is_not_wanted() -> None:
    (site,) = check(Masked(masked.triangle, spell=masked.capped), given()).sites
    assert [reason.code for reason in site.reasons] == ["softcap"]
    (site,) = check(Masked(masked.triangle, spell=masked.capped), given(), flex=True).sites
    assert site.kernel == "flex"


@pytest.mark.parametrize("flex", [None, True])
def test_shared_heads_are_not_repeated(flex) -> None:
    (site,) = check(Masked(masked.window, heads=2), given(), flex=flex).sites
    assert site.fused


def test_rules_are_compiled_with_the_rest_as_well() -> None:
    (site,) = check(Masked(masked.documents), given("documents"), flex=True, rest="aot_eager").sites
    assert site.kernel == "flex"


def test_a_mask_that_a_caller_gives_is_added_as_it_is() -> None:
    mask = torch.zeros(masked.BATCH, 1, masked.LENGTH, masked.LENGTH)
    mask[0, 0, 3] = LOWEST
    mask[0, 0, 4, 10:] = LOWEST
    mask[1, 0, 5] = LOWEST
    mask[1, 0, 5, :4] = -math.inf
    module = Masked(None, spell=lambda scores, i, j, module, given: scores + given["bias"])
    (site,) = check(module, {**given(), "bias": mask}).sites
    assert site.handed == "its mask as a bias, rows without a key apart"


@pytest.mark.parametrize("lengths", [(700, 601), (256, 256), (100, 300)])
def test_blocks_are_those_that_pytorch_sorts(lengths) -> None:
    rows, keys = lengths
    query, key = torch.zeros(2, 4, rows, 16), torch.zeros(2, 4, keys, 16)
    marks = torch.stack([torch.arange(700) // 150, torch.arange(700) // 90])
    program = ("and", ("eq", ("read", 0, ("b",), ("i",)), ("read", 0, ("b",), ("j",))), ("le", ("j",), ("i",)))
    expected = create_block_mask(lambda b, n, i, j: (marks[b, i] == marks[b, j]) & (j <= i), 2, None, rows, keys, device="cpu")
    for mine, theirs in zip(flex.block_mask(program, [marks], query, key, True), expected.as_tuple()[:-1], strict=True):
        if isinstance(theirs, torch.Tensor):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        else:
            assert mine == theirs


_STRIDES: list[tuple[int, ...]] = []


@torch.library.custom_op("attnfuse_tests::strides", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def strides(blocks: list[torch.Tensor]) -> torch.Tensor:
    """Notes the strides that inductor gives to tensors where nobody asks for any."""
    _STRIDES[:] = [item.stride() for item in blocks]
    return torch.zeros(())


@strides.register_fake
def _(blocks: list[torch.Tensor]) -> torch.Tensor:
    return torch.zeros(())


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("entries", [1, 3])
def test_compiled_blocks_have_the_strides_of_their_shapes_as_kernels_take_for_granted(entries) -> None:
    query = torch.zeros(entries, 4, 300, 16)
    program = ("eq", ("read", 0, ("b",), ("i",)), ("read", 0, ("b",), ("j",)))

    def seen(marks: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        found = flex.block_mask(program, [marks], query, query, True)
        return strides([item for item in found if isinstance(item, torch.Tensor)])

    torch.compile(seen, fullgraph=True)(torch.zeros(entries, 300, dtype=torch.int64), query)
    assert _STRIDES == [(3, 3, 1), (9, 9, 3, 1)] * 4


def test_blocks_of_a_rule_that_reads_nothing_are_made_once_for_each_length() -> None:
    query, longer = torch.zeros(2, 4, 300, 16), torch.zeros(2, 4, 301, 16)
    window = ("and", ("le", ("j",), ("i",)), ("le", ("i",), ("sum", 7, (1, ("j",)))))
    documents = ("eq", ("read", 0, ("b",), ("i",)), ("read", 0, ("b",), ("j",)))
    marks = torch.zeros(2, 300, dtype=torch.int64)
    with torch.inference_mode():
        first = flex.block_mask(window, [], query, query, False)
    assert flex.block_mask(window, [], query.clone(), query, False) is first
    assert not any(item.is_inference() for item in first if isinstance(item, torch.Tensor))
    assert flex.block_mask(window, [], longer, longer, False)[:2] == (301, 301)
    read = flex.block_mask(documents, [marks], query, query, False)
    marks[:, 150:] = 1
    other = flex.block_mask(documents, [marks], query, query, False)
    assert not all(torch.equal(one, two) for one, two in zip(read, other, strict=True) if isinstance(one, torch.Tensor))


@pytest.mark.parametrize("is_added", [True, False])
@pytest.mark.parametrize("fill", [-1e9, -1e12, -1e15, -1e30])
def test_numbers_that_leave_scores_of_float64_are_not_taken_for_masks_that_swallow_them(is_added, fill) -> None:
    def spell(scores, i, j, module, given):
        seen = masked.padding(i, j, module, given)
        return scores + torch.where(seen, 0.0, fill).to(scores.dtype) if is_added else scores.masked_fill(~seen, fill)

    inputs = given("mask", padding="all")
    (site,) = check(Masked(None, spell=spell).double(), {**inputs, "x": inputs["x"].double()}).sites
    stays = is_added and fill > -1e17
    assert [reason.code for reason in site.reasons] == ["rounded-mask"] * stays
