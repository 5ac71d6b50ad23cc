"""What the variables of the environment come to, attention by attention and device by device.

    python -m tests.support.environment_table > benchmarks/results/environment.md

Forecasts only: nothing is run, and no GPU is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import onnx
import onnx.parser

import onnx_attnfuse
from onnx_attnfuse import Policy, Report

_CAUSAL = """
    [size] size = Shape<start = 2, end = 3>(q)
    [scalar] count = Squeeze(size)
    [places] places = Range(zero, count, one)
    [column] column = Unsqueeze(places, last)
    [seen] seen = GreaterOrEqual(column, places)
    [bias] bias = Where(seen, none, lowest)
    [masked] masked = Add(scaled, bias)
"""
_PADDING = """
    [kept] kept = Cast<to = 9>(attention_mask)
    [spread] seen = Unsqueeze(kept, inner)
    [bias] bias = Where(seen, none, lowest)
    [masked] masked = Add(scaled, bias)
"""
_BIAS = "[masked] masked = Add(scaled, given)"


@dataclasses.dataclass(frozen=True)
class Site:
    """One attention as an exporter writes it; the model has nothing else."""

    name: str
    dtype: str = "float16"
    batch: str = "b"
    rows: str = "s"
    head: int = 64
    v_head: int = 64
    given: str = ""
    masked: str = "[masked] masked = Identity(scaled)"

    def model(self) -> onnx.ModelProto:
        """The model: 16 heads, keys as many as queries."""
        dims = f"{self.batch}, 16, {self.rows}"
        kind, number = self.dtype, onnx.TensorProto.DataType.Value(self.dtype.upper())
        text = f"""<ir_version: 9, opset_import: ["" : 18]>
attention ({kind}[{dims}, {self.head}] q, {kind}[{dims}, {self.head}] k, {kind}[{dims}, {self.v_head}] v{self.given})
    => ({kind}[{dims}, {self.v_head}] out)
<float eighth = {{0.125}}, float nothing = {{0}}, float least = {{-65504}}, int64 zero = {{0}}, int64 one = {{1}},
 int64[1] last = {{1}}, int64[2] inner = {{1, 2}}>
{{
    scale = Cast<to = {number}>(eighth)
    none = Cast<to = {number}>(nothing)
    lowest = Cast<to = {number}>(least)
    [transpose] kt = Transpose<perm = [0, 1, 3, 2]>(k)
    [scores] qk = MatMul(q, kt)
    [scaling] scaled = Mul(qk, scale)
    {self.masked}
    [softmax] weights = Softmax<axis = -1>(masked)
    [values] out = MatMul(weights, v)
}}"""
        return onnx.parser.parse_model(text)


SITES = (
    Site("no mask"),
    Site("no mask, float32", dtype="float"),
    Site("no mask, head size 60", head=60, v_head=60),
    Site("no mask, values of 128", v_head=128),
    Site("causal", masked=_CAUSAL),
    Site("padding", given=", int64[b, s] attention_mask", masked=_PADDING),
    Site("bias", given=", float16[b, 16, s, s] given", masked=_BIAS),
    Site("bias, 8×512", batch="8", rows="512", given=", float16[8, 16, 512, 512] given", masked=_BIAS),
)
DEVICES: Mapping[str, Mapping[str, str]] = {
    "cpu": {"ep": "cpu"},
    "sm75": {"ep": "cuda", "arch": "sm75"},
    "sm80": {"ep": "cuda", "arch": "sm80"},
    "sm90": {"ep": "cuda", "arch": "sm90"},
}
_FLASH, _EFFICIENT, _FALLBACK = "ATTNFUSE_USE_FLASH_ATTENTION", "ATTNFUSE_USE_EFFICIENT_ATTENTION", "ATTNFUSE_SDPA_FALLBACK"
SETTINGS: tuple[Mapping[str, str], ...] = (
    {},
    {_FLASH: "1"},
    {_EFFICIENT: "1"},
    {_FALLBACK: "1"},
    {_FLASH: "1", _EFFICIENT: "1"},
    {_FLASH: "1", _EFFICIENT: "1", _FALLBACK: "1"},
    {_FLASH: "0"},
    {_EFFICIENT: "0"},
    {"ORTMODULE_USE_FLASH_ATTENTION": "1"},
    {"ORTMODULE_USE_TRITON": "1", "ORTMODULE_USE_FLASH_ATTENTION": "1"},
    {"ORTMODULE_USE_TRITON": "1", "ORTMODULE_USE_FLASH_ATTENTION": "1", _FLASH: "0"},
    {"ORTMODULE_USE_EFFICIENT_ATTENTION": "1"},
    {"ORTMODULE_ATEN_SDPA_FALLBACK": "1"},
)


def resolved(settings: Mapping[str, str], site: Site, device: str) -> Report:
    """What becomes of one attention."""
    policy = Policy.from_environment(settings)
    return onnx_attnfuse.explain(site.model(), policy=policy, verify="none", **DEVICES[device])


def reported(report: Report) -> str:
    """The kernels of the only site, in the order in which they are tried, or why it is left as it is."""
    (site,) = report.sites
    if site.kernel is None:
        return f"left: {', '.join(dict.fromkeys(reason.code for reason in site.reasons))}"
    kernels = [site.kernel.forecast, *(item.kernel for item in site.kernel.otherwise)]
    return " / ".join(dict.fromkeys(name.removesuffix("_ATTENTION").lower() for name in kernels))


def table(settings: Mapping[str, str]) -> Iterator[str]:
    """One table: attentions down, devices across, and what ONNX Runtime is told at the end."""
    yield f"## {', '.join(f'`{name}={value}`' for name, value in settings.items()) or 'Nothing set'}"
    yield f"\nresolves to: {Policy.from_environment(settings)}\n"
    yield f"| | {' | '.join(DEVICES)} |\n|---|{'---|' * len(DEVICES)}"
    lines: dict[str, list[str]] = {device: [] for device in DEVICES}
    for site in SITES:
        reports: dict[str, Report] = {device: resolved(settings, site, device) for device in DEVICES}
        yield f"| {site.name} | {' | '.join(map(reported, reports.values()))} |"
        for device, report in reports.items():
            lines[device] += report.session.lines() if report.session else []
    said = [", ".join(line.removeprefix("export ") for line in dict.fromkeys(lines[device])) for device in DEVICES]
    yield f"| *ONNX Runtime is told* | {' | '.join(text or '-' for text in said)} |\n"


def main() -> None:
    """Prints all tables."""
    print("# What the environment comes to\n\n    python -m tests.support.environment_table\n")
    print("16 heads of 64 in float16 unless it says otherwise, as many keys as queries, batch and length not known unless given.")
    print(
        "A cell names the kernels that ONNX Runtime 1.31 is forecast to run, those after the first where its conditions or a test"
    )
    print("at run time do not hold; *left* says why an attention stays spelled out. Nothing was run for this.\n")
    for settings in SETTINGS:
        print("\n".join(table(settings)))


if __name__ == "__main__":
    main()
