"""The last bytes: hold other values, one by one, while it still fits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recoup.core.graph import Graph
from recoup.core.memory_use import MemoryUse
from recoup.core.segments import Action, Segment
from recoup.planners.options import Option, footprints_of, kept_around, nested

_FILLS = 24
_SWAPS = 32


def refine(
    graph: Graph, segments: Sequence[Segment], budget_bytes: int
) -> tuple[Segment, ...]:
    """Return a plan that is not slower than another and fits into the same budget.

    More values are held where there is room, those whose operators take longest first;
    then values that are cheap to make again are given up for dearer ones. Segments with
    others inside stay as they are. Costs a few hundred footprints and profiles.

    Examples:
        >>> refine(Graph((), 0, (), (), (), (), ()), (), 0)
        ()
    """
    around = kept_around(graph, [(s.start, s.stop) for s in segments])
    refiner = _Refiner(graph, MemoryUse(graph, [around]), budget_bytes)
    options = [nested(graph, segment) for segment in segments]
    if refiner.room_bytes(options) < 0:
        return tuple(segments)
    options = refiner.filled(options)
    for number, value in refiner.held(options)[:_SWAPS]:
        without = refiner.replaced(options, number, drop=value)
        trial = refiner.filled(without)
        if _seconds(trial) < _seconds(options):
            options = trial
    return tuple(option.segments[0] for option in options)


@dataclass(frozen=True)
class _Refiner:
    graph: Graph
    use: MemoryUse
    budget_bytes: int

    def room_bytes(self, options: Sequence[Option]) -> int:
        """Return what is left of the budget."""
        return self.budget_bytes - self.use.peak_bytes(footprints_of(options))

    def filled(self, options: list[Option]) -> list[Option]:
        """Return options that hold more, as long as it fits."""
        room = self.room_bytes(options)
        tried = 0
        for number, values in self.replayed(options):
            if tried >= _FILLS:
                break
            if sum(self.graph.bytes_of(value) for value in values) > room:
                continue
            tried += 1
            trial = self.replaced(options, number, keep=values)
            left = self.room_bytes(trial)
            if left >= 0 and trial[number].seconds < options[number].seconds:
                options, room = trial, left
        return options

    def replaced(
        self,
        options: list[Option],
        number: int,
        *,
        keep: tuple[int, ...] = (),
        drop: int | None = None,
    ) -> list[Option]:
        """Return options of which one holds some values more, or one less."""
        segment = options[number].segments[0]
        actions = {v: a for v, a in segment.actions.items() if v != drop}
        actions.update(dict.fromkeys(keep, Action.KEEP))
        option = nested(self.graph, Segment(segment.start, segment.stop, actions))
        return [*options[:number], option, *options[number + 1 :]]

    def replayed(
        self, options: Sequence[Option]
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield what operators make again, with the segment, the dearest first."""
        graph = self.graph
        found = [
            (graph.operations[place].seconds, number, place)
            for number, option in enumerate(options)
            if not option.segments[0].inner
            for replay in option.footprint.replays
            for place in replay.operations
        ]
        for _, number, place in sorted(found, reverse=True):
            made = graph.operations[place].makes
            yield number, tuple(v for v in made if graph.values[v].holdable)

    def held(self, options: Sequence[Option]) -> list[tuple[int, int]]:
        """Return values that are held, with their segments, the cheapest first."""
        graph = self.graph
        found = [
            (
                graph.operations[graph.values[value].producer].seconds
                / graph.bytes_of(value),
                number,
                value,
            )
            for number, option in enumerate(options)
            if not option.segments[0].inner
            for value, action in option.segments[0].actions.items()
            if action is Action.KEEP and graph.bytes_of(value)
        ]
        return [(number, value) for _, number, value in sorted(found)]


def _seconds(options: Sequence[Option]) -> float:
    return sum(option.seconds for option in options)
