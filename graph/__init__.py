"""Floor 1: the step graph, what its operators do, what it must obey, and how it prints."""

from . import ops as ops
from .effects import UNINITIALISED as UNINITIALISED
from .effects import Effects as Effects
from .effects import argument as argument
from .effects import effects_of as effects_of
from .effects import is_scalar_function as is_scalar_function
from .effects import nodes_in as nodes_in
from .effects import picks_indices as picks_indices
from .effects import writes_of as writes_of
from .effects import written_nodes as written_nodes
from .spec import InputRole as InputRole
from .spec import InputSpec as InputSpec
from .spec import LogicalKey as LogicalKey
from .spec import OutputRole as OutputRole
from .spec import OutputSpec as OutputSpec
from .spec import Phase as Phase
from .step_graph import StepGraph as StepGraph
from .step_graph import family_of as family_of
from .storage import StorageMap as StorageMap
from .storage import storages_of as storages_of
from .storage import tensors_in as tensors_in
from .text import format_graph as format_graph
