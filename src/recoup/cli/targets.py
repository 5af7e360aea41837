"""Targets: the user's own function that returns a model and its training data."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from types import ModuleType
from typing import Any, cast

from recoup.cli.statuses import TARGET, USAGE, CommandError
from recoup.core.display import WIDTH
from recoup.core.units import print_bytes

_FORM = (
    "Name it as module:function or path/to/file.py:function; it returns (model, "
    "batch), (model, batch, loss), (model, batch, loss, optimizer), or a dictionary "
    "with these names, or with model and step."
)
_NAMES = ("model", "batch", "loss", "optimizer")


@dataclass(frozen=True, slots=True)
class Target:
    """The result of a user's function.

    Attributes:
        name: The name that the user gave.
        model: The model.
        batch: Its arguments.
        loss: Computes the loss from its output.
        optimizer: Trains it.
        step: Runs forward and backward, instead of batch and loss.
        dry: Whether nothing is to be computed.
        device: The device whose times are estimated, if dry; None: this CPU.
    """

    name: str
    model: Any
    batch: Any = None
    loss: Any = None
    optimizer: Any = None
    step: Any = None
    dry: bool = False
    device: str | None = None

    def uncounted(self) -> str:
        """Return a note if no optimizer was given, whose state would count.

        Examples:
            >>> from torch import nn
            >>> print(Target("a:b", nn.Linear(512, 512)).uncounted())
            No optimizer was given, so its state is not counted. AdamW takes 2 MiB here.
            Return it after the loss, or as "optimizer" in a dictionary.
            >>> Target("a:b", nn.Linear(2, 2), optimizer=object()).uncounted()
            ''
        """
        if self.optimizer is not None or self.step is not None:
            return ""
        trained = [each for each in self.model.parameters() if each.requires_grad]
        moments_bytes = 2 * sum(each.numel() * each.element_size() for each in trained)
        return fill(
            "No optimizer was given, so its state is not counted. AdamW takes "
            f"{print_bytes(moments_bytes)} here. Return it after the loss, or as "
            '"optimizer" in a dictionary.',
            WIDTH,
        )


def load_target(name: str, *, dry: bool = False, device: str | None = None) -> Target:
    """Import the user's function, call it, and return its target.

    Args:
        name: The name that the user gave.
        dry: Try to call it on the meta device, without memory. A function that cannot
            run there is called normally.
        device: The device whose times are estimated, if dry.

    Raises:
        CommandError: There is no such function, it raised, or it returned something
            else.
    """
    function = _function(name)
    target = _without_memory(name, function) if dry else None
    return replace(target or _called(name, function), dry=dry, device=device)


def load_sized_target(name: str) -> Callable[[int], Target]:
    """Import the user's function of a batch size; return a function that calls it.

    A step that it returns must take a batch: larger batches use the first model.
    """
    function = _function(name)

    def make(size: int) -> Target:
        target = _called(name, function, size)
        if target.batch is None:
            raise CommandError(
                f"expected {name} to return a batch of the size, got a step alone; "
                "return a batch too, and a step that takes it.",
                status=TARGET,
            )
        return target

    return make


def _function(name: str) -> Callable[..., object]:
    """Import the user's function."""
    place, colon, function_name = name.rpartition(":")
    if not colon or not place or not function_name:
        raise CommandError(
            f"expected module:function, got {name!r}. {_FORM}", status=USAGE
        )
    module = _module(place)
    function = getattr(module, function_name, None)
    if not callable(function):
        found = [n for n, v in vars(module).items() if _is_own(v, module)]
        listed = f" It has {', '.join(found[:8])}." if found else ""
        raise CommandError(
            f"{place!r} has no function {function_name!r}.{listed} {_FORM}",
            status=USAGE,
        )
    return function


def _called(name: str, function: Callable[..., object], *args: int) -> Target:
    try:
        returned = function(*args)
    except (Exception, SystemExit) as error:
        raise CommandError(
            f"{name} raised {type(error).__name__}: {first_line(error)}. Call it by "
            "itself to see where, or give --debug.",
            status=TARGET,
        ) from error
    return _described(name, returned)


def _without_memory(name: str, function: Callable[[], object]) -> Target | None:
    """Return the target of a function if it runs on the meta device."""
    torch = importlib.import_module("torch")
    try:
        with torch.device("meta"):
            described = _described(name, function())
    except (Exception, SystemExit):  # noqa: BLE001 (called again below, errors shown)
        return None
    # A custom step refers to real tensors, which meta tensors cannot replace.
    return described if described.step is None else None


def _module(place: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _module_of_file(Path(place))
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)
        return importlib.import_module(place)
    except CommandError:
        raise
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(error.name + ".")):
            raise CommandError(
                f"there is no module {place!r} in this folder or installed. {_FORM}",
                status=USAGE,
            ) from error
        raise _import_failed(place, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(place, error) from error


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CommandError(f"there is no file {str(path)!r}. {_FORM}", status=USAGE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None, "and it is one that executes"
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _import_failed(place: str, error: BaseException) -> CommandError:
    return CommandError(
        f"{place} cannot be imported, it raised {type(error).__name__}: "
        f"{first_line(error)}. Import it by itself to see where, or give --debug.",
        status=TARGET,
    )


def _described(name: str, returned: object) -> Target:
    if isinstance(returned, Mapping):
        given = cast("Mapping[str, Any]", returned)
        unknown = [key for key in given if key not in (*_NAMES, "step")]
        if unknown or "model" not in given:
            raise _wrong(name, f"a dictionary with {', '.join(map(str, given))}")
        return _checked(Target(name, **given))
    if isinstance(returned, tuple):
        parts = cast("tuple[Any, ...]", returned)
        if 2 <= len(parts) <= len(_NAMES):
            return _checked(Target(name, *parts))
        raise _wrong(name, f"a tuple of {len(parts)}")
    raise _wrong(name, type(returned).__name__)


def _checked(target: Target) -> Target:
    """Return the target if each of its parts has the right type."""
    parts = (
        ("model", _is_model(target.model)),
        ("loss", target.loss is None or callable(target.loss)),
        ("optimizer", target.optimizer is None or _is_optimizer(target.optimizer)),
        ("step", target.step is None or callable(target.step)),
    )
    for part, is_right in parts:
        if not is_right:
            kind = type(getattr(target, part)).__name__
            raise _wrong(target.name, f"{kind} as its {part}")
    if target.batch is None and target.step is None:
        raise _wrong(target.name, "neither a batch nor a step")
    return target


def _is_model(model: object) -> bool:
    return isinstance(model, importlib.import_module("torch.nn").Module)


def _is_optimizer(optimizer: object) -> bool:
    # By duck typing: some optimizers wrap one of torch without being one.
    return all(hasattr(optimizer, name) for name in ("state", "param_groups", "step"))


def _wrong(name: str, found: str) -> CommandError:
    return CommandError(f"{name} returned {found}. {_FORM}", status=TARGET)


def _is_own(value: object, module: ModuleType) -> bool:
    own = getattr(value, "__module__", None) == module.__name__
    return isinstance(value, Callable) and own


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's message, without a full stop.

    Examples:
        >>> first_line(ValueError("too long.\nsee above"))
        'too long'
        >>> first_line(SystemExit())
        'no message'
    """
    return (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
