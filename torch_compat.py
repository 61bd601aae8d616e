"""Every private name of torch that stepgraph uses, with the version it was seen in.

Nothing else in the package imports a name of torch that starts with an underscore, except for ``torch._ops.OpOverload``, the
type of a graph's targets, and its ``_schema``, which have no public names.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource  # seen in 2.13
from torch._subclasses.fake_impls import fast_detach  # seen in 2.13
from torch._subclasses.fake_tensor import (  # seen in 2.13
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    in_kernel_invocation_manager,
)
from torch.autograd import profiler_legacy  # seen in 2.13
from torch.fx.experimental.proxy_tensor import (  # seen in 2.13
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    _ProxyTensor,
    fetch_sym_proxy,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import (  # seen in 2.13
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_unbacked_symbols,
)
from torch.multiprocessing.reductions import StorageWeakRef  # seen in 2.13
from torch.optim.optimizer import (  # seen in 2.13
    _default_to_fused_or_foreach,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)
from torch.utils import _foreach_utils as foreach_utils  # seen in 2.13
from torch.utils import _pytree as pytree  # seen in 2.13
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # seen in 2.13
from torch.utils.weak import WeakTensorKeyDictionary  # seen in 2.13

# Attributes that torch's optimizers set on themselves and that carry no result. Seen in 2.13.
OPTIMIZER_BOOKKEEPING = frozenset({"_opt_called", "_need_device_dtype_check_for_fused"})

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GraphTracer",
    "GuardOnDataDependentSymNode",
    "OPTIMIZER_BOOKKEEPING",
    "RecordingMode",
    "ShapeEnv",
    "StorageWeakRef",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "WeakTensorKeyDictionary",
    "autograd_sequence_number",
    "checkpoint_replaced",
    "compile_with_inductor",
    "constant_of",
    "default_foreach",
    "device_and_dtype_groups",
    "differing_flags",
    "dispatch_modes_disabled",
    "fake_kernel",
    "fake_snapshot",
    "foreach_norm_by_default",
    "forget_constant",
    "free_unbacked_symbols",
    "fused_optimizers_replaced",
    "grad_mode_below_autograd",
    "has_own_kernel",
    "has_post_accumulate_hooks",
    "has_step_hooks",
    "has_symbolic_shape",
    "hyper_scalar",
    "is_composite",
    "like_fake",
    "mark_stepped",
    "metadata_guard",
    "module_hooks_of",
    "numeric_flags",
    "parameter_hooks_of",
    "pytree",
    "recorded_allocations",
    "selective_policy",
    "sequence_number_of",
    "step_without_hooks",
    "storage_key",
    "tensor_hooks_of",
    "traced_node",
    "track_fixed_shape",
    "track_tensor_tree",
    "tracked_tensor",
]


def storage_key(tensor: Tensor) -> int:
    """Identity of the storage behind ``tensor``; valid while the tensor is alive. ``_cdata`` seen in 2.13."""
    return int(tensor.untyped_storage()._cdata)


def constant_of(fake: Tensor) -> Tensor | None:
    """The real value of a fake tensor that is a known constant. ``FakeTensor.constant`` seen in 2.13."""
    return cast("Tensor | None", getattr(fake, "constant", None))


def traced_node(value: Any) -> torch.fx.Node | None:
    """The node that stands for a tensor in the trace that is going on. ``get_proxy_slot`` seen in 2.13."""
    proxy_mode = get_proxy_mode()
    slot = get_proxy_slot(value, proxy_mode.tracer, None) if proxy_mode is not None else None
    return None if slot is None else slot.proxy.node


class grad_mode_below_autograd:
    """Within the context, kernels see grad mode on, as in eager's forward, while nothing is recorded for backward.

    oneDNN's LSTM, for one, returns the workspace that its backward needs only then. ``_AutoDispatchBelowAutograd`` seen in
    2.13.
    """

    def __enter__(self) -> None:
        self._guard = torch._C._AutoDispatchBelowAutograd()
        self._guard.__enter__()
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)

    def __exit__(self, *exception: object) -> None:
        torch._C._set_grad_enabled(self._before)
        self._guard.__exit__(*exception)


def forget_constant(fake: Tensor, tracer: GraphTracer) -> None:
    """Makes a fake tensor's value unknown again, to fake mode and to a trace. ``FakeTensor.constant`` seen in 2.13."""
    if getattr(fake, "constant", None) is not None:
        fake.constant = None  # type: ignore[attr-defined]
    if (tracked := tracked_tensor(fake, tracer)) is not None:
        tracked.constant = None


