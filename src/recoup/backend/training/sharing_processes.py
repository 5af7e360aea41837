"""The processes that share the parameters of a model."""

from typing import Any, TypeVar

from torch import distributed, nn

Thing = TypeVar("Thing")


class SharingProcesses:
    """The processes that hold parts of a model's parameters, this one included.

    Operators on such parameters may communicate, so all processes must run the same
    steps, and decisions based on local time or memory must be made together. Nothing is
    sent for a model whose parameters are all local.
    """

    def __init__(self, model: nn.Module) -> None:
        found = [getattr(p, "device_mesh", None) for p in model.parameters()]
        meshes: list[Any] = [mesh for mesh in dict.fromkeys(found) if mesh is not None]
        self._groups = [
            mesh.get_group(dimension)
            for mesh in meshes
            for dimension in range(mesh.ndim)
            if mesh.size(dimension) > 1
        ]

    def gather(self, thing: Thing) -> list[Thing]:
        """Return every process's object, in the same order; a collective call."""
        found = [thing]
        for group in self._groups:
            answers: list[Any] = [None] * group.size()
            distributed.all_gather_object(answers, found, group=group)
            found = [each for answer in answers for each in answer]
        return found
