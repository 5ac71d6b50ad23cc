"""Names of inputs and outputs that differ in the number of a layer alone, as onnxruntime-genai wants them."""

from __future__ import annotations

import re
from collections.abc import Sequence


def template(names: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    """Names as one with %d in the place of the layer's number, and the numbers; an empty name where they differ otherwise."""
    parts = [re.split(r"(\d+)", name) for name in names]
    first = parts[0]
    for place in range(1, len(first), 2):
        layers = tuple(part[place] if place < len(part) else "" for part in parts)
        rest = {tuple(part[:place] + part[place + 1 :]) for part in parts}
        if len(rest) == 1 and len(set(layers)) == len(layers) and all(str(int(item)) == item for item in layers):
            return "".join("%d" if at == place else item for at, item in enumerate(first)), tuple(map(int, layers))
    return "", ()
