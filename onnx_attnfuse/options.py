"""Options of a caller; the command line is derived from these fields."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from onnx_attnfuse.assumptions import Assumed
from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.operators import target_names
from onnx_attnfuse.kernels.policy import Policy

Progress = Callable[[str, int, int], None]
"""Called as `progress(step, done, total)` while a long step goes on."""
PaddingPolicy = Literal["auto", "exact", "guarded", "assume-right", "assume-none"]
"""What to do with forms of a mask that are exact for some batches only."""
CachePolicy = Literal["as-is", "shared"]
"""What becomes of the keys and values of earlier positions."""
CacheType = Literal["same", "int8", "int4", "float8"]
"""The type in which a shared cache keeps keys and values."""
TargetName: TypeAlias = str
"""A fused operator that has a record, or `auto`; those of ai.onnx have their domain before them. `packed` is
PackedMultiHeadAttention on tokens without padding, which is removed once and restored once."""


def _provider_names() -> tuple[str, ...]:
    return ("auto", *providers.names())


def _no_progress(step: str, done: int, total: int) -> None:
    del step, done, total


@dataclasses.dataclass(frozen=True)
class Options:
    """Choices for `optimize` and `explain`; fields whose metadata says `command: False` are no options of the command."""

    ep: str = dataclasses.field(default="auto", metadata={"choices": _provider_names, "several": True})
    """Execution provider the model will run on, or several, with commas; `auto` takes CUDA where onnxruntime has it here."""
    arch: str | None = None
    """GPU architecture to plan and forecast for, sm70 to sm120; default: the GPU here, else sm80."""
    onnxruntime: str | None = None
    """Version of ONNX Runtime that the model will run on, as 1.30; what enabling rules write of later ones is left out. Default:
    that of the execution provider's package if it is installed here, else the newest."""
    verify: Literal["none", "sites", "model"] | None = None
    """How rewrites are judged. `sites` runs each site before and after, `model` the whole model too, `none` nothing but what
    patterns of yours make. By default `sites` if onnxruntime is there."""
    padding: PaddingPolicy = "auto"
    """What to do with forms of a mask that are exact for some batches only. `guarded` puts them behind a test at run time
    wherever they are faster, `auto` only where the form for all batches takes more memory than a test; `exact` leaves them out.
    `assume-right` takes it as given that padding is on the right, `assume-none` that there is none and no batch of several
    entries gets several new tokens on top of a cache."""
    cache: CachePolicy = "as-is"
    """What becomes of a decoder's cache. `as-is` keeps a past that grows; `shared` makes past and present one buffer of a fixed
    length, the form in which onnxruntime-genai runs a decoder, where all of its attentions can be."""
    kv_cache: CacheType = "same"
    """The type of a shared cache. `same` is the model's; the others take less memory, and results differ by what rounding keys
    and values costs, which is measured and told."""
    context_length: int | None = dataclasses.field(default=None, metadata={"least": 1})
    """The most positions that a decoder with a shared cache will see: its cosines and sines become tables of as many rows, and a
    position behind them ends in an error. By default what the file of --hf-config says, if there is one, else any number."""
    past_length: bool = False
    """Tell the length of a shared cache by one number, past_sequence_length, in the place of a mask, as onnxruntime-genai does
    for the decoder of Whisper; for a model that has no mask of its own. By default where the file of --hf-config is Whisper's."""
    calibrate: pathlib.Path | None = None
    """Tokens to measure the scales of a quantised cache on: an .npz file with arrays by the names of the model's inputs; by
    default tokens are drawn."""
    dequantise_attention: bool = False
    """Fuse attentions of a quantised model without the roundings inside, those of scores and weights; results differ by these,
    which is measured and told."""
    dim: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    """Length that a symbolic dimension will mostly have, as NAME=N; decides what is fast, never what is exact. With
    `cuda_graph` it always has that length."""
    same: tuple[str, ...] = ()
    """Names of symbolic dimensions that are equal whenever the model runs, as A=B=C; `*` in a name stands for anything."""
    target: TargetName = dataclasses.field(default="auto", metadata={"choices": target_names})
    """Fused operator to use: the fastest at each site, or this one wherever it can be, also where others are faster."""
    assume: tuple[str, ...] = ()
    """Take only this for granted: large-fills, bounded-scores, level-rows, named-sizes, nonempty-axes, masks-fit, equal-pasts,
    indices-in-range, finite-exponentials, padded-rows-unused, padding-at-the-ends, small-results, wide-subgroups, none, or
    default, which is all of them but wide-subgroups. Repeatable. docs/assumptions.md says what each is."""
    cuda_graph: bool = False
    """Make a model that ONNX Runtime captures in a CUDA graph, of the sizes that `dim` tells and without a test at run time; a
    model that it cannot capture is refused with the node that prevents it."""
    conformance: pathlib.Path | None = dataclasses.field(default=None, metadata={"metavar": "FILE"})
    """Leave out what failed in this table of `attnfuse conformance --json`; by default what failed in the one that comes with the
    package for the execution provider, if there is one."""
    always: bool = False
    """Fuse also where what is spelled out was measured to be faster."""
    keep_outputs: bool = False
    """Fuse sites whose attention weights are used elsewhere too, computing the weights beside the fused operator."""
    patterns: tuple[Any, ...] = ()
    """Patterns of your own: a Python file or a folder of them; in Python also patterns, modules, and rules of onnxscript."""
    skip_patterns: tuple[str, ...] = ()
    """Leave out the pattern of this name; `*` stands for anything."""
    only_patterns: tuple[str, ...] = ()
    """Use no whole attentions, operators and rules but the one of this name; readers of single steps stay."""
    policy: Policy | None = None
    """Kernels to use; by default what the environment asks for when the work begins."""
    evidence: pathlib.Path | None = None
    """Folder for the evidence of rewrites that differ; by default `attnfuse-evidence` in the working directory, made when
    needed."""
    unproved: tuple[str, ...] = dataclasses.field(default=(), metadata={"command": False})
    """Values that keep the way in which they are computed, as no proof of another was found."""
    pictures: bool = dataclasses.field(default=False, metadata={"command": False})
    """Draw each site before and after, and its mask, for a report as a page; takes about as long again as finding them."""
    progress: Progress = dataclasses.field(default=_no_progress, repr=False, compare=False, metadata={"command": False})
    """Told about long work."""

    @property
    def assumed(self) -> Assumed:
        """The assumptions of `assume`, and the equal dimensions of `same`.

        Raises:
            OptionError: There is no assumption of such a name.
        """
        return Assumed.of(self.assume, self.same)
