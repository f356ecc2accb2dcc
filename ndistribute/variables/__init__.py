"""What a replica reads and writes."""

from ndistribute.variables.policy import VariableAggregation, VariableSynchronization
from ndistribute.variables.variable import Variable

__all__ = ["Variable", "VariableAggregation", "VariableSynchronization"]
