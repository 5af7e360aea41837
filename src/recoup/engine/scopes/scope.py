"""Scopes: `with CheckpointScope("layer1"):` around ordinary PyTorch code."""

import sys
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self
from weakref import ref

from recoup.backend.compiler.recognition import leave_uncompiled
from recoup.engine.recording.active import (
    abandon_from,
    begin,
    depth,
    end,
    end_inside,
    refuse_transform,
    region_exit,
    skip,
)
from recoup.engine.recording.region_options import Options, keeping_nothing
from recoup.engine.scopes.checkpoint_node import CheckpointNode, NodeKeeper
from recoup.engine.scopes.policies import Policy, recomputes_beside
from recoup.engine.scopes.statistics import Account, NamedAccount
from recoup.engine.tiers.protocol import Tier
from recoup.engine.verification.replay_check import Verify, check_verify
from recoup.errors import UsageError


class CheckpointScope(NodeKeeper):
    """Drop what autograd saves inside the block; replay it in backward.

    The block is ordinary code and need not be a function. Between forward and backward
    autograd holds only the block's external inputs. In backward the operators that the
    saved tensors need run once, and values are freed at their last use. No Python code
    of the block runs twice. Gradients are bitwise those of the same code without the
    scope.

    A compiled function runs uncompiled inside a scope, and torch may never compile it
    again after that: call it through `checkpoint` instead.

    A scope may be entered again, nested to any depth, and used with the same name any
    number of times. With gradients disabled it does nothing.

    Costs: in backward at most the operators of the block once more; in forward some
    microseconds of host time per operator; no synchronisation.

    Args:
        name: Its name in statistics and error messages.
        enabled: Whether the scope has an effect.
        use_recomputation: Whether to recompute; False keeps what autograd saves, with
            name and statistics.
        policy: Which outputs to keep although they could be recomputed.
        verify: Compare replayed values with forward's: at the `"first"` use of this
            scope, `"always"`, `"full"` (copies of everything, names the first operator
            that differs), or `"off"`.
        cache: Keep recomputed values across several backwards, until the graph is
            freed; by default each backward recomputes.
        store: The tier of kept values, such as `Host()` or `Disk()`. With a policy
            these are the values the policy keeps; without one everything that autograd
            saves in the block, and nothing is recomputed. Parameters and small tensors
            stay on the device.

    Raises:
        UsageError: The name is empty or no text, `verify` is not one of its words, or
            `store` is no tier.

    Examples:
        >>> import torch
        >>> x = torch.linspace(-1, 1, 8, requires_grad=True)
        >>> with CheckpointScope("block"):
        ...     y = (x.exp() * x.sin()).tanh()
        >>> y.sum().backward()
        >>> plain = x.detach().clone().requires_grad_()
        >>> (plain.exp() * plain.sin()).tanh().sum().backward()
        >>> torch.equal(x.grad, plain.grad)
        True
    """

    @leave_uncompiled
    def __init__(  # noqa: PLR0913 (options by keyword)
        self,
        name: str,
        enabled: bool = True,  # noqa: FBT001, FBT002 (MLFramework's signature)
        *,
        use_recomputation: bool = True,
        policy: Policy | None = None,
        verify: Verify = "first",
        cache: bool = False,
        store: Tier | None = None,
    ) -> None:
        if not isinstance(name, str) or not name.strip():
            raise UsageError(
                f"expected a name for the scope, got {name!r}; give a string, "
                'as in CheckpointScope("layer1").'
            )
        check_verify(verify)
        caller = _caller()
        self._name = name
        self._key: Hashable = (name, *caller)
        self._recomputes = recomputes_beside(store, policy)
        recompute = use_recomputation and self._recomputes
        if policy is None and store is None:
            self._known_options = keeping_nothing(
                recompute=recompute, cache=cache, verify=verify
            )
        else:
            self._known_options = Options(recompute, policy, cache, verify, store)
        self._nodes: list[CheckpointNode] = []
        self._prune_at = 16
        self._account = NamedAccount(name)
        self._accounts: tuple[Account, ...] = ()
        self._kept_operators: Counter[str] | None = None
        self.is_enabled = enabled
        self.use_recomputation = use_recomputation

    @property
    def name(self) -> str:
        """The name in statistics and error messages."""
        return self._name

    @property
    def kept_operators(self) -> dict[str, int]:
        """The number of runs of operators whose results are never recomputed.

        Their results are held if backward or a replay needs them.
        """
        return dict(self._kept_operators or {})

    def add_account(self, account: Account) -> None:
        """Add an account to which later regions of the scope add their counts."""
        if account not in self._accounts:
            self._accounts = (*self._accounts, account)

    def remove_account(self, account: Account) -> None:
        """Remove an account from later regions of the scope."""
        self._accounts = tuple(each for each in self._accounts if each is not account)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy: the options and the counts, but no regions."""
        return {**self.__dict__, "_nodes": [], "_accounts": ()}

    @leave_uncompiled
    def __enter__(self) -> Self:
        place = depth()
        try:
            if not self.is_enabled:
                skip(self)
                return self
            options = self._options()
            region = begin(self, self._name, options, self._key, self._accounts)
            if region is not None:
                if len(self._nodes) >= self._prune_at:
                    self._prune_at = 2 * len(self.nodes) + 16
                node = CheckpointNode(region=region)
                self._nodes.append(node)
                self._account.calls += 1
                region.own_accounts = ref(self._account), ref(node)
            return self
        except BaseException:  # `__exit__` is not called if `__enter__` raises
            abandon_from(self, place)
            raise

    @leave_uncompiled
    def _leave(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        del kind, traceback
        if error is not None and not isinstance(error, Exception):
            # An interrupt may have left an inner region open.
            end_inside(self)
        self.close()
        refuse_transform(self._name, error)

    __exit__ = region_exit(_leave)

    def close(self) -> None:
        """End the last recording; do nothing if none is open.

        Keeps what backward will need.

        Raises:
            UsageError: A region that was opened inside it is still open.
        """
        region = end(self)
        if region is not None and region.tape.unrecorded:
            if self._kept_operators is None:
                self._kept_operators = Counter()
            self._kept_operators.update(region.tape.unrecorded)

    def _options(self) -> Options:
        recompute = self.use_recomputation and self._recomputes
        if self._known_options.recompute != recompute:
            self._known_options = replace(self._known_options, recompute=recompute)
        return self._known_options


def _caller() -> tuple[str, int, int]:
    """Return where the scope was made, to distinguish scopes of one name.

    Returns the instruction offset, because computing the line is slow, and accesses one
    frame only, because each costs as much as a saved tensor.
    """
    try:
        frame = sys._getframe(2)  # noqa: SLF001 (documented; all others cost frames)
    except ValueError:  # made by a thread itself
        return "", 0, 0
    return frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lasti
