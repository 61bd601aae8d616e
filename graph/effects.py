"""What each operator does besides computing its result.

One table, asked by every pass and by the verifier. Neither the schema nor ``Node.is_impure`` is enough:
``aten.native_batch_norm`` writes its running statistics while its schema denies it. What is not known is effectful.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .operands import argument, nodes_in


@dataclass(frozen=True)
class Effects:
    """Effects of one operator call.

    Attributes:
        random: draws from a generator.
        writes: names of the arguments that it writes in place.
        collective: communicates with other ranks.
        moves: copies between memories (host, device).
        control: decides whether what follows runs.
        opaque: nothing is known; it must stay where it is.
    """

    random: bool = False
    writes: tuple[str, ...] = ()
    collective: bool = False
    moves: bool = False
    control: bool = False
    opaque: bool = False

    @property
    def pure(self) -> bool:
        """Whether the result is all there is: the call may be dropped, repeated or moved between its operands' uses."""
        return not (self.random or self.writes or self.collective or self.moves or self.control or self.opaque)


PURE = Effects()
OPAQUE = Effects(opaque=True)

# Operators whose schema hides what they write or draw. Seen in torch 2.13.
_HIDDEN_WRITES: dict[str, tuple[str, ...]] = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::batch_norm_update_stats": ("running_mean", "running_var"),
    "aten::_batch_norm_impl_index": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
    "aten::rrelu_with_noise": ("noise",),
}
# Operators that draw only where a dropout probability is above zero: argument name, and the argument that turns it on.
_DRAWS_IF_POSITIVE: dict[str, str] = {
    "aten::_scaled_dot_product_flash_attention": "dropout_p",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "dropout_p",
    "aten::_scaled_dot_product_efficient_attention": "dropout_p",
    "aten::_scaled_dot_product_cudnn_attention": "dropout_p",
    "aten::_scaled_dot_product_fused_attention_overrideable": "dropout_p",
    "aten::_scaled_dot_product_attention_math": "dropout_p",
    "aten::_flash_attention_forward": "dropout_p",
    "aten::_efficient_attention_forward": "dropout_p",
    "aten::_cudnn_attention_forward": "dropout_p",
    "aten::scaled_dot_product_attention": "dropout_p",
    "aten::_cudnn_rnn": "dropout",
    "aten::miopen_rnn": "dropout",
    "aten::native_dropout": "p",
}
# Operators whose result is memory that nobody has written yet: two calls are not equal, and there is nothing to compare.
UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
# Operators that check and raise, or that must not be repeated: they stay although they compute nothing.
_CHECKS = (
    "aten::_assert_async",
    "aten::_assert_scalar",
    "aten::_assert_tensor_metadata",
    "aten::sym_constrain_range",
    "aten::sym_constrain_range_for_size",
    "aten::_print",
    "aten::_functional_assert_async",
    "aten::_functional_assert_scalar",
    "aten::_functional_sym_constrain_range",
    "aten::_functional_sym_constrain_range_for_size",
)
_KNOWN_NAMESPACES = ("aten", "prims", "prim", "profiler", "stepgraph")
_SCALAR_MODULES = ("operator", "_operator", "math", "builtins")


def effects_of(node: fx.Node) -> Effects:
    """Effects of ``node``; placeholders, outputs and attribute reads have none."""
    remembered: tuple[Any, Any, Any, Effects] | None = node.meta.get("effects")
    if remembered is not None and remembered[0] is node.target:
        _, args, kwargs, effects = remembered
        if args is None or (args is node.args and kwargs is node.kwargs):
            return effects
    effects = _effects_of(node)
    arguments = (node.args, node.kwargs) if _depends_on_arguments(node.target) else (None, None)
    node.meta["effects"] = (node.target, *arguments, effects)
    return effects


@functools.cache
def _depends_on_arguments(target: Any) -> bool:
    """Whether two calls of this operator may have different effects."""
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else None
    return name in _HIDDEN_WRITES or name in _DRAWS_IF_POSITIVE


def _effects_of(node: fx.Node) -> Effects:
    if node.op in ("placeholder", "output", "get_attr"):
        return PURE
    if node.op != "call_function":
        return OPAQUE
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _effects_of_overload(node, target)
    return PURE if is_scalar_function(target) else OPAQUE


