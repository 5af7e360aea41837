"""Placement: the tier of each value of a region that is not recomputed."""

from collections.abc import Callable, Sequence

from torch import Tensor

from recoup.backend.autograd.saved_tensors import is_activation
from recoup.engine.lifetime.values import OUTSIDE, Hold, TapeValue
from recoup.engine.scopes.policies import Policy
from recoup.engine.tiers.protocol import Tier


class Placement:
    """Asks the policy about values, and assigns tiers to held ones.

    Args:
        policy: Which outputs to keep although they could be recomputed.
        store: The tier of kept values, if not their device.

    Attributes:
        moves_inputs: Whether external activations may be moved to a tier.
    """

    def __init__(self, policy: Policy | None, store: Tier | None) -> None:
        self.policy = policy
        self._store = store
        self._asked: Callable[[int], Tier | None] | None = getattr(
            policy, "keeps_input", None
        )
        self.moves_inputs = store is not None or self._asked is not None

    def place_output(self, operator: str, value: TapeValue, tensor: Tensor) -> None:
        """Hold a new value of an operator of this name if the policy keeps it."""
        assert self.policy is not None, "only called when there is a policy"
        kept = self.policy.keeps(operator, tensor.untyped_storage().nbytes())
        if kept:
            # The tensor itself has the value's geometry: `fetch` needs no view.
            whole = value.born is not None and value.born() is tensor
            hold = value.keep_tensor(tensor, is_first=whole)
            store = self._store if kept is True else kept
            if store is not None:
                hold.assign(store)

    def place_saved(self, hold: Hold) -> None:
        """Assign a tier to a value that autograd saved."""
        hold.assign(self._store)

    def place_input(self, value: TapeValue, nbytes: int) -> None:
        """Assign a tier to an external activation, unless it has one."""
        hold = value.hold
        assert hold is not None, "a value from outside is held"
        if hold.tensor is not None and hold.tier is None:
            asked = None if self._asked is None else self._asked(nbytes)
            hold.assign(asked or self._store)

    def place_roots(self, roots: Sequence[TapeValue]) -> None:
        """Assign tiers to external activations that a replay starts from."""
        if not self.moves_inputs:
            return
        for value in roots:
            hold, born = value.hold, value.born
            if value.producer != OUTSIDE or hold is None or hold.tensor is None:
                continue
            # A tensor that is no longer referenced has no other owner.
            tensor = value.first_tensor()
            if born is not None and (tensor is None or is_activation(tensor)):
                self.place_input(value, hold.tensor.untyped_storage().nbytes())


_KEEPS_NOTHING = Placement(None, None)


def placement_of(policy: Policy | None, store: Tier | None) -> Placement:
    """Return the placement for the values of a region."""
    if policy is None and store is None:
        return _KEEPS_NOTHING
    return Placement(policy, store)
