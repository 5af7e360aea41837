"""What recoup expects of each private name of torch, by name.

A contract gets the thing that torch has under the name, and returns whether it behaves
as recoup needs. Where one or two statements cannot tell, the table names the test that
can. Every name of `recoup.backend.capabilities` has one of both.
"""

# Torch's stubs leave out most of its private parts.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportPrivateImportUsage=false

import ast
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx import GraphModule

from recoup.backend import capabilities
from recoup.backend.capabilities import COMPILER, DEVICE, NAMES, UNCHECKED
from tests.support.twin import leftovers

TESTS = Path(__file__).parents[1]
KEYS = torch._C.DispatchKey
COMPLEX = torch.tensor([1 + 2j])
COLUMN = torch.tensor([[1.0], [3.0]])
WHOLE = torch.ones(2)
PART = nn.BatchNorm1d(1)
PART.register_forward_pre_hook(id)
MODEL = nn.Sequential(PART)
DISPATCH = torch.utils._python_dispatch

Contract = Callable[[Any], bool]


def ones(*, grad: bool = False) -> Tensor:
    return torch.ones(2, requires_grad=grad)


def jagged(lengths: Tensor | None = None) -> Any:
    offsets = torch.tensor([0, 2, 4])
    return torch.nested.nested_tensor_from_jagged(torch.ones(4), offsets, lengths)


def entered() -> list[Any]:
    return DISPATCH._get_current_dispatch_mode_stack()