def is_scalar_function(target: Any) -> bool:
    """Whether ``target`` is a Python function on numbers or tuples, such as ``operator.mul`` or ``torch.sym_sqrt``."""
    name = getattr(target, "__name__", "")
    if name.startswith(("sym_", "_sym_")) and getattr(torch, name, None) is target:
        return True
    return callable(target) and getattr(target, "__module__", None) in _SCALAR_MODULES


def _effects_of_overload(node: fx.Node, target: torch._ops.OpOverload) -> Effects:
    effects = _declared_effects(target)
    name = target._schema.name
    if hidden := _HIDDEN_WRITES.get(name):
        written = tuple(a for a in hidden if argument(node, a) is not None)
        effects = replace(effects, writes=effects.writes + written)
    if name in _DRAWS_IF_POSITIVE:
        random = _may_be_positive(argument(node, _DRAWS_IF_POSITIVE[name])) and _is_training(node)
        effects = replace(effects, random=random)
    return effects


@functools.cache
def _declared_effects(target: torch._ops.OpOverload) -> Effects:
    """What can be said of an operator whatever its arguments are."""
    name = target._schema.name
    namespace = name.split("::")[0]
    if name in _OWN:
        return _OWN[name]
    if namespace in ("_c10d_functional", "c10d_functional"):
        return Effects(collective=True)
    writes = tuple(a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    if namespace not in _KNOWN_NAMESPACES or name in _CHECKS:
        return replace(OPAQUE, writes=writes)
    if not target._schema.returns and not writes and namespace == "aten":
        return OPAQUE  # called for an effect that its schema does not tell: it checks, prints or configures
    if name.startswith("aten::_fused_") and "state_steps" not in writes:
        writes += tuple(a.name for a in target._schema.arguments if a.name == "state_steps")
    return Effects(random=torch.Tag.nondeterministic_seeded in target.tags, writes=writes)


# Operators of stepgraph's own (graph/ops.py); the twins of fused kernels declare what they write in their schema.
_OWN: dict[str, Effects] = {
    "stepgraph::nonfinite_code": PURE,
    "stepgraph::loss_code": PURE,
    "stepgraph::gate": Effects(control=True),
}


def _may_be_positive(value: Any) -> bool:
    return not isinstance(value, (int, float)) or value > 0


def _is_training(node: fx.Node) -> bool:
    train = argument(node, "train")
    return train is None or bool(train)


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The operands that ``node`` writes in place."""
    writes = effects_of(node).writes
    return [operand for name in writes for operand in nodes_in(argument(node, name))] if writes else []


def arguments_without_writes(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments with which the call computes the same and updates no statistics, as it would if repeated.

    A batch norm in training computes its result from the batch, and writes running statistics beside that: without them,
    the result has the same bits. For all other calls these are their own arguments.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or argument(node, "training") is not True:
        return node.args, node.kwargs
    hidden = _HIDDEN_WRITES.get(target._schema.name, ())
    names = [a.name for a in target._schema.arguments]
    args = tuple(None if name in hidden else value for name, value in zip(names, node.args, strict=False))
    return args, {name: None if name in hidden else value for name, value in node.kwargs.items()}


def picks_indices(node: fx.Node) -> bool:
    """Whether the op's results are indices chosen by comparing values: ties make a second evaluation unsafe."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = target._schema.name
    return name in _INDEX_PICKING or (name in ("aten::max", "aten::min") and len(target._schema.returns) == 2)


_INDEX_PICKING: frozenset[str] = frozenset(
    {
        "aten::topk",
        "aten::sort",
        "aten::argsort",
        "aten::msort",
        "aten::argmax",
        "aten::argmin",
        "aten::kthvalue",
        "aten::mode",
        "aten::cummax",
        "aten::cummin",
        "aten::median",
        "aten::nanmedian",
        "aten::max_pool2d_with_indices",
        "aten::max_pool3d_with_indices",
        "aten::adaptive_max_pool2d",
        "aten::adaptive_max_pool3d",
        "aten::fractional_max_pool2d",
        "aten::nonzero",
        "aten::unique_consecutive",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::multinomial",
    }
)


def writes_of(target: torch._ops.OpOverload) -> set[str]:
    """Names of the arguments that the operator writes where they are given, whatever the call."""
    return {*_declared_effects(target).writes, *_HIDDEN_WRITES.get(target._schema.name, ())}
