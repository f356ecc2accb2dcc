# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.tf.image import ResizeMethod as ResizeMethod
adjust_brightness: Any
adjust_contrast: Any
adjust_saturation: Any
central_crop: Any
convert_image_dtype: Any
crop_to_bounding_box: Any
decode_bmp: Any
decode_image: Any
decode_jpeg: Any
decode_png: Any
flip_left_right: Any
flip_up_down: Any
grayscale_to_rgb: Any
pad_to_bounding_box: Any
per_image_standardization: Any
random_brightness: Any
random_contrast: Any
random_crop: Any
random_flip_left_right: Any
random_flip_up_down: Any
random_saturation: Any
resize: Any
resize_with_crop_or_pad: Any
resize_with_pad: Any
rgb_to_grayscale: Any
rot90: Any
sobel_edges: Any
stateless_random_brightness: Any
stateless_random_contrast: Any
stateless_random_crop: Any
stateless_random_flip_left_right: Any
stateless_random_flip_up_down: Any
stateless_random_saturation: Any
total_variation: Any
