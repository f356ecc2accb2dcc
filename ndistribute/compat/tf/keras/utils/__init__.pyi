# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.tf.keras.utils import experimental as experimental
CustomObjectScope: Any
from ndistribute.compat.keras_objects import PyDataset as _PyDataset
PyDataset = _PyDataset
from ndistribute.compat.keras_objects import PyDataset as _Sequence
Sequence = _Sequence
from ndistribute.models.sidecar import SidecarEvaluator as _SidecarEvaluator
SidecarEvaluator = _SidecarEvaluator
array_to_img: Any
custom_object_scope: Any
deserialize_keras_object: Any
get_custom_objects: Any
image_dataset_from_directory: Any
img_to_array: Any
load_img: Any
pad_sequences: Any
plot_model: Any
register_keras_serializable: Any
save_img: Any
serialize_keras_object: Any
set_random_seed: Any
text_dataset_from_directory: Any
timeseries_dataset_from_array: Any
to_categorical: Any
