"""A CUDA build of torch on a machine without a driver: everything runs on the CPU."""

import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, tempfile, torch
from torch import nn

NAMES = (
    "_lazy_init current_device current_device_index current_stream device_count "
    "empty_cache get_device_name get_device_properties get_rng_state init "
    "is_current_stream_capturing max_memory_allocated mem_get_info memory_allocated "
    "memory_stats reset_peak_memory_stats set_rng_state synchronize"
)

def current_accelerator(check_available=False):
    return None if check_available else torch.device("cuda")

def fail(*args, **kwargs):
    raise RuntimeError("Found no NVIDIA driver on your system.")

def patch():
    torch.accelerator.current_accelerator = current_accelerator
    for module in (torch.cuda, torch.accelerator):
        for name in NAMES.split():
            if hasattr(module, name):
                setattr(module, name, fail)

patch()
import recoup
from recoup import CheckpointScope, Disk, Host, Packed

def close(x):
    return x.square().mean()

def run(context):
    torch.manual_seed(0)
    x = torch.randn(100, 100, requires_grad=True)
    with context:
        y = torch.dropout(x.exp().sin(), 0.3, True)
    y.sum().backward()
    return x.grad

plain = run(contextlib.nullcontext())
for store in (None, Host(smallest_bytes=0), Disk(smallest_bytes=0), Packed()):
    scope = CheckpointScope("a", verify="always", **({"store": store} if store else {}))
    assert torch.equal(run(scope), plain)
x = torch.ones(2, requires_grad=True)
layers = recoup.ActivationCheckpointer()
layers.checkpointed_forward(x, [0, 1, 2], lambda h, _: h.sin()).sum().backward()
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
)
batch = torch.randn(512, 64)
recoup.measure(model, batch, loss=close)
recoup.largest_batch(model, lambda n: torch.randn(n, 64), "2MiB", loss=close)
_, report = recoup.fit(model, batch, 0.8, loss=close)
assert report.measured_peak_bytes <= report.budget_bytes
with recoup.MixedPrecisionScope():
    close(model(batch)).backward()
print("done")
"""


@pytest.mark.slow
def test_no_question_goes_to_a_runtime_that_cannot_start():
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert found.stdout == "done\n", found.stderr
