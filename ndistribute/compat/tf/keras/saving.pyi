# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

CustomObjectScope: Any
custom_object_scope: Any
deserialize_keras_object: Any
get_custom_objects: Any
get_registered_name: Any
load_model: Any
register_keras_serializable: Any
save_model: Any
serialize_keras_object: Any