class Counting(DISPATCH.TorchDispatchMode):
    """Counts operators."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def sees_operators(mode_class):
    class Mode(mode_class):
        __torch_dispatch__ = Counting.__torch_dispatch__
        calls = 0

    with Mode() as mode:
        ones().add(1)
    return issubclass(mode_class, object) and mode.calls == 2


def pops_the_mode(pop):
    with entered_again(mode := Counting()):
        return pop() is mode and entered() == []


@contextmanager
def entered_again(mode):
    """Leave a mode at the end, wherever the block took it."""
    mode.__enter__()
    try:
        yield
    finally:
        if not entered():
            DISPATCH._push_mode(mode)
        mode.__exit__(None, None, None)


def lists_the_modes(entered):
    with Counting() as mode:
        return entered() == [mode]


def pushes_the_mode(push):
    with entered_again(mode := Counting()):
        DISPATCH._pop_mode()
        push(mode)
        return entered() == [mode]


def hides_operators(guard):
    with Counting() as mode, guard():
        ones()
    return mode.calls == 0


def excludes(key: str) -> Callable[[Callable[[], Any]], bool]:
    def does(guard):
        is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
        before = is_excluded(getattr(KEYS, key))
        with guard():
            return not before and is_excluded(getattr(KEYS, key))

    return does


def tracks_views_with(key):
    """Whether excluding a key makes views that do not know their base."""
    with torch._C._SetExcludeDispatchKeyGuard(key, True):
        view = ones()[:1]
    return view._base is None


def lost_under(key, lazy: Tensor):
    """Whether kernels do not see a lazy bit where its key is excluded."""
    with torch._C._SetExcludeDispatchKeyGuard(key, True):
        lost = lazy + 0
    return not torch.equal(lost, lazy + 0)


def autocasts_with(key):
    with torch.autocast("cpu", torch.bfloat16):
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            inside = ones().unsqueeze(0).mm(ones().unsqueeze(1))
        outside = ones().unsqueeze(0).mm(ones().unsqueeze(1))
    return (inside.dtype, outside.dtype) == (torch.float32, torch.bfloat16)


def is_pushed_by_hooks(top):
    pack, unpack = lambda it: it, lambda it: it
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        inside = top(False)
    return inside == (pack, unpack) and top(False) is None


def pushes_hooks(push):
    packed: list[Tensor] = []
    push(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor)
    try:
        ones(grad=True).exp()
    finally:
        if packed:
            torch._C._autograd._pop_saved_tensors_default_hooks()
    return len(packed) == 1


def pops_hooks(pop):
    torch._C._autograd._push_saved_tensors_default_hooks(id, id)
    try:
        pop()
    finally:
        if is_left := torch._C._autograd._top_saved_tensors_default_hooks(False):
            torch._C._autograd._pop_saved_tensors_default_hooks()
    return not is_left


def says_why_hooks_are_disabled(message):
    with torch.autograd.graph.disable_saved_tensors_hooks("because"):
        return message() == "because"


def knows_of_disabled_hooks(is_enabled):
    with torch.autograd.graph.disable_saved_tensors_hooks("because"):
        return is_enabled() is False


def in_backward(call: Callable[[], Any]) -> Any:
    """Return what a call returns inside a backward."""
    x, found = ones(grad=True), []
    y = x * 2
    y.register_hook(lambda _: found.append(call()))
    y.sum().backward()
    return found[0]


def runs_at_the_end_of_backward(queue):
    order: list[str] = []
    x = ones(grad=True)
    x.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    y = x * 2
    y.register_hook(lambda _: queue(lambda: order.append("end")))
    y.sum().backward()
    return order == ["gradient", "end"]


def switches_gradients(switch):
    with torch.enable_grad():
        switch(False)
        return not torch.is_grad_enabled()


def keeps_versions(guard):
    tensor = ones()
    with guard(tensor):
        tensor.add_(1)
    return tensor._version == 0


def sets_versions(set_versions):
    tensor = ones().add_(1)
    set_versions((tensor,), (5,))
    return tensor._version == 5


@torch.library.custom_op("recoup_names::write", mutates_args={"x"})
def counted_before(x: torch.Tensor) -> None:
    seen_versions.append(x._version)
    x.add_(1)


seen_versions: list[int] = []


def names_operators_that_count_first(known):
    seen_versions.clear()
    counted_before(ones())
    is_known = "recoup_names::write" in known and "aten::add" not in known
    return is_known and seen_versions == [1]


def pulls_gradients(run):
    x = ones(grad=True)
    found = run(
        (x * 3,),
        (ones(),),
        False,
        False,
        (x,),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found[0].tolist() == [3, 3] and x.grad is None


def in_transform(call: Callable[[], Any], transform: Any = torch.func.vmap) -> Any:
    """Return what a call returns inside a transform of torch.func."""
    found = []

    def function(x):
        found.append(call())
        return x * 2

    if transform is torch.func.jvp:
        with warnings.catch_warnings():
            # Its first call compiles torch's own scripts, deprecated since 2.14.
            warnings.simplefilter("ignore", FutureWarning)
            torch.func.jvp(function, (ones(),), (ones(),))
    else:
        transform(function)(ones())
    return found[0]


def clears_transforms(clear):
    peek = torch._C._functorch.peek_interpreter_stack

    def inside():
        with clear():
            return peek() is None

    return in_transform(inside)


def batches_gradients(parse):
    included = torch._C._dispatch_tls_is_dispatch_key_included
    x, found = ones(grad=True), []
    y = x * 2
    y.register_hook(lambda _: found.append(included(parse("VmapMode"))))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    return found == [True] and not included(parse("VmapMode"))


def knows_batches(included):
    key = torch._C._dispatch_key_parse("VmapMode")
    x, found = ones(grad=True), []
    y = x * 2
    y.register_hook(lambda _: found.append(included(key)))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    return found == [True] and not included(key)


def pins_an_address(take):
    """Whether a reference keeps an address, and not the memory behind it."""
    storage = ones().untyped_storage()
    address = take(storage)
    alive = torch.UntypedStorage._expired(address)
    del storage
    dead = torch.UntypedStorage._expired(address)
    torch.UntypedStorage._free_weak_ref(address)
    return (alive, dead) == (False, True)


def says_what_expired(expired):
    storage = ones().untyped_storage()
    address = storage._weak_ref()
    alive = expired(address)
    del storage
    dead = expired(address)
    torch.UntypedStorage._free_weak_ref(address)
    return (alive, dead) == (False, True)


def frees_an_address(free):
    """Whether an address that was pinned is given to new storages again."""
    storage = ones().untyped_storage()
    address = storage._weak_ref()
    del storage
    free(address)
    others = [ones() for _ in range(64)]
    return address in [torch._C._storage_address(each) for each in others]


def tells_storages_apart(address):
    x = ones()
    return address(x) == address(x[1:]) != address(ones())


def counts_allocations(enable=None, disable=None, settings=None):
    """Whether torch's first profiler counts the bytes of a tensor."""
    profiler, legacy = torch._C._profiler, torch._C._autograd
    config = torch._C._profiler.ProfilerConfig(
        profiler.ProfilerState.CPU,
        *(False, True, False, False, False),
        (settings or profiler._ExperimentalConfig)(),
    )
    (enable or legacy._enable_profiler_legacy)(config)
    try:
        torch.empty(1024)
        threads = (disable or legacy._disable_profiler_legacy)()
    finally:
        if torch.autograd._profiler_enabled():
            legacy._disable_profiler_legacy()
    events = [event for thread in threads for event in thread]
    counted = [e.cpu_memory_usage() for e in events if e.kind() == "memory_alloc"]
    return [nbytes for nbytes in counted if nbytes > 0] == [4096]


