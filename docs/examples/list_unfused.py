"""Lists each attention that would stay unfused, with reasons and nodes: list_unfused.py MODEL.onnx"""

import sys

import onnx_attnfuse

report = onnx_attnfuse.explain(sys.argv[1], ep="cpu")
print("fused", report.fused, "of", report.candidates)
for site in report.sites:
    if site.status == "skipped":
        print(site.name)
        for reason in site.reasons:
            print(f"    {reason.code}: {reason.message} (node: {reason.node or 'unknown'})")
