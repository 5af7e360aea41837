"""Loop schedules as streams of integer actions; no torch here.

`schedule` defines the actions, the other modules one schedule each.
"""

from recoup.schedules.even import Even, StoreAll
from recoup.schedules.interpreter import draw, interpret
from recoup.schedules.online import Online
from recoup.schedules.revolve import Chunked, Multistage, Revolve
from recoup.schedules.schedule import Counts, Schedule, positions
from recoup.schedules.slot_budget import fit_budget, least_evaluations

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
