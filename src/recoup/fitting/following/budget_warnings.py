"""Warnings of steps that exceed the budget of a fitted model."""

import warnings
from collections.abc import Collection, Sequence

import torch

from recoup.backend.state.model_state import needs
from recoup.core.callers import user_stacklevel
from recoup.core.graph import Graph
from recoup.core.plan import Plan
from recoup.core.segments import Segment
from recoup.core.simulation import LoopKept, peak_with, simulate
from recoup.errors import BudgetWarning
from recoup.fitting.budgets import budget_for_floor
from recoup.fitting.following.loop_memory import advice_for, reasons_of


class BudgetWarnings:
    """Warns of what exceeds a budget: of each kind once.

    Args:
        budget_bytes: The budget, without the reserved bytes.
        reserved_bytes: The reserved bytes.

    Attributes:
        budget_bytes: The budget, without the reserved bytes.
        said: The kinds that were said.
    """

    def __init__(self, budget_bytes: int, reserved_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.said: set[str] = set()
        self._reserved_bytes = reserved_bytes

    def say(self, message: str, needed_bytes: int, kinds: Collection[str] = ()) -> bool:
        """Warn if a step exceeds the budget; return whether it was said.

        Args:
            message: The text; `{needs}` stands for needed and budgeted bytes.
            needed_bytes: The bytes that the step needs.
            kinds: Its topics. If all were warned of before, it is not repeated.
        """
        is_known = bool(kinds) and self.said.issuperset(kinds)
        if needed_bytes <= self.budget_bytes or is_known:
            return False
        self.said.update(kinds)
        needed_bytes += self._reserved_bytes
        budget_bytes = self.budget_bytes + self._reserved_bytes
        warning = BudgetWarning(
            message.replace("{needs}", needs(needed_bytes, budget_bytes)),
            needed_bytes=needed_bytes,
            budget_bytes=budget_bytes,
        )
        warnings.warn(warning, stacklevel=user_stacklevel())
        return True

    def say_difference(self, differences: Sequence[str], needed_bytes: int) -> None:
        """Warn of a step that is not the measured one."""
        reasons = "; ".join(differences)
        self.say(
            f"expected the step that recoup.fit measured, got another one: {reasons}; "
            "{needs}. Later steps get a plan that leaves room for it, as far as there "
            "is one. Call recoup.fit on the step as you train it to have the budget "
            "checked.",
            needed_bytes,
            kinds=[reasons],
        )

    def say_more(self, peak_bytes: int, device: torch.device) -> None:
        """Warn of a step like the measured one that took more, if nothing is said."""
        if self.said or peak_bytes <= budget_for_floor(self.budget_bytes, device):
            return
        self.say(
            "expected the step that recoup.fit measured, got one that takes more: "
            "{needs}. Your code keeps tensors that the measured step did not, such as "
            "features from hooks, a graph by retain_graph, copies of parameters. Call "
            "recoup.fit with step= a function that does the same.",
            peak_bytes,
            kinds=["more"],
        )

    def say_size(self, size: str, needed_bytes: int) -> bool:
        """Warn of a batch that does not fit; return whether it was said."""
        return self.say(
            f"expected a batch that fits, got {size}: {{needs}}. The smallest plan "
            "known is applied; give smaller batches, or call recoup.fit with the "
            "largest batch.",
            needed_bytes,
        )

    def say_order(
        self, plan: Plan, step: Graph, used: Sequence[Segment], wrong: Sequence[int]
    ) -> None:
        """Warn of a call that did not run blocks as the measured one did.

        Args:
            plan: The plan that it ran with.
            step: Its step.
            used: The plan as segments of the step.
            wrong: The spans of the plan that did not begin and end in order.
        """
        if "order" in self.said:
            return
        names = [plan.spans[number].start.module or "the model" for number in wrong]
        begun = [used[n] for n in range(len(used)) if n not in wrong]
        self.say(
            f"expected the blocks in the measured order, got another one: "
            f"{', '.join(names[:3])} did not run as in the measured step; {{needs}}, "
            "if what ran elsewhere is kept. Call recoup.fit with a step that runs the "
            "blocks as you train them.",
            simulate(step, begun).peak_bytes,
            kinds=["order"],
        )

    def say_outside(self, name: str, graph: Graph) -> None:
        """Warn of a part of the model that is called directly."""
        roots = " and ".join(root or "the model" for root in graph.roots)
        self.say(
            f"expected a call of {roots}, as in the measured step, got a call of "
            f"{name} outside of one (`forward` called by name is none): no plan "
            "applies to it. At the measured size {needs}. Call recoup.fit with step= "
            "a function that calls what you train.",
            simulate(graph, ()).peak_bytes,
            kinds=["outside"],
        )

    def say_transformed(self, graph: Graph) -> None:
        """Warn of a call inside a transform of torch.func."""
        self.say(
            "expected a call as in the measured step, got one inside a transform of "
            "torch.func, or with batched gradients: no plan applies to it. At the "
            "measured size {needs}.",
            simulate(graph, ()).peak_bytes,
            kinds=["transformed"],
        )

    def say_open(self, times: int, needed_bytes: int) -> None:
        """Warn of a call whose memory adds to that of calls before it."""
        self.say(
            f"expected backward after {times} call{'s' if times > 1 else ''} of the "
            "model, as in the measured step, got another call before it: {needs}. "
            "Call recoup.fit with step= a function that runs all calls and backward.",
            needed_bytes,
            kinds=["open"],
        )

    def say_kept(
        self,
        graph: Graph,
        segments: Sequence[Segment],
        kept: LoopKept,
        excess_bytes: int = 0,
    ) -> int | None:
        """Warn if a step does not fit because of memory that the training loop keeps.

        Returns:
            The bytes that are left in the budget; None: a warning was given, now or
            before.
        """
        kept = kept.beyond(graph)
        reasons = reasons_of(kept)
        if reasons and self.said.issuperset(reasons):
            return None
        needed_bytes = peak_with(graph, segments, kept) + excess_bytes
        room_bytes = self.budget_bytes - needed_bytes
        if room_bytes >= 0 or not reasons:
            return max(0, room_bytes)
        self.say(
            "expected a training loop that keeps what the measured step kept, got "
            f"{' and '.join(reasons.values())}: {{needs}}. To fit, {advice_for(kept)}.",
            needed_bytes,
            kinds=list(reasons),
        )
        return None
