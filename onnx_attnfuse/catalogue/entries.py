"""All patterns of a run, by what they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from onnx_attnfuse.catalogue.foreign import GraphRule
from onnx_attnfuse.equations.net import Net
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.language.grains import Grain, Operator, Pattern, ScoreStepReader, WeightStepReader
from onnx_attnfuse.language.readers import Readers

Kind: TypeAlias = "Grain | GraphRule"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One pattern and where it is from."""

    name: str
    grain: Kind
    owner: str
    """`pack builtin`, a file, `registered` or `given`."""

    @property
    def is_step(self) -> bool:
        """Whether it reads a single step."""
        return isinstance(self.grain, (ScoreStepReader, WeightStepReader))

    @property
    def kind(self) -> str:
        """What it is, in words."""
        if isinstance(self.grain, Pattern):
            return "refusal" if self.grain.refused else "pattern"
        if isinstance(self.grain, Operator):
            return "operator"
        if isinstance(self.grain, GraphRule):
            return "onnxscript rule"
        return "score step" if isinstance(self.grain, ScoreStepReader) else "weight step"


@dataclasses.dataclass(frozen=True)
class Catalogue:
    """Patterns, ready for use."""

    entries: tuple[Entry, ...]
    readers: Readers
    net: Net
    operators: Mapping[tuple[str, str], Operator]
    rules: tuple[GraphRule, ...]

    @staticmethod
    def of(entries: Iterable[Entry]) -> Catalogue:
        """A catalogue of entries.

        Raises:
            OptionError: Two have the same name, read the same operator, define it, or are the same formula.
        """
        found = tuple(entries)
        names: dict[str, Entry] = {}
        for entry in found:
            other = names.setdefault(entry.name, entry)
            if other is not entry:
                raise OptionError(
                    f"two patterns are called '{entry.name}': in {other.owner} and in {entry.owner}; rename or skip one"
                )
        grains = [entry.grain for entry in found]
        return Catalogue(
            entries=found,
            readers=Readers.of(grains),
            net=Net(grain for grain in grains if isinstance(grain, Pattern)),
            operators={(grain.domain, grain.op): grain for grain in grains if isinstance(grain, Operator)},
            rules=tuple(grain for grain in grains if isinstance(grain, GraphRule)),
        )
