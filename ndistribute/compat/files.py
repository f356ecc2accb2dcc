"""Images and texts in files, and in directories with a folder for each class.

Pillow reads images. Files are read when the dataset yields their elements.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ndistribute.compat.adapters import TensorDataset
from ndistribute.compat.image_functions import resize
from ndistribute.compat.tensors import as_tensor
from ndistribute.errors import MissingDependencyError
from ndistribute.mistakes import count_of

_IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
_MODES = {"grayscale": "L", "rgb": "RGB", "rgba": "RGBA"}
_CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}


def _pillow(part: str = "Image") -> Any:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        what = "Images in files need Pillow: pip install 'ndistribute[images]'."
        raise MissingDependencyError(what) from error
    return import_module(f"PIL.{part}")


def read_file(filename: Any, name: Any = None) -> Any:
    """Return the contents of a file: a tensor of text, or of one `bytes` if it is not UTF-8."""
    contents = Path(str(filename)).read_bytes()
    try:
        return as_tensor(np.array(contents.decode()))
    except UnicodeDecodeError:
        return as_tensor(np.array(contents, object))


def decode_image(
    contents: Any,
    channels: int | None = 0,
    dtype: Any = np.uint8,
    name: Any = None,
    expand_animations: bool = False,
) -> Any:
    """Return the image in the bytes of a file: a tensor of rows, columns and channels.

    Args:
        contents: what `read_file` returned, or `bytes`.
        channels: 1, 3 or 4; 0 or None means as many as the file has.
        dtype: `uint8`, or a dtype of floats, whose images are between 0 and 1.
        name: ignored.
        expand_animations: must be False: the first image of several is returned.
    """
    if expand_animations or channels not in (0, None, *_CHANNELS):
        what = f"channels={channels}, expand_animations={expand_animations}"
        raise ValueError(
            f"decode_image: channels must be 0, 1, 3 or 4, and expand_animations False, got {what}."
        )
    data = np.asarray(contents).item() if hasattr(contents, "dtype") else contents
    image = _pillow().open(io.BytesIO(data if isinstance(data, bytes) else data.encode()))
    known = image.mode if image.mode in _CHANNELS.values() else "RGB"
    array = np.asarray(image.convert(_CHANNELS[channels] if channels else known))
    array = array if array.ndim == 3 else array[..., None]
    is_float = np.dtype(dtype).kind == "f"
    return as_tensor((array / 255 if is_float else array).astype(dtype))


def load_img(
    path: Any,
    color_mode: str = "rgb",
    target_size: Sequence[int] | None = None,
    interpolation: str = "nearest",
) -> Any:
    """Return a Pillow image, of the height and width `target_size` unless it is None."""
    pillow = _pillow()
    image = pillow.open(path).convert(_MODES[color_mode])
    if target_size is None:
        return image
    how = getattr(pillow.Resampling, interpolation.upper())
    return image.resize((target_size[1], target_size[0]), how)


def img_to_array(img: Any, dtype: Any = np.float32) -> Any:
    """Return an image as an array of rows, columns and channels."""
    array = np.asarray(img).astype(dtype or np.float32)
    return array if array.ndim == 3 else array[..., None]


def array_to_img(x: Any, *, scale: bool = True) -> Any:
    """Return a Pillow image of an array; `scale` maps its smallest number to 0, its largest to 255.

    Without `scale`, the numbers must be from 0 to 255.
    """
    array = img_to_array(x)
    if scale:
        array = array - array.min()
        array = array / (array.max() or 1) * 255
    mode = _CHANNELS[array.shape[-1]]
    pixels = array.astype(np.uint8)
    return _pillow().fromarray(pixels[..., 0] if mode == "L" else pixels)


def save_img(path: Any, x: Any, file_format: str | None = None, scale: bool = True) -> None:
    """Write an array as an image file; see `array_to_img`."""
    array_to_img(x, scale=scale).save(path, file_format)


def image_dataset_from_directory(
    directory: Any,
    color_mode: str = "rgb",
    image_size: Sequence[int] = (256, 256),
    interpolation: str = "bilinear",
    **options: Any,
) -> Any:
    """Return a dataset of images of one size, as `float32` from 0 to 255, and their labels.

    Args:
        directory: a directory with a folder for each class.
        color_mode: ``"rgb"``, ``"rgba"`` or ``"grayscale"``.
        image_size: the height and width.
        interpolation: ``"bilinear"`` or ``"nearest"``.
        options: see `_of_directory`.
    """

    def load(path: str) -> Any:
        return resize(img_to_array(load_img(path, color_mode)), image_size, interpolation)

    return _of_directory(directory, load, _IMAGES, **options)


def text_dataset_from_directory(directory: Any, **options: Any) -> Any:
    """Return a dataset of texts and their labels; see `image_dataset_from_directory`."""

    def load(path: str) -> Any:
        return np.array(Path(path).read_text(encoding="utf-8"))

    return _of_directory(directory, load, (".txt",), **options)


def timeseries_dataset_from_array(
    data: Any,
    targets: Any,
    sequence_length: int,
    sequence_stride: int = 1,
    sampling_rate: int = 1,
    batch_size: int | None = 128,
    shuffle: bool = False,
    seed: int | None = None,
    start_index: int | None = None,
    end_index: int | None = None,
) -> Any:
    """Return a dataset of sequences of an array's rows, each with the target of its first row.

    Args:
        data: an array, ordered by time.
        targets: for each row, the target of the sequence that begins there; None for no targets.
        sequence_length: the number of rows of a sequence.
        sequence_stride: the number of rows between the starts of successive sequences.
        sampling_rate: the number of rows between successive rows of a sequence.
        batch_size: the number of sequences per batch; None yields single sequences.
        shuffle: whether the order changes in each epoch.
        seed: the seed of the order.
        start_index: the first row that is used.
        end_index: the row after the last row that is used.
    """
    data = np.asarray(data)[start_index:end_index]
    count = len(data) - (sequence_length - 1) * sampling_rate
    if targets is not None:
        targets = np.asarray(targets)[start_index:end_index]
        count = min(count, len(targets))
    steps = np.arange(sequence_length) * sampling_rate

    def sequence(start: Any) -> Any:
        rows = data[np.asarray(start) + steps]
        return rows if targets is None else (rows, targets[int(start)])

    starts = np.arange(0, count, sequence_stride)
    dataset = TensorDataset.from_tensor_slices(starts)
    dataset = dataset.shuffle(len(starts) or 1, seed) if shuffle else dataset
    dataset = dataset.map(sequence)
    return dataset if batch_size is None else dataset.batch(batch_size)


def _of_directory(
    directory: Any,
    load: Callable[[str], Any],
    endings: tuple[str, ...],
    labels: str | None = "inferred",
    label_mode: str | None = "int",
    class_names: Sequence[str] | None = None,
    batch_size: int | None = 32,
    shuffle: bool = True,
    seed: int | None = None,
    validation_split: float | None = None,
    subset: str | None = None,
    verbose: bool = True,
) -> Any:
    """Return a dataset of the contents of the files in a directory.

    Args:
        directory: see `image_dataset_from_directory`.
        load: a function of the path of a file.
        endings: the endings of the names of the files.
        labels: ``"inferred"`` for the number of each file's folder, or None for no labels.
        label_mode: ``"int"``, ``"binary"``, ``"categorical"``, or None for no labels.
        class_names: the folders in the order of their numbers; None sorts the folders.
        batch_size: the number of examples per batch; None yields single examples.
        shuffle: whether the order changes in each epoch; False sorts by name.
        seed: the seed of the order; it is required to divide the files.
        validation_split: the fraction of the files that is kept for validation.
        subset: ``"training"``, ``"validation"``, or ``"both"`` for a tuple of the two.
        verbose: ignored.
    """
    share, subsets = validation_split, (None, "training", "validation", "both")
    if (share is None) != (subset is None) or subset not in subsets:
        what = f"validation_split={share}, subset={subset!r}"
        raise ValueError(
            "pass both validation_split and subset='training', 'validation' or 'both', or pass "
            f"neither; got {what}."
        )
    if share is not None and shuffle and seed is None:
        raise ValueError("validation_split needs a seed, so that its parts have no file in common.")
    folders = sorted(each.name for each in os.scandir(directory) if each.is_dir())
    names = folders if class_names is None else [*class_names]
    if labels not in ("inferred", None) or (labels and sorted(names) != folders):
        what = f"labels={labels!r} and class_names {names} for the folders {folders}"
        raise ValueError(
            f"labels must be 'inferred' or None, and class_names must list all folders; got {what}."
        )
    paths, numbers = _files_of(directory, names if labels else [""], endings)
    wanted = _labels(np.array(numbers, np.int32), label_mode, len(names))
    load_only = not labels or label_mode is None
    order = np.arange(len(paths))
    if shuffle:
        np.random.default_rng(seed).shuffle(order)
    at = len(paths) - int((share or 0) * len(paths))

    def made(part: Any) -> Any:
        if not len(part):
            raise ValueError(
                f"validation_split={share} of {count_of(len(paths), 'file')} leaves one part empty."
            )
        some = np.array(paths)[part]
        dataset = TensorDataset.from_tensor_slices((some, wanted[part]))
        dataset = dataset.shuffle(len(part), seed) if shuffle else dataset
        result: Any = dataset.map(
            lambda path, label: load(str(path)) if load_only else (load(str(path)), label)
        )
        result = result if batch_size is None else result.batch(batch_size)
        result.class_names, result.file_paths = names, some.tolist()
        return result

    parts = order[:at], order[at:]
    if share is None:
        return made(order)
    return tuple(map(made, parts)) if subset == "both" else made(parts[subset == "validation"])


def _files_of(root: Any, folders: Any, endings: tuple[str, ...]) -> tuple[list[str], list[int]]:
    """Return paths of files with some endings, by folder and name, and their folders' numbers."""
    paths, numbers = list[str](), list[int]()
    for number, folder in enumerate(folders):
        tree = os.walk(os.path.join(root, folder))
        below = sorted(os.path.join(at, name) for at, _, files in tree for name in files)
        chosen = [path for path in below if path.lower().endswith(endings)]
        paths += chosen
        numbers += [number] * len(chosen)
    if not paths:
        raise ValueError(f"{root}: no file in it ends with {', '.join(endings)}.")
    return paths, numbers


