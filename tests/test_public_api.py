"""The public names: sorted, there, described, and complete as far as errors go."""

import inspect

import pytest

import recoup
from recoup.core import errors


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
    others = {
        name
        for name, value in vars(recoup).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert others == set(recoup.__all__)


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
