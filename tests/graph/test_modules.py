"""The torch module of a node, in the metadata of exporters; an export is the independent truth."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch

import onnx_attnfuse
from onnx_attnfuse.graph.uses import module_of
from onnx_attnfuse.report.grouping import folded


@pytest.mark.parametrize(
    ("metadata", "module"),
    [
        ({"pkg.torch.onnx.name_scopes": "['', 'encoder', 'encoder.layer.0', 'softmax']"}, "encoder.layer.0"),
        ({"pkg.torch.onnx.name_scopes": "['', 'softmax']"}, None),
        ({"pkg.torch.onnx.name_scopes": "no list"}, None),
        ({"namespace": ": Model/encoder: a.Encoder/encoder.layer.0: a.Layer/softmax: aten.softmax.int"}, "encoder.layer.0"),
        ({"namespace": ": Model/softmax: aten.softmax.int"}, None),
        ({}, None),
    ],
)
def test_the_module_is_the_innermost_scope(metadata: dict[str, str], module: str | None) -> None:
    node = ir.Node("", "Softmax", [ir.val("x")], name="softmax", metadata_props=metadata)
    assert module_of(node) == module


class _Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(2, 6, 2, 4).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(2, 6, 8)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch's own
def test_a_report_names_the_modules_of_an_export() -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(_Layer()) for _ in range(2))).eval()
    program = torch.onnx.export(model, (torch.randn(2, 6, 8),), dynamo=True, verbose=False)
    report = onnx_attnfuse.explain(program)
    modules = {name for name, module in model.named_modules() if isinstance(module, _Layer)}
    assert {site.module for site in report.sites} == modules
    assert [row.name for row in folded(report, fold=False)] == [f"{site.module} ({site.name})" for site in report.sites]
