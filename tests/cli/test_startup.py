"""What a run of the command imports, and that what is deferred is all there once it is used."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.support import small_models

_RUN = "import sys; from onnx_attnfuse_cli.main import main; code = main(); print('LOADED', *sys.modules); sys.exit(code)"
_NEVER = {"onnxruntime", "onnxscript", "jinja2", "torch", "grandalf", "onnx.reference", "rich.table"}
_SYMPY = {"sympy.core", "mpmath"}
"""What importing SymPy imports; a module called `sympy` stands in for it before."""
_COMPUTES = """
import sys
from onnx_attnfuse_cli.main import defer_imports
defer_imports()
import onnx_ir as ir
before = "sympy.core" in sys.modules
length = ir.SymbolicDim("length")
twice = ((length + 2) * 2).simplify()
print(before, twice, twice.evaluate({"length": 3}), ir.SymbolicDim("max(length, 4)").evaluate({"length": 3}))
import sympy
from sympy import Symbol
print(type(Symbol("x") + 1) is sympy.Add, isinstance(sympy.Integer(2), sympy.core.expr.Expr), ir.SymbolicDim(Symbol("x") + 1))
"""


def run(code: str, *arguments: str, defer: str = "") -> str:
    """What code prints in a process of its own."""
    environment = {**os.environ, "ATTNFUSE_DEFER_IMPORTS": defer}
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, env=environment)
    return done.stdout


def modules(*arguments: str, defer: str = "") -> set[str]:
    """What is imported once the command is done."""
    last = run(_RUN, *arguments, defer=defer).splitlines()[-1]
    assert last.startswith("LOADED ")
    return set(last.split()[1:])


@pytest.fixture
def model(tmp_path: pathlib.Path) -> str:
    """The path of a model with one attention."""
    return str(small_models.written(small_models.ATTENTION, tmp_path / "model.onnx"))


@pytest.mark.newest  # onnx-ir before 1.0 keeps its algebra where nothing can have it wait
def test_a_run_without_verification_imports_no_engine_and_no_algebra(model: str) -> None:
    loaded = modules("optimize", model, "--verify", "none")
    assert not loaded & (_NEVER | _SYMPY)
    assert "onnx_ir" in loaded


@pytest.mark.exhaustive
def test_explaining_imports_no_algebra_either(model: str) -> None:
    assert not modules("explain", model) & _SYMPY


@pytest.mark.exhaustive
def test_a_run_that_verifies_imports_no_algebra(model: str) -> None:
    assert not modules("optimize", model, "--verify", "sites") & (_SYMPY | {"onnxscript", "jinja2", "torch"})


@pytest.mark.exhaustive
def test_everything_is_imported_at_once_where_that_is_asked_for(model: str) -> None:
    assert modules("optimize", model, "--verify", "none", defer="0") >= _imported_by_onnx_ir()


def _imported_by_onnx_ir() -> set[str]:
    """The part of SymPy that onnx-ir imports by itself: none in versions that do without."""
    return set(run("import sys, onnx_ir; print(*sys.modules)").split()) & _SYMPY


@pytest.mark.exhaustive
@pytest.mark.newest
def test_what_is_deferred_computes_as_ever() -> None:
    told = run(_COMPUTES).splitlines()
    assert told == ["False 2*length + 4 10 4", "True True x + 1"]
    assert run(_COMPUTES, defer="0").splitlines() == [told[0].replace("False", "True"), told[1]]


@pytest.mark.exhaustive
def test_a_program_that_calls_the_command_keeps_its_imports_as_they_are(model: str) -> None:
    code = "import sys; from onnx_attnfuse_cli.main import main; before = list(sys.meta_path); main(sys.argv[1:]); "
    code += "assert sys.meta_path == before; print(*sys.modules)"
    assert set(run(code, "optimize", model, "-q", "--verify", "none").split()) >= _imported_by_onnx_ir()


def test_another_value_of_the_variable_is_refused(model: str) -> None:
    environment = {**os.environ, "ATTNFUSE_DEFER_IMPORTS": "later"}
    command = [sys.executable, "-m", "onnx_attnfuse_cli", "explain", model]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert done.stderr == "Error: ATTNFUSE_DEFER_IMPORTS is 'later'; set it to 0 or 1, or unset it\n"
