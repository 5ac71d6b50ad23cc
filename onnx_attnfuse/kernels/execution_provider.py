"""The record of an execution provider of ONNX Runtime: one file for each in `kernels/providers/`.

Unknown facts are None, or are left out: whoever asks then refuses with a reason, or takes the answer that keeps
results as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias, get_args

import onnx_ir as ir

from onnx_attnfuse.graph.assumptions import AssumptionName
from onnx_attnfuse.kernels.conditions import AttentionParams, Condition, MaskForm
from onnx_attnfuse.kernels.kernel_table import KernelTable
from onnx_attnfuse.reasons import Reason

Kernels: TypeAlias = tuple[tuple[str, tuple[Condition, ...]], ...]
"""Kernels in the order in which they are tried, each with its conditions; the last one takes all that is left."""
Paying: TypeAlias = Literal[
    "split-gemm",
    "quotients",
    "skip-norm",
    "separate-norm",
    "half-gelu",
    "padded-columns",
    "shared-table",
    "projection-bias",
    "fewer-biases",
    "bias-after",
    "emptied-rotations",
    "own-products",
    "packed-operands",
    "norms-inside",
    "merged-projections",
    "position-tables",
    "wide-norms",
    "split-gelu",
    "experts",
    "single-experts",
    "repeated-heads",
    "roundings-first",
    "fused-products",
    "split-products",
    "any-by-sum",
    "whole-rotations",
    "paired-rotations",
    "rotated-rows",
    "packed-rows",
    "one-matrix",
]
"""Rewrites that are faster on some providers only: the enabling rules; biases of projections handed to MultiHeadAttention, and
a product for each of its operands instead of one that is sliced; queries, keys and values handed to GroupQueryAttention as one
tensor where they are pieces of one, and one product of theirs where each has its own; tables of cosines and sines for all
positions, of which a decoder with a shared cache takes rows; ai.onnx Attention where heads share keys and values, even if that
takes a newer opset; roundings of operands before their views, which operators then take in; products and norms of the tokens
alone that are no padding, by operators of the standard."""

ANY_MASK: frozenset[MaskForm] = frozenset(get_args(MaskForm))
UNFUSED = "SpelledOut"
"""The name of attention in operators of the standard among fused operators, for providers that fuse it themselves."""
UNKNOWN: Kernels = (("UNKNOWN", ()),)
"""The operator runs, by whatever kernel."""


@dataclasses.dataclass(frozen=True)
class OpSupport:
    """Facts on a fused operator on an execution provider: element types, kernels and their times.

    Raises:
        ValueError: The last kernel has conditions, so that none would be left for some attention.
    """

    known_from: str
    """The source of the facts: measured or read, and in which version."""
    runs: frozenset[ir.DataType]
    """The element types that there is a kernel for."""
    written: frozenset[ir.DataType]
    """The element types in which the operator is a target."""
    kernels: Kernels = UNKNOWN
    masks: frozenset[MaskForm] = frozenset(["none"])
    """The forms in which a mask is taken."""
    causal: bool = False
    """Whether the causal attribute is taken."""
    by_default: bool = True
    """Whether the operator is considered where nobody asks for it."""
    packed_inputs: bool = False
    """Whether queries, keys and values are taken as one tensor."""
    keys_by_head: bool = False
    """Whether MultiHeadAttention takes keys and values as (b, n, t, h)."""
    broadcasts_bias: bool = False
    """Whether a bias may be broadcast over all entries or all heads; if not, or not known, it is passed as (b, n, s, t)."""
    bias_beside_lengths: bool = False
    """Whether GroupQueryAttention is known to add a bias where each entry has a length of its own."""
    wide_heads: bool = False
    """Whether heads of GroupQueryAttention are known to take more than 256 channels."""
    reads_without_new_keys_from: tuple[int, int] | None = None
    """The ONNX Runtime from which on GroupQueryAttention reads a buffer that holds the new keys already; None: not known to."""
    counts_rows_from: tuple[int, int] | None = None
    """The ONNX Runtime from which on GroupQueryAttention takes the number of new rows of each entry; None: not known to."""
    evicts_from: tuple[int, int] | None = None
    """The ONNX Runtime from which on GroupQueryAttention keeps no more than a window; None: not known to."""
    rotates_inside: bool = False
    """Whether GroupQueryAttention rotates queries and keys where it is handed cosines and sines."""
    is_wrong: Callable[[AttentionParams], Reason | None] | None = None
    """Why the result is known to be wrong for some attentions, or why the operator is not to be trusted with them."""
    time: Callable[[AttentionParams, str], float] | None = None
    """How long a kernel takes, to compare operators and forms of a mask on this provider; None: not known, so never preferred."""
    blocks_time: Callable[[AttentionParams], float] | None = None
    """How long an attention within a window takes in blocks of rows, on the scale of `time`; None: never written so."""
    cached_times: Mapping[MaskForm, tuple[float, float]] | None = None
    """How long an attention with a cache takes, by form of the mask: with one new position, and with many."""
    ungrouped: float = 1.0
    """Share of `cached_times` left where no heads share keys and values."""
    timed_as: str | None = None
    """The operator whose times count in the place of its own."""
    share: Callable[[AttentionParams], float] | None = None
    """Share of those times that is left; None: all."""
    math_fails: Callable[[AttentionParams], Reason | None] | None = None
    """Why the math kernel, the last one, ends with an error or ends the process, if it does."""
    caches: Mapping[str, tuple[Condition, ...]] = dataclasses.field(default_factory=dict[str, "tuple[Condition, ...]"])
    """The formats of a quantised cache that are taken (`cache_formats.FORMATS`), each with its conditions."""
    assumes: Callable[[AttentionParams], AssumptionName | None] | None = None
    """The assumptions under which the result of some attentions is right; None: none."""
    math_is_safe: bool | None = None
    """Whether the math kernel takes every size that `math_fails` leaves; False: only sizes known to be small."""

    def __post_init__(self) -> None:
        if not self.kernels or self.kernels[-1][1]:
            raise ValueError("the last kernel takes all that is left, so it has no conditions")


@dataclasses.dataclass(frozen=True)
class UnfusedForm:
    """The form in which an execution provider fuses attention by itself.

    One product of queries and transposed keys, one factor, one sum with a mask, one Softmax, one product with the values: nothing
    else is between them, no Where and no test for NaN.
    """

    known_from: str
    dtypes: frozenset[ir.DataType]
    """The element types in which attention is brought into it."""
    scale: Literal["queries", "scores"] = "scores"
    """The place of the factor: before the product, or after it."""
    rounds_products: bool = False
    """Where a model is quantised, roundings are wanted right at the products, after views and factors."""

    @property
    def support(self) -> OpSupport:
        """The conditions on any form that the planner asks about."""
        kernels: Kernels = (("OWN_FUSION", ()),)
        return OpSupport(self.known_from, self.dtypes, self.dtypes, kernels, frozenset(["none", "bias"]), broadcasts_bias=True)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that tell ONNX Runtime which kernels to choose."""

    options: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Options of the execution provider, of one session."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Variables, which count for the whole process."""


