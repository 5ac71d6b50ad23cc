"""Fails where an attention is left unfused, or was not verified: check_in_ci.py MODEL.onnx ..."""

import sys

import onnx_attnfuse

problems = []
for path in sys.argv[1:]:
    report = onnx_attnfuse.optimize(path, ep="cpu").report
    print("fused", report.fused, "of", report.candidates)
    for site in report.sites:
        if site.status == "skipped":
            problems.append(f"{path}: {site.name}: {'; '.join(f'{reason.code}: {reason}' for reason in site.reasons)}")
        elif site.verified is None:
            problems.append(f"{path}: {site.name}: fused, but not verified")
sys.exit("\n".join(problems) or None)
