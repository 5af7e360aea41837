"""The public names: sorted, there, described, and complete as far as errors go."""

# The package gives its names at first use, which a type checker cannot follow.
# pyright: reportAttributeAccessIssue=false

import inspect
import subprocess
import sys

import pytest

import recoup
from recoup import errors


def own_docstring(value: object) -> str:
    """The docstring of a thing itself, not the one it inherits."""
    if inspect.isclass(value):
        return inspect.cleandoc(vars(value).get("__doc__") or "")
    return inspect.cleandoc(getattr(value, "__doc__", None) or "")


def test_the_public_names_are_sorted_and_unique():
    assert list(recoup.__all__) == sorted(set(recoup.__all__))


@pytest.mark.parametrize("name", recoup.__all__)
def test_a_public_name_exists_and_is_documented(name):
    value = getattr(recoup, name)
    assert callable(value), "a public name is a function or a class"
    assert own_docstring(value)


def test_nothing_else_is_in_the_top_package():
    assert recoup.errors.RecoupError  # the first use of a name brings in all of them
    others = {
        name
        for name, value in vars(recoup).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert others == set(recoup.__all__)


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_importing_everything_draws_no_random_number():
    code = (
        "import random; random.seed(0); before = random.getstate()\n"
        "import recoup; recoup.fit\n"
        "print(random.getstate() == before)"
    )
    assert in_a_fresh_process(code) == "True"


def test_torch_is_imported_only_when_a_name_needs_it():
    code = (
        "import sys, recoup, recoup.report.pages, recoup.planners.plan\n"
        "before = 'torch' in sys.modules\n"
        "recoup.CheckpointScope\n"
        "print(before, 'torch' in sys.modules)"
    )
    assert in_a_fresh_process(code) == "False True"


def test_a_subpackage_does_not_hide_the_public_name():
    code = (
        "import pkgutil, types, recoup\n"
        "for found in pkgutil.walk_packages(recoup.__path__, 'recoup.'):\n"
        "    if found.name.count('.') == 1: __import__(found.name)\n"
        "import recoup.measurement.steps.boundaries\n"
        "names = [n for n in recoup.__all__"
        " if isinstance(getattr(recoup, n), types.ModuleType)]\n"
        "print(names, recoup.measure.__name__)"
    )
    assert in_a_fresh_process(code) == "[] measure"


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        getattr(recoup, "nonsense")  # noqa: B009 (for a type checker it is not there)
    assert set(recoup.__all__) <= set(dir(recoup))


def test_every_error_is_public():
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert defined <= set(recoup.__all__)


def test_an_inherited_docstring_does_not_count():
    class Described:
        """Described."""

    class Silent(Described):
        pass

    assert own_docstring(Described) == "Described."
    assert own_docstring(Silent) == ""
