"""Autograd internals: saved-tensor hooks, the running backward, graph-free code."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 (no stub names it)

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]

push_hooks: Callable[[Pack, Unpack], None] = _autograd._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
current_backward: Callable[[], int] = torch._C._current_graph_task_id

"""Return the task id of the backward that runs on this thread, or -1."""

_is_grad_enabled = torch.is_grad_enabled
_set_grad_enabled = torch._C._set_grad_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_BelowAutograd = torch._C._AutoDispatchBelowADInplaceOrView
_IDLE: set[Any] = set()
"""Unused guards for reuse: construction costs as much as entering and leaving."""

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
for _name in ("CUDA", "XPU", "MPS", "HPU", "PrivateUse1"):
    _AUTOCAST = _AUTOCAST | torch._C.DispatchKeySet(
        getattr(torch._C.DispatchKey, f"Autocast{_name}")
    )


def is_in_backward() -> bool:
    """Return whether this thread is running a backward pass.

    Examples:
        >>> is_in_backward()
        False
    """
    return current_backward() != -1


def ambient_hooks() -> tuple[Pack, Unpack] | None:
    """Return the innermost saved-tensor hooks of this thread, or None."""
    return _autograd._top_saved_tensors_default_hooks(False)


def finds_by_place(pack: Pack) -> bool:
    """Return whether hooks belong to torch.utils.checkpoint, forward or recompute.

    It matches tensors by position: the n-th one saved by the recomputation replaces the
    n-th one saved in forward, if shape, dtype and device are equal.
    """
    return getattr(pack, "__module__", None) == "torch.utils.checkpoint"


def hooks_refused() -> str | None:
    """Return why saved-tensor hooks cannot be used here, or None if they can."""
    if _autograd._saved_tensors_hooks_is_enabled():
        return None
    return _autograd._saved_tensors_hooks_get_disabled_error_message()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Queue a callback for the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


class Follower(Protocol):
    """An object that is notified when a backward ends."""

    def end(self, task: int) -> None:
        """Handle the end of the backward with this task id."""
        ...


class _BackwardEnd:
    """Calls a follower at the end of a backward without keeping it alive."""

    _follower: Callable[[], Follower | None] = staticmethod(lambda: None)

    def __init__(self, follower: Follower, task: int) -> None:
        self._task = task
        self._follower = weakref.ref(follower)

    def __call__(self) -> None:
        follower = self._follower()
        if follower is not None:
            follower.end(self._task)

    def __del__(self) -> None:
        # A backward that raises runs no callbacks; it only releases them.
        self()


def follow_backward(follower: Follower) -> None:
    """Notify the follower when the running backward ends, also if it raises."""
    at_end_of_backward(_BackwardEnd(follower, current_backward()))


class below_autograd:  # noqa: N801 (used as a verb: `with below_autograd():`)
    """Run operators below autograd: no graph, no view tracking, no autocast.

    A class, because `contextmanager` and `torch.no_grad` cost more than an operator.
    """

    __slots__ = ("_gradients", "_guards")
    _is_unseen = False

    def __enter__(self) -> None:
        self._gradients = _is_grad_enabled()
        self._guards: tuple[Any, ...] = ()
        try:
            if self._gradients:  # backward has disabled gradients already
                _set_grad_enabled(False)
            try:
                guard = _IDLE.pop()
            except KeyError:
                guard = _BelowAutograd()
            self._guards = (guard,)
            guard.__enter__()
            if _is_any_autocast_enabled():
                self._add(torch._C._ExcludeDispatchKeyGuard(_AUTOCAST))
            if self._is_unseen:  # last: this guard is active once constructed
                self._add(torch._C._DisableTorchDispatch())
        except BaseException:  # an interrupt: `__exit__` will not be called
            self._leave()
            raise

    def _add(self, guard: Any) -> None:
        self._guards += (guard,)
        guard.__enter__()

    def __exit__(self, *error: object) -> None:
        try:
            self._leave()
        except BaseException:  # an interrupt: leaving twice is harmless
            self._leave()
            raise

    def _leave(self) -> None:
        guards = self._guards
        for guard in reversed(guards):
            guard.__exit__(None, None, None)
        if guards:
            self._guards = ()  # first: an idle guard may be reused at once
            _IDLE.add(guards[0])
        if _is_grad_enabled() is not self._gradients:
            _set_grad_enabled(self._gradients)


def has_hooks(tensor: Tensor) -> bool:
    """Return whether the tensor has backward hooks.

    Examples:
        >>> x = torch.ones(2, requires_grad=True)
        >>> before, _ = has_hooks(x), x.register_hook(lambda gradient: gradient * 2)
        >>> before, has_hooks(x)
        (False, True)
    """
    return bool(tensor._backward_hooks)


class recording:  # noqa: N801 (used as a verb: `with recording():`)
    """Run the block with gradients enabled.

    A separate class, because `torch.enable_grad` costs as much as a small operator.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._before)


