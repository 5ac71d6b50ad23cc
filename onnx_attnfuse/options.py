"""Options of a caller; the command line is derived from these fields."""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar, cast

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph.assumptions import ASSUMPTIONS, DEFAULT, Assumed
from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.operators import target_names
from onnx_attnfuse.kernels.policy import Policy

_Self = TypeVar("_Self", bound="Choices")


class Choices:
    """Base of dataclasses whose fields are options."""

    def __new__(cls: type[_Self], *values: Any, **choices: Any) -> _Self:
        """Options, whose fields the dataclass sets.

        Raises:
            OptionError: There is no field of such a name.
        """
        del values
        names = [field.name for field in dataclasses.fields(cast("Any", cls))]
        for name in choices:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                remedy = f"did you mean {close[0]!r}?" if close else f"choose {', '.join(names)}"
                raise OptionError(f"{cls.__name__} has no field {name!r}; {remedy}")
        return object.__new__(cls)


Progress = Callable[[str, int, int], None]
"""Called as `progress(step, done, total)` when a step begins, `total` 1, and while one of several parts goes on."""
PaddingPolicy = Literal["auto", "exact", "guarded", "assume-right", "assume-none"]
"""Treatment of forms of a mask that are exact for some batches only."""
CachePolicy = Literal["as-is", "shared", "paged"]
"""Treatment of the keys and values of earlier positions."""
CacheType = Literal["same", "int8", "int4", "float8"]
"""The type in which a shared cache keeps keys and values."""
TargetName: TypeAlias = str
"""A fused operator that has a record, or `auto`; those of ai.onnx have their domain before them. `packed` is
PackedMultiHeadAttention on tokens without padding, which is removed once and restored once."""


def _provider_names() -> tuple[str, ...]:
    return ("auto", *providers.names())


def _assumption_names() -> tuple[str, ...]:
    return ("none", DEFAULT, *ASSUMPTIONS)


def _no_progress(step: str, done: int, total: int) -> None:
    del step, done, total


