"""`tf.image` gives the pixels that TensorFlow gives."""

import numpy as np
import pytest

from ndistribute.compat import tf

BYTES = np.array([[[217, 163, 130], [69, 78, 10]], [[186, 161, 139], [143, 239, 71]]], np.uint8)
u8, floats = tf.constant(BYTES), tf.constant((BYTES / 255).astype(np.float32))
row = tf.reshape(tf.range(4.0), [1, 4, 1])
image = tf.image

# What TensorFlow 2.21 returns; of several values, those of the first pixel.
PIXELS = {
    "to floats": (
        lambda: image.convert_image_dtype(u8, tf.float32),
        [0.8509805, 0.6392157, 0.5098039],
    ),
    "to bytes": (lambda: image.convert_image_dtype(floats, tf.uint8), [217, 163, 130]),
    "limited": (
        lambda: image.convert_image_dtype(floats * 2, tf.uint8, saturate=True),
        [255, 255, 255],
    ),
    "wider": (lambda: image.convert_image_dtype(u8, tf.int16), [27776, 20864, 16640]),
    "brighter": (lambda: image.adjust_brightness(u8, 0.1), [242, 188, 155]),
    "darker": (lambda: image.adjust_brightness(floats, -0.3), [0.5509804, 0.3392157, 0.2098039]),
    "colour": (lambda: image.adjust_saturation(u8, 3), [217, 82, 0]),
    "pale": (lambda: image.adjust_saturation(floats, 0.3), [0.8509805, 0.787451, 0.7486275]),
    "grey": (lambda: image.rgb_to_grayscale(u8), [175]),
    "grey floats": (lambda: image.rgb_to_grayscale(floats), [0.6876953]),
    "of grey": (lambda: image.grayscale_to_rgb(u8[..., :1]), [217, 217, 217]),
    "left": (lambda: image.flip_left_right(u8), [69, 78, 10]),
    "down": (lambda: image.flip_up_down(u8), [186, 161, 139]),
    "turned": (lambda: image.rot90(u8), [69, 78, 10]),
    "part": (lambda: image.crop_to_bounding_box(u8, 1, 1, 1, 1), [143, 239, 71]),
    "padded": (lambda: image.pad_to_bounding_box(u8, 1, 2, 4, 5)[1:, 2:], [217, 163, 130]),
    "crop or pad": (lambda: image.resize_with_crop_or_pad(u8, 1, 4)[:, 1:], [217, 163, 130]),
    "middle": (lambda: image.central_crop(tf.tile(u8, [2, 2, 1]), 0.5), [143, 239, 71]),
}


@pytest.mark.parametrize("name", PIXELS)
def test_pixels_are_those_of_tensorflow(name: str) -> None:
    make, expected = PIXELS[name]
    result = make()
    assert isinstance(result, tf.Tensor)
    np.testing.assert_allclose(result[0, 0], expected, rtol=1e-6)


def test_contrast_is_about_the_mean_of_each_channel() -> None:
    np.testing.assert_allclose(image.adjust_contrast(row, 2.0)[0, :, 0], [-1.5, 0.5, 2.5, 4.5])


def test_sizes_are_interpolated_between_centres() -> None:
    assert image.resize(row, [1, 2]).numpy().ravel().tolist() == [0.5, 2.5]
    assert image.resize(row, [2, 2]).shape.as_list() == [2, 2, 1]
    wide = image.resize(row, [1, 8]).numpy().ravel()
    np.testing.assert_allclose(wide, [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3])
    nearest = image.resize(
        tf.cast(row, tf.uint8), [1, 2], method=image.ResizeMethod.NEAREST_NEIGHBOR
    )
    assert (nearest.dtype, nearest.numpy().ravel().tolist()) == (tf.uint8, [1, 3])
    assert image.resize(u8, [4, 9], preserve_aspect_ratio=True).shape.as_list() == [4, 4, 3]
    batch = image.resize(u8[None], [3, 3])
    assert batch.dtype == tf.float32
    np.testing.assert_array_equal(batch[0], image.resize(u8, [3, 3]))


