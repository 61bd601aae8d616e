"""Which hooks modules and parameters have, without asking each of them on every call."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import GuardError
from ..torch_compat import has_post_accumulate_hooks, module_hooks_of, parameter_hooks_of


class HookWatch:
    """The handles of all hooks that a trace would run.

    Whatever registers a hook takes the next number of :class:`RemovableHandle`, so that nothing is looked through while
    that number stands still; a hook that is removed leaves a dict that is known.
    """

    def __init__(self, modules: list[nn.Module], params: list[Tensor]) -> None:
        self._params = params
        self._of_modules = module_hooks_of(modules)
        self._filled: list[dict[int, object]] = []
        self._handles: list[tuple[int, ...]] = []
        self._signature: Hashable = ()
        self._next_id = -1

    def signature(self) -> Hashable:
        """Equal where every module and parameter has the same hooks. Handles are never used again, unlike identities.

        Raises:
            GuardError: a parameter has a hook that the step cannot run.
        """
        if RemovableHandle.next_id != self._next_id or list(map(tuple, self._filled)) != self._handles:
            if any(map(has_post_accumulate_hooks, self._params)):
                raise GuardError(
                    "a parameter got a post-accumulate-grad hook after the step was compiled. The graph never accumulates "
                    "into .grad, so the hook would not run: remove it, or use param.register_hook, which is traced."
                )
            dicts = [*self._of_modules, *parameter_hooks_of(self._params)]
            filled = {position: hooks for position, hooks in enumerate(dicts) if hooks}
            self._filled = list(filled.values())
            self._handles = list(map(tuple, self._filled))
            self._signature = tuple(zip(filled, self._handles, strict=True))
            self._next_id = RemovableHandle.next_id
        return self._signature
