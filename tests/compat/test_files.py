"""Files and directories of images and text, and series, under TensorFlow's names."""

import numpy as np
import pytest

from ndistribute.compat import tf
from ndistribute.errors import MissingDependencyError


@pytest.fixture
def reviews(tmp_path):
    for kind in ("neg", "pos"):
        (tmp_path / kind).mkdir()
        for number in range(10):
            (tmp_path / kind / f"{number}.txt").write_text(f"{kind} {number}")
    return tmp_path


def _elements(dataset):
    return [(str(text), int(label)) for text, label in dataset.unbatch()]


def test_a_directory_of_texts_has_the_number_of_the_folder_as_label(reviews):
    dataset = tf.keras.utils.text_dataset_from_directory(reviews, batch_size=8, shuffle=False)
    assert dataset.class_names == ["neg", "pos"]
    texts = [
        (f"{kind} {number}", k) for k, kind in enumerate(("neg", "pos")) for number in range(10)
    ]
    assert _elements(dataset) == texts
    assert [len(batch) for batch, _ in dataset] == [8, 8, 4]
    columns = tf.keras.utils.text_dataset_from_directory(reviews, label_mode="categorical")
    assert next(iter(columns))[1].shape == (20, 2)
    assert next(iter(tf.keras.utils.text_dataset_from_directory(reviews, labels=None))).shape == (
        20,
    )


def test_the_parts_for_training_and_validation_have_no_file_in_common(reviews):
    def part(subset):
        return tf.keras.utils.text_dataset_from_directory(
            reviews, validation_split=0.2, subset=subset, seed=3
        )

    train, validation = map(_elements, part("both"))
    assert sorted(train + validation) == sorted(_elements(part("training")) + validation)
    assert (len(train), len(set(train + validation))) == (16, 20)
    with pytest.raises(ValueError, match="needs a seed"):
        tf.keras.utils.text_dataset_from_directory(reviews, validation_split=0.2, subset="training")
    with pytest.raises(ValueError, match="no file in it ends with"):
        tf.keras.utils.image_dataset_from_directory(reviews)


def test_images_of_files_are_tensors_and_datasets(tmp_path):
    pytest.importorskip("PIL")
    pixels = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3) * 10
    for kind in ("cat", "dog"):
        (tmp_path / kind).mkdir()
        tf.keras.utils.save_img(tmp_path / kind / "a.png", pixels, scale=False)
    path = str(tmp_path / "cat" / "a.png")
    assert np.array_equal(tf.image.decode_png(tf.io.read_file(path)), pixels)
    assert tf.io.decode_image(tf.io.read_file(path), channels=1).shape == (2, 4, 1)
    assert tf.keras.utils.load_img(path, target_size=(6, 5)).size == (5, 6)
    images, labels = next(
        iter(tf.keras.utils.image_dataset_from_directory(tmp_path, image_size=(4, 4)))
    )
    assert images.shape == (2, 4, 4, 3)
    assert images.dtype == np.float32
    assert sorted(labels) == [0, 1]
    between = 0.75 * pixels[0, 0] + 0.25 * pixels[1, 0]  # Centres of pixels are compared.
    assert np.allclose(
        images[0, :, 0],
        [pixels[0, 0], between, 0.25 * pixels[0, 0] + 0.75 * pixels[1, 0], pixels[1, 0]],
    )


def test_images_without_pillow_say_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'ndistribute\[images\]'"):
        tf.keras.utils.array_to_img(np.zeros((2, 2, 1)))


def test_a_series_becomes_sequences_with_the_targets_of_their_first_rows():
    series = tf.keras.utils.timeseries_dataset_from_array
    data = np.arange(10)
    (rows, targets), *rest = series(data, data[3:] * 10, 3, sequence_stride=2, sampling_rate=2)
    assert rows.tolist() == [[0, 2, 4], [2, 4, 6], [4, 6, 8]]
    assert targets.tolist() == [30, 50, 70]
    assert not rest
    only = series(data, None, 2, start_index=2, end_index=6, batch_size=None)
    assert [row.tolist() for row in only] == [[2, 3], [3, 4], [4, 5]]
    mixed = series(data, None, 2, shuffle=True, seed=1)
    assert sorted(map(tuple, next(iter(mixed)).tolist())) == [(k, k + 1) for k in range(9)]


def test_a_model_is_drawn_with_its_connections(tmp_path):
    pytest.importorskip("PIL")
    first, second = tf.keras.Input((4,), name="first"), tf.keras.Input((4,), name="second")
    joined = tf.keras.layers.concatenate([first, tf.keras.layers.Dense(2)(second)])
    model = tf.keras.Model([first, second], joined)
    image = tf.keras.utils.plot_model(model, tmp_path / "model.png", show_shapes=True, dpi=64)
    assert (tmp_path / "model.png").stat().st_size > 0
    rows, columns = np.array(image).shape[:2]
    turned = tf.keras.utils.plot_model(model, None, show_shapes=True, dpi=64, rankdir="LR")
    assert rows > turned.size[1]  # Three levels below each other, or two lines.
    assert columns < turned.size[0]
    colours = {colour for _, colour in image.getcolors()}
    assert {(0, 0, 0), (128, 128, 128), (255, 255, 255)} <= colours  # Boxes and connections.
    with pytest.raises(ValueError, match="show_dtype"):
        tf.keras.utils.plot_model(model, None, show_dtype=True)
