"""The record of a quantised cache, in a report and in the model's own metadata, where `attnfuse verify` finds it again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.verify.decoder_feeds import Loop

if TYPE_CHECKING:
    from typing_extensions import Self

_ERRORS = "error", "error_on_text"


class MetadataRecord:
    """A frozen dataclass in an entry of a model's metadata."""

    KEY: ClassVar[str]
    """The name of the entry."""

    def write(self, model: ir.Model) -> None:
        """Puts the record into a model's metadata, in place."""
        model.metadata_props[self.KEY] = json.dumps(dataclasses.asdict(cast("Any", self)), sort_keys=True)

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> Self | None:
        """The record in a model's metadata; None where there is none.

        Raises:
            ModelError: The entry was changed.
        """
        if cls.KEY not in metadata:
            return None
        try:
            return cls._made(json.loads(metadata[cls.KEY]))
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise ModelError(f"the metadata '{cls.KEY}' cannot be read: {problem}; make the model again") from problem

    @classmethod
    def _made(cls, found: dict[str, Any]) -> Self:
        """The record of its content; raises what a changed content raises."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class CacheError:
    """How far the logits of a decoder with a quantised cache are from those of its source, over loops of generated tokens."""

    largest: float
    """The largest difference, as a part of the standard deviation of the source's logits; so is the next."""
    mean: float
    equal_tokens: float
    """The share of tokens after which both have the same largest logit."""
    tokens: int
    """How many tokens there were."""

    def __str__(self) -> str:
        parts = f"largest {self.largest:.2g}, mean {self.mean:.2g} of their spread"
        return f"{parts}; {self.equal_tokens:.1%} of {self.tokens} greedy tokens are the same"


@dataclasses.dataclass(frozen=True)
class QuantisedCache(MetadataRecord):
    """A cache that is kept in fewer bits than it is computed in."""

    KEY = "onnx_attnfuse.kv_cache"

    format: str
    """`int8`, `int4` or `float8`."""
    scales: str
    """The granularity of scales, as the operator calls it: PER_CHANNEL."""
    scales_from: str
    """The calibration data of the scales, in words."""
    bytes_per_position: int
    """The bytes of one position of one entry, in all layers."""
    bytes_before: int
    """The bytes of one position in the type that the model computes in."""
    loop: Loop = dataclasses.field(repr=False)
    """How source and result are run."""
    logits: str
    context_length: int | None = None
    """The most positions, where that is known."""
    error: CacheError | None = None
    """None: it was not measured."""
    error_on_text: CacheError | None = None
    """The error on some text of a file, with scales from its rest; None: there is no file, or it is too short."""

    def lines(self) -> tuple[str, ...]:
        """Lines for a reader."""
        size = f"the cache is {self.format}, {self.bytes_per_position} bytes a position instead of {self.bytes_before}"
        error, name = "not measured" if self.error is None else str(self.error), f"error of the logits by the {self.format} cache"
        lines = f"{size}; scales from {self.scales_from}", f"{name}: {error}"
        if self.error_on_text is None:
            return lines
        return (
            lines[0],
            f"{name} on text of that file, with scales from the rest: {self.error_on_text}",
            f"{name} on random tokens: {error}",
        )

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON types, without how it is run."""
        found = dataclasses.asdict(self)
        return {name: item for name, item in found.items() if name not in {"loop", "context_length"}}

    @classmethod
    def _made(cls, found: dict[str, Any]) -> Self:
        loop = found.pop("loop")
        error, on_text = (None if (item := found.pop(name, None)) is None else CacheError(**item) for name in _ERRORS)
        loop |= {name: tuple((old, new) for old, new in loop[name]) for name in ("pasts", "presents")}
        loop["outputs"] = tuple(loop["outputs"])
        return cls(**found, loop=Loop(**loop), error=error, error_on_text=on_text)