def dispatch_modes_disabled() -> contextlib.AbstractContextManager[Any]:
    """Within the context, operators run for real although a trace is going on. Seen in 2.13."""
    return cast("contextlib.AbstractContextManager[Any]", _disable_current_modes())


def autograd_sequence_number() -> int:
    """Sequence number that the next autograd node will get. ``_get_sequence_nr`` seen in 2.13."""
    return int(torch._C._autograd._get_sequence_nr())


def sequence_number_of(grad_fn: torch.autograd.graph.Node) -> int:
    """The sequence number that an autograd node got. ``_sequence_nr`` seen in 2.13."""
    return int(grad_fn._sequence_nr())


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tells schedulers that the optimizer has stepped, or else they warn. ``_opt_called`` seen in 2.13."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


class RecordingMode(ProxyTorchDispatchMode):
    """``ProxyTorchDispatchMode`` without the guard against Dynamo around each call, which takes 10 µs. Seen in 2.13."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class GraphTracer(PythonKeyTracer):
    """Holds the graph that :class:`ProxyTorchDispatchMode` records into.

    Attribute names and ``create_arg`` seen in 2.13.

    Args:
        on_create: called with every node, before its operator runs.

    Attributes:
        graph: the nodes.
        root: the module that holds the real tensors that the graph reads by name.
    """

    def __init__(self, on_create: Callable[[torch.fx.Node], None]) -> None:
        super().__init__()
        self.graph = torch.fx.Graph(tracer_cls=PythonKeyTracer)
        self.root = torch.nn.Module()
        self.tensor_attrs: dict[Any, str] = {}
        self.submodule_paths = None
        self._on_create = on_create

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """As in torch, and tells ``on_create``."""
        node = super().create_node(*args, **kwargs)
        self._on_create(node)
        return node

    def operand(self, value: Any) -> Any:
        """The node that stands for a recorded tensor or symbol; other values become constants of the graph."""
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            known = fetch_sym_proxy(self)(value)
        else:
            known = self.unwrap_proxy(value)
        return known.node if isinstance(known, torch.fx.Proxy) else self.create_arg(known)


def tracked_tensor(tensor: Tensor, tracer: GraphTracer) -> Any:
    """What the trace knows of a tensor (``.proxy.node``, ``.constant``), or None. ``tensor_tracker`` seen in 2.13."""
    return tracer.tensor_tracker.get(tensor)


def track_fixed_shape(tensor: Tensor, node: torch.fx.Node, tracer: GraphTracer) -> None:
    """``track_tensor_tree`` for a tensor without symbols: ``node`` stands for it from now on."""
    tracer.tensor_tracker[tensor] = _ProxyTensor(torch.fx.Proxy(node, tracer), None)


def fake_snapshot(fake: FakeTensor) -> FakeTensor:
    """A fake tensor on the same memory, outside of autograd. ``fast_detach`` seen in 2.13."""
    return fast_detach(fake.fake_mode, fake)


def like_fake(template: FakeTensor, meta: Tensor) -> FakeTensor:
    """``FakeTensor(template.fake_mode, meta, template.fake_device)``, ten times faster.

    ``_make_subclass`` and ``_set_throw_on_mutable_data_ptr`` as in ``FakeTensor.__new__``, seen in 2.13; ``template`` must be
    new, so that it carries no memo.
    """
    fake = Tensor._make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=template.fake_device
    )
    torch._C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__.update(template.__dict__)
    return fake


def fake_kernel(mode: FakeTensorMode) -> contextlib.AbstractContextManager[None]:
    """Within the context, fake tensors are the meta tensors behind them. ``in_kernel_invocation_manager`` seen in 2.13."""
    return in_kernel_invocation_manager(mode)


def has_symbolic_shape(fake: Tensor) -> bool:
    """Whether a size or stride of a fake tensor is a symbol. ``_has_symbolic_sizes_strides`` seen in 2.13."""
    return bool(fake._has_symbolic_sizes_strides)


def has_own_kernel(overload: torch._ops.OpOverload) -> bool:
    """Whether a backend implements ``overload`` itself. ``_dispatch_has_kernel_for_dispatch_key`` seen in 2.13."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CPU"))