class out_of_sight(below_autograd):  # noqa: N801 (used as a verb)
    """Run recoup's own operators, hidden from dispatch modes and autograd."""

    __slots__ = ()
    _is_unseen = True


def pull_gradients(
    results: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return `torch.autograd.grad(..., allow_unused=True)` without argument checks.

    Each gradient must have its result's shape. The omitted checks cost as much as a
    small loop step.

    Examples:
        >>> x = torch.ones(2, requires_grad=True)
        >>> pull_gradients([x * 3], [x], [torch.ones(2)])
        (tensor([3., 3.]),)
    """
    return torch.autograd.graph._engine_run_backward(
        tuple(results),
        tuple(gradients),
        False,  # retain_graph
        False,  # create_graph
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )


def records_gradients() -> bool:
    """Return whether autograd records operators here."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def has_graph(tensor: Tensor) -> bool:
    """Return whether a tensor has an autograd graph.

    Examples:
        >>> x = torch.ones(2, requires_grad=True)
        >>> has_graph(x), has_graph(x * 2), has_graph(torch.ones(2))
        (False, True, False)
    """
    if not tensor.requires_grad:
        return False
    try:
        return not tensor.is_leaf
    except RuntimeError:
        # A multi-output view whose base was written to since: it has a graph, but
        # torch refuses to return it.
        return True


def stays_leaf(tensor: Tensor) -> bool:
    """Return whether a tensor that requires a gradient is and stays a leaf.

    A view without a graph gets its base's graph when the base is written to.

    Examples:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with torch.no_grad():
        ...     view = (x * 2)[:]
        >>> stays_leaf(x), view.is_leaf, stays_leaf(view)
        (True, True, False)
    """
    return tensor._base is None and tensor.is_leaf


def is_activation(tensor: Tensor) -> bool:
    """Return whether an external tensor may be kept alive by the graph alone.

    Parameters and other leaves are excluded, and tensors without a graph are data and
    buffers with another owner: offloading any of these would free nothing.
    """
    if not has_graph(tensor):
        return False
    base = tensor._base
    return base is None or not base.is_leaf


def is_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is an `nn.Parameter`, or a view of one.

    Examples:
        >>> weight = torch.nn.Linear(2, 3).weight
        >>> is_parameter(weight.t()), is_parameter(weight * 2)
        (True, False)
    """
    base = tensor._base
    return isinstance(tensor if base is None else base, torch.nn.Parameter)


def without_parameters(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that are not parameters, without a function call for each.

    Examples:
        >>> weight = torch.nn.Linear(2, 3).weight
        >>> without_parameters([weight, weight.t(), torch.ones(1)])
        [tensor([1.])]
    """
    found: list[Tensor] = []
    for tensor in tensors:
        base = tensor._base
        if not isinstance(tensor if base is None else base, torch.nn.Parameter):
            found.append(tensor)
    return found


def saves_its_result(node: Any) -> bool:
    """Return whether an operator saves its result for backward.

    Examples:
        >>> x = torch.ones(1, requires_grad=True)
        >>> saves_its_result(x.tanh().grad_fn), saves_its_result(x.sin().grad_fn)
        (True, False)
    """
    # Ask the class: reading the node's attribute would unpack the saved tensor.
    return hasattr(type(node), "_saved_result")
