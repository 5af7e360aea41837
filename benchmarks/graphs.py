"""Graphs of training steps, written down operator by operator."""

from collections.abc import Sequence
from dataclasses import dataclass

from recoup.core.graph import (
    BEFORE,
    Boundary,
    Graph,
    Operation,
    Save,
    Storage,
    Value,
)


@dataclass(frozen=True)
class Kernel:
    """One forward operator, and what its backward needs.

    Attributes:
        name: The operator.
        seconds: How long it runs.
        reads: Kernels whose results it takes, by number; -1 is the step's input.
        nbytes: The size of its result.
        saves: Kernels whose results autograd saves for it, itself included.
        replayable: It can be recomputed.
        workspace_bytes: What it takes while it runs.
        holdable: Its result may be held.
    """

    name: str
    seconds: float
    reads: tuple[int, ...]
    nbytes: int
    saves: tuple[int, ...] = ()
    replayable: bool = True
    workspace_bytes: int = 0
    holdable: bool = True


def step_graph(
    kernels: Sequence[Kernel],
    boundaries: Sequence[int],
    *,
    blocks: Sequence[int] = (),
    static_bytes: int = 0,
    link_bytes_per_second: float = 0.0,
) -> Graph:
    """Return the graph of a step that runs these kernels, and backward in reverse.

    Backward takes twice as long as forward; a kernel's backward needs the gradients of
    its result and of what it reads. Value and storage k + 1 are the result of kernel k;
    0 is the input.
    """
    count = len(kernels)
    last_read = list(range(count))
    for number, kernel in enumerate(kernels):
        for read in kernel.reads:
            if read >= 0:
                last_read[read] = number
    storages = [Storage(0, BEFORE, 2 * count - 1)]
    storages += [Storage(k.nbytes, i, last_read[i]) for i, k in enumerate(kernels)]
    operations = [
        Operation(
            kernel.name,
            kernel.seconds,
            tuple(read + 1 for read in kernel.reads),
            (number + 1,),
            kernel.replayable,
            kernel.workspace_bytes,
        )
        for number, kernel in enumerate(kernels)
    ]
    saves: list[Save] = []
    saves_before = [0]
    for number, kernel in enumerate(kernels):
        moment = 2 * count - 1 - number
        saves += [Save(saved + 1, moment, moment) for saved in kernel.saves]
        saves_before.append(len(saves))
    forward = [static_bytes + k.workspace_bytes for k in kernels]
    backward = [
        static_bytes
        + k.nbytes
        + sum(kernels[read].nbytes for read in k.reads if read >= 0)
        + k.workspace_bytes
        for k in kernels
    ]
    values = [Value(0, BEFORE)]
    values += [Value(i + 1, i, k.holdable) for i, k in enumerate(kernels)]
    return Graph(
        operations=tuple(operations),
        backward=count,
        storages=tuple(storages),
        values=tuple(values),
        saves=tuple(saves),
        boundaries=tuple(Boundary(b, saves_before[b], f"at{b}") for b in boundaries),
        other_bytes=tuple(forward + backward[::-1]),
        step_seconds=3 * sum(kernel.seconds for kernel in kernels),
        link_bytes_per_second=link_bytes_per_second,
        blocks=tuple(blocks),
    )


def transformer_kernels(blocks: int, *, unit_bytes: int = 2**20) -> list[Kernel]:
    """Return kernels of a stack of transformer blocks, about 25 each.

    Sizes are in units of one activation; seconds are those of a roofline: matrix
    products by their arithmetic, the rest by their traffic.
    """
    kernels: list[Kernel] = []

    def add(
        name: str, seconds: float, reads: Sequence[int], units: float, saves: str
    ) -> int:
        number = len(kernels)
        kept = [number] if "result" in saves else []
        kept += list(reads) if "inputs" in saves else []
        nbytes = int(units * unit_bytes)
        kernels.append(Kernel(name, seconds, tuple(reads), nbytes, tuple(kept)))
        return number

    stream = -1
    for _ in range(blocks):
        stream = _transformer_block(add, stream)
    return kernels


def _transformer_block(add, x: int) -> int:  # noqa: ANN001 - the local function above
    mean = add("mean", 1.0, [x], 0.01, "result")
    norm = add("normalize", 2.0, [x, mean], 1, "result")
    scaled = add("scale", 2.0, [norm], 1, "")
    query, key, value = (add(n, 10.0, [scaled], 1, "inputs") for n in ("q", "k", "v"))
    query_rotated = add("rotate", 2.0, [query], 1, "")
    key_rotated = add("rotate", 2.0, [key], 1, "")
    heads = add("contiguous", 2.0, [value], 1, "")
    attended = add(
        "attention", 30.0, [query_rotated, key_rotated, heads], 1.02, "result inputs"
    )
    merged = add("transpose", 2.0, [attended], 1, "")
    projected = add("projection", 10.0, [merged], 1, "inputs")
    mask = add("mask", 1.0, [], 0.25, "result")
    dropped = add("dropout", 2.0, [projected, mask], 1, "")
    residual = add("add", 2.0, [x, dropped], 1, "")
    mean = add("mean", 1.0, [residual], 0.01, "result")
    norm = add("normalize", 2.0, [residual, mean], 1, "result")
    scaled = add("scale", 2.0, [norm], 1, "")
    up = add("up", 40.0, [scaled], 4, "inputs result")
    active = add("gelu", 6.0, [up], 4, "inputs")
    down = add("down", 40.0, [active], 1, "inputs")
    mask = add("mask", 1.0, [], 0.25, "result")
    dropped = add("dropout", 2.0, [down, mask], 1, "")
    return add("add", 2.0, [residual, dropped], 1, "")


def transformer_graph(blocks: int, *, link_bytes_per_second: float = 0.0) -> Graph:
    """Return the graph of a stack of transformer blocks, with places inside each."""
    kernels = transformer_kernels(blocks)
    size = len(kernels) // blocks
    places = [b * size + p for b in range(blocks) for p in (0, 3, 15, 18)]
    places.append(len(kernels))
    return step_graph(
        kernels,
        places,
        blocks=[*range(0, 4 * blocks, 4), 4 * blocks],
        link_bytes_per_second=link_bytes_per_second,
    )
