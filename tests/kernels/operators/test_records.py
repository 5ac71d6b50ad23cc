"""Every record says what the operator's own schema says, and names parts that are there."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from onnx_attnfuse.bodies.table import BODIES, RUN
from onnx_attnfuse.kernels import operators, providers
from onnx_attnfuse.kernels.execution_provider import OpSupport
from onnx_attnfuse.kernels.operators import OpInfo, by_key, find, info_of, ranked, records, target_names
from onnx_attnfuse.kernels.support import support
from onnx_attnfuse.reasons import Reason

INFOS = sorted(records().values(), key=lambda info: info.key)
HEAVY = ("'numpy'", "'onnx'", "'onnx_ir'", "'onnx_attnfuse.targets'", "'onnx_attnfuse.kernels.conditions'")
every_record = pytest.mark.parametrize(
    "info", [pytest.param(info, id=info.key, marks=[pytest.mark.newest] if any(info.runtime) else ()) for info in INFOS]
)
GROUPED = records()["com.microsoft", "GroupQueryAttention"]
MULTI_HEAD = records()["com.microsoft", "MultiHeadAttention"]


def schemas(info: OpInfo) -> list[Any]:
    """The versions of an operator's schema, oldest first."""
    if info.domain == "":
        found = onnx.defs.get_all_schemas_with_history()
    else:
        state = pytest.importorskip("onnxruntime").capi.onnxruntime_pybind11_state
        found = state.get_all_operator_schema()
    mine = [item for item in found if (item.domain, item.name) == (info.domain, info.name)]
    return sorted(mine, key=lambda item: item.since_version)


def wrong_inputs(info: OpInfo, told: Sequence[str]) -> list[str]:
    """Inputs that a schema has and the record has not in their place; schemas of older versions lack the last ones."""
    names = list(info.inputs)
    return [name for place, name in enumerate(told) if name not in names[place : place + 1]]


@every_record
def test_the_inputs_of_a_record_are_those_of_the_schema(info: OpInfo) -> None:
    versions = schemas(info)
    assert versions
    for schema in versions:
        assert wrong_inputs(info, [item.name for item in schema.inputs]) == []


@pytest.mark.newest
@every_record
def test_a_record_names_no_input_that_the_newest_schema_lacks(info: OpInfo) -> None:
    assert len(info.inputs) == len(schemas(info)[-1].inputs)


@every_record
def test_an_operator_is_there_from_the_version_on_that_its_record_says(info: OpInfo) -> None:
    assert schemas(info)[0].since_version == info.since


@pytest.mark.parametrize(
    ("told", "wrong"),
    [
        (["query", "key", "value"], []),
        (["query", "value", "key"], ["value", "key"]),
        (["query", "key", "values"], ["values"]),
        ([*MULTI_HEAD.inputs, "more"], ["more"]),
    ],
)
def test_another_order_or_another_name_would_be_noticed(told: list[str], wrong: list[str]) -> None:
    assert wrong_inputs(MULTI_HEAD, told) == wrong


@every_record
def test_what_appends_to_a_cache_gives_keys_and_values_back(info: OpInfo) -> None:
    presents = [output.name for output in schemas(info)[-1].outputs if output.name.startswith("present")]
    assert list(info.inputs.values()).count("past") == len(presents)


@pytest.mark.parametrize("info", [info for info in INFOS if info.target], ids=lambda info: info.key)
def test_a_target_builds_the_operator_of_its_record(info: OpInfo) -> None:
    target = importlib.import_module(info.target or "")
    assert target.INFO is info
    assert callable(target.refuse)
    assert (info.rank is None) == (not hasattr(target, "encodings"))


def test_what_works_on_padded_tensors_has_a_body_under_the_name_of_its_record() -> None:
    assert set(BODIES) == {(info.domain, info.name) for info in INFOS if not info.packed}
    assert set(RUN) == {(info.domain, info.name) for info in INFOS if info.packed} | {("com.microsoft", "FusedMatMul")}


def test_no_two_files_have_a_record_of_the_same_operator() -> None:
    files = [path for path in pathlib.Path(operators.__file__).parent.glob("*.py") if path.stem not in {"__init__", "record"}]
    assert len(files) == len(INFOS) == len({info.key for info in INFOS})


def test_whatever_is_planned_has_a_rank_of_its_own() -> None:
    assert [info.rank for info in ranked()] == list(range(1, len(ranked()) + 1))


def test_a_caller_may_ask_for_what_is_planned_or_has_an_option() -> None:
    assert set(target_names()) == {"auto", "packed", *(info.key for info in INFOS if info.rank is not None)}
    assert "PackedMultiHeadAttention" not in target_names()
    assert "RotaryEmbedding" not in target_names()


