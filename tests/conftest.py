"""What holds for every test: one thread, its own seed, no collector, no surprises."""

import gc
import os
import random
import zlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, register_random, settings

# A program of its own that needs a browser; not to be imported while tests are sought.
collect_ignore = ["support/browser.py"]

# One thread makes sums on the CPU repeatable, and small tensors fast.
torch.set_num_threads(1)


class _TorchRandom:
    """Torch's generators as hypothesis wants them: reset before every example."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


# Hypothesis holds it by a weak reference only.
_torch_random = _TorchRandom()
register_random(_torch_random)

# The first call of a torch operator takes a thousand times as long as the second, so
# time limits on single examples mean nothing; pytest-timeout limits whole tests.
# The test command draws the same examples everywhere; `make sweep` searches at random.
settings.register_profile(
    "random", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fixed", settings.get_profile("random"), derandomize=True)
settings.load_profile(os.environ.get("RECOUP_EXAMPLES", "fixed"))


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what needs a missing accelerator, and sweeps nobody asked for."""
    unwanted = set()
    if not torch.accelerator.is_available():
        unwanted.add("cuda")
    if "sweep" not in str(config.getoption("markexpr")):
        unwanted.add("sweep")
    left_out = [
        item for item in items if any(item.get_closest_marker(m) for m in unwanted)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed every test by its own name, so that none depends on which ran before."""
    number = zlib.crc32(request.node.nodeid.encode())
    random.seed(number)
    torch.manual_seed(number)
    return number


@pytest.fixture(autouse=True)
def no_gc() -> Iterator[None]:
    """Run without the garbage collector: what only it would free counts as leaked."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device there is: the CPU, and the accelerator if there is one."""
    if request.param == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "deselected where there is no accelerator"
    return accelerator
