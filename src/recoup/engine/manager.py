"""The manager: knows scopes by registration, and what their regions hold."""

import threading
import weakref
from inspect import signature
from types import TracebackType
from typing import Any, Self

from recoup.core.errors import UsageError
from recoup.engine.node import CheckpointNode, held_bytes
from recoup.engine.observers import Watched, subscribe, unsubscribe
from recoup.engine.scope import CheckpointScope
from recoup.engine.statistics import Accounts, StatisticsTable

_MEBIBYTE = 1 << 20


class ScopeManager:
    """Accounts for scopes: which there are, and how many bytes they hold.

    Scopes are registered one by one, or all that run inside `with manager:`.

    What it should choose by itself is validated here, and chosen by
    `recoup.CheckpointManager`, which has the planner.

    Args:
        max_memory_mb: The budget for saved activations, in MiB.
        auto_checkpoint: Let the manager choose.
        memory_threshold: The share of the budget to plan for, above 0 and up to 1.

    Raises:
        UsageError: An option is out of range.

    Examples:
        >>> import torch
        >>> manager = ScopeManager(max_memory_mb=64)
        >>> x = torch.ones(256, requires_grad=True)
        >>> with manager, CheckpointScope("block"):
        ...     y = x.exp().sin()
        >>> manager.total_memory_bytes(), manager.scope_memory_bytes("block")
        (1024, 1024)
    """

    def __init__(
        self,
        *,
        max_memory_mb: int = 1024,
        auto_checkpoint: bool = False,
        memory_threshold: float = 0.8,
    ) -> None:
        self.max_memory_mb = max_memory_mb
        self.auto_checkpoint = auto_checkpoint
        self.memory_threshold = memory_threshold
        self._scopes: list[CheckpointScope] = []
        self._regions: list[weakref.ref[Watched]] = []
        self._prune_at = 16
        self._accounts = Accounts()
        self._lock = threading.Lock()

    @property
    def max_memory_mb(self) -> int:
        """The budget for saved activations, in MiB."""
        return self._max_memory_mb

    @max_memory_mb.setter
    def max_memory_mb(self, mebibytes: int) -> None:
        is_number = isinstance(mebibytes, int) and not isinstance(mebibytes, bool)
        if not is_number or mebibytes < 1:
            raise UsageError(
                "max_memory_mb is a whole number of MiB, at least 1: got "
                f"{mebibytes!r}."
            )
        self._max_memory_mb = mebibytes

    @property
    def auto_checkpoint(self) -> bool:
        """Whether the manager chooses what to checkpoint."""
        return self._auto_checkpoint

    @auto_checkpoint.setter
    def auto_checkpoint(self, choose: bool) -> None:
        if not isinstance(choose, bool):
            raise UsageError(f"auto_checkpoint is True or False: got {choose!r}.")
        self._auto_checkpoint = choose

    @property
    def memory_threshold(self) -> float:
        """The share of the budget to plan for."""
        return self._memory_threshold

    @memory_threshold.setter
    def memory_threshold(self, share: float) -> None:
        is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
        if not is_number or not 0 < share <= 1:
            raise UsageError(
                f"memory_threshold is a share above 0 and up to 1: got {share!r}."
            )
        self._memory_threshold = float(share)

    @property
    def scopes(self) -> tuple[CheckpointScope, ...]:
        """The registered scopes."""
        return tuple(self._scopes)

    @property
    def nodes(self) -> list[CheckpointNode]:
        """The living regions of registered scopes and of the manager's own blocks."""
        regions: dict[int, Watched] = {}
        for reference in self._regions:
            region = reference()
            if region is not None:
                regions[id(region)] = region
        for scope in self._scopes:
            for node in scope.nodes:
                region = node.region
                if region is not None:
                    regions[id(region)] = region
        return [CheckpointNode(region=region) for region in regions.values()]

    def register_scope(self, scope: CheckpointScope) -> None:
        """Account for a scope from now on; a second time changes nothing."""
        self._require_scope(scope)
        if scope not in self._scopes:
            self._scopes.append(scope)
            scope.add_account(self._accounts.named(scope.name))

    def unregister_scope(self, scope: CheckpointScope) -> None:
        """Stop accounting for a scope.

        Raises:
            UsageError: It is not registered.
        """
        self._require_scope(scope)
        if scope not in self._scopes:
            raise UsageError(f"scope {scope.name!r} is not registered here.")
        self._scopes.remove(scope)
        scope.remove_account(self._accounts.named(scope.name))

    @property
    def statistics(self) -> StatisticsTable:
        """What regions did, by name, also those that are gone; print it for a table.

        It counts the regions of registered scopes, and all that ran inside
        `with manager:`.
        """
        for node in self.nodes:
            node.count_bytes()
        return self._accounts.table()

    def reset_statistics(self) -> None:
        """Set all counts back to zero."""
        self._accounts.reset()
        for scope in self._scopes:
            scope.add_account(self._accounts.named(scope.name))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: options, scopes and counts.

        Regions belong to a step, and a model to the manager that it was applied to.
        """
        options = {
            name: getattr(self, name) for name in signature(type(self)).parameters
        }
        return {"options": options, "scopes": self._scopes, "accounts": self._accounts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["options"])
        self._accounts = state["accounts"]
        for scope in state["scopes"]:
            self.register_scope(scope)

    def clear_all_checkpoints(self) -> None:
        """Let go of everything that the living regions hold, at once.

        A backward through them raises `ClearedError` afterwards.
        """
        for node in self.nodes:
            node.clear_saved_activations()
        self._regions = []

    def scope_memory_bytes(self, name: str) -> int:
        """Return the bytes that living regions of this name hold."""
        return held_bytes(node for node in self.nodes if node.name == name)

    def total_memory_bytes(self) -> int:
        """Return the bytes that all living regions hold, shared storages once."""
        return held_bytes(self.nodes)

    @property
    def current_memory_mb(self) -> float:
        """What `total_memory_bytes` says, in MiB."""
        return self.total_memory_bytes() / _MEBIBYTE

    def began(self, region: Watched) -> None:
        """Account for a region that runs inside `with manager:`."""
        with self._lock:
            if len(self._regions) >= self._prune_at:
                self._regions = [seen for seen in self._regions if seen() is not None]
                self._prune_at = 2 * len(self._regions) + 16
            self._regions.append(weakref.ref(region))
        account = self._accounts.named(region.name)
        if account not in region.accounts:
            region.accounts = (*region.accounts, account)

    def ended(self, region: Watched) -> None:
        """Nothing more to note: the region is asked when somebody wants to know."""

    def __enter__(self) -> Self:
        subscribe(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        unsubscribe(self)

    def _require_scope(self, scope: object) -> None:
        if not isinstance(scope, CheckpointScope):
            raise TypeError(
                f"this takes a CheckpointScope: got {type(scope).__name__}."
            )
