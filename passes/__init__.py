"""Floor 3: rewrites of the step graph, one file a pass."""

from .accumulate import Accumulate as Accumulate
from .accumulate import flush_graph as flush_graph
from .base import Pass as Pass
from .base import PassResult as PassResult
from .compact_masks import CompactMasks as CompactMasks
from .fold import can_fold as can_fold
from .pipeline import PASSES as PASSES
from .pipeline import PassRecord as PassRecord
from .pipeline import backward_passes as backward_passes
from .pipeline import run_passes as run_passes
from .pipeline import training_passes as training_passes
from .recompute import Recompute as Recompute
from .skip_on_device import SkipOnDevice as SkipOnDevice
from .skip_on_device import is_skippable as is_skippable
