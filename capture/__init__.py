"""Floor 2: model, loss and optimizer to graphs. Nothing real is read, run or changed here."""

from .ambient import garbage_collection_paused as garbage_collection_paused
from .ambient import is_capturing as is_capturing
from .batch import FlatBatch as FlatBatch
from .batch import LossCall as LossCall
from .batch import batch_signature as batch_signature
from .batch import flatten_batch as flatten_batch
from .batch import is_plain as is_plain
from .batch import varying_leaves as varying_leaves
from .forward_backward import CapturedStep as CapturedStep
from .forward_backward import capture_forward_backward as capture_forward_backward
from .module_tensors import MODULE_INTERNALS as MODULE_INTERNALS
from .module_tensors import HeldTensor as HeldTensor
from .module_tensors import ModuleState as ModuleState
from .module_tensors import ModuleTensors as ModuleTensors
from .module_tensors import containers_in as containers_in
from .module_tensors import refill as refill
from .module_tensors import tensors_of as tensors_of
from .optimizer import CapturedUpdate as CapturedUpdate
from .optimizer import capture_update as capture_update
from .optimizer import group_constants as group_constants
from .optimizer import hypers_of as hypers_of
from .optimizer import state_signature as state_signature
from .optimizer import update_targets as update_targets
from .preflight import check_model as check_model
from .preflight import check_optimizer as check_optimizer
from .regions import regions_run_once as regions_run_once
