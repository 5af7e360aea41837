"""Loop schedules as streams of integer actions; no torch here."""

from recoup.schedules.counts import Counts
from recoup.schedules.even import Even
from recoup.schedules.interpreter import interpret
from recoup.schedules.multistage import Multistage
from recoup.schedules.online import Online
from recoup.schedules.optimum import least_evaluations
from recoup.schedules.picture import draw
from recoup.schedules.revolve import Chunked, Revolve
from recoup.schedules.schedule import Schedule, positions
from recoup.schedules.slot_budget import fit_budget
from recoup.schedules.whole_tape import StoreAll

__all__ = [
    "Chunked",
    "Counts",
    "Even",
    "Multistage",
    "Online",
    "Revolve",
    "Schedule",
    "StoreAll",
    "draw",
    "fit_budget",
    "interpret",
    "least_evaluations",
    "positions",
]