_NUMERIC_FLAGS: dict[str, Callable[[], Any]] = {
    "the default dtype": torch.get_default_dtype,
    "torch.backends.mkldnn.enabled": torch._C._get_mkldnn_enabled,
    "torch.backends.cudnn.enabled": torch._C._get_cudnn_enabled,
    "torch.backends.cudnn.deterministic": torch._C._get_cudnn_deterministic,
    "torch.backends.cudnn.benchmark": torch._C._get_cudnn_benchmark,
    "torch.backends.cudnn.allow_tf32": torch._C._get_cudnn_allow_tf32,
    "torch.use_deterministic_algorithms": torch._C._get_deterministic_algorithms,
    "torch.set_float32_matmul_precision": torch._C._get_float32_matmul_precision,
}
_NUMERIC_GETTERS = list(_NUMERIC_FLAGS.values())


def numeric_flags() -> list[Any]:
    """Process-wide settings that change what operators compute and that no call carries. Getters seen in 2.13."""
    return [get() for get in _NUMERIC_GETTERS]


def differing_flags(before: list[Any], now: list[Any]) -> list[str]:
    """Names of the settings of :func:`numeric_flags` that differ."""
    return [name for name, a, b in zip(_NUMERIC_FLAGS, before, now, strict=True) if a != b]


