"""The public names: sorted, there, described, and complete as far as errors go."""

# The package gives its names at first use, which a type checker cannot follow.
# pyright: reportAttributeAccessIssue=false

import importlib.metadata
import inspect
import json
import subprocess
import sys

import pytest

import recoup
from recoup import errors

PARTS = (
    "checkpointing",
    "errors",
    "loops",
    "precision",
    "results",
    "tiers",
    "train",
)


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
        "import sys, recoup, recoup.report.pages, recoup.planners.planner\n"
        "before = 'torch' in sys.modules\n"
        "recoup.CheckpointScope\n"
        "print(before, 'torch' in sys.modules)"
    )
    assert in_a_fresh_process(code) == "False True"


WITHOUT_OPTIONAL = """
import importlib, json, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
import recoup
everything = [getattr(recoup, name) for name in recoup.__all__]
missing = {}
for found in pkgutil.walk_packages(recoup.__path__, "recoup."):
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        missing[found.name] = error.name
print(json.dumps(missing))
"""


def test_optional_packages_are_needed_by_the_modules_for_them_alone():
    optional = {"transformers", "accelerate", "lightning", "peft", "trl", "datasets"}
    optional |= {"torchao", "bitsandbytes", "timm", "torchdata"}
    optional |= {"jax", "autograd", "matplotlib", "PyQt6"}
    code = WITHOUT_OPTIONAL.replace("OPTIONAL", repr(optional))
    assert json.loads(in_a_fresh_process(code)) == {
        "recoup.integrations.lightning": "lightning",
        "recoup.integrations.transformers": "transformers",
        "recoup.loops.jax.loop": "jax",
        "recoup.loops.jax.run": "jax",
        "recoup.loops.numpy.step_tape": "autograd",
    }


def test_a_subpackage_does_not_hide_a_public_name():
    code = (
        "import pkgutil, types, recoup\n"
        "for found in pkgutil.walk_packages(recoup.__path__, 'recoup.'):\n"
        "    if found.name.count('.') == 1: __import__(found.name)\n"
        "print([n for n in recoup.__all__"
        " if isinstance(getattr(recoup, n), types.ModuleType)])"
    )
    assert in_a_fresh_process(code) == "[]"


def test_the_top_has_at_most_forty_names():
    assert len(recoup.__all__) <= 40


def test_a_name_of_a_part_is_found_by_the_error():
    with pytest.raises(AttributeError, match=r"import it from recoup\.errors"):
        getattr(recoup, "MismatchError")  # noqa: B009 (it is not there)


def test_the_parts_are_attributes_without_being_imported():
    code = f"import recoup; print([getattr(recoup, p).__name__ for p in {PARTS}])"
    assert in_a_fresh_process(code) == str([f"recoup.{part}" for part in PARTS])


@pytest.mark.parametrize(
    ("part", "name"), [(p, n) for p in PARTS for n in getattr(recoup, p).__all__]
)
def test_a_name_of_a_part_is_documented(part, name):
    assert own_docstring(getattr(getattr(recoup, part), name))


def test_the_version_is_that_of_the_package():
    assert recoup.__version__ == importlib.metadata.version("recoup")


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
    assert defined == set(errors.__all__)


def test_an_inherited_docstring_does_not_count():
    class Described:
        """Described."""

    class Silent(Described):
        pass

    assert own_docstring(Described) == "Described."
    assert own_docstring(Silent) == ""