def makes_fakes(mode_class):
    fake = torch._subclasses.fake_tensor.FakeTensor
    with mode_class() as mode:
        made = torch.ones(2**50)
    return isinstance(made, fake) and isinstance(mode.from_tensor(ones()), fake)


def is_raised(error, call: Callable[[Tensor], Any]) -> bool:
    with torch._subclasses.fake_tensor.FakeTensorMode():
        x = ones()
        try:
            call(x)
        except error:
            return issubclass(error, Exception) and error is not Exception
    return False


def refuses_quantized(error):
    with warnings.catch_warnings(action="ignore"):  # they are deprecated
        quantized = torch.quantize_per_tensor(ones(), 1, 0, torch.quint8)
    mode = torch._subclasses.FakeTensorMode()
    return is_raised(error, lambda _: mode.from_tensor(quantized))


def counts_modes(count):
    with Counting():
        return (count(), entered() != []) == (1, True)


def compiles(aot_autograd=None, boxed_nop=None, choose=None, min_cut=None):
    """Whether a step is split and run with these parts of the compiler."""
    from torch._dynamo.backends import common, debugging
    from torch._functorch import partitioners

    ran: list[object] = []
    choose = choose or partitioners.choose_saved_values_set

    def chosen(graph, node_info, memory_budget=1.0):
        ran.append(len(node_info.inputs))
        return choose(graph, node_info, memory_budget=memory_budget)

    def split(module, inputs, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(partitioners, "choose_saved_values_set", chosen)
            cut = min_cut or partitioners.min_cut_rematerialization_partition
            forward, backward = cut(module, inputs, **kwargs)
        ran.extend(isinstance(each, GraphModule) for each in (forward, backward))
        return forward, backward

    backend = (aot_autograd or common.aot_autograd)(
        fw_compiler=boxed_nop or debugging.boxed_nop, partition_fn=split
    )
    torch._dynamo.reset()
    x = ones(grad=True)
    torch.compile(lambda x: x.sin().cos(), backend=backend)(x).sum().backward()
    right = -ones().sin().sin() * ones().cos()
    return ran == [1, True, True] and torch.equal(x.grad, right)


def knows_what_is_excluded(is_excluded):
    before = is_excluded(KEYS.Negative)
    with torch._C._SetExcludeDispatchKeyGuard(KEYS.Negative, True):
        return not before and is_excluded(KEYS.Negative)


def knows_autocast(is_enabled):
    before = is_enabled()
    with torch.autocast("cpu"):
        return not before and is_enabled()


def changed(write: Any, *values: Any) -> list[float]:
    targets = [ones()]
    write(targets, *values)
    return targets[0].tolist()


def hooked(*, of_gradient: bool = False) -> Tensor:
    tensor = ones(grad=True)
    if of_gradient:
        tensor.register_post_accumulate_grad_hook(id)
    else:
        tensor.register_hook(id)
    return tensor


def raises_level(level):
    with forward_ad.dual_level():
        inside = forward_ad._current_level
    return level == -1 < inside


def knows_ragged_sizes(registry):
    tensor = jagged()
    registry[tensor._offsets] = tensor.shape[1]
    nested = torch.nested._internal.nested_tensor
    return nested.get_tensor_symint(tensor._offsets) == tensor.shape[1]


def compiled_in_place() -> nn.Module:
    module = nn.Linear(1, 1)
    module.compile(backend="eager")
    return module


def normalises(results: Any) -> bool:
    return results[0].tolist() == [[-1], [1]] and results[1].item() == 2


def with_mode(call: Callable[[], Any]) -> Any:
    with Counting():
        return call()


SHARDED = (
    "fitting/test_fit_sharded.py::"
    "test_gradients_that_are_not_exchanged_yet_are_those_of_the_twin"
)
CONTROL_FLOW = (
    "engine/test_control_flow.py::test_control_flow_in_a_region_is_bitwise_the_twins"
)
INDUCTOR = "fitting/test_compiled_fit.py::test_inductor_updates_running_statistics_once"
PARAMETERS = (
    "backend/test_fakes.py::"
    "test_a_model_has_its_own_tensors_again_and_nothing_that_a_step_added"
)
PERSISTENT = (
    "backend/test_loaders.py::test_persistent_workers_draw_the_orders_of_new_ones"
)
FLAGS = "backend/test_private_names.py::test_the_flags_of_modes_begin_alike"
UNTRACED = "backend/test_compiled.py::test_a_function_left_uncompiled_is_not_traced"
DROPOUT = (
    "fitting/test_compiled_fit.py::test_recomputed_dropout_has_the_mask_of_forward"
)

CONTRACTS: Mapping[str, Contract | str] = {
    "torch.utils._python_dispatch.TorchDispatchMode": sees_operators,
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": lists_the_modes,
    "torch.utils._python_dispatch._pop_mode": pops_the_mode,
    "torch.utils._python_dispatch._push_mode": pushes_the_mode,
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": lambda it: (
        it(jagged()) and not it(ones())
    ),
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass_type": lambda it: (
        it(type(jagged())) and not it(Tensor)
    ),
    "torch._C.DispatchKey": lambda it: it.Conjugate != it.Negative,
    "torch._C.DispatchKey.ADInplaceOrView": tracks_views_with,
    "torch._C.DispatchKey.AutocastCPU": autocasts_with,
    "torch._C.DispatchKey.Conjugate": lambda it: lost_under(it, COMPLEX.conj()),
    "torch._C.DispatchKey.Negative": lambda it: lost_under(it, COMPLEX.conj().imag),
    "torch._C.DispatchKeySet": lambda it: it(KEYS.Conjugate).has(KEYS.Conjugate),
    "torch._C._AutoDispatchBelowADInplaceOrView": excludes("ADInplaceOrView"),
    "torch._C._DisableTorchDispatch": hides_operators,
    "torch._C._ExcludeDispatchKeyGuard": lambda it: excludes("Negative")(
        lambda: it(torch._C.DispatchKeySet(KEYS.Negative))
    ),
    "torch._C._SetExcludeDispatchKeyGuard": lambda it: excludes("Negative")(
        lambda: it(KEYS.Negative, True)
    ),
    "torch._C._dispatch_key_parse": batches_gradients,
    "torch._C._dispatch_tls_is_dispatch_key_excluded": knows_what_is_excluded,
    "torch._C._dispatch_tls_is_dispatch_key_included": knows_batches,
    "torch._C._is_any_autocast_enabled": knows_autocast,
    "torch._library.custom_ops.OPDEFS": names_operators_that_count_first,
    "torch._ops.HigherOrderOperator": lambda it: isinstance(
        torch.ops.higher_order.cond, it
    ),
    "torch._ops.OpOverload": lambda it: isinstance(torch.ops.aten.add.Tensor, it),
    "torch.ops.aten.add.Tensor._op": lambda it: it(ones(), ones()).tolist() == [2, 2],
    "torch.ops.aten.add.Tensor._schema": lambda it: it.name == "aten::add",
    "torch.ops.aten._neg_view": lambda it: (
        it(ones()).is_neg() and it(ones()).tolist() == [-1, -1]
    ),
    "torch.ops.aten._unsafe_view.default": lambda it: (
        it(ones(), [2, 1]).tolist() == [[1], [1]]
    ),
    "torch._C.TensorBase": lambda it: it.add_(ones(), 1).tolist() == [2, 2],
    "torch._C._VariableFunctions": lambda it: it.add(ones(), 1).tolist() == [2, 2],
    "torch._C._nn": lambda it: it.gelu(torch.zeros(1)).tolist() == [0],
    "torch._foreach_copy_": lambda it: changed(it, [ones() * 3]) == [3, 3],
    "torch._foreach_lerp_": lambda it: changed(it, [ones() * 3], 0.5) == [2, 2],
    "torch._C._autograd._pop_saved_tensors_default_hooks": pops_hooks,
    "torch._C._autograd._push_saved_tensors_default_hooks": pushes_hooks,
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message": (
        says_why_hooks_are_disabled
    ),
    "torch._C._autograd._saved_tensors_hooks_is_enabled": knows_of_disabled_hooks,
    "torch._C._autograd._top_saved_tensors_default_hooks": is_pushed_by_hooks,
    "torch._C._current_graph_task_id": lambda it: it() == -1 < in_backward(it),
    "torch._C._set_grad_enabled": switches_gradients,
    "torch.Tensor._backward_hooks": lambda it: (
        it.__get__(ones()) is None and len(it.__get__(hooked())) == 1
    ),
    "torch.Tensor._base": lambda it: (
        it.__get__(ones()) is None and it.__get__(WHOLE[:1]) is WHOLE
    ),
    "torch.Tensor._post_accumulate_grad_hooks": lambda it: (
        it.__get__(ones()) is None and len(it.__get__(hooked(of_gradient=True))) == 1
    ),
    "torch.autograd.Variable._execution_engine.queue_callback": (
        runs_at_the_end_of_backward
    ),
    "torch._C._autograd._unsafe_set_version_counter": sets_versions,
    "torch.autograd.grad_mode._unsafe_preserve_version_counter": keeps_versions,
    "torch.autograd.graph._engine_run_backward": pulls_gradients,
    "torch._C._functorch.TransformType.Jvp": lambda it: (
        it
        == in_transform(
            lambda: torch._C._functorch.peek_interpreter_stack().key(), torch.func.jvp
        )
    ),
    "torch._C._functorch.peek_interpreter_stack": lambda it: (
        it() is None and in_transform(it) is not None
    ),
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack": (
        clears_transforms
    ),
    "torch.autograd.forward_ad._current_level": raises_level,
    "torch.UntypedStorage._expired": says_what_expired,
    "torch.UntypedStorage._free_weak_ref": frees_an_address,
    "torch.UntypedStorage._weak_ref": pins_an_address,
    "torch._C._has_storage": lambda it: it(ones()) and not it(ones().to_sparse()),
    "torch._C._storage_address": tells_storages_apart,
    "torch.Tensor._indices": lambda it: it(ones().to_sparse()).tolist() == [[0, 1]],
    "torch.Tensor._values": lambda it: it(ones().to_sparse()).tolist() == [1, 1],
    "torch.Tensor._version": lambda it: (
        it.__get__(ones()) == 0 and it.__get__(ones().add_(1)) == 1
    ),
    "torch._C._autograd._disable_profiler_legacy": lambda it: counts_allocations(
        disable=it
    ),
    "torch._C._autograd._enable_profiler_legacy": lambda it: counts_allocations(
        enable=it
    ),
    "torch._C._profiler._ExperimentalConfig": lambda it: counts_allocations(
        settings=it
    ),
    "torch._subclasses.fake_tensor.DataDependentOutputException": lambda it: is_raised(
        it, lambda x: x.sum().item()
    ),
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": lambda it: is_raised(
        it, torch.nonzero
    ),
    "torch._subclasses.fake_tensor.FakeTensor": lambda it: (
        type(torch._subclasses.FakeTensorMode().from_tensor(ones())) is it
    ),
    "torch._subclasses.fake_tensor.FakeTensorMode": makes_fakes,
    "torch._subclasses.fake_tensor.UnsupportedFakeTensorException": refuses_quantized,
    "torch.nested._internal.nested_tensor._tensor_symint_registry": (
        knows_ragged_sizes
    ),
    "torch.nn.Module()._buffers": lambda it: "running_mean" in it(PART),
    "torch.nn.Module()._compiled_call_impl": lambda it: (
        it(PART) is None and it(compiled_in_place()) is not None
    ),
    "torch.nn.Module()._forward_pre_hooks": lambda it: list(it(PART).values()) == [id],
    "torch.nn.Module()._modules": lambda it: it(MODEL) == {"0": PART},
    "torch.nn.Module()._parameters": lambda it: it(PART)["weight"] is PART.weight,
    "torch.nn.modules.batchnorm._NormBase": lambda it: (
        issubclass(nn.BatchNorm2d, it) and issubclass(nn.InstanceNorm1d, it)
    ),
    "torch.nn.modules.dropout._DropoutNd": lambda it: issubclass(nn.Dropout2d, it),
    "torch.utils._pytree": lambda it: it.tree_leaves([1, {"a": (2,)}]) == [1, 2],
    "torch._C._dynamo.eval_frame._FrameAction": UNTRACED,
    "torch._C._dynamo.eval_frame._FrameExecStrategy": UNTRACED,
    "torch._C._len_torch_dispatch_stack": counts_modes,
    "torch._dynamo.backends.common.aot_autograd": lambda it: compiles(aot_autograd=it),
    "torch._dynamo.backends.debugging.boxed_nop": lambda it: compiles(boxed_nop=it),
    "torch._functorch.config.graphsafe_rng_functionalization": DROPOUT,
    "torch._functorch.partitioners.choose_saved_values_set": lambda it: compiles(
        choose=it
    ),
    "torch._functorch.partitioners.functionalize_rng_ops": DROPOUT,
    "torch._functorch.partitioners.min_cut_rematerialization_partition": lambda it: (
        compiles(min_cut=it)
    ),
    "torch._inductor.custom_graph_pass.CustomPartitionerFn": INDUCTOR,
    "torch._inductor.runtime.cache_dir_utils.cache_dir": (
        "backend/test_stored_numbers.py::"
        "test_the_file_is_in_the_folder_of_the_compilers_caches"
    ),
    "torch.ops.aten._native_batch_norm_legit.no_stats": lambda it: normalises(
        it(COLUMN, None, None, True, 0.1, 0.0)
    ),
    "torch.ops.aten._native_batch_norm_legit_functional.default": lambda it: normalises(
        it(COLUMN, None, None, ones()[:1], ones()[:1], True, 0.1, 0.0)
    ),
    "torch._C._cuda_memoryStats": (
        "backend/test_memory.py::test_the_peak_of_an_allocator_is_frozen_on_leaving"
    ),
    "_is_param": PARAMETERS,
    "_torchdynamo_disable": UNTRACED,
    "_torchdynamo_disable_msg": UNTRACED,
    "_iterator": PERSISTENT,
    "_orig_mod": lambda it: it(torch.compile(PART, backend="eager")) is PART,
    "_torchdynamo_orig_callable": lambda it: (
        it(torch.compile(ones, backend="eager")) is ones
    ),
    "_saved_result": lambda it: torch.equal(
        it(ones(grad=True).exp().grad_fn), ones().exp()
    ),
    "_lengths": lambda it: it(jagged(lengths=torch.ones(2))).tolist() == [1, 1],
    "_offsets": lambda it: it(jagged()).tolist() == [0, 2, 4],
    "_dispatch_key": lambda it: (
        it(FunctionalTensorMode(pre_dispatch=True)) == KEYS.PreDispatch
    ),
    "_mode_key": lambda it: it(torch._subclasses.FakeTensorMode()) is not None,
    "_is_in_any_mode_without_ignore_compile_internals": lambda it: (
        (it(DISPATCH), with_mode(lambda: it(DISPATCH))) == (False, True)
    ),
    "_is_in": FLAGS,
    "_get_fsdp_state": SHARDED,
    "_fsdp_param_group": SHARDED,
    "_fsdp_param_groups": SHARDED,
    "_unsharded_param": SHARDED,
    "_hop_compile_and_call": CONTROL_FLOW,
    "_maybe_compile_and_run_fn": CONTROL_FLOW,
}


