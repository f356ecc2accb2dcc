"""Variables: arrays that keep their values between steps, under any strategy."""

from ndistribute.variables.policy import VariableAggregation as VariableAggregation
from ndistribute.variables.policy import VariableSynchronization as VariableSynchronization
from ndistribute.variables.variable import Variable as Variable
