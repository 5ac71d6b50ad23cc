"""Terms made of weights, compared by their numbers: biases that were moved, columns that were cut, for CUDA above all."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.certify.sums import is_nothing, total
from onnx_attnfuse.certify.terms import Term, add, element, index, multiply, number, subtract
from onnx_attnfuse.graph import io
from tests.certify.test_claims import BUNDLED, proofs

_RNG = np.random.default_rng(3)
_WEIGHTS = {"w0": _RNG.standard_normal((6, 12)), "w1": _RNG.standard_normal(6), "w2": _RNG.standard_normal(12)}
_WEIGHTS |= {
    "w3": _WEIGHTS["w0"][:, 4:8].copy(),
    "w4": _WEIGHTS["w1"] @ _WEIGHTS["w0"] + _WEIGHTS["w2"],
    "w5": 1.001 * _WEIGHTS["w1"],
}
_ROW, _COLUMN = index("c", number(6)), index("d", number(12))


def _is_nothing(term: Term, tolerance: float = 1e-6) -> bool:
    return is_nothing(term, _WEIGHTS.get, tolerance)


def _at(name: str, *place: Term) -> Term:
    return element(name, "Real", place)


def _moved(bias: str = "w2") -> Term:
    """A bias that went through a product, and what stands in its place."""
    product = total(_ROW, multiply(_at("w1", _ROW), _at("w0", _ROW, _COLUMN)))
    return subtract(add(product, _at(bias, _COLUMN)), _at("w4", _COLUMN))


def test_a_bias_behind_a_product_is_what_the_numbers_say() -> None:
    assert _is_nothing(_moved())
    assert not _is_nothing(add(_moved(), number(0.01, "Real")))
    assert not _is_nothing(add(_moved(), _at("v0", _COLUMN)))
    assert not _is_nothing(add(_moved(), multiply(number(0.5, "Real"), _at("w2", _COLUMN))))


@pytest.mark.parametrize(("begin", "same"), [(4, True), (3, False), (8, False)])
def test_columns_of_a_weight_are_those_that_were_cut(begin: int, same: bool) -> None:
    column = index("d", number(4))
    activation = _at("v0", _ROW)
    one = multiply(activation, _at("w0", _ROW, add(column, number(begin))))
    assert _is_nothing(subtract(one, multiply(activation, _at("w3", _ROW, column)))) == same


def test_an_index_outside_of_a_weight_and_a_weight_that_is_not_known_say_nothing() -> None:
    column = index("d", number(4))
    beyond = multiply(_at("v0", _ROW), _at("w0", _ROW, add(column, number(9))))
    assert not _is_nothing(subtract(beyond, multiply(_at("v0", _ROW), _at("w3", _ROW, column))))
    assert not _is_nothing(subtract(_at("w9", _ROW), _at("w1", _ROW)))
    assert _is_nothing(subtract(_at("w1", _ROW), _at("w1", _ROW)))


def test_what_rounding_leaves_is_told_by_the_sizes_of_the_summands() -> None:
    difference = subtract(_at("w5", _ROW), _at("w1", _ROW))
    assert _is_nothing(difference, 1e-2)
    assert not _is_nothing(difference, 1e-4)


def test_weights_of_all_keys_come_to_one_but_for_a_sink() -> None:
    from onnx_attnfuse.certify.softmaxes import weight

    key, row, length = index("j", number(5)), index("i", number(5)), number(5)

    def score(place: Term) -> Term:
        return _at("v0", row, place)

    shared, own = _at("v1", row), _at("v2", key)
    alone = weight(score, length, key)
    assert total(key, multiply(alone, shared)) is shared
    assert total(key, multiply(alone, own)) is not own
    both = total(key, multiply(alone, add(own, shared)))
    assert both is add(total(key, multiply(alone, own)), shared)
    beside = weight(score, length, key, sink=_at("v3", row))
    assert total(key, multiply(beside, shared)) is not shared


_CUDA = [
    "bert__dyn18__sdpa",
    "bert__ts17__eager",
    "gpt2__ts17__eager",
    "vit__dyn18__sdpa",
    "t5__dyn18__eager",
    "swin__dyn18__sdpa",
]


def _fused(name: str, folder: pathlib.Path) -> tuple[ir.Model, onnx.ModelProto]:
    source = BUNDLED / f"{name}.onnx"
    result = onnx_attnfuse.optimize(source, ep="cuda", arch="sm90", verify="none")
    result.save(folder / "fused.onnx")
    return io.load(str(source)), onnx.load(folder / "fused.onnx")


@pytest.mark.parametrize("name", _CUDA)
def test_every_change_for_cuda_is_proved(name: str, tmp_path: pathlib.Path) -> None:
    source, result = _fused(name, tmp_path)
    found = proofs(source, ir.serde.deserialize_model(result))
    assert found
    assert [proof.claim.name for proof in found if not proof.proved] == []


@pytest.mark.parametrize("name", ["bert__dyn18__sdpa", "vit__dyn18__sdpa", "gpt2__ts17__eager"])
def test_other_biases_for_cuda_are_not_proved(name: str, tmp_path: pathlib.Path) -> None:
    source, result = _fused(name, tmp_path)
    known = {value.name for value in source.graph.initializers.values()}
    made = [item for item in result.graph.initializer if item.name not in known and len(item.dims) == 1 and item.data_type == 1]
    made = [item for item in made if item.dims[0] > 16]
    assert made
    array = onnx.numpy_helper.to_array(made[0]).copy()
    array[[0, 1]] = array[[1, 0]]
    made[0].CopyFrom(onnx.numpy_helper.from_array(array, made[0].name))
    assert not all(proof.proved for proof in proofs(source, ir.serde.deserialize_model(result)))
