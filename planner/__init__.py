"""Floor 2: what a step needs in memory and time, and what to do about it. Reads graphs, writes plans."""

from .cost import node_seconds as node_seconds
from .hardware import SPECS as SPECS
from .hardware import HardwareSpec as HardwareSpec
from .hardware import spec_from_json as spec_from_json
from .memory import CATEGORIES as CATEGORIES
from .memory import WORKSPACE as WORKSPACE
from .memory import MemoryTimeline as MemoryTimeline
from .memory import Peak as Peak
from .memory import categories_of as categories_of
from .memory import category_of_input as category_of_input
from .memory import simulate as simulate
from .plan import STRATEGIES as STRATEGIES
from .plan import Decision as Decision
from .plan import Plan as Plan
from .plan import Prediction as Prediction
from .plan import Repeat as Repeat
from .plan import load_plan as load_plan
from .plan import rounded as rounded
from .search import fingerprint_of as fingerprint_of
from .search import plan_step as plan_step
from .search import prediction_of as prediction_of
from .tables import Table as Table
from .timeline import stage_of as stage_of
from .timeline import timeline_of as timeline_of
from .workspaces import Workspaces as Workspaces
from .workspaces import measured_workspaces as measured_workspaces
