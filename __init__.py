"""stepgraph: a compiler for PyTorch training steps."""

from importlib.metadata import version as _version

from .api import TrainStep as TrainStep
from .api import compile_train_step as compile_train_step
from .errors import CaptureError as CaptureError
from .errors import ConfigError as ConfigError
from .errors import GuardError as GuardError
from .errors import NonFiniteError as NonFiniteError
from .errors import NotYetError as NotYetError
from .errors import PlanError as PlanError
from .errors import PlanMismatchError as PlanMismatchError
from .errors import StepGraphError as StepGraphError
from .errors import StepGraphWarning as StepGraphWarning
from .errors import VerificationError as VerificationError
from .planner import Plan as Plan
from .planner import load_plan as load_plan
from .runtime import LossScale as LossScale
from .runtime import NonfiniteReport as NonfiniteReport
from .runtime import SkipRecord as SkipRecord
from .runtime import StepLog as StepLog
from .runtime import StepRecord as StepRecord
from .runtime import StepResult as StepResult
from .runtime import VerifyReport as VerifyReport
from .runtime import clip_grad_norm_ as clip_grad_norm_
from .runtime import clip_grad_value_ as clip_grad_value_
from .tools import Job as Job

__version__ = _version("stepgraph")
