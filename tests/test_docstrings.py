"""Every public name is documented, and the examples in its docstring run."""

import doctest
import importlib.util
import inspect
from functools import reduce
from pathlib import Path

import griffe
import pytest
import torch

import scalelong

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs" / "docstrings.py")
docstrings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(docstrings)


def test_every_public_name_is_documented_with_arguments_returns_and_an_example():
    assert list(docstrings.problems()) == []


def examples_of(name):
    """The examples of a name and of its methods."""
    value = reduce(getattr, name.split("."), scalelong)
    finder = doctest.DocTestFinder(recurse=inspect.isclass(value))
    names = {"scalelong": scalelong, "torch": torch, "__name__": "example"}
    return [test for test in finder.find(value, name, globs=names) if test.examples]


@pytest.mark.parametrize("name", docstrings.complete())
def test_the_examples_of_a_docstring_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    tests = examples_of(name)
    assert tests, f"scalelong.{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said = []
    for test in tests:
        runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)


def test_a_function_without_arguments_returns_or_example_is_reported():
    with griffe.temporary_visited_module('def f(x: int) -> int:\n    """Do."""\n', docstring_parser="google") as module:
        assert list(docstrings._incomplete(module["f"])) == [
            ": no description of 'x'",
            ": no `Returns:`",
            ": no example",
        ]