LISTED = [*(n for names in NAMES.values() for n in names), *COMPILER, *DEVICE]
DIRECT = {name: law for name, law in CONTRACTS.items() if callable(law)}
NAMED = {name: test for name, test in CONTRACTS.items() if isinstance(test, str)}


def resolved(name: str) -> Any:
    """Return what torch has under a name; of attributes of objects, their getter."""
    if "()." in name or not name.startswith("torch."):
        return attrgetter(name.rpartition(".")[2])
    capabilities.require([name])
    return attrgetter(name.removeprefix("torch."))(torch)


def is_kept(law: Contract, it: Any) -> bool:
    with suppress(Exception):
        return bool(law(it))
    return False


def exists(test: str) -> bool:
    """Whether a test with this name is in the file that the table names."""
    file, _, name = test.partition("::")
    text = (TESTS / file).read_text() if (TESTS / file).is_file() else ""
    names = (n.name for n in ast.walk(ast.parse(text)) if hasattr(n, "name"))
    return name.startswith("test_") and name in names


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch):
    """Also laws of something else leave no hooks, modes or flags behind."""
    # Torch shares these flags among threads: concurrent ones may have left one set.
    flags = [n for n, flag in vars(DISPATCH).items() if flag is True]
    for name in flags:
        monkeypatch.setattr(DISPATCH, name, False)
    yield
    assert list(leftovers()) == []


@pytest.mark.parametrize("name", DIRECT)
def test_a_private_name_means_what_recoup_expects(name):
    assert DIRECT[name](resolved(name))


@pytest.mark.parametrize("name", DIRECT)
@pytest.mark.parametrize("wrong", [lambda *_, **__: None, object()])
def test_something_else_under_a_name_is_noticed(name, wrong):
    assert not is_kept(DIRECT[name], wrong)


def test_the_flags_of_modes_begin_alike():
    before = dict(vars(DISPATCH))
    changed = with_mode(
        lambda: {n for n, flag in vars(DISPATCH).items() if flag is not before.get(n)}
    )
    assert {name[: len("_is_in")] for name in changed} == {"_is_in"}


def test_every_listed_name_has_a_test():
    assert sorted(CONTRACTS) == sorted([*LISTED, *UNCHECKED])
    assert [test for test in NAMED.values() if not exists(test)] == []


@pytest.mark.parametrize(
    "test",
    [
        "backend/test_nothing.py::test_that_does_not_exist",
        "backend/test_compiled.py::test_that_does_not_exist",
        "backend/test_compiled.py::TestRecognition",
        "backend/test_compiled.py",
    ],
)
def test_an_entry_without_a_test_is_noticed(test):
    assert not exists(test)
