"""Options of a region."""

from dataclasses import dataclass
from functools import cache

from recoup.engine.scopes.policies import Policy
from recoup.engine.tiers.protocol import Tier
from recoup.engine.verification.replay_check import Verify


@dataclass(frozen=True, slots=True)
class Options:
    """The treatment of tensors that autograd saves in a region.

    Attributes:
        recompute: Whether to drop and recompute saved tensors; False keeps them.
        policy: Which outputs to keep although they could be recomputed.
        cache: Whether to keep recomputed values until the graph is freed, for several
            backwards.
        verify: When to compare recomputed values with forward's.
        store: The tier of kept values, if not their device.
        at_once: Whether to recompute everything when backward needs the first value, as
            the simulation of a plan does; False recomputes what backward needs.
    """

    recompute: bool = True
    policy: Policy | None = None
    cache: bool = False
    verify: Verify = "first"
    store: Tier | None = None
    at_once: bool = False


@cache
def keeping_nothing(*, recompute: bool, cache: bool, verify: Verify) -> Options:
    """Return cached options without a policy and a store, for scopes per layer.

    Examples:
        >>> keeping_nothing(recompute=True, cache=False, verify="first") == Options()
        True
    """
    return Options(recompute=recompute, cache=cache, verify=verify)
