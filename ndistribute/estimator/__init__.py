"""Estimators: loops that train, evaluate and predict with a graph that a function builds."""

from ndistribute.estimator import feature_column
from ndistribute.estimator.canned import (
    DNNClassifier,
    DNNRegressor,
    LinearClassifier,
    LinearRegressor,
)
from ndistribute.estimator.estimator import Estimator
from ndistribute.estimator.models import model_to_estimator
from ndistribute.estimator.run_config import RunConfig
from ndistribute.estimator.spec import EstimatorSpec, EvalSpec, ModeKeys, TrainSpec
from ndistribute.estimator.training import train_and_evaluate

__all__ = [
    "DNNClassifier",
    "DNNRegressor",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "LinearClassifier",
    "LinearRegressor",
    "ModeKeys",
    "RunConfig",
    "TrainSpec",
    "feature_column",
    "model_to_estimator",
    "train_and_evaluate",
]