def _labels(numbers: Any, mode: str | None, count: int) -> Any:
    """Return class numbers in the form of a label mode."""
    modes: dict[Any, Any] = {
        None: numbers,
        "int": numbers,
        "binary": numbers.astype(np.float32)[:, None],
        "categorical": np.eye(count, dtype=np.float32)[numbers],
    }
    if mode not in modes or (mode == "binary" and count != 2):
        what = f"got {mode!r} for {count_of(count, 'class', 'classes')}"
        raise ValueError(
            f"label_mode must be 'int', 'categorical', 'binary' (for two classes) or None, {what}."
        )
    return modes[mode]


def plot_model(
    model: Any,
    to_file: Any = "model.png",
    show_shapes: bool = False,
    rankdir: str = "TB",
    dpi: int = 96,
    **details: Any,
) -> Any:
    """Draw the layers of a functional model and their connections; return the image.

    Args:
        model: a functional model, or a `Sequential` that knows its input.
        to_file: the path of the image file; None writes no file.
        show_shapes: whether the boxes show the shapes of outputs.
        rankdir: ``"TB"``, from top to bottom, or ``"LR"``, from left to right.
        dpi: the dots per inch; an inch has 8 lines of text.
        details: `expand_nested` and `show_layer_names` have no effect: a nested model is one box,
            and boxes have names. Other keywords are refused.
    """
    ignored = "expand_nested", "show_layer_names"
    wrong = [name for name in details if details[name] and name not in ignored]
    if wrong or rankdir not in ("TB", "LR"):
        raise ValueError(f"plot_model: it has no {wrong}, and rankdir is 'TB' or 'LR': leave out.")
    texts, before = dict[str, str](), dict[str, list[str]]()
    # The distance from the inputs, and the number among layers at that distance.
    places = dict[str, tuple[int, int]]()
    for label, shapes, _, sources in model._connected().rows():
        name = label.partition(" (")[0]
        texts[name] = label + f"\n{shapes}" * show_shapes
        before[name] = [source for source in sources.split(", ") if source in places]
        level = 1 + max((places[source][0] for source in before[name]), default=-1)
        places[name] = level, sum(other[0] == level for other in places.values())
    longest = max(len(line) for text in texts.values() for line in text.split("\n"))
    size, order = dpi / 8, -1 if rankdir == "TB" else 1
    box = np.array([size * (2 + 0.6 * longest), size * (2 + 1.5 * show_shapes)])
    corners = {name: size + np.array(places[name][::order]) * (box + 2 * size) for name in places}
    ends = np.max([*corners.values()], axis=0) + box + size
    image = _pillow().new("RGB", tuple(ends.astype(int).tolist()), "white")
    draw, font = _pillow("ImageDraw").Draw(image), _pillow("ImageFont").load_default(size)
    for name, corner in corners.items():
        for source in before[name]:
            draw.line([*(corners[source] + box / 2), *(corner + box / 2)], "gray", 2)
    for name, corner in corners.items():
        draw.rectangle([*corner, *(corner + box)], "white", "black")
        draw.text((corner[0] + size, corner[1] + size / 2), texts[name], "black", font)
    if to_file is not None:
        image.save(to_file)
    return image
