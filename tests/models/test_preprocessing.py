"""Layers that prepare images, texts and numbers: what they compute, and what they refuse."""

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import layers
from ndistribute.models import load

RNG = np.random.default_rng(3)
IMAGES = RNG.random((2, 4, 4, 3)).astype(np.float32)
TEXTS = np.array(["The cat sat.", "the DOG", "A cat, the cat!"])


def test_images_are_turned_against_the_clock_moved_and_zoomed_about_the_middle():
    turned = layers.RandomRotation((0.25, 0.25))(IMAGES)
    np.testing.assert_allclose(turned, np.rot90(IMAGES, axes=(1, 2)), atol=1e-5)
    moved = layers.RandomTranslation((0.25, 0.25), (-0.5, -0.5), fill_mode="wrap")(IMAGES)
    np.testing.assert_allclose(moved, np.roll(IMAGES, (1, -2), axis=(1, 2)), atol=1e-6)
    small = layers.RandomZoom((1.0, 1.0), fill_mode="constant", fill_value=7.0)(IMAGES)
    np.testing.assert_allclose(small[:, 1, 1], IMAGES[:, :2, :2].mean(axis=(1, 2)), atol=1e-6)
    assert (small[:, 0, 0] == 7).all()
    nearest = layers.RandomZoom((1.0, 1.0), fill_mode="nearest", interpolation="nearest")(IMAGES)
    assert {*nearest.ravel().tolist()} <= {*IMAGES.ravel().tolist()}


