"""What is refused before anything is traced, by name and with a remedy."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ..device import require_supported, stands_for
from ..errors import CaptureError, ConfigError, NotYetError
from ..torch_compat import has_post_accumulate_hooks
from .module_tensors import ModuleTensors

_WRAPPERS = {
    "DistributedDataParallel": "pass the module itself; data parallelism is a plan",
    "FullyShardedDataParallel": "pass the module itself; sharding is a plan",
    "DataParallel": "pass the module itself",
    "OptimizedModule": "pass the module itself, before torch.compile",
    "DeepSpeedEngine": "pass the module itself",
}


def check_model(model: nn.Module, tensors: ModuleTensors) -> torch.device:
    """Refuses models and process groups that cannot be compiled for; returns the device that they run on."""
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise NotYetError(
            f"a process group of {torch.distributed.get_world_size()} ranks is initialized, and this version trains on one: "
            "each rank would train alone, and nothing would be reduced. Run one "
            "process."
        )
    if remedy := _WRAPPERS.get(type(model).__name__):
        raise ConfigError(f"the model is wrapped in {type(model).__name__}: {remedy}.")
    devices: dict[torch.device, str] = {}
    for held in tensors.params:
        _check_parameter(held.key, held.tensor)
        devices.setdefault(held.tensor.device, held.key)
    if len(devices) > 1:
        places = ", ".join(f"{key!r} on {device}" for device, key in devices.items())
        raise CaptureError(
            f"parameters are on {len(devices)} devices: {places}.",
            module_path=list(devices.values())[1].rpartition(".")[0],
            remedy="move the model to one device with model.to(device) before building the optimizer",
        )
    if not devices:
        raise ConfigError("the model has no parameters, so there is nothing to train")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{path or 'the model'!r} is a ScriptModule, which runs outside of Python and cannot be traced.",
                module_path=path,
                remedy="use the module that it was made from",
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise CaptureError(
                f"{type(module).__name__} {path!r} asks for sparse gradients, which are not supported.",
                module_path=path,
                remedy="build it with sparse=False",
            )
    own = next(iter(devices))
    device = stands_for(own)
    require_supported(device, f"parameter {devices[own]!r}")
    return device


def _check_parameter(key: str, param: Tensor) -> None:
    if isinstance(param, UninitializedParameter):
        raise CaptureError(
            f"parameter {key!r} is lazy and has no shape yet.",
            module_path=key.rpartition(".")[0],
            remedy="run the model once in eager before compiling the step",
        )
    if type(param) not in (Tensor, nn.Parameter):
        raise CaptureError(
            f"parameter {key!r} is a {type(param).__name__}, a tensor subclass that is not supported.",
            module_path=key.rpartition(".")[0],
            remedy="use plain parameters; sharded ones come from a plan",
        )
    if param.layout is not torch.strided:
        raise CaptureError(
            f"parameter {key!r} has layout {param.layout}; only dense parameters are supported.",
            module_path=key.rpartition(".")[0],
            remedy="use a dense parameter",
        )
    if has_post_accumulate_hooks(param):
        raise CaptureError(
            f"parameter {key!r} has a post-accumulate-grad hook. The graph never accumulates into .grad, so the hook would "
            "not run.",
            module_path=key.rpartition(".")[0],
            remedy="remove the hook (an optimizer in backward is what the compiled step does anyway), or use "
            "param.register_hook, which is traced",
        )


def check_optimizer(optimizer: Any, tensors: ModuleTensors) -> None:
    """Refuses optimizers that cannot be traced, or that do not belong to the model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS evaluates the loss several times a step through a closure and cannot be compiled.")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__}.step needs a closure that evaluates the loss again, which a compiled step cannot give "
            "it. Use an optimizer whose step() takes none."
        )
    if "step" in optimizer.__dict__ and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ConfigError(
            "optimizer.step was replaced on the instance, so what it does is unknown. Subclass the optimizer."
        )
    known = {id(held.tensor): held.key for held in tensors.params}
    ours = 0
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in known:
                raise ConfigError(
                    f"parameter {position} of optimizer group {index} (shape {list(param.shape)}) does not belong to the "
                    "model. The step would never update it. Build the optimizer from model.parameters(), after the last "
                    "change of the model's structure or device; if it belongs to a criterion, put model and criterion into one "
                    "module."
                )
            ours += 1
    if not ours:
        raise ConfigError("the optimizer holds none of the model's parameters; build it from model.parameters()")
