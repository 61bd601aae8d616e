"""Floor 4: runs step graphs on live models and optimizers."""

from .attributes import AttributeWatch as AttributeWatch
from .binding import Binding as Binding
from .clipping import clip_grad_norm_ as clip_grad_norm_
from .clipping import clip_grad_value_ as clip_grad_value_
from .clipping import register_clipping as register_clipping
from .compiled import CompiledBatch as CompiledBatch
from .compiled import StepOptions as StepOptions
from .compiled import Variant as Variant
from .executor import Executor as Executor
from .executor import first_run_error as first_run_error
from .guards import MembershipGuard as MembershipGuard
from .guards import ModelGuard as ModelGuard
from .inductor import lowered as lowered
from .nonfinite import NonfiniteReport as NonfiniteReport
from .nonfinite import first_nonfinite as first_nonfinite
from .regions import Region as Region
from .regions import regions_of as regions_of
from .result import StepResult as StepResult
from .result import describe_nonfinite as describe_nonfinite
from .rollback import restored_on_error as restored_on_error
from .verify import VerifyReport as VerifyReport
from .verify import verify_step as verify_step
