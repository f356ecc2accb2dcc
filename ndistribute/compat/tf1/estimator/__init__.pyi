# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.tf1.estimator import experimental as experimental
from ndistribute.compat.tf1.estimator import inputs as inputs
BinaryClassHead: Any
from ndistribute.graph.hooks import CheckpointSaverHook as _CheckpointSaverHook
CheckpointSaverHook = _CheckpointSaverHook
from ndistribute.graph.hooks import CheckpointSaverListener as _CheckpointSaverListener
CheckpointSaverListener = _CheckpointSaverListener
from ndistribute.estimator.canned import DNNClassifier as _DNNClassifier
DNNClassifier = _DNNClassifier
from ndistribute.estimator.canned import DNNEstimator as _DNNEstimator
DNNEstimator = _DNNEstimator
from ndistribute.estimator.canned import DNNLinearCombinedClassifier as _DNNLinearCombinedClassifier
DNNLinearCombinedClassifier = _DNNLinearCombinedClassifier
from ndistribute.estimator.canned import DNNLinearCombinedEstimator as _DNNLinearCombinedEstimator
DNNLinearCombinedEstimator = _DNNLinearCombinedEstimator
from ndistribute.estimator.canned import DNNLinearCombinedRegressor as _DNNLinearCombinedRegressor
DNNLinearCombinedRegressor = _DNNLinearCombinedRegressor
from ndistribute.estimator.canned import DNNRegressor as _DNNRegressor
DNNRegressor = _DNNRegressor
from ndistribute.estimator.estimator import Estimator as _Estimator
Estimator = _Estimator
from ndistribute.estimator.specs import EstimatorSpec as _EstimatorSpec
EstimatorSpec = _EstimatorSpec
from ndistribute.estimator.specs import EvalSpec as _EvalSpec
EvalSpec = _EvalSpec
from ndistribute.graph.hooks import FeedFnHook as _FeedFnHook
FeedFnHook = _FeedFnHook
from ndistribute.graph.hooks import FinalOpsHook as _FinalOpsHook
FinalOpsHook = _FinalOpsHook
from ndistribute.graph.hooks import GlobalStepWaiterHook as _GlobalStepWaiterHook
GlobalStepWaiterHook = _GlobalStepWaiterHook
from ndistribute.estimator.canned import LinearClassifier as _LinearClassifier
LinearClassifier = _LinearClassifier
from ndistribute.estimator.canned import LinearEstimator as _LinearEstimator
LinearEstimator = _LinearEstimator
from ndistribute.estimator.canned import LinearRegressor as _LinearRegressor
LinearRegressor = _LinearRegressor
from ndistribute.graph.hooks import LoggingTensorHook as _LoggingTensorHook
LoggingTensorHook = _LoggingTensorHook
from ndistribute.estimator.specs import ModeKeys as _ModeKeys
ModeKeys = _ModeKeys
MultiClassHead: Any
from ndistribute.graph.hooks import NanLossDuringTrainingError as _NanLossDuringTrainingError
NanLossDuringTrainingError = _NanLossDuringTrainingError
from ndistribute.graph.hooks import NanTensorHook as _NanTensorHook
NanTensorHook = _NanTensorHook
RegressionHead: Any
from ndistribute.estimator.run_config import RunConfig as _RunConfig
RunConfig = _RunConfig
from ndistribute.graph.hooks import SessionRunArgs as _SessionRunArgs
SessionRunArgs = _SessionRunArgs
from ndistribute.graph.hooks import SessionRunContext as _SessionRunContext
SessionRunContext = _SessionRunContext
from ndistribute.graph.hooks import SessionRunHook as _SessionRunHook
SessionRunHook = _SessionRunHook
from ndistribute.graph.hooks import SessionRunValues as _SessionRunValues
SessionRunValues = _SessionRunValues
from ndistribute.graph.hooks import StepCounterHook as _StepCounterHook
StepCounterHook = _StepCounterHook
from ndistribute.graph.hooks import StopAtStepHook as _StopAtStepHook
StopAtStepHook = _StopAtStepHook
from ndistribute.graph.hooks import SummarySaverHook as _SummarySaverHook
SummarySaverHook = _SummarySaverHook
from ndistribute.estimator.specs import TrainSpec as _TrainSpec
TrainSpec = _TrainSpec
from ndistribute.estimator.specs import WarmStartSettings as _WarmStartSettings
WarmStartSettings = _WarmStartSettings
add_metrics: Any
train_and_evaluate: Any
