"""Published results on the published traces, for comparison."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Baseline:
    """A step without recomputation, as DTR's simulator reports it."""

    peak_megabytes: int
    milliseconds: float


@dataclass(frozen=True)
class Cell:
    """Recomputation in percent of the compute; `cut` None: infeasible or unknown."""

    dtr: float
    cut: float | None


BASELINES = {
    "transformer": Baseline(9864, 276.26),
    "resnet32": Baseline(10061, 291.91),
    "unet": Baseline(8416, 419.0),
}

CELLS = {
    ("transformer", 0.8): Cell(1.99, 1.34),
    ("transformer", 0.6): Cell(4.42, 3.88),
    ("transformer", 0.5): Cell(5.84, 5.37),
    ("transformer", 0.4): Cell(9.14, 6.04),
    ("transformer", 0.3): Cell(12.38, 8.08),
    ("transformer", 0.2): Cell(54.49, 14.52),
    ("resnet32", 0.8): Cell(2.48, None),
    ("resnet32", 0.6): Cell(7.37, 6.05),
    ("resnet32", 0.5): Cell(10.68, 9.62),
    ("resnet32", 0.4): Cell(14.04, 13.71),
    ("resnet32", 0.3): Cell(17.86, 17.85),
    ("resnet32", 0.2): Cell(33.22, None),
    ("unet", 0.8): Cell(5.77, 3.18),
    ("unet", 0.6): Cell(14.89, 10.81),
    ("unet", 0.5): Cell(15.87, None),
}


def percent(name: str, seconds: float) -> float:
    """Return seconds in percent of a trace's step."""
    return 100 * seconds / (BASELINES[name].milliseconds / 1e3)
