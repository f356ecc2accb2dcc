# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.tf.keras import activations as activations
from ndistribute.compat.tf.keras import applications as applications
from ndistribute.compat.tf.keras import backend as backend
from ndistribute.compat.tf.keras import callbacks as callbacks
from ndistribute.compat.tf.keras import config as config
from ndistribute.compat.tf.keras import datasets as datasets
from ndistribute.compat.tf.keras import estimator as estimator
from ndistribute.compat.tf.keras import initializers as initializers
from ndistribute.compat.tf.keras import layers as layers
from ndistribute.compat.tf.keras import losses as losses
from ndistribute.compat.tf.keras import metrics as metrics
from ndistribute.compat.tf.keras import mixed_precision as mixed_precision
from ndistribute.compat.tf.keras import models as models
from ndistribute.compat.tf.keras import ops as ops
from ndistribute.compat.tf.keras import optimizers as optimizers
from ndistribute.compat.tf.keras import preprocessing as preprocessing
from ndistribute.compat.tf.keras import random as random
from ndistribute.compat.tf.keras import regularizers as regularizers
from ndistribute.compat.tf.keras import saving as saving
from ndistribute.compat.tf.keras import utils as utils
Input: Any
from ndistribute.compat.adapters import Model as _Model
Model = _Model
from ndistribute.compat.adapters import Sequential as _Sequential
Sequential = _Sequential
