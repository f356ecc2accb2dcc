"""Feature columns against values computed by hand."""

from typing import Any

import numpy as np
import pytest

from ndistribute import graph as g
from ndistribute.estimator import feature_column as fc

WORDS = np.array([["a", "c"], ["b", ""], ["x", "a"]])
IDS = np.array([[0, 2], [1, -1], [0, 0]])
AGES = np.array([5.0, 18.0, 70.0])
FEATURES = {"word": WORDS, "id": IDS, "age": AGES, "pair": np.arange(6.0).reshape(3, 2)}
WORD = fc.categorical_column_with_vocabulary_list("word", ["a", "b", "c"])
ID = fc.categorical_column_with_identity("id", 3)
AGE = fc.numeric_column("age")


def computed(make: Any) -> Any:
    with g.Graph().as_default(), g.Session() as session:
        tensor = make()
        session.run(g.global_variables_initializer())
        return session.run(tensor)


PAIR = fc.numeric_column("pair", shape=2)
LOG = fc.numeric_column("age", normalizer_fn=lambda x: np.log(x / 5))
INTEGER = fc.numeric_column("age", dtype=np.int64)
ANY_WORD = fc.categorical_column_with_vocabulary_list("word", ["a", "b"], default_value=1)
ANY_ID = fc.categorical_column_with_identity("id", 2, default_value=1)
DENSE = {
    "numeric": (AGE, [[5], [18], [70]]),
    "pair": (PAIR, [[0, 1], [2, 3], [4, 5]]),
    "normalized": (LOG, np.log([[1], [3.6], [14]])),
    "bucketized": (fc.bucketized_column(AGE, [18, 65]), [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
    "bucketized pair": (
        fc.bucketized_column(PAIR, [2]),
        [[1, 0, 1, 0], [0, 1, 0, 1], [0, 1, 0, 1]],
    ),
    "words": (fc.indicator_column(WORD), [[1, 0, 1], [0, 1, 0], [1, 0, 0]]),
    "words with a default": (fc.indicator_column(ANY_WORD), [[1, 1], [0, 1], [1, 1]]),
    "integers": (fc.bucketized_column(INTEGER, [5.5, 17.5]), [[1, 0, 0], [0, 0, 1], [0, 0, 1]]),
    "a matrix of another form": (fc.numeric_column("pair", shape=(2, 1)), [[0, 1], [2, 3], [4, 5]]),
    "ids with a default": (fc.indicator_column(ANY_ID), [[1, 1], [0, 1], [2, 0]]),
    "ids": (fc.indicator_column(ID), [[1, 0, 1], [0, 1, 0], [2, 0, 0]]),
}


@pytest.mark.parametrize("case", DENSE)
def test_dense_columns_have_the_values_computed_by_hand(case: str) -> None:
    column, expected = DENSE[case]
    found = computed(lambda: fc.input_layer(FEATURES, column))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert column.width == found.shape[1]


def test_a_crossed_column_counts_the_combinations_of_words_and_intervals() -> None:
    interval = fc.bucketized_column(AGE, [18, 65])
    crossed = fc.crossed_column(["word", interval], 1000)
    found = computed(lambda: crossed.ids(FEATURES))
    nothing = np.array([], str)
    for ids, words, kind in zip(found, WORDS, [0, 1, 2], strict=True):
        of_words = [fc.lookup(np.array([[f"{w}_X_{kind}"]]), nothing, -1, 1000) for w in words]
        expected = [
            -1 if w == "" else int(k) for w, k in zip(words, np.ravel(of_words), strict=True)
        ]
        assert ids.tolist() == expected
    assert (crossed.name, crossed.width) == ("age_bucketized_X_word", 1000)
    table = computed(lambda: fc.linear_model(FEATURES, [crossed, AGE]))
    assert table.shape == (3, 1)


def rows(shape: Any, dtype: Any) -> Any:
    return np.array([[1, 2], [4, 8], [16, 32]], dtype)


@pytest.mark.parametrize(
    ("combiner", "expected"),
    [
        ("sum", [[17, 34], [4, 8], [2, 4]]),
        ("mean", [[8.5, 17], [4, 8], [1, 2]]),
        ("sqrtn", [[17 / 2**0.5, 34 / 2**0.5], [4, 8], [2**0.5, 8**0.5]]),
    ],
)
def test_embeddings_combine_the_rows_of_an_example(combiner: str, expected: Any) -> None:
    column = fc.embedding_column(ID, 2, combiner, initializer=rows)
    found = computed(lambda: fc.input_layer(FEATURES, column))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_an_example_without_ids_has_an_embedding_of_zeros() -> None:
    column = fc.embedding_column(ID, 2, initializer=rows)
    found = computed(lambda: fc.input_layer({"id": np.array([-1, 2])}, column))
    np.testing.assert_array_equal(found, [[0, 0], [16, 32]])


def test_unknown_words_are_divided_among_buckets_by_hash() -> None:
    column = fc.categorical_column_with_vocabulary_list("word", ["a"], num_oov_buckets=4)
    words = np.array(["a", "b", "c", "b", ""])
    found = computed(lambda: column.ids({"word": words})).ravel()
    assert (found[0], found[4], column.width) == (0, -1, 5)
    assert found[1] == found[3]
    assert all(place in range(1, 5) for place in found[1:4])


def test_hashes_are_the_same_for_texts_bytes_and_numbers() -> None:
    column = fc.categorical_column_with_hash_bucket("word", 1000)
    ids = [
        computed(lambda words=words: column.ids({"word": words})).ravel().tolist()
        for words in (np.array(["12", "7"]), np.array([b"12", b"7"]), np.array([12, 7]))
    ]
    assert ids == [[627, 255]] * 3


def test_columns_stand_in_the_order_of_their_names() -> None:
    columns = [fc.indicator_column(WORD), AGE, fc.indicator_column(ID)]
    found = computed(lambda: fc.input_layer(FEATURES, columns))
    np.testing.assert_array_equal(found[0], [5, 1, 0, 1, 1, 0, 1])


def test_a_linear_model_has_weights_for_columns_and_ids() -> None:
    with g.Graph().as_default(), g.Session() as session:
        columns = [AGE, WORD, fc.bucketized_column(fc.numeric_column("age"), [18])]
        y = fc.linear_model(FEATURES, columns, units=2)
        session.run(g.global_variables_initializer())
        np.testing.assert_array_equal(session.run(y), np.zeros((3, 2)))
        weights = {one.name: one for one in g.global_variables()}
        weights["linear_model/bias_weights:0"].load(np.array([1.0, 2.0]))
        weights["linear_model/age/weights:0"].load(np.array([[0.1, 0]]))
        weights["linear_model/word/weights:0"].load(np.array([[10.0, 0], [20, 0], [40, 3]]))
        weights["linear_model/age_bucketized/weights:0"].load(np.array([[100.0, 0], [200, 0]]))
        found = session.run(y)
    np.testing.assert_allclose(found, [[151.5, 5], [222.8, 2], [218, 2]], rtol=1e-6)


def test_columns_of_a_scope_that_is_entered_again_share_their_weights() -> None:
    with g.Graph().as_default():
        for _ in range(2):
            with g.variable_scope("tower", reuse=g.AUTO_REUSE):
                fc.input_layer(FEATURES, fc.embedding_column(ID, 2))
                fc.linear_model(FEATURES, [ID, AGE])
        assert [one.op.name for one in g.global_variables()] == [
            "tower/input_layer/id_embedding/embedding_weights",
            "tower/linear_model/bias_weights",
            "tower/linear_model/age/weights",
            "tower/linear_model/id/weights",
        ]
