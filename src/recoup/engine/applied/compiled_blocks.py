"""Blocks that run compiled, with a planned partition into forward and backward.

The compiled forward replaces the block's `forward` on the instance, so hooks,
parameters and `state_dict` are unchanged. Without gradients a block runs uncompiled.
"""

import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn

from recoup.backend.autograd.transforms import is_transformed
from recoup.backend.compiler.joint_graphs import JointGraph
from recoup.backend.compiler.partitioning import (
    Executor,
    Partitioner,
    Probed,
    backend_for,
    compiled_by,
    compiler_error,
    hits_recompile_limit,
    with_own_code,
)
from recoup.backend.compiler.recognition import leave_uncompiled, sees_operators
from recoup.backend.compiler.suspension import SuspendedCompilation
from recoup.core.compiled_plan import BlockPartition, CompiledPlan
from recoup.engine.applied.applied_plan import Applied, digest_of
from recoup.engine.applied.offloaded_saves import moving_saves
from recoup.engine.scopes.scope import CheckpointScope
from recoup.errors import BudgetWarning, PlanError, UnsupportedError, UsageError

Forward = Callable[..., Any]
_Code = tuple[FunctionType, dict[str, Any]]
"""A function, and the backend that compiles it."""


def probe(
    block: nn.Module, executor: Executor, /, *args: Any, **kwargs: Any
) -> JointGraph:
    """Return the joint graph of a block for these arguments, without compiling it.

    Raises:
        UnsupportedError: The block cannot be captured as one graph.
    """
    found: list[JointGraph] = []
    function = with_own_code(forward_of(block), "probe")
    backend = backend_for(Partitioner({}, executor, probe=found), executor)
    kind = type(block).__name__
    try:
        compiled_by(MethodType(function, block), backend)(*args, **kwargs)
    except Exception as error:
        if found and isinstance(compiler_error(error), Probed):
            return found[0]
        reason = str(compiler_error(error)).strip().partition("\n")[0]
        raise UnsupportedError(
            f"{kind} cannot be captured as one graph: {reason}"
        ) from error
    raise UnsupportedError(f"{kind} has nothing to differentiate")


