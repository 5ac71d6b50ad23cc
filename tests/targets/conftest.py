"""What tests of single targets share."""

from __future__ import annotations

import dataclasses

import pytest

from onnx_attnfuse.kernels import providers


@pytest.fixture
def biases_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases stay where the operator takes them on CUDA, and are not moved out of it afterwards."""
    record = providers.provider("cuda")
    monkeypatch.setitem(providers._records, "cuda", dataclasses.replace(record, pays=record.pays - {"fewer-biases"}))