@dataclasses.dataclass(frozen=True)
class Switching:
    """How kernels of an execution provider are switched off."""

    kernels: frozenset[str]
    """The kernels that can be."""
    settings: Callable[[int, frozenset[str]], Settings]
    """The conditions that exclude kernels on an architecture, and raise least lengths where `narrows`."""
    alone: Callable[[int], Mapping[str, Settings]]
    """The kernels that can be asked for by themselves on an architecture, by a name for a reader."""
    narrows: bool = False
    """Whether a wish for one kind of kernels switches others off, and lets kernels run on short sequences."""
    is_safe: bool = False
    """Whether every operator runs with any of the kernels switched off."""


@dataclasses.dataclass(frozen=True, eq=False)
class Capture:
    """Facts on models that are captured: the work of the device is recorded once, and then replayed without the host."""

    name: str
    """The name of the record."""
    known_from: str
    kernels: Callable[[], KernelTable]
    """All kernels there are; nodes without one run on the host."""
    host_inputs: Mapping[tuple[str, str], tuple[int, ...]]
    """The inputs that kernels read on the host, by domain and operator."""
    waits: Mapping[tuple[str, str], str]
    """The operators for which the host waits for the device, and for what."""
    not_run: Callable[[ir.Node], str | None]
    """The reason that keeps a node on the host although there is a kernel."""
    options: Mapping[str, str]
    """The options of the provider with which a session captures."""


