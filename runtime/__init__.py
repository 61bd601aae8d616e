"""Floor 4: runs step graphs on live models and optimizers."""

from .binding import Binding as Binding
from .compiled import CompiledBatch as CompiledBatch
from .compiled import StepOptions as StepOptions
from .compiled import Variant as Variant
from .executor import EagerExecutor as EagerExecutor
from .guards import MembershipGuard as MembershipGuard
from .guards import ModelGuard as ModelGuard
from .result import StepResult as StepResult
from .result import describe_nonfinite as describe_nonfinite
from .verify import VerifyReport as VerifyReport
from .verify import verify_step as verify_step
