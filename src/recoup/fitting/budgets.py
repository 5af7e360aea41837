"""Budgets: convert a user's budget to bytes."""

import os

import torch

from recoup.core.units import parse_budget, print_bytes
from recoup.errors import InfeasibleError
from recoup.planners.infeasible import reworded

Budget = str | int | float | None
"""Bytes as a number or as text ("8GiB"), a share of the plain peak (a float up to 1,
"0.6" or "60%"), or None for the device's free memory. See `parse_budget`."""

_SHARE_OF_DEVICE = 0.95
"""The usable share of a device's free memory; the rest is for fragmentation."""


_TWO_BLOCKS_BYTES = 2 << 20

BUDGET_VARIABLE = "RECOUP_BUDGET"
"""The environment variable that launchers set; arguments have precedence."""


def budget_or_environment(budget: Budget) -> Budget:
    """Return a budget, or the one in the environment if None is given.

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
    """Raise `UsageError` if it is no budget; cheap, so it can run first.

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

    On the CPU, where bytes are counted exactly, they are equal. An allocator may use up
    to 1 MiB more for a block above 1 MiB, depending on its free blocks, so the peak of
    a plan varies a little. The margin added is two such blocks, but at most a hundredth
    and at least a thousandth of the peak.

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
    """Return an error for a budget of which a part was reserved.

    It names the whole budget only, so that the user need not add amounts.

    Args:
        error: The error for the rest of the budget.
        asked_bytes: The whole budget.
        device: The device whose bytes are counted.
        needed_bytes: The measured peak of the smallest plan, if above the error's.
        reserved_bytes: The reserved bytes.

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
    # The error's own text names a part of the budget: use only its reason.
    reason = (
        f"{print_bytes(floor_bytes - error.floor_bytes)} are reserved for an "
        "optimizer's state, for the bytes of a real step beyond its prediction, and "
        "for blocks that an accelerator's allocator does not divide. Besides, "
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
    """Return the bytes that a step may use on a device: in use and free ones.

    On an accelerator these are the free and this process's bytes, less a margin for
    fragmentation; on the CPU the available memory.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        mine = torch.cuda.memory_reserved(device)
        return int((free + mine) * _SHARE_OF_DEVICE)
    pages = os.sysconf("SC_AVPHYS_PAGES")
    return pages * os.sysconf("SC_PAGE_SIZE")
