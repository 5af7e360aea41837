"""Options: what is settled about a region before it runs."""

from dataclasses import dataclass
from functools import cache

from recoup.engine.scopes.policies import Policy
from recoup.engine.tiers.protocol import Tier
from recoup.engine.verification.replay_check import Verify


@dataclass(frozen=True, slots=True)
class Options:
    """The treatment of tensors that autograd saves in a region.

    Attributes:
        recompute: Forget what is saved and recompute it; False keeps it.
        policy: Which outputs to keep although they could be recomputed.
        cache: Keep recomputed values until the graph is freed, for several backwards.
        verify: When recomputed values are compared with what forward saw.
        store: The tier of kept values, if not their device.
        at_once: Recompute everything when backward asks for the first value, as the
            simulation of a plan does; False recomputes what it asks for.
    """

    recompute: bool = True
    policy: Policy | None = None
    cache: bool = False
    verify: Verify = "first"
    store: Tier | None = None
    at_once: bool = False


@cache
def keeping_nothing(*, recompute: bool, cache: bool, verify: Verify) -> Options:
    """Return options without a policy and a store, made once: scopes come by the layer.

    Examples:
        >>> keeping_nothing(recompute=True, cache=False, verify="first") == Options()
        True
    """
    return Options(recompute=recompute, cache=cache, verify=verify)