def is_composite(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator is run as others (CompositeImplicitAutograd), on some device at least.

    Some that could be, such as ``native_batch_norm``, have kernels of their own. ``_can_decompose`` and
    ``_dispatch_has_kernel_for_dispatch_key`` seen in 2.13.
    """
    backends = ("CPU", "CUDA") if torch.backends.cuda.is_built() else ("CPU",)
    has_kernels = all(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), b) for b in backends)
    return operator._can_decompose() and not has_kernels


def hyper_scalar(fake: Tensor, value: float, name: str, shape_env: ShapeEnv) -> Any:
    """Makes ``fake.item()`` a symbol that stands for ``value``: a branch on it becomes a guard of ``shape_env``.

    ``item_memo`` and ``create_unspecified_symbol`` seen in 2.13.
    """
    source = ConstantSource(name)
    symbol = shape_env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    scalar = shape_env.create_symfloatnode(symbol, hint=value, source=source)
    fake.item_memo = scalar  # type: ignore[attr-defined]
    return fake.item(), symbol


@contextlib.contextmanager
def fused_optimizers_replaced(replacements: dict[str, Callable[..., None]]) -> Iterator[None]:
    """Within the context, ``torch._fused_adam_`` and the like are the given functions, by name. Seen in 2.13."""
    originals = {name: getattr(torch, name) for name in replacements}
    try:
        for name, replacement in replacements.items():
            setattr(torch, name, replacement)
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def selective_policy(context: Any) -> Callable[[Any, tuple[Any, ...], dict[str, Any], Any], bool] | None:
    """Whether eager would keep what an operator of a selective checkpoint returned; None where ``context`` is no such one.

    Args:
        context: the first of the two that a ``context_fn`` returns. ``_CachingTorchDispatchMode`` and its ``policy_fn`` seen in
            2.13; that the policy is shown the result (``op_output``) as well.
    """
    if not isinstance(context, torch_checkpoint._CachingTorchDispatchMode):
        return None
    policies, shown_type = torch_checkpoint.CheckpointPolicy, torch_checkpoint.SelectiveCheckpointContext
    decide, saving = context.policy_fn, (policies.MUST_SAVE, policies.PREFER_SAVE)
    shows_result = "op_output" in inspect.signature(shown_type.__init__).parameters

    def keeps(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        if func in torch_checkpoint.SAC_IGNORED_OPS:
            return False
        shown: dict[str, Any] = {"op_output": result} if shows_result else {}
        decision = decide(shown_type(is_recompute=False, **shown), func, *args, **kwargs)
        return decision is True or decision in saving

    return keeps


@contextlib.contextmanager
def checkpoint_replaced(non_reentrant: Callable[..., Iterator[None]], reentrant: Callable[..., Any]) -> Iterator[None]:
    """Within the context, checkpointed regions run through the given functions.

    torch's internals are replaced and not ``checkpoint`` itself, since libraries keep references to it.
    ``_checkpoint_without_reentrant_generator`` and ``CheckpointFunction.apply`` seen in 2.13.
    """
    generator = torch_checkpoint._checkpoint_without_reentrant_generator
    function = torch_checkpoint.CheckpointFunction
    original_apply, thread = function.apply, threading.get_ident()

    def pick(mine: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (mine if threading.get_ident() == thread else original)(*args, **kwargs)

    had_own_apply = "apply" in function.__dict__
    own_apply = function.__dict__.get("apply")
    torch_checkpoint._checkpoint_without_reentrant_generator = pick(non_reentrant, generator)
    function.apply = staticmethod(pick(reentrant, original_apply))  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch_checkpoint._checkpoint_without_reentrant_generator = generator
        if had_own_apply:
            function.apply = own_apply  # type: ignore[method-assign,assignment]
        else:
            del function.apply


def default_foreach(params: list[Tensor]) -> bool:
    """Whether an optimizer that was not told takes its foreach implementation for these (real) parameters."""
    _, foreach = _default_to_fused_or_foreach(params, differentiable=False, use_fused=False)
    return bool(foreach)


def foreach_norm_by_default(device: torch.device) -> bool:
    """Whether torch's own gradient clipping takes foreach kernels for plain tensors on ``device``."""
    return foreach_utils._device_has_foreach_support(device)


def device_and_dtype_groups(specs: list[tuple[torch.device, torch.dtype]]) -> list[list[int]]:
    """Positions of ``specs`` in the groups, and the order of groups, in which eager's total norm visits them."""
    stand_ins = [torch.empty(0, device=device, dtype=dtype) for device, dtype in specs]
    groups = foreach_utils._group_tensors_by_device_and_dtype([stand_ins], with_indices=True)  # type: ignore[list-item]
    return [list(indices) for _, indices in groups.values()]


def has_post_accumulate_hooks(param: Tensor) -> bool:
    """``_post_accumulate_grad_hooks`` seen in 2.13."""
    return bool(getattr(param, "_post_accumulate_grad_hooks", None))


def parameter_hooks_of(params: list[Tensor]) -> list[dict[int, Any]]:
    """The dicts that hold the hooks on each of ``params``, live; an empty one where none was ever registered.

    ``_backward_hooks`` seen in 2.13.
    """
    return [p._backward_hooks or {} for p in params]


def metadata_guard(tensors: list[Tensor]) -> Callable[..., bool]:
    """A check, faster than Python's, that tensors have the metadata and ``requires_grad`` that these have now.

    ``torch._C._dynamo.guards.TensorGuards`` seen in 2.13.
    """
    sizes: Any
    strides: Any
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return cast("Callable[..., bool]", guards.check)


def module_hooks_of(modules: list[torch.nn.Module]) -> list[dict[int, Any]]:
    """The dicts that hold the modules' hooks and those of all modules, live. Attribute names seen in 2.13."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    everywhere = [getattr(torch.nn.modules.module, f"_global{kind}") for kind in kinds]
    return [getattr(module, kind) for module in modules for kind in kinds] + everywhere


def tensor_hooks_of(param: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """The hooks that ``param.register_hook`` registered. ``_backward_hooks`` seen in 2.13."""
    return list((param._backward_hooks or {}).values())


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step()`` runs hooks, its own or those of all optimizers. Attribute names seen in 2.13."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def step_without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """``kind.step`` below the wrapper that runs hooks, ``profile_hook_step``; its mark ``hooked`` seen in 2.13."""
    step: Any = kind.step
    return cast("Callable[[torch.optim.Optimizer], Any]", step.__wrapped__ if getattr(step, "hooked", False) else step)


def compile_with_inductor(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compiles a graph module over fake ``inputs``, for their shapes alone; torch caches the result on disk."""
    from torch._inductor import standalone_compile  # seen in 2.13; slow to import

    options = {"config_patches": {"fallback_random": True}}
    with torch.no_grad():
        return standalone_compile(module, inputs, dynamic_shapes="from_graph", options=options)


def recorded_allocations(run: Callable[[], Any]) -> tuple[Any, list[list[int]]]:
    """What ``run`` returns, and the bytes of each allocation (positive) and release (negative) on the CPU, by thread, in order.

    The profiler behind ``profiler_legacy`` (seen in 2.13): it starts and stops in 0.1 ms, where ``torch.profiler`` takes tens,
    and keeps the order of events within a thread.

    Not for captures: what autograd does to the thread's state in them can end the recording.

    Raises:
        RuntimeError: another profiler is at work.
    """
    profiler: Any = profiler_legacy
    profiler._enable_profiler_legacy(profiler.profile(profile_memory=True).config())
    try:
        result = run()
    finally:
        threads = profiler._disable_profiler_legacy()
    return result, [[e.cpu_memory_usage() for e in events if e.kind() == "memory_alloc"] for events in threads]
