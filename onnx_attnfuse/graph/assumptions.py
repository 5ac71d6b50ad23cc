"""Assumptions on models, each by a name with which a caller can take it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph.thresholds import MASKS, MASKS_ANY_SCORE

AssumptionName = Literal[
    "large-fills", "bounded-scores", "level-rows", "named-sizes", "nonempty-axes", "masks-fit", "equal-pasts",
    "indices-in-range", "finite-exponentials", "kept-weights", "padded-rows-unused", "padding-at-the-ends",
    "small-results", "wide-subgroups",
]  # fmt: skip

ASSUMPTIONS: Mapping[AssumptionName, str] = {
    "large-fills": "a number of -1000 or less that is added to a score, or replaces it, masks it",
    "bounded-scores": "scores, and summands of them that are no mask, stay between -900 and 900",
    "level-rows": "in rows without a key, scores are so small that the number that masks them all leaves nothing of them",
    "named-sizes": "sizes of the same name are the same number",
    "nonempty-axes": "there is at least one batch entry, one query and one key; earlier positions may be none",
    "masks-fit": "a mask is no longer than the part read of it, or the scores it is added to, as a length of 1 would be repeated",
    "equal-pasts": "attentions that share a mask, or whose caches become one, have equally many earlier positions",
    "indices-in-range": "an index or a range that a run has stays inside the row, the buffer or the table that it is meant for",
    "finite-exponentials": "exponentials do not overflow, nor all of a row vanish, where its maximum is not subtracted first",
    "kept-weights": "where weights are masked after a softmax and divided by their sum, the unmasked sum is not lost in rounding",
    "padded-rows-unused": "outputs of packed encoders and shared caches at padding are not used, by no other token either",
    "padding-at-the-ends": "where a window counts keys, padding of a decoder with a shared cache is not between tokens",
    "small-results": "the result of a product for all tokens, as logits are, has fewer than 2^31 numbers",
    "wide-subgroups": "a GPU that webgpu runs on computes 8 or more lanes of a subgroup at once",
}
"""Each assumption, and what it says."""
ON_REQUEST: frozenset[AssumptionName] = frozenset(["wide-subgroups"])
"""Assumptions that are made only where a caller names them: devices are known on which they do not hold."""
DEFAULT = "default"
"""All others together."""


def named_in_order(*names: AssumptionName) -> tuple[AssumptionName, ...]:
    """Each of these names once, in the order in which assumptions are documented."""
    return tuple(name for name in ASSUMPTIONS if name in names)


@dataclasses.dataclass(frozen=True)
class Assumed:
    """The assumptions that hold in one run."""

    names: frozenset[AssumptionName] = frozenset(ASSUMPTIONS) - ON_REQUEST
    same: tuple[tuple[str, ...], ...] = ()
    """Symbolic dimensions of inputs that are equal, by patterns of their names."""
    one_cache: bool = False
    """The caches of a decoder become one, so that they have one length (`equal-pasts`)."""

    @classmethod
    def of(cls, names: Iterable[str], same: Iterable[str] = (), *, one_cache: bool = False) -> Assumed:
        """The assumptions of these names, those of `default` if there are none; `none` is a name for no assumption.

        Args:
            names: Names of assumptions.
            same: Names of equal dimensions, each as `A=B=C`, in which `*` matches anything.
            one_cache: The caches of a decoder become one.

        Raises:
            OptionError: There is no such assumption.
        """
        asked = list(names)
        for name in asked:
            if name not in {"none", DEFAULT, *ASSUMPTIONS}:
                raise OptionError(
                    f"there is no assumption {name!r}; choose none, {DEFAULT}, {', '.join(get_args(AssumptionName))}"
                )
        usual = cls().names if DEFAULT in asked or not asked else ()
        return cls(
            frozenset(name for name in ASSUMPTIONS if name in asked or name in usual),
            tuple(tuple(item.split("=")) for item in same),
            one_cache,
        )

    @property
    def masked_from(self) -> float:
        """From here down a number that is added to a score, or put in its place, masks it."""
        return MASKS if {"large-fills", "bounded-scores"} <= self.names else MASKS_ANY_SCORE

    @property
    def finite_exponentials(self) -> bool:
        """Whether exponentials of scores are taken not to overflow."""
        return "finite-exponentials" in self.names

    @property
    def kept_weights(self) -> bool:
        """Whether weights that a mask after a softmax keeps are taken to have a sum that rounding leaves."""
        return "kept-weights" in self.names

    @property
    def indices_in_range(self) -> bool:
        """Whether indices that are computed at run time are taken to count from 0 and to be inside their axis."""
        return "indices-in-range" in self.names

    @property
    def nonempty_axes(self) -> bool:
        """Whether symbolic axes of scores are taken to be at least 1 long."""
        return "nonempty-axes" in self.names

    @property
    def masks_fit(self) -> bool:
        """Whether masks are taken to be no longer than the scores."""
        return "masks-fit" in self.names

    @property
    def equal_pasts(self) -> bool:
        """Whether two sums of earlier and new positions that meet are taken to be equal, and not one of them 1."""
        return "equal-pasts" in self.names

    @property
    def named_sizes(self) -> bool:
        """Whether sizes of the same name are taken to be the same number."""
        return "named-sizes" in self.names

    @property
    def bounded_scores(self) -> bool:
        """Whether numbers computed from activations are taken to be ordinary."""
        return "bounded-scores" in self.names
