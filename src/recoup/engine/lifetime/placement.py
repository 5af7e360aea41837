"""Placement: where each value of a region lives that is not recomputed."""

from collections.abc import Callable, Sequence

from torch import Tensor

from recoup.backend.autograd.saved_tensors import is_activation
from recoup.engine.lifetime.values import OUTSIDE, Hold, TapeValue
from recoup.engine.scopes.policies import Policy
from recoup.engine.tiers.protocol import Tier


class Placement:
    """Asks the policy about values, and says where the held ones are to be kept.

    Args:
        policy: Which outputs to keep although they could be recomputed.
        store: The tier of kept values, if not their device.

    Attributes:
        moves_inputs: Whether activations from outside may be moved.
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
            # The very tensor lies as the value does: no view is needed to give it back.
            whole = value.born is not None and value.born() is tensor
            hold = value.keep_tensor(tensor, is_first=whole)
            store = self._store if kept is True else kept
            if store is not None:
                hold.assign(store)

    def place_saved(self, hold: Hold) -> None:
        """Say where a value is kept that autograd saved."""
        hold.assign(self._store)

    def place_input(self, value: TapeValue, nbytes: int) -> None:
        """Say where an activation from outside is kept, unless that has been said."""
        hold = value.hold
        assert hold is not None, "a value from outside is held"
        if hold.tensor is not None and hold.tier is None:
            asked = None if self._asked is None else self._asked(nbytes)
            hold.assign(asked or self._store)

    def place_roots(self, roots: Sequence[TapeValue]) -> None:
        """Say where activations from outside are kept that a replay starts from."""
        if not self.moves_inputs:
            return
        for value in roots:
            hold, born = value.hold, value.born
            if value.producer != OUTSIDE or hold is None or hold.tensor is None:
                continue
            # No module owns a tensor that is no longer referenced.
            tensor = value.first_tensor()
            if born is not None and (tensor is None or is_activation(tensor)):
                self.place_input(value, hold.tensor.untyped_storage().nbytes())


_KEEPS_NOTHING = Placement(None, None)


def placement_of(policy: Policy | None, store: Tier | None) -> Placement:
    """Return who places the values of a region."""
    if policy is None and store is None:
        return _KEEPS_NOTHING
    return Placement(policy, store)
