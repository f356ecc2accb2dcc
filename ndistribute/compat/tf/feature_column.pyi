# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

bucketized_column: Any
categorical_column_with_hash_bucket: Any
categorical_column_with_identity: Any
categorical_column_with_vocabulary_list: Any
crossed_column: Any
embedding_column: Any
indicator_column: Any
numeric_column: Any
