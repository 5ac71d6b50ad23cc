"""Attentions of quantised models fused without the roundings inside, as `dequantise_attention` asks for: check and report.

The roundings are taken out in a pass (`left_out.py`), so that all later passes fuse and verify the site as attention in
floats. So each fused attention is exactly that without the roundings. Their effect is measured on the whole model.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.errors import ModelError, VerificationError
from onnx_attnfuse.fusion.left_out import counted
from onnx_attnfuse.fusion.pass_context import Run
from onnx_attnfuse.verify.quantised.roundings import DequantisedAttention


def measure(run: Run) -> int:
    """Takes down the roundings that were left out, with their cost, also in the model's metadata.

    Raises:
        VerificationError: The whole model is to be judged, and differs by more than these roundings.
    """
    if run.source is None:
        return 0
    counts = [counted(graph.left_out, run.sites) for graph in run.graphs]
    sites, roundings = (sum(numbers) for numbers in zip(*counts, strict=True)) if counts else (0, 0)
    if not sites:
        return 0
    record = DequantisedAttention(sites, roundings)
    if run.shared.decoder is not None:  # it has other inputs than its source, so that the two cannot be compared
        run.notes.append(f"{roundings} quantizations inside {sites} attentions are dropped; the effect was not measured")
        run.dequantised = record
        return 0
    if run.verifier.level == "model":
        _check(run, run.source)
    run.dequantised = record = _measured(run, run.source, record)
    record.write(run.model)
    run.notes += record.lines()
    return 0


def _measured(run: Run, source: ir.Model, record: DequantisedAttention) -> DequantisedAttention:
    if run.verifier.level == "none":
        return record
    from onnx_attnfuse.verify.quantised.stated_error import measure_dequantised

    try:
        with run.verifier.timer.step("measure what roundings cost"):
            return measure_dequantised(source, run.model, record)
    except ModelError as error:
        run.notes.append(f"the effect of dropping quantizations could not be measured: {error}")
        return record


def _check(run: Run, source: ir.Model) -> None:
    from onnx_attnfuse.verify.quantised.stated_error import check_dequantised

    try:
        with run.verifier.timer.step("verify the whole model"):
            verdict = check_dequantised(source, run.model)
    except ModelError as error:
        run.notes.append(f"the whole model could not be verified without quantizations: {error}")
        return
    if verdict.undecided is not None:
        run.notes.append(f"the whole model could not be verified without quantizations: {verdict.undecided}")
    elif not verdict.equal:
        problem = f"the fused model differs by more than the dropped quantizations: {verdict.detail}"
        raise VerificationError(f"{problem}; please report it with the model")
    else:
        run.notes.append(f"whole model verified on {verdict.cases} inputs without roundings, error {verdict.max_abs_error:.1e}")
