"""How com.microsoft's MultiHeadAttention and Attention are handed a mask: not at all, as lengths, by an attribute, as a bias."""

from __future__ import annotations

from onnx_attnfuse.attention.axes.factors import length
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.predicates import Causal
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.targets.base import MaskEncoding
from onnx_attnfuse.targets.padding import is_padding


def refuse_scores(spec: AttentionSpec, op: str) -> Reason | None:
    """Why neither operator can compute the steps of the scores of `spec`, or None."""
    if spec.softcap is not None:
        return Reason("no-softcap", f"{op} cannot cap scores by tanh")
    if spec.causal and (spec.mask or length(spec.axes.i) != length(spec.axes.j)):
        message = "causal by attribute, with a mask besides or without a proof that there are as many queries as keys"
        return Reason("unproven-square", message)
    return None


def encodings(spec: AttentionSpec, meaning: Meaning) -> tuple[MaskEncoding, ...]:
    """Every way to pass the mask, and for which batches each is exact.

    The kernels align the causal triangle differently where there are more keys than queries: both must be proven equal in number.
    """
    axes = spec.axes
    triangles = [item for item in meaning.predicates if isinstance(item, Causal)]
    causal = len(triangles) == 1 and triangles[0].offset == 0 and length(axes.i) == length(axes.j)
    rest = [item for item in meaning.predicates if item not in triangles]
    if spec.sink is not None:
        return (MaskEncoding("bias"),)
    if meaning.is_trivial:
        return (MaskEncoding("none"),)
    if causal and meaning.only_causal:  # a triangle of the mask may be a bias where there is no attribute for it
        return (MaskEncoding("none", causal=True), *([MaskEncoding("bias")] if spec.mask else []))
    if meaning.biases or (triangles and not causal) or not is_padding(rest, spec):
        return (MaskEncoding("bias"),)
    padded = (
        MaskEncoding("lengths", causal, "right_padded"),
        MaskEncoding("ranges", causal, "right_padded"),
        MaskEncoding("none", causal, "unpadded"),
    )
    return (*padded, MaskEncoding("bias"))


def shown(encoding: MaskEncoding, bias: IndexedValue | None, lengths: str) -> str:
    """The form in which the mask is passed; `lengths` is the input that takes lengths."""
    words = ["unidirectional"] if encoding.causal else []
    if bias is not None:
        words.append(
            f"attention_bias {' '.join(letter if axis else '1' for letter, axis in zip('bnst', bias.axes, strict=True))}"
        )
    elif encoding.mask != "none":
        words.append(f"{lengths} {'b' if encoding.mask == 'lengths' else '3b+2'}")
    return " + ".join(words) or "none"