def test_standardized_images_have_a_mean_and_a_variance() -> None:
    result = image.per_image_standardization(u8).numpy()
    np.testing.assert_allclose((result.mean(), result.std()), (0, 1), atol=1e-6)
    assert not image.per_image_standardization(tf.ones([2, 2, 1])).numpy().any()


def test_variation_is_summed_for_each_image() -> None:
    assert image.total_variation(row).numpy() == 3
    assert image.total_variation(tf.stack([row, row])).numpy().tolist() == [3, 3]


def test_contrast_has_a_gradient() -> None:
    factor = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        result = image.adjust_contrast(row, factor)[0, 0, 0]
    assert tape.gradient(result, factor).numpy() == -1.5


def test_random_changes_come_from_their_seed() -> None:
    images = tf.reshape(tf.range(64.0), [16, 1, 4, 1])
    flipped = image.random_flip_left_right(images).numpy()
    sides = {float(each[0, 0, 0] % 4) for each in flipped}
    assert sides == {0, 3}  # Each image of a batch is flipped or not.
    for change in (
        lambda seed: image.stateless_random_crop(row, [1, 2, 1], seed=seed),
        lambda seed: image.stateless_random_brightness(row, 0.5, seed=seed),
        lambda seed: image.stateless_random_contrast(row, 0.1, 0.9, seed=seed),
        lambda seed: image.stateless_random_flip_left_right(images, seed=seed),
    ):
        results = [change((1, k)).numpy().tolist() for k in range(9)]
        assert results == [change(tf.constant([1, k])).numpy().tolist() for k in range(9)]
        assert any(result != results[0] for result in results)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: image.resize(row, [1, 2], method="bicubic"), "bicubic"),
        (lambda: image.resize(row, [1, 2], antialias=True), "antialias"),
        (
            lambda: image.crop_to_bounding_box(row, 0, 3, 1, 2),
            "the box from 0 x 3 to 1 x 5 is not inside",
        ),
        (lambda: image.pad_to_bounding_box(row, 0, 1, 1, 4), "does not fit into 1 x 4"),
        (lambda: image.central_crop(row, 0.0), "central_fraction"),
        (lambda: image.random_crop(row, [2, 1, 1]), "larger than the shape"),
        (lambda: image.grayscale_to_rgb(u8), "one channel"),
        (lambda: image.random_contrast(row, 0.5, 0.5), "below upper"),
        (lambda: image.random_brightness(row, -1.0), "max_delta"),
        (lambda: image.adjust_hue(floats, 0.1), "Pillow"),
    ],
)
def test_what_images_do_not_do_is_refused(call, message) -> None:
    with pytest.raises((ValueError, NotImplementedError, AttributeError), match=message):
        call()


def test_edges_are_the_changes_along_rows_and_columns() -> None:
    ramp = np.arange(5, dtype=np.float32)[:, None] + 10 * np.arange(4, dtype=np.float32)
    edges = tf.image.sobel_edges(ramp[None, ..., None]).numpy()
    assert edges.shape == (1, 5, 4, 1, 2)
    assert (edges[0, 1:-1, 1:-1, 0] == [8, 80]).all()
    assert not edges[0, 0, :, 0, 0].any()  # Rows are mirrored at the border.
    assert not edges[0, :, 0, 0, 1].any()


def test_a_resized_image_keeps_its_proportions_between_zeros() -> None:
    image = tf.image.resize_with_pad(np.ones((2, 4, 1), np.float32), 4, 4).numpy()[..., 0]
    assert image.tolist() == [[0] * 4, [1] * 4, [1] * 4, [0] * 4]
    image = tf.image.resize_with_pad(np.ones((4, 5, 1), np.float32), 8, 8).numpy()[..., 0]
    assert image[:, 0].tolist() == [1] * 6 + [0] * 2  # The rows of 6.4 begin above.


def test_a_seed_is_split_into_seeds() -> None:
    seeds = tf.random.split((1, 2), num=3)
    assert seeds.shape == (3, 2)
    assert (seeds.numpy() == tf.random.split([1, 2], 3).numpy()).all()
    drawn = [tf.random.stateless_uniform([2], seed).numpy().tolist() for seed in seeds]
    assert len({*map(tuple, drawn)}) == 3
