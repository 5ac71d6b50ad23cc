"""Report records of one site: before it is planned, where an existing operator stays, and of the kernels that are forecast."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import get_args

from onnx_attnfuse.attention.axes.factors import leaves, length
from onnx_attnfuse.attention.match.candidates import Candidate
from onnx_attnfuse.attention.spec import AttentionSpec, Role, Roles
from onnx_attnfuse.fusion.plan import FASTER_FROM, Lowering, Plan, params_of
from onnx_attnfuse.graph.assumptions import AssumptionName
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.graph.uses import label, module_of
from onnx_attnfuse.kernels.device import Device
from onnx_attnfuse.kernels.forecast import Forecast, Speedup
from onnx_attnfuse.kernels.operators import qualified
from onnx_attnfuse.kernels.support import support
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.report.model import Kernel, LaterKernel, NodesOfRole, RoundingReport, SiteReport, Status
from onnx_attnfuse.targets import name_of


def unfused(candidate: Candidate, scope: Scope) -> SiteReport:
    """The report on a site as it is before anything is done."""
    node, spec, refusal = candidate.node, candidate.read, candidate.refusal
    if candidate.softmax is not None:
        found = SiteReport(label(node), scope.path, "skipped")
    else:
        heads = attribute(node, "num_heads", attribute(node, "q_num_heads"))
        kv_heads = attribute(node, "kv_num_heads", heads)
        found = SiteReport(
            label(node), scope.path, "already-fused", op=node.op_type, domain=node.domain, num_heads=heads, kv_num_heads=kv_heads
        )
    found = dataclasses.replace(found, module=module_of(node))
    if refusal is not None:
        status: Status = "not-attention" if refusal.code == "not-attention" else found.status
        found = dataclasses.replace(found, status=status, reasons=(refusal,))
    return found if spec is None else dataclasses.replace(found, **_sizes(spec))


def nodes_by_role(candidate: Candidate, names: Set[str]) -> tuple[NodesOfRole, ...]:
    """The nodes of a site by role, in the order of the roles; those that are not called by one of `names` are left out.

    Args:
        candidate: The site; one that was not read is reported with its own nodes.
        names: The names of the nodes in the source.
    """
    if candidate.read is not None:
        roles = candidate.read.roles
    elif candidate.softmax is None:
        roles: Roles = (("attention", candidate.node),)
    else:
        roles = tuple(("softmax", node) for node in candidate.softmax.nodes)
    found: dict[Role, list[str]] = {role: [] for role in get_args(Role)}
    for role, node in roles:
        if node.name and node.name in names:
            found[role].append(node.name)
    return tuple(NodesOfRole(role, tuple(listed)) for role, listed in found.items() if listed)


def roundings_of(candidate: Candidate, names: Mapping[str, str]) -> tuple[RoundingReport, ...]:
    """The roundings of a site as reported.

    Args:
        candidate: The site.
        names: For the name of a node that is none of the source that of the one it replaces, or empty.
    """
    return tuple(
        RoundingReport(
            place=item.place,
            type=None if item.dtype is None else item.dtype.name,
            axis=item.pair.axis,
            block_size=item.pair.block_size,
            nodes=tuple(name for node in item.pair.nodes if (name := names.get(label(node), label(node)))),
        )
        for item in (() if candidate.read is None else candidate.read.roundings)
    )


def _sizes(spec: AttentionSpec) -> dict[str, int | None]:
    """Heads and head sizes by their names in a report; None where they are computed at run time."""
    axes = spec.axes
    present = {leaf for axis in spec.key[-1].indexed.axes for leaf in leaves(axis)}
    kv_heads = tuple(leaf for leaf in axes.n if leaf in present)
    named = {"num_heads": axes.n, "kv_num_heads": kv_heads, "head_size": axes.h, "v_head_size": axes.v}
    sizes = {name: length(axis) for name, axis in named.items()}
    return {name: size if isinstance(size, int) else None for name, size in sizes.items()}


def kept(found: SiteReport, asked: str) -> Reason:
    """Why an operator stays that a plan would have put in its own place."""
    if asked != "auto":
        return Reason("as-asked", f"{found.op} is the operator asked for and is kept")
    return Reason("fastest", f"{found.op} is the faster operator here and is kept")


def as_wanted(ep: str) -> Reason:
    """Why nothing was changed about an attention that the execution provider fuses itself."""
    return Reason("provider-form", f"it has the form that {ep} fuses itself")


def as_asked(site: SiteReport, asked: str) -> SiteReport:
    """Marks a site as skipped if --target names another operator and an operator of the standard was kept."""
    name = qualified(site.op or "", site.domain or "")
    if asked in {"auto", name} or site.status != "already-fused" or site.domain == CONTRIB:
        return site
    reason = Reason("not-as-asked", f"{name} is kept, although {asked} was asked for")
    return dataclasses.replace(site, status="skipped", reasons=(*site.reasons, reason))


_WHEN = {"right_padded": "padding is on the right", "unpadded": "there is no padding"}
_SINGLE = "one entry, one new position or no past"


def kernel_of(plan: Plan, device: Device) -> Kernel:
    """The kernel that a plan will run, with the others where that depends on the batch or on sizes."""
    chain = [next(_chain(item, tested=True)) for item in plan.faster]
    return _kernel([*chain, *_chain(plan.main, tested=False)], plan.best.forecast, device, plan.gains)


def kernel_of_forecast(found: Forecast, device: Device, when: str | None = None, usual: Kernel | None = None) -> Kernel:
    """The report record of the kernel forecast for an operator.

    Args:
        found: The forecast.
        device: The device that it is for.
        when: A condition on batches under which the operator runs.
        usual: The kernel that runs otherwise.
    """
    return _kernel([*_steps(found, when), *(usual.chain if usual is not None else ())], found, device)


def _kernel(chain: Sequence[LaterKernel], best: Forecast, device: Device, gains: tuple[Speedup, ...] = ()) -> Kernel:
    return Kernel(device.name, chain[0].kernel, chain[0].when, tuple(chain[1:]), best.refused, gains)


def _chain(item: Lowering, *, tested: bool) -> Iterator[LaterKernel]:
    """The kernels of one way; where a test at run time makes sure of sizes, the first of them always runs."""
    least = FASTER_FROM.get(item.encoding.mask, 0) if tested else 0
    size = f"there are 2^{least.bit_length() - 1} scores or more" if least else None
    return _steps(item.forecast, _WHEN.get(item.encoding.when), _SINGLE if item.encoding.single else None, size)


def _steps(found: Forecast | None, *conditions: str | None) -> Iterator[LaterKernel]:
    """The kernels of a forecast in the order in which they are tried, each with conditions of its operator besides its own."""
    while found is not None:
        yield LaterKernel(found.kernel, " and ".join(filter(None, (*conditions, found.needs))) or None)
        found = found.otherwise


def assumed_of(plan: Plan, spec: AttentionSpec, device: Device) -> tuple[AssumptionName, ...]:
    """The assumptions of a plan on the device."""
    names: dict[AssumptionName, None] = {}
    for item in (plan.main, *plan.faster):
        found = support(name_of(item.target), device.provider)
        if not isinstance(found, Reason) and found.assumes is not None:
            name = found.assumes(params_of(spec, item.encoding, item.target))
            names |= {} if name is None else {name: None}
    return tuple(names)