@dataclasses.dataclass(frozen=True, eq=False)
class ExecutionProvider:
    """An execution provider: its names, its operators, and what else depends on it."""

    name: str
    """Its name for callers: the name of the record's file."""
    ort_name: str
    """Its name in ONNX Runtime."""
    distribution: str
    """The distribution of ONNX Runtime that has it."""
    known_from: str
    """Where the facts are from that are of no single operator."""
    operators: Mapping[str, OpSupport | Reason | None]
    """Facts about fused operators by name, `onnx.` before standard ones; None: there is no kernel; or why it is not used."""
    members: tuple[ExecutionProvider, ...] = ()
    """The providers that the record is of, where it is of several (`several_providers.py`)."""
    plugins: tuple[str, ...] = ()
    """Distributions that bring the provider to an ONNX Runtime that is there."""
    unfused_form: UnfusedForm | None = None
    """The form that it fuses by itself; None: none is known, and decomposed attention stays as it is."""
    keeps_fused: bool = False
    """Whether fused operators of a model are left alone; else those that it is not known to run are decomposed."""
    skip_norms: Literal["none", "without sum"] | None = None
    """The forms of SkipLayerNormalization and its like that it runs; the rest is decomposed. None: all stays."""
    decomposed_norms: frozenset[str] = frozenset()
    """Normalizations of ai.onnx that it is known not to run, or not right: they are decomposed."""
    rotates: bool = False
    """Whether it runs RotaryEmbedding of com.microsoft; if not, or not known, rotations are decomposed."""
    shares_cache: bool = False
    """Whether GroupQueryAttention is known to read a length for each entry, as a cache in one buffer needs (`--cache shared`)."""
    pages_from: tuple[int, int] | None = None
    """The version of ONNX Runtime from which on it runs PagedAttention in half types, with sinks and pages of 16, 32, 64, ...
    positions; else attention to pages is decomposed (`--cache paged`)."""
    fixed_sizes: bool = False
    """Whether it takes models whose sizes are all numbers only."""
    mixes_up_inputs: bool = False
    """Whether it takes inputs for one another after one that nobody reads, so that such an input has to be last."""
    gathers_flat: bool = False
    """Whether Gather is wrong there with indices of more than two axes, so that they are laid flat."""
    any_by: Literal["ReduceSum", "ReduceMax"] = "ReduceSum"
    """Reduction that computes `any` along an axis."""
    computes_in_float16: bool = False
    """Whether it computes float32 in float16, so that rows without a key are edited until they come out as in float32.

    There the lowest number leaves something of a score that it is added to. `rounds_float16` is False then, as rows of float16
    models are edited until they come out as on the CPU.
    """
    merges_into_norms: bool = False
    """Whether it makes one normalization of what it finds before one, and is wrong then, so that it is written in another way."""
    architectures: tuple[int, ...] = ()
    """The architectures that kernels are forecast for, as compute capability times ten; none where they make no difference."""
    default_architecture: int = 0
    architecture_here: Callable[[], int | None] | None = None
    """The architecture of this machine, None if it has none."""
    is_preferred: bool = False
    """Whether `auto` takes it where its distribution is installed."""
    memory: Literal["cpu", "cuda"] = "cpu"
    """Where ONNX Runtime keeps inputs and outputs."""
    session_options: frozenset[str] | None = None
    """The options that sessions take for it; None: not known, so that whatever is given is passed on."""
    measured_with: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Options of a session whose memory is measured."""
    rounds_float16: bool | None = None
    """Whether float16 sums are rounded to float16; None: not known, so no float16 attention is fused."""
    keeps_nan_rows: bool | None = None
    """Whether fused operators give NaN in a row whose scores are all -inf, as Softmax does; if not known, the row is made NaN."""
    rotates_each_token: bool = False
    """Whether GroupQueryAttention rotates each token by its own position also where nothing is cached yet; if not, or not known,
    such a token is rotated by the position that follows that of the one before it, and the first by the first of the batch."""
    takes_if: bool | None = None
    """Whether an If costs no more than its test; if not, no form of a mask is chosen by one."""
    options_for_if: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Options of the provider without which an If takes memory of its own."""
    option_words: Callable[[str, str], str] | None = None
    """The effect of an option of the provider, a name and a value, for a reader."""
    pays: frozenset[Paying] = frozenset()
    unfused_time: Callable[[AttentionParams, int, bool], float] | None = None
    """The time of decomposed attention, on an architecture, with a guard against NaN or not; None: not known."""
    switching: Switching | None = None
    """None: no kernel is ever switched off."""
    capture: Capture | None = None
    """None: no model is captured."""
