"""Run a step plain and inside a region, and say bit by bit how the two differ.

A *step* is a function that is given a region factory, does its work, opens the
regions it wants through the factory, and returns what it observed by name. The
plain twin is the same step with a factory whose regions do nothing.
"""

import contextlib
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)

from tests.support.bits import tree_differences

Region = Callable[..., contextlib.AbstractContextManager[Any]]
Step = Callable[[Region], Mapping[str, Any]]
Kind = Literal["equal", "wrong", "crashed", "refused", "excluded"]

# Begins the detail of what is wrong, but just as wrong under a mode that does nothing.
IDLE_NOTE = "PyTorch answers so under an idle dispatch mode: "


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything one run of a step left behind."""

    values: dict[str, Any]
    generator_states: list[Tensor]
    warnings: frozenset[tuple[str, str]]
    leftovers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of comparing a step with its twin.

    `refused` is an error of ours where an error is an allowed answer; `excluded`
    means that the plain twin itself gives nothing to compare with.
    """

    kind: Kind
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in ("wrong", "crashed")


class IdleMode(TorchDispatchMode):
    """See every operator and do nothing about it.

    PyTorch itself chooses other formulas while any dispatch mode is active (the
    forward-mode derivatives of the normalisations, `out=` of some composites).
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def idle(*_: object, **__: object) -> contextlib.AbstractContextManager[Any]:
    """Make a region that only watches: what PyTorch does under any dispatch mode."""
    return IdleMode()


def plain(*_: object, **__: object) -> contextlib.AbstractContextManager[None]:
    """Make a region that does nothing: the plain twin's."""
    return contextlib.nullcontext()


def judge(
    step: Step,
    region: Region,
    *,
    seed: int = 0,
    refusals: tuple[type[BaseException], ...] = (),
) -> Verdict:
    """Run a step plain and with regions, and compare what they left behind.

    Args:
        step: The work; it must make or copy its own inputs each time.
        region: Makes the regions under test.
        seed: Both runs start from it.
        refusals: Exceptions that are an allowed answer of the region.
    """
    try:
        expected = observe(step, plain, seed=seed)
    except Exception as error:  # noqa: BLE001
        # Whatever it is: there is nothing to compare with.
        return Verdict("excluded", f"plain run raises {last_line(error)}")
    try:
        actual = observe(step, region, seed=seed)
    except refusals as error:
        return Verdict("refused", last_line(error))
    except Exception as error:  # noqa: BLE001
        # Whatever it is: that is the finding.
        return Verdict("crashed", last_line(error))
    found = differences(expected, actual)
    if not found:
        return Verdict("equal")
    if not _is_repeatable(step, expected, seed=seed):
        return Verdict("excluded", "plain run is not repeatable")
    note = IDLE_NOTE if _idle_mode_explains(step, actual, seed=seed) else ""
    return Verdict("wrong", note + "; ".join(found))


def compare(step: Step, region: Region, *, seed: int = 0) -> list[str]:
    """List how a step with regions differs from its plain twin; empty when equal.

    Unlike `judge` it lets every exception through.
    """
    expected = observe(step, plain, seed=seed)
    return differences(expected, observe(step, region, seed=seed))


def observe(step: Step, region: Region, *, seed: int) -> Observed:
    """Run a step from a seed and record its results, random state and warnings."""
    seed_generators(seed)
    with warnings.catch_warnings(record=True) as caught:
        # PyTorch's samples provoke many warnings. The region may raise none besides.
        warnings.simplefilter("always")
        values = dict(step(region))
    return Observed(
        values=values,
        generator_states=generator_states(),
        warnings=frozenset((w.category.__name__, str(w.message)) for w in caught),
        leftovers=tuple(leftovers()),
    )


def seed_generators(seed: int) -> None:
    """Seed every global generator that PyTorch's samples and models draw from.

    `torch.manual_seed` would format a stack trace for each kind of accelerator that
    is not there: half the time of a sweep.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def generator_states() -> list[Tensor]:
    """Return the state of every default generator in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states


def leftovers() -> Iterator[str]:
    """Name the global state that a finished region should have taken back."""
    if modes := _get_current_dispatch_mode_stack():
        yield f"dispatch modes still active: {modes}"
    hooks: Any = torch._C
    if hooks._autograd._top_saved_tensors_default_hooks(True) is not None:
        yield "saved-tensor hooks still active"
    if not torch.is_grad_enabled():
        yield "gradients still disabled"


def differences(expected: Observed, actual: Observed) -> list[str]:
    """List in words what differs between two runs; empty when all bits are equal."""
    found = list(tree_differences(expected.values, actual.values, where=""))
    found += tree_differences(
        expected.generator_states, actual.generator_states, where="generator state "
    )
    found += [
        f"warning not given by the plain run: {category}: {message}"
        for category, message in sorted(actual.warnings - expected.warnings)
    ]
    if actual.leftovers != expected.leftovers:
        found += [f"left behind: {name}" for name in actual.leftovers]
    return found


def _is_repeatable(step: Step, expected: Observed, *, seed: int) -> bool:
    """Run the plain step again, over memory filled with other garbage each time.

    Some kernels of PyTorch read memory that they never wrote; what they find there
    is often the same twice in a row.
    """
    for garbage in range(8):
        for size_bytes in (8, 16, 24, 32, 64, 128, 256, 512, 1024, 4096):
            blocks = [torch.full((size_bytes,), garbage).byte() for _ in range(8)]
            del blocks
        if differences(expected, observe(step, plain, seed=seed)):
            return False
    return True


def _idle_mode_explains(step: Step, actual: Observed, *, seed: int) -> bool:
    """Whether an idle dispatch mode gives, bit by bit, what the region gave."""
    try:
        watched = observe(step, idle, seed=seed)
    except Exception:  # noqa: BLE001
        # No answer explains nothing.
        return False
    return not differences(watched, actual)


def last_line(error: BaseException) -> str:
    """Return the exception in one line, with the place in our code that raised it."""
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "recoup" in f.filename
    ]
    place = f" at {frames[-1].name}:{frames[-1].lineno}" if frames else ""
    return text[:300] + place
