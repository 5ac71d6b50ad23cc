"""Bundled models as ONNX Runtime's quantiser writes them, with the settings that change what stands around attentions."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import shutil
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize, quantize_dynamic, quantize_static
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config, qnn_preprocess_model
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

import onnx_attnfuse
from benchmarks.harness import quietly
from tests.support.bundled import BUNDLED, Array, cases

Settings = Mapping[str, Any]
SETTINGS: Mapping[str, Settings] = {
    "defaults": {},
    "products alone": {"op_types_to_quantize": ["MatMul"]},
    "per channel": {"per_channel": True},
    "unsigned": {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8},
    "16 bits": {"activation_type": QuantType.QUInt16, "weight_type": QuantType.QInt8},
    "a pair for each reader": {"extra_options": {"DedicatedQDQPair": True}},
    "symmetric": {"extra_options": {"ActivationSymmetric": True, "ForceQuantizeNoInputCheck": True}},
    "weights' products alone": {"extra_options": {"MatMulConstBOnly": True}},
    "operators on quantised numbers": {"quant_format": QuantFormat.QOperator},
    "activations kept": {"extra_options": {"QDQKeepRemovableActivations": True}},
}
"""Arguments of `quantize_static` by what they are for."""


class _Batches(CalibrationDataReader):
    """The inputs recorded beside a bundled model."""

    def __init__(self, path: pathlib.Path) -> None:
        self._batches = _batches(path)

    def get_next(self) -> Mapping[str, Array] | None:
        """The next batch; None behind the last."""
        return next(self._batches, None)


def source(name: str) -> pathlib.Path:
    """The file of a bundled model."""
    return next(path for path in BUNDLED if path.stem == name)


@functools.cache
def quantised(name: str, setting: str = "defaults", *, spared: bool = False) -> onnx.ModelProto:
    """A bundled model in QDQ format, or in QOperator format where a setting says so.

    Args:
        name: Of the model.
        setting: One of `SETTINGS`, or `qnn`: as for that execution provider, with 16 bits.
        spared: The nodes of its attentions are left alone.
    """
    path = source(name)
    nodes = list(onnx_attnfuse.explain(path, verify="none").attention_nodes) if spared else []
    if setting == "qnn":
        return _written(path, lambda copy, out: _for_qnn(copy, out, _Batches(path), nodes))
    chosen = {"quant_format": QuantFormat.QDQ, "nodes_to_exclude": nodes, **SETTINGS[setting]}
    return _written(path, lambda copy, out: quantize_static(copy, out, _Batches(path), **chosen))


@functools.cache
def dynamically_quantised(name: str) -> onnx.ModelProto:
    """A bundled model with MatMulInteger in the place of products with weights."""
    return _written(source(name), quantize_dynamic)


@functools.cache
def with_small_weights(name: str, form: str) -> onnx.ModelProto:
    """A bundled model whose products have weights of 4 bits.

    Args:
        name: Of the model.
        form: `QOperator` for MatMulNBits, `QDQ` for DequantizeLinear in front of MatMul.
    """
    small = MatMulNBitsQuantizer(onnx.load(source(name)), block_size=16, is_symmetric=True, quant_format=QuantFormat[form])
    with _quietly():
        small.process()
    assert small.model is not None
    return small.model.model


def _for_qnn(path: pathlib.Path, out: pathlib.Path, batches: _Batches, nodes: list[str]) -> None:
    prepared = out.with_name("prepared.onnx")
    given = prepared if qnn_preprocess_model(path, prepared) else path
    config = get_qnn_qdq_config(given, batches, activation_type=QuantType.QUInt16, weight_type=QuantType.QUInt8)
    config.nodes_to_exclude = nodes
    quantize(given, out, config)


def _written(path: pathlib.Path, write: Callable[[pathlib.Path, pathlib.Path], object]) -> onnx.ModelProto:
    """What a quantiser writes, which puts files beside the model that it reads."""
    with _quietly(), tempfile.TemporaryDirectory() as folder:
        copy, out = (pathlib.Path(folder) / name for name in ("model.onnx", "quantised.onnx"))
        shutil.copy(path, copy)
        write(copy, out)
        return onnx.load(out)


@contextlib.contextmanager
def _quietly() -> Generator[None]:
    """Drops the advice that quantisers log, and their warnings."""
    with quietly(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _batches(path: pathlib.Path) -> Iterator[Mapping[str, Array]]:
    wanted = {entry.name for entry in onnx.load(path).graph.input}
    for fed in cases(path).values():
        yield {name: np.asarray(array) for name, array in fed.items() if name in wanted}
