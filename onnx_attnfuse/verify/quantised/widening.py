"""Decoders in float32 that are run several times over: many weights are widened once, to a file that ONNX Runtime maps.

    with widening() as wide:
        calibrate(source, ..., wide)
        measure(source, result, record, wide)

A tensor that several models share is written once.
"""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Callable, Generator
from typing import TypeAlias

import onnx_ir as ir

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph import external
from onnx_attnfuse.graph.tensors import all_graphs
from onnx_attnfuse.verify.float32_copy import is_half, is_large, widened
from onnx_attnfuse.verify.runtime import RuntimeRefusal

Widen: TypeAlias = "Callable[[ir.Model], ir.Model]"
"""Gives a model that computes in float32; raises RuntimeRefusal where there is no room for its weights."""
_LEAST_BYTES = 1024
"""Smaller weights stay inside, where shapes are inferred from them."""


def wide(model: ir.Model) -> ir.Model:
    """The model, or a copy in float32 where it computes in a half type, its weights widened whenever they are asked for."""
    return widened(model) if is_half(model) else model


@contextlib.contextmanager
def widening() -> Generator[Widen]:
    """A context in which models are widened to float32; files that it writes are deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="attnfuse-") as folder:
        yield _Files(pathlib.Path(folder)).wide


class _Files:
    """Weights that were widened, by the tensors that they are of."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder, self._count = folder, 0
        self._written = dict[int, tuple[ir.TensorProtocol, ir.ExternalTensor]]()
        """By the identity of a tensor, which is kept so that no other gets it."""

    def wide(self, model: ir.Model) -> ir.Model:
        """The model in float32, large ones with their weights in files of the folder.

        Raises:
            RuntimeRefusal: The disk has no room for them.
        """
        copy = wide(model)
        if copy is model or not is_large(model):
            return copy
        pairs = [
            (value, old)
            for before, after in zip(all_graphs(model), all_graphs(copy), strict=True)
            for name, value in after.initializers.items()
            if (old := before.initializers[name].const_value) is not None
            and value.const_value is not None
            and (old.dtype != value.const_value.dtype or isinstance(old, ir.ExternalTensor))
        ]
        self._write([(value, old) for value, old in pairs if old.nbytes >= _LEAST_BYTES])
        for value, old in pairs:
            found = self._written.get(id(old))
            value.const_value = ir.tensor(_tensor(value).numpy(), name=value.name) if found is None else found[1]
        return copy

    def _write(self, pairs: list[tuple[ir.Value, ir.TensorProtocol]]) -> None:
        """Writes data that no file has yet to another file."""
        missing = {id(old): (old, _tensor(value)) for value, old in pairs if id(old) not in self._written}
        if not missing:
            return
        self._count += 1
        path = self._folder / f"weights.{self._count}.data"
        tensors = [tensor for _, tensor in missing.values()]
        try:
            external.check_room(path, external.DataFiles((), {}), sum(tensor.nbytes for tensor in tensors))
            written = ir.external_data.convert_tensors_to_external(tensors, path.parent, path.name)
        except (OptionError, OSError) as error:
            raise RuntimeRefusal(f"its weights cannot be widened to files: {error}") from error
        for (old, _), tensor in zip(missing.values(), written, strict=True):
            self._written[id(old)] = old, tensor


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None
    return value.const_value
