"""Estimators, which train, evaluate and predict with a graph that a function builds."""

from ndistribute.estimator import early_stopping as early_stopping
from ndistribute.estimator import feature_column as feature_column
from ndistribute.estimator.canned import *
from ndistribute.estimator.estimator import Estimator as Estimator
from ndistribute.estimator.estimator import add_metrics as add_metrics
from ndistribute.estimator.models import model_to_estimator as model_to_estimator
from ndistribute.estimator.run_config import RunConfig as RunConfig
from ndistribute.estimator.specs import EstimatorSpec as EstimatorSpec
from ndistribute.estimator.specs import EvalSpec as EvalSpec
from ndistribute.estimator.specs import ModeKeys as ModeKeys
from ndistribute.estimator.specs import TrainSpec as TrainSpec
from ndistribute.estimator.specs import WarmStartSettings as WarmStartSettings
from ndistribute.estimator.tasks import train_and_evaluate as train_and_evaluate
from ndistribute.exports import export as _export

_export(vars(), "early_stopping feature_column")
