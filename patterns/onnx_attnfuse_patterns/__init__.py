"""The built-in pattern pack: one file per idea, entering by the same door as anyone's.

Importing the pack registers its readers (`onnx_attnfuse.score_step`, `onnx_attnfuse.weight_step`).
"""

from onnx_attnfuse_patterns import floors, guards, masks, passing, scaling, soft_cap

__all__ = ["floors", "guards", "masks", "passing", "scaling", "soft_cap"]
