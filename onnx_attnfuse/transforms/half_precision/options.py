"""How a model is converted; the command line is derived from these fields."""

from __future__ import annotations

import dataclasses
from typing import Literal

from onnx_attnfuse.options import Choices


@dataclasses.dataclass(frozen=True)
class Conversion(Choices):
    """Choices for `convert`."""

    dtype: Literal["float16", "bfloat16"] = "float16"
    """Type that float32 becomes."""
    keep_io_types: bool = False
    """Leave inputs and outputs of the model float32."""
    verify: Literal["none", "model"] | None = None
    """`model`: compare the result with the model on adversarial inputs. Default: `model` if onnxruntime is installed."""
