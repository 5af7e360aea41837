"""Every private name of torch that recoup uses, checked in one place.

Torch may change these between versions. `require` checks them when this package is
imported, so that a missing name fails with one clear error instead of in the middle of
a step. `tests/backend/test_capabilities.py` compares this list with the source;
`tests/backend/test_private_names.py` tests what recoup expects of each name.
"""

import importlib
from collections.abc import Iterable
from typing import Any

import torch

from recoup.errors import UnsupportedError

TESTED = ("2.11", "2.13", "2.15")
"""Versions of torch that recoup was tested with."""

NAMES = {
    "Dispatch: observe operators, and run them below modes and wrapper subclasses": (
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "torch.utils._python_dispatch._pop_mode",
        "torch.utils._python_dispatch._push_mode",
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass_type",
        "torch._C.DispatchKey",
        "torch._C.DispatchKey.ADInplaceOrView",
        "torch._C.DispatchKey.AutocastCPU",
        "torch._C.DispatchKey.Conjugate",
        "torch._C.DispatchKey.Negative",
        "torch._C.DispatchKeySet",
        "torch._C._AutoDispatchBelowADInplaceOrView",
        "torch._C._DisableTorchDispatch",
        "torch._C._ExcludeDispatchKeyGuard",
        "torch._C._SetExcludeDispatchKeyGuard",
        "torch._C._dispatch_key_parse",
        "torch._C._dispatch_tls_is_dispatch_key_excluded",
        "torch._C._dispatch_tls_is_dispatch_key_included",
        "torch._C._is_any_autocast_enabled",
    ),
    "Operators: their schemas, and their fastest calls": (
        "torch._library.custom_ops.OPDEFS",
        "torch._ops.HigherOrderOperator",
        "torch._ops.OpOverload",
        "torch.ops.aten.add.Tensor._op",
        "torch.ops.aten.add.Tensor._schema",
        "torch.ops.aten._neg_view",
        "torch.ops.aten._unsafe_view.default",
        "torch._C.TensorBase",
        "torch._C._VariableFunctions",
        "torch._C._nn",
        "torch._foreach_copy_",
        "torch._foreach_lerp_",
    ),
    "Autograd: saved-tensor hooks, and the backward that runs": (
        "torch._C._autograd._pop_saved_tensors_default_hooks",
        "torch._C._autograd._push_saved_tensors_default_hooks",
        "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message",
        "torch._C._autograd._saved_tensors_hooks_is_enabled",
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "torch._C._autograd._unsafe_set_version_counter",
        "torch._C._current_graph_task_id",
        "torch._C._set_grad_enabled",
        "torch.Tensor._backward_hooks",
        "torch.Tensor._base",
        "torch.Tensor._post_accumulate_grad_hooks",
        "torch.autograd.Variable._execution_engine.queue_callback",
        "torch.autograd.grad_mode._unsafe_preserve_version_counter",
        "torch.autograd.graph._engine_run_backward",
    ),
    "Transforms of torch.func": (
        "torch._C._functorch.TransformType.Jvp",
        "torch._C._functorch.peek_interpreter_stack",
        "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
        "torch.autograd.forward_ad._current_level",
    ),
    "Storages: identity without keeping them alive": (
        "torch.UntypedStorage._expired",
        "torch.UntypedStorage._free_weak_ref",
        "torch.UntypedStorage._weak_ref",
        "torch._C._has_storage",
        "torch._C._storage_address",
        "torch.Tensor._indices",
        "torch.Tensor._values",
        "torch.Tensor._version",
    ),
    "Meters of memory": (
        "torch._C._autograd._disable_profiler_legacy",
        "torch._C._autograd._enable_profiler_legacy",
        "torch._C._profiler._ExperimentalConfig",
    ),
    "Tensors without memory": (
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch._subclasses.fake_tensor.UnsupportedFakeTensorException",
    ),
    "Modules: their hooks, buffers and modes": (
        "torch.nested._internal.nested_tensor._tensor_symint_registry",
        "torch.nn.Module()._buffers",
        "torch.nn.Module()._compiled_call_impl",
        "torch.nn.Module()._forward_pre_hooks",
        "torch.nn.Module()._modules",
        "torch.nn.Module()._parameters",
        "torch.nn.modules.batchnorm._NormBase",
        "torch.nn.modules.dropout._DropoutNd",
        "torch.utils._pytree",
    ),
    "Compiled code is recognised, and recoup's own is left out of it": (
        "torch._C._dynamo.eval_frame._FrameAction",
        "torch._C._dynamo.eval_frame._FrameExecStrategy",
    ),
}
"""Names that recoup always needs, grouped by purpose."""

COMPILER = (
    "torch._C._len_torch_dispatch_stack",
    "torch._dynamo.backends.common.aot_autograd",
    "torch._dynamo.backends.debugging.boxed_nop",
    "torch._functorch.config.graphsafe_rng_functionalization",
    "torch._functorch.partitioners.choose_saved_values_set",
    "torch._functorch.partitioners.functionalize_rng_ops",
    "torch._functorch.partitioners.min_cut_rematerialization_partition",
    "torch._inductor.custom_graph_pass.CustomPartitionerFn",
    "torch._inductor.runtime.cache_dir_utils.cache_dir",
    "torch.ops.aten._native_batch_norm_legit.no_stats",
    "torch.ops.aten._native_batch_norm_legit_functional.default",
)
"""Names that only `fit(..., compile=...)` needs; importing them takes seconds."""

DEVICE = ("torch._C._cuda_memoryStats",)
"""Names that only exist in builds of torch with CUDA."""

UNCHECKED = (
    "_is_param",  # set by recoup, read by torch; so are the next two
    "_torchdynamo_disable",
    "_torchdynamo_disable_msg",
    "_iterator",  # of a data loader, which needs data to be constructed
    "_orig_mod",  # of compiled modules and functions, like the next one
    "_torchdynamo_orig_callable",
    "_saved_result",  # of autograd nodes
    "_lengths",  # of nested tensors, like the next one
    "_offsets",
    "_dispatch_key",  # of torch's own dispatch modes, like the next two
    "_mode_key",
    "_is_in_any_mode_without_ignore_compile_internals",
    "_is_in",  # prefix of the names of such flags
    "_get_fsdp_state",  # of modules that FSDP2 shards; the next three are in it
    "_fsdp_param_group",
    "_fsdp_param_groups",
    "_unsharded_param",
    "_hop_compile_and_call",  # torch functions whose frames are recognised
    "_maybe_compile_and_run_fn",
)
"""Attributes that `require` cannot check; they have tests like the others."""


def require(names: Iterable[str]) -> None:
    """Check that torch has these names.

    Raises:
        UnsupportedError: This torch does not have one of them.

    Examples:
        >>> require(["torch._C._has_storage"])
    """
    missing = [name for name in names if not _exists(name)]
    if missing:
        raise UnsupportedError(
            f"expected torch {TESTED[0]} to {TESTED[-1]}, got {torch.__version__}, "
            f"which lacks {', '.join(missing)}. Install a version in that range."
        )


def _exists(name: str) -> bool:
    parts = name.split(".")
    found: Any = torch
    for position, part in enumerate(parts[1:], start=2):
        plain = part.removesuffix("()")
        if not hasattr(found, plain):
            try:
                importlib.import_module(".".join(parts[:position]))
            except ImportError:
                return False
        found = getattr(found, plain, None)
        if part.endswith("()") and found is not None:
            found = found()
        if found is None and position < len(parts):
            return False
    return True