class CompiledForward:
    """The forward of a block: compiled if gradients are recorded, else eager.

    Dynamo limits the recompilations of one code object, and numeric module attributes
    cause some. Beyond the limit a block gets a separate code object; beyond that one's
    limit it runs in a region that recomputes everything, with a warning. Under a
    dispatch mode, which sees no operators of a compiled block, it also runs in such a
    region, without a warning. Inside a transform of torch.func it runs eagerly.
    """

    def __init__(
        self, block: nn.Module, partition: BlockPartition, executor: Executor
    ) -> None:
        self._block = block
        self._partition = partition
        self._executor: Executor = executor
        self.eager = MethodType(forward_of(block), block)
        self._is_shared = True
        self._run = self._compiled(_code_for) if partition.digest else self._in_region

    def _compiled(self, code_for: Callable[..., _Code]) -> Forward:
        """Return the compiled forward, with shared or separate code."""
        function, key = forward_of(self._block), _key(self._partition)
        code, backend = code_for(function, key, self._executor)
        return compiled_by(MethodType(code, self._block), backend)

    @leave_uncompiled  # compiled with the whole model it would lose its partition
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        if not torch.is_grad_enabled() or is_transformed():
            return self.eager(*args, **kwargs)
        if sees_operators():
            return self._in_region(*args, **kwargs)
        moving: AbstractContextManager[object] = nullcontext()
        if self._partition.offloads:
            moving = moving_saves(self._block, (args, kwargs))
        while True:
            try:
                with moving:
                    return self._run(*args, **kwargs)
            except Exception as error:
                if not hits_recompile_limit(error):
                    raise
            if not self._is_shared:
                break
            self._is_shared = False
            self._run = self._compiled(_code_for.__wrapped__)
        self._run = self._in_region
        warnings.warn(
            BudgetWarning(
                f"{self._partition.module!r} was called with more kinds of inputs than "
                "torch compiles a function for. From now on it runs uncompiled and "
                "recomputes everything. Pad inputs to a few sizes, or raise "
                "torch._dynamo.config.recompile_limit."
            ),
            stacklevel=2,
        )
        return self._run(*args, **kwargs)

    def _in_region(self, *args: Any, **kwargs: Any) -> Any:
        with CheckpointScope(self._partition.module or "block"):
            return self.eager(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return plain data: a copy compiles again when it is called."""
        return {
            "block": self._block,
            "partition": self._partition,
            "executor": self._executor,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuild the forward for the copied block."""
        # The block is still being copied: its forward is that of its class.
        self.__init__(**state)


_Key = tuple[int, str, tuple[str, ...], int]


def _key(partition: BlockPartition) -> _Key:
    """Return a key that is equal for blocks that share compiled code."""
    saved = partition.saves, partition.saved_bytes
    return (partition.kind, partition.digest, *saved)


@functools.lru_cache(maxsize=512)
def _code_for(function: FunctionType, key: _Key, executor: Executor) -> _Code:
    """Return a code object for a partition, and the backend that compiles it.

    Blocks share both: Dynamo's cache is keyed by them.
    """
    kind, digest, saves, planned_bytes = key

    def notice(joint: JointGraph, found_bytes: int | None) -> None:
        if found_bytes is None:
            del joint
            what = (
                "is captured as another graph than when it was planned (training mode, "
                "requires_grad or autocast changed); torch's default partition is used"
            )
        elif found_bytes > planned_bytes:
            what = f"saves {found_bytes} bytes, planned were {planned_bytes}"
        else:
            return
        warnings.warn(
            BudgetWarning(
                f"{function.__qualname__} {what}. Gradients are right; the peak may "
                "exceed the budget. Call fit with the step that is trained."
            ),
            stacklevel=2,
        )

    partitioner = Partitioner({digest: saves}, executor, notice=notice)
    return with_own_code(function, f"recoup_{kind}"), backend_for(partitioner, executor)


class CompiledBlocks:
    """A compiled plan on the blocks of a model, until `remove`.

    The user's own compilation is suspended meanwhile.

    Raises:
        PlanError: The plan was made for another model.
        UnsupportedError: The forward of a block cannot be compiled.
        UsageError: A compiled plan is active on a block already.
    """

    def __init__(self, model: nn.Module, plan: CompiledPlan) -> None:
        # Blocks are gathered by hooks around the forward that is replaced here.
        if plan.model not in ("", digest_of(model, is_unsharded=True)):
            raise PlanError(
                f"expected a plan for this {type(model).__name__}, got one for a model "
                "of other modules or parameters; make a new plan with recoup.fit."
            )
        executor = cast("Executor", plan.executor)
        forwards: dict[nn.Module, CompiledForward] = {}
        self._suspended = SuspendedCompilation(model)
        try:
            for partition in plan.blocks:
                block = block_at(model, partition.module)
                forwards[block] = CompiledForward(block, partition, executor)
        except BaseException:
            self._suspended.restore()
            raise
        for block, forward in forwards.items():
            block.__dict__["forward"] = forward
        self._blocks = list(forwards)
        self._rest = None
        if plan.rest is not None:
            try:
                self._rest = Applied(model, plan.rest)
            except BaseException:
                self.remove()
                raise

    def remove(self) -> None:
        """Restore the blocks' own forwards and the user's compilation."""
        if self._rest is not None:
            self._rest.remove()
        for block in self._blocks:
            if isinstance(block.__dict__.get("forward"), CompiledForward):
                del block.__dict__["forward"]
        self._blocks = []
        self._suspended.restore()


def block_at(model: nn.Module, path: str) -> nn.Module:
    """Return a block of a model that can be compiled.

    Raises:
        PlanError: The model has no such module.
        UsageError: A compiled plan is active on it.
    """
    try:
        block = model.get_submodule(path)
    except AttributeError as error:
        raise PlanError(
            f"expected a module {path!r} in this {type(model).__name__}; apply the "
            "plan to the model it was made for."
        ) from error
    if isinstance(block.__dict__.get("forward"), CompiledForward):
        raise UsageError(
            f"a compiled plan is active on {path!r} already; call its remove() first."
        )
    return block


def forward_of(block: nn.Module) -> FunctionType:
    """Return the function of a block's own forward.

    Raises:
        UnsupportedError: It was replaced on the instance.
    """
    forward = block.__dict__.get("forward")
    if forward is not None and not isinstance(forward, CompiledForward):
        raise UnsupportedError(
            f"the forward of this {type(block).__name__} was replaced by "
            f"{type(forward).__name__}, which cannot be compiled for other blocks"
        )
    function = type(block).forward
    if not isinstance(function, FunctionType):
        raise UnsupportedError(
            f"the forward of {type(block).__name__} is no Python function"
        )
    return function


def compiled_blocks_in(model: nn.Module) -> Mapping[str, CompiledForward]:
    """Return the compiled forwards that are active on a model, by path."""
    found = (
        (name, module.__dict__.get("forward")) for name, module in model.named_modules()
    )
    return {name: f for name, f in found if isinstance(f, CompiledForward)}


def signature_of(block: nn.Module) -> Iterator[tuple[str, Hashable]]:
    """Yield the types, parameters, buffers and flags that blocks of one kind share."""
    for name, module in block.named_modules():
        yield name, (type(module), module.training, module.extra_repr())
    for name, tensor in block.named_parameters():
        yield name, (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
    for name, tensor in block.named_buffers():
        yield name, (tuple(tensor.shape), tensor.dtype)