@dataclasses.dataclass(frozen=True)
class Options(Choices):
    """Choices for `optimize` and `explain`; fields whose metadata says `command: False` are no options of the command."""

    ep: str = dataclasses.field(default="auto", metadata={"choices": _provider_names, "several": True})
    """Execution provider that the model will run on; several with commas. `auto`: CUDA where onnxruntime has it here,
    else the CPU."""
    arch: str | None = None
    """GPU architecture to plan for, sm70 to sm120. Default: the GPU of this machine, else sm80."""
    onnxruntime: str | None = None
    """Version of ONNX Runtime that the model will run on, for example 1.30; later operators are not written. Default: the
    installed version, else the newest."""
    verify: Literal["none", "sites", "model"] | None = None
    """How to check rewrites. `sites`: run each attention before and after. `model`: the whole model, too. `none`: only
    rewrites by user patterns. Default: `sites` if onnxruntime is installed."""
    padding: PaddingPolicy = "auto"
    """Whether attnfuse may rely on where padding is. `exact`: never. `guarded`: check at run time wherever that is
    faster. `auto`: like exact, but check where the general form needs more memory than the check. `assume-right`: padding
    is on the right. `assume-none`: no padding; with a cache, batches of several entries append one token at a time."""
    cache: CachePolicy = "as-is"
    """What to do with a decoder's KV cache. `as-is`: keep a growing past. `shared`: one preallocated buffer for past and
    present, as onnxruntime-genai uses it. `paged`: pages of fixed size, with the tokens of many requests in one axis, as
    its Engine uses them."""
    window_cache: bool = False
    """Keep no more than a window of keys and values in layers of a shared cache that have one. Tokens cannot be taken
    back then."""
    kv_cache: CacheType = "same"
    """Element type of a shared cache. `same`: the model's type. The others take less memory and change results; the
    report gives the measured difference."""
    context_length: int | None = dataclasses.field(default=None, metadata={"least": 1})
    """Most positions that a decoder with a shared cache will see. Its cosines and sines become tables of that many rows,
    and a later position is an error. Default: the value in --hf-config, else no limit."""
    past_length: bool = False
    """Pass the cache length as a scalar, past_sequence_length, instead of a mask, as onnxruntime-genai does for Whisper's
    decoder. For models without a mask. Default: on if --hf-config is Whisper's."""
    calibrate: pathlib.Path | None = None
    """Tokens for the scales of a quantized cache: an .npz file with an array for each model input. Default: random
    tokens."""
    dequantise_attention: bool = False
    """Fuse attention of a quantized model and drop the quantization of its scores and weights. Results change; the report
    gives the measured difference."""
    dim: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    """Typical size of a symbolic dimension, as NAME=N. Affects performance choices only. With --cuda-graph the size
    becomes fixed."""
    same: tuple[str, ...] = ()
    """Symbolic dimensions that are equal whenever the model runs, as A=B=C. `*` in a name matches anything."""
    target: TargetName = dataclasses.field(default="auto", metadata={"choices": target_names})
    """Fused operator to write. `auto`: the fastest for each attention. Otherwise this operator wherever it is exact."""
    assume: tuple[str, ...] = dataclasses.field(default=(), metadata={"choices": _assumption_names})
    """Take only the assumption of this name for granted. `none` is no assumption, `default` is all but wide-subgroups.
    Repeatable. docs/assumptions.md explains each."""
    cuda_graph: bool = False
    """Write a model that ONNX Runtime can capture in a CUDA graph: with the sizes of --dim and no run-time If. A model
    that cannot be captured is refused, with the node that prevents it."""
    packed_tokens: int | None = dataclasses.field(default=None, metadata={"least": 1})
    """Rows for the tokens of a batch, with --target packed and --cuda-graph. Where a batch has more tokens, every output
    that packing reaches is NaN."""
    conformance: pathlib.Path | None = dataclasses.field(default=None, metadata={"metavar": "FILE"})
    """Do not use operators that failed in this table of `attnfuse conformance --json`. Default: the table that comes with
    the package, if there is one."""
    always: bool = False
    """Fuse even where the unfused form was measured to be faster."""
    keep_outputs: bool = False
    """Also fuse attention whose weights have other consumers; the weights are computed a second time."""
    patterns: tuple[Any, ...] = ()
    """User patterns: a Python file or a folder. In Python also patterns, modules and onnxscript rules."""
    skip_patterns: tuple[str, ...] = ()
    """Do not use the pattern of this name. `*` matches anything."""
    only_patterns: tuple[str, ...] = ()
    """Use only the pattern of this name; readers of single steps are kept."""
    policy: Policy | None = None
    """Kernels to use. Default: what the environment variables ask for."""
    evidence: pathlib.Path | None = None
    """Folder for the evidence of rewrites that differ. Default: `attnfuse-evidence` in the working directory, created
    when needed."""
    unproved: tuple[str, ...] = dataclasses.field(default=(), metadata={"command": False})
    """Values whose computation stays unchanged because no proof of another was found."""
    provable: bool = dataclasses.field(default=False, metadata={"command": False})
    """Write no form that certificates cannot prove, as windows in blocks. On with --require-proof."""
    pictures: bool = dataclasses.field(default=False, metadata={"command": False})
    """Draw each attention before and after, and its mask, for the HTML report. Takes about as long again as finding them."""
    progress: Progress = dataclasses.field(default=_no_progress, repr=False, compare=False, metadata={"command": False})
    """Called during long steps."""

    def given(self) -> dict[str, Any]:
        """The options that differ from the defaults, as plain JSON types."""
        values = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.metadata.get("command", True)
        }
        return {name: _plain(value) for name, value in values.items() if value not in (getattr(Options, name, {}), Policy())}

    @property
    def assumed(self) -> Assumed:
        """The assumptions of `assume`, the equal dimensions of `same`, and the one length of caches that become one.

        Raises:
            OptionError: There is no assumption of such a name.
        """
        return Assumed.of(self.assume, self.same, one_cache=self.cache != "as-is")


def _plain(value: Any) -> Any:
    """A value as JSON has it; whatever has no such form is a string."""
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[Any, ...]", value)]
    if isinstance(value, Policy):
        return dataclasses.asdict(value)
    is_plain = isinstance(value, (str, int, float, dict))
    return cast("Any", value) if is_plain else str(value)
