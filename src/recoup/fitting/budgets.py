"""Budgets: what a user may ask for, in bytes."""

import os

import torch

from recoup.core.units import parse_budget, print_bytes
from recoup.errors import InfeasibleError
from recoup.planners.infeasible import reworded

Budget = str | int | float | None
"""Bytes as a number or as text ("8GiB"), a share of the plain peak (a float up to 1,
"0.6" or "60%"), or None for what the device has. See `parse_budget`."""

_SHARE_OF_DEVICE = 0.95
"""Of a device's free memory, the rest is left to fragments of the allocator."""


_TWO_BLOCKS_BYTES = 2 << 20

BUDGET_VARIABLE = "RECOUP_BUDGET"
"""The environment variable that launchers set; arguments have precedence."""


def budget_or_environment(budget: Budget) -> Budget:
    """Return a budget, or the one in the environment where none is given.

    Raises:
        UsageError: It is no budget.

    Examples:
        >>> budget_or_environment("8GiB")
        '8GiB'
    """
    found = budget
    if found is None:
        found = os.environ.get(BUDGET_VARIABLE) or None
    check_budget(found)
    return found


def budget_bytes(budget: Budget, plain_peak_bytes: int, device: torch.device) -> int:
    """Return a budget in bytes.

    Raises:
        UsageError: It is no budget.

    Examples:
        >>> budget_bytes("2KiB", 0, torch.device("cpu"))
        2048
        >>> budget_bytes(0.5, 1000, torch.device("cpu"))
        500
        >>> budget_bytes("60%", 1000, torch.device("cpu"))
        600
    """
    if budget is None:
        return free_bytes(device)
    found = parse_budget(budget)
    return found if isinstance(found, int) else int(found * plain_peak_bytes)


def check_budget(budget: Budget) -> None:
    """Raise `UsageError` if it is no budget; costs nothing, so it can be done first.

    Examples:
        >>> check_budget("0.5 GiB")
        >>> check_budget("0 GiB")
        Traceback (most recent call last):
        recoup.errors.UsageError: expected a positive budget, got '0 GiB'. ...
    """
    if budget is not None:
        parse_budget(budget)


def budget_for_floor(floor_bytes: int, device: torch.device) -> int:
    """Return the smallest budget to report for the peak of the smallest plan.

    On the CPU bytes are counted exactly, and it is the same. An allocator may count up
    to 1 MiB more of a block of more than 1 MiB, by what happens to be free, so that the
    same plan takes a little more or less each time. A margin is added for as much as
    two such blocks, but at most a hundredth and at least a thousandth of it all.

    Examples:
        >>> budget_for_floor(1000, torch.device("cpu"))
        1000
        >>> budget_for_floor(1 << 30, torch.device("cuda")) - (1 << 30) == 2 << 20
        True
        >>> budget_for_floor(8_000_000_000, torch.device("cuda"))
        8008000000
    """
    if device.type == "cpu":
        return floor_bytes
    usual_bytes = min(_TWO_BLOCKS_BYTES, floor_bytes // 100)
    return floor_bytes + max(usual_bytes, floor_bytes // 1000)


def infeasible_with(
    error: InfeasibleError,
    asked_bytes: int,
    device: torch.device,
    *,
    needed_bytes: int = 0,
    reserved_bytes: int = 0,
) -> InfeasibleError:
    """Return an error for a budget of which a part had been set aside.

    It speaks of the whole budget alone, so that only one amount is to be given.

    Args:
        error: The error for the rest of the budget.
        asked_bytes: The whole budget.
        device: Where bytes are counted.
        needed_bytes: What the smallest plan took on a real step, if that is more than
            the error says.
        reserved_bytes: What was set aside.

    Examples:
        >>> error = InfeasibleError("no.", budget_bytes=4, floor_bytes=7, reason="no.")
        >>> infeasible_with(error, 4, torch.device("cpu")) is error
        True
        >>> cpu = torch.device("cpu")
        >>> infeasible_with(error, 6, cpu, reserved_bytes=2).floor_bytes
        9
    """
    needed_bytes = max(needed_bytes, error.floor_bytes) + reserved_bytes
    floor_bytes = budget_for_floor(needed_bytes, device)
    if floor_bytes == error.floor_bytes:
        return error
    # Budget and advice of the error are of a part of the budget: its reason will do.
    reason = (
        f"{print_bytes(floor_bytes - error.floor_bytes)} are set aside for an "
        "optimizer's state, for what a real step took beyond its plan, and for blocks "
        "that an accelerator's allocator does not divide. Apart from that, "
        f"{error.reason}"
    )
    return reworded(
        error,
        f"a budget of {print_bytes(asked_bytes)} cannot be met: {reason} Give it "
        f"{floor_bytes} bytes, {error.advice}",
        budget_bytes=asked_bytes,
        floor_bytes=floor_bytes,
        reason=reason,
    )


def free_bytes(device: torch.device) -> int:
    """Return how many bytes a step may use there: what it uses now, and what is free.

    On an accelerator that is this process's share with a margin for fragments; on the
    CPU it is the memory that is available now.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        mine = torch.cuda.memory_reserved(device)
        return int((free + mine) * _SHARE_OF_DEVICE)
    pages = os.sysconf("SC_AVPHYS_PAGES")
    return pages * os.sysconf("SC_PAGE_SIZE")
