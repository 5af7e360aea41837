"""What was seen of one training step, as plain data."""

from dataclasses import dataclass, field


@dataclass
class TracedOperation:
    """One operator of forward, as it ran."""

    name: str
    reads: list[int]
    makes: list[int]
    timing: int
    peak_bytes: int
    own_bytes: int
    workspace_bytes: int
    state_bytes: int = 0
    asked: int = 0


@dataclass
class TracedStorage:
    """A storage that was seen in forward.

    Attributes:
        bytes: Its size.
        born: The moment that made it; -1 if it existed before.
        dies: The last moment at which it exists; None: it outlives the step.
        value: What is in it now.
        names: How many tensors that modules took or returned refer to it now.
        unnamed: The last moment at which there was such a tensor.
    """

    bytes: int
    born: int
    dies: int | None = None
    value: int = -1
    names: int = 0
    unnamed: int | None = None


@dataclass
class TracedValue:
    """A storage at one version."""

    storage: int
    producer: int
    overwritten: bool = False


@dataclass
class TracedSave:
    """A tensor that autograd saved, with its life in backward.

    Attributes:
        value: What was saved.
        by_region: A region holds it longer than autograd does.
        used: The moment that first asked for it.
        released: The last moment at which autograd held it.
        finished: The last moment at which a replayed copy of it existed.
        is_later: It was asked for in a later pass.
    """

    value: int
    by_region: bool = False
    used: int | None = None
    released: int | None = None
    finished: int | None = None
    is_later: bool = False


@dataclass
class TracedBoundary:
    """A module is entered or left."""

    operation: int
    saves: int
    module: str
    call: int
    entering: bool
    model_call: int


@dataclass(eq=False)
class Trace:
    """One pass of a step: forward, and backward until the model is called again.

    Attributes:
        roots: The paths of the modules that the step itself called, in order.
        gradients: For each parameter with a gradient, by its path, the first moment
            with the gradient; -1: it existed before the pass.
    """

    operations: list[TracedOperation] = field(default_factory=list)
    backward_bytes: list[int] = field(default_factory=list)
    backward_own_bytes: list[int] = field(default_factory=list)
    backward_timings: list[int] = field(default_factory=list)
    storages: list[TracedStorage] = field(default_factory=list)
    values: list[TracedValue] = field(default_factory=list)
    saves: list[TracedSave] = field(default_factory=list)
    boundaries: list[TracedBoundary] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)
    gradients: dict[str, int] = field(default_factory=dict)

    def add_moments(self, other: "Trace") -> None:
        """Append the moments of a pass that is not planned to those of backward."""
        for operation in other.operations:
            self.backward_bytes.append(operation.peak_bytes)
            self.backward_own_bytes.append(operation.own_bytes)
            self.backward_timings.append(operation.timing)
        self.backward_bytes += other.backward_bytes
        self.backward_own_bytes += other.backward_own_bytes
        self.backward_timings += other.backward_timings

    @property
    def model_calls(self) -> int:
        """How often the step called the model, or parts of it."""
        return len(self.roots)

    @property
    def moment(self) -> int:
        """The number of the next moment."""
        return len(self.operations) + len(self.backward_bytes)
