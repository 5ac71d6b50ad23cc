"""The built-in pattern pack: one file per idea, entering by the same door as anyone's.

Its modules hold readers of single steps, and formulas; `onnx_attnfuse.language.registry.discovery` finds them by the entry
point.
"""

from onnx_attnfuse_patterns import floors, guards, masks, passing, rounding, scaling, soft_cap, softmax_by_hand

__all__ = ["floors", "guards", "masks", "passing", "rounding", "scaling", "soft_cap", "softmax_by_hand"]
