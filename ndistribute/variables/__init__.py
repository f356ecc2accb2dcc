"""Variables: arrays that keep their values between steps, under any strategy."""

from ndistribute.variables.policy import VariableAggregation, VariableSynchronization
from ndistribute.variables.variable import Variable

__all__ = ["Variable", "VariableAggregation", "VariableSynchronization"]