@pytest.mark.parametrize(
    ("domain", "op", "first"),
    [
        ("", "Attention", "Q"),
        ("ai.onnx", "Attention", "Q"),
        ("com.microsoft", "Attention", "input"),
        ("", "RotaryEmbedding", "X"),
        ("com.microsoft", "RotaryEmbedding", "input"),
        ("", "MultiHeadAttention", None),
        ("com.example", "MultiHeadAttention", None),
        ("com.microsoft", "QAttention", None),
    ],
)
def test_an_operator_is_found_by_its_domain_and_name(domain: str, op: str, first: str | None) -> None:
    found = find(domain, op)
    assert first == (None if found is None else next(iter(found.inputs)))
    assert info_of(ir.Node(domain, op, [])) is found


def test_inputs_go_by_their_names() -> None:
    query, key, past, bias = (ir.Value(name=name) for name in ("q", "k", "p", "b"))
    inputs = MULTI_HEAD.arranged({"past_key": past, "query": query, "key": key, "past_value": None})
    assert inputs == [query, key, None, None, None, None, past]
    node = ir.Node("com.microsoft", "MultiHeadAttention", inputs)
    assert MULTI_HEAD.input(node, "past_key") is past
    assert MULTI_HEAD.input(node, "attention_bias") is None  # left out
    assert MULTI_HEAD.input(node, "past_value") is None  # behind the last one
    assert MULTI_HEAD.first(node, "past") is past
    assert MULTI_HEAD.first(node, "bias") is None
    assert MULTI_HEAD.arranged({"query": query, "attention_bias": bias}).index(bias) == 5
    with pytest.raises(ValueError, match="seqlens_k"):
        MULTI_HEAD.arranged({"query": query, "seqlens_k": bias})


def test_a_place_behind_all_inputs_has_no_role() -> None:
    assert GROUPED.role(GROUPED.place("head_sink")) == "sink"
    assert GROUPED.role(len(GROUPED.inputs)) == "other"


NEW = """
from __future__ import annotations

from typing import TYPE_CHECKING

from onnx_attnfuse.kernels.operators.record import OpInfo

if TYPE_CHECKING:
    from onnx_attnfuse.kernels.execution_provider import OpSupport


def _on_cpu() -> OpSupport:
    import onnx_ir as ir

    from onnx_attnfuse.kernels.execution_provider import OpSupport

    floats = frozenset([ir.DataType.FLOAT])
    return OpSupport("made up", floats, floats)


INFO = OpInfo(name="NewAttention", inputs={"query": "query"}, rank=99, support={"cpu": _on_cpu})
"""


@contextlib.contextmanager
def new_file(folder: pathlib.Path) -> Iterator[None]:
    """The file of a new operator in a folder counts among the others."""
    (folder / "new_attention.py").write_text(NEW, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "__path__", [*operators.__path__, str(folder)])
        _forget()
        yield
    _forget()
    sys.modules.pop("onnx_attnfuse.kernels.operators.new_attention", None)


def _forget() -> None:
    for table in (records, by_key):
        table.cache_clear()


def test_a_new_file_is_enough(tmp_path: pathlib.Path) -> None:
    known = set(records())
    with new_file(tmp_path):
        assert set(records()) == known | {("com.microsoft", "NewAttention")}
        assert [info.name for info in ranked()][-1] == "NewAttention"
        assert "NewAttention" in target_names()
    assert set(records()) == known
    assert "NewAttention" not in target_names()


def test_a_new_file_tells_of_the_providers_that_it_knows(tmp_path: pathlib.Path) -> None:
    with new_file(tmp_path):
        cpu, cuda = (support("NewAttention", providers.provider(name)) for name in ("cpu", "cuda"))
    assert isinstance(cpu, OpSupport)
    assert (cpu.known_from, cpu.written) == ("made up", {ir.DataType.FLOAT})
    assert cuda == Reason("no-kernel-for-device", "it is not known whether NewAttention has a kernel on cuda")


def test_what_the_record_of_a_provider_says_comes_first(tmp_path: pathlib.Path) -> None:
    cpu = providers.provider("cpu")
    refusing = dataclasses.replace(cpu, operators={**cpu.operators, "NewAttention": None})
    with new_file(tmp_path):
        assert support("NewAttention", refusing) == Reason("no-kernel-for-device", "NewAttention has no kernel on cpu")


def test_the_file_of_a_new_operator_imports_nothing_heavy(tmp_path: pathlib.Path) -> None:
    (tmp_path / "new_attention.py").write_text(NEW, encoding="utf-8")
    code = f"""
import sys
from onnx_attnfuse.kernels import operators
operators.__path__.append({str(tmp_path)!r})
assert "NewAttention" in operators.target_names()
print(sorted(sys.modules))
"""
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'onnx_attnfuse.kernels.operators.new_attention'" in modules
    assert not any(heavy in modules for heavy in HEAVY)


def test_records_import_nothing_heavy() -> None:
    code = "import sys; from onnx_attnfuse.kernels.operators import records; records(); print(sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'onnx_attnfuse.kernels.operators.group_query_attention'" in modules
    for heavy in HEAVY:
        assert heavy not in modules
