"""Segments and groups: functions of several tensors with one, two or three results.

Run it with `python examples/flexible_checkpointing.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recoup import CheckpointGroup
from recoup.checkpointing import checkpoint_segment, checkpoint_segment_flex

Run = Callable[[list[Tensor]], Tensor]


def blend(inputs: Sequence[Tensor]) -> Tensor:
    """Turn any number of tensors into one."""
    return torch.stack([tensor.sin() * tensor.exp() for tensor in inputs]).sum(0)


def product_and_sum(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Turn two tensors into two."""
    return (inputs[0] * inputs[1]).tanh(), (inputs[0] + inputs[1]).sigmoid()


def three_powers(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Turn a tensor into three."""
    return inputs[0].square(), inputs[0] ** 3, inputs[0] ** 4


def statistics(inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Turn a dictionary into another, with something in it that is no tensor."""
    scaled = inputs["values"] * inputs["scale"].exp()
    return {"mean": scaled.mean(), "spread": scaled.std(), "count": scaled.numel()}


def plain(tensors: list[Tensor]) -> Tensor:
    """Call everything as it is."""
    a, b, c = tensors
    first, second = product_and_sum([blend([a, b]), blend([a, b, c])])
    powers = three_powers([first])
    found = statistics({"values": second, "scale": sum(powers, start=a)})
    return found["mean"] + found["spread"] / found["count"]


def checkpointed(tensors: list[Tensor]) -> Tensor:
    """Call everything in regions, the last three in one group."""
    a, b, c = tensors
    group = CheckpointGroup("example")
    two = checkpoint_segment([a, b], blend)
    three = checkpoint_segment_flex([a, b, c], blend)
    first, second = group.checkpoint_fn_flex2([two, three], product_and_sum)
    powers = group.checkpoint_fn_flex3([first], three_powers)
    found = group.checkpoint_fn(
        {"values": second, "scale": sum(powers, start=a)}, statistics
    )
    print(f"the group made {group.call_count} calls and holds {group.memory_bytes} B")
    return found["mean"] + found["spread"] / found["count"]


def gradients(run: Run) -> list[Tensor]:
    """Run forward and backward on the same three tensors each time."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(64, generator=generator).requires_grad_() for _ in range(3)]
    run(tensors).backward()
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def main() -> None:
    """Compare the two."""
    found, expected = gradients(checkpointed), gradients(plain)
    assert len(found) == 3
    assert all(map(torch.equal, found, expected)), "gradients must be equal"
    print("All three gradients are bitwise those of the plain run.")


if __name__ == "__main__":
    main()