@pytest.mark.parametrize("name", ["RandomRotation", "RandomZoom", "RandomContrast"])
def test_random_layers_draw_for_each_image_in_training_alone(name):
    layer = getattr(layers, name)(0.4)
    twice = np.concatenate([IMAGES[:1], IMAGES[:1]])
    first, second = layer(twice)
    assert np.abs(first - second).max() > 1e-3
    np.testing.assert_array_equal(layer(twice, training=False), twice)
    assert layer(IMAGES[0]).shape == IMAGES[0].shape
    model = nd.Sequential([layer, layers.Flatten(), layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True)
    assert np.isfinite(model.fit(IMAGES, np.ones((2, 1)), verbose=0).history["loss"]).all()


def test_contrast_is_the_distance_from_the_mean():
    mean = IMAGES.mean(axis=(1, 2), keepdims=True)
    expected = np.clip(mean + 0.5 * (IMAGES - mean), 0.3, 0.6)
    contrast = layers.RandomContrast((0.5, -0.5), value_range=(0.3, 0.6))(IMAGES)
    np.testing.assert_allclose(contrast, expected, atol=1e-6)


def test_one_image_of_bytes_is_resized_in_a_map():
    images = (IMAGES * 255).astype(np.uint8)
    resize = layers.Resizing(2, 2)
    [one] = nd.Dataset.from_tensor_slices(images[:1]).map(resize)
    expected = images[0].astype(np.float32).reshape(2, 2, 2, 2, 3).mean(axis=(1, 3))
    np.testing.assert_allclose(one, expected, atol=1e-4)
    assert layers.Resizing(8, 6, "nearest")(images).shape == (2, 8, 6, 3)


@pytest.mark.parametrize("output_mode", ["int", "multi_hot", "count", "tf_idf"])
def test_texts_become_numbers_of_their_words(output_mode, tmp_path):
    layer = layers.TextVectorization(max_tokens=4, output_mode=output_mode)
    layer.adapt(nd.Dataset.from_tensor_slices(TEXTS).batch(2))
    special = ["", "[UNK]"] if output_mode == "int" else ["[UNK]"]
    known = ["the", "cat", "sat"][: 4 - len(special)]
    assert layer.get_vocabulary() == special + known
    weights = np.log(1 + 3 / (1 + np.array([3, 2, 1])))
    counts = np.array([[0, 1, 1, 1], [1, 1, 0, 0], [1, 1, 2, 0]])
    expected = {
        "int": [[2, 3, 1, 0], [2, 1, 0, 0], [1, 3, 2, 3]],
        "multi_hot": np.minimum(counts, 1),
        "count": counts,
        "tf_idf": counts * np.array([weights.mean(), *weights]),
    }
    np.testing.assert_allclose(layer(TEXTS), expected[output_mode], rtol=1e-6)
    np.testing.assert_allclose(layer(TEXTS[:, None]), expected[output_mode], rtol=1e-6)
    assert layer(TEXTS[:0]).shape[0] == 0
    model = nd.Sequential([layers.Input((1,), dtype="string"), layer])
    loaded = load(model.export(tmp_path / "model"))
    np.testing.assert_allclose(loaded(TEXTS[:, None]), model(TEXTS[:, None]))


def test_how_texts_are_split_is_chosen():
    def words(**options):
        layer = layers.TextVectorization(output_sequence_length=5, **options)
        layer.adapt(TEXTS)
        return {*layer.get_vocabulary()[2:]}, layer(TEXTS[0])

    assert words(ngrams=2)[0] >= {"the", "the cat", "cat sat", "a cat"}
    assert words(ngrams=(2,))[1].shape == (5,)
    assert words(standardize="lower")[0] >= {"sat.", "cat!"}
    assert words(standardize=None, split="character")[0] >= {"T", ".", "!"}
    assert words(standardize=lambda x: np.char.replace(x, "cat", "cow"))[0] >= {"cow", "sat."}
    assert words(split=lambda text: text.split("t"))[0] >= {"he ca", " sa"}
    layer = layers.TextVectorization(vocabulary=["a"])
    model = nd.Sequential([layers.Input((1,), dtype="string"), layer])
    assert model.output_shape == (None, None)


def test_numbers_are_found_in_bins_as_many_in_each():
    layer = layers.Discretization(num_bins=4, output_mode="one_hot")
    layer.adapt(np.arange(100.0))
    np.testing.assert_array_equal(layer(np.arange(100.0)).sum(axis=0), [25] * 4)
    again = layers.Discretization(**layer.get_config())
    np.testing.assert_array_equal(again(np.array([[30.0]])), [[0, 1, 0, 0]])


def test_hashes_spread_over_all_bins():
    words = np.array([f"word {k}" for k in range(300)])
    numbers, other = layers.Hashing(4)(words), layers.Hashing(4, salt=7)(words)
    assert {*numbers.tolist()} == {0, 1, 2, 3}
    assert 0.5 < (numbers != other).mean() < 1
    assert layers.Hashing(5, output_mode="one_hot")(words).shape == (300, 5)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: layers.RandomRotation(0.1, "mirror"), "fill_mode must be one of"),
        (lambda: layers.RandomZoom((0.2, -0.2)), "height_factor must be a number"),
        (lambda: layers.RandomTranslation(0.1), "width_factor must be a number"),
        (lambda: layers.Resizing(2, 2, "cubic"), "interpolation must be one of"),
        (lambda: layers.RandomFlip()(np.ones((2, 2))), "needs the axes .images, height"),
        (
            lambda: layers.TextVectorization(split="lines"),
            "split, unless a function, must be one of",
        ),
        (lambda: layers.TextVectorization(output_mode="one_hot"), "output_mode must be one of"),
        (lambda: layers.TextVectorization(vocabulary=["a"])(TEXTS[None]), r"shape \(batch,\)"),
        (lambda: layers.StringLookup(output_mode="tf_idf", vocabulary=["a"]), "needs idf_weights"),
        (layers.Discretization, "either bin_boundaries, or num_bins"),
        (lambda: layers.Hashing(0), "num_bins must be an integer, 1 or more"),
        (lambda: layers.GroupNormalization(4)(np.ones((1, 6))), "multiple of groups=4"),
    ],
)
def test_what_cannot_be_prepared_is_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_an_empty_text_builds_recurrent_layers():
    texts = layers.TextVectorization(vocabulary=["word"])
    model = nd.Sequential([texts, layers.Embedding(3, 2, mask_zero=True), layers.LSTM(2)])
    assert model(np.array([""])).tolist() == [[0, 0]]
    assert model(np.array(["word word"])).shape == (1, 2)


def test_statistics_of_one_axis_serve_a_column():
    numbers = layers.Normalization(axis=None, input_shape=(1,))
    numbers.adapt(np.array([1.0, 3.0]))
    assert nd.Sequential([numbers])(np.array([[1.0], [3.0]])).ravel().tolist() == [-1, 1]
