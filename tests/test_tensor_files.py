"""Tensors on disk: what was written is found again, and nothing else is taken for it."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given

from ndistribute import tensor_files
from ndistribute.errors import CheckpointCorruptError, DistributeError

FILES = ("SHA256SUMS", "data.json", "tensors.safetensors")
DTYPES = [
    *(np.dtype(code) for code in "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16 >f4 >i2".split()),
    np.dtype(ml_dtypes.bfloat16),
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # Any text, lone surrogates too.
    | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ENDLESS = """
import itertools, sys
import numpy as np
from ndistribute import tensor_files
with tensor_files.claim(sys.argv[1], "ps-0", 10):
    for step in itertools.count(1):
        tensors = {"a": np.full(500_000, step), "b": np.full(7, step)}
        tensor_files.write(sys.argv[1], "ps-0", tensors, step)
        print(step, flush=True)
"""


@st.composite
def any_array(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    raw = draw(st.binary(min_size=int(np.prod(shape)) * dtype.itemsize).map(bytearray))
    if dtype.kind == "b":
        raw = bytearray(byte & 1 for byte in raw)
    array = np.frombuffer(raw, dtype, int(np.prod(shape))).reshape(shape)
    return array.T if draw(st.booleans()) else array


@contextlib.contextmanager
def python(source, *arguments):
    command = [sys.executable, "-c", source, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=40)
        process.stdout.close()


def write(directory, step):
    tensors = {"w": np.full((2, 3), step, np.float32), "scalar": np.array(step)}
    return tensor_files.write(directory, "ps-0", tensors, {"step": step})


def newest_step(directory):
    saved = tensor_files.newest(directory, "ps-0")
    assert saved.data["step"] == saved.tensors["scalar"]
    return saved.data["step"]


def folders(directory):
    return sorted(path.name for path in Path(directory).iterdir() if path.is_dir())


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@given(
    st.dictionaries(st.text(st.characters(exclude_categories=())), any_array(), max_size=4), JSON
)
def test_what_was_written_is_read(tmp_path_factory, tensors, data):
    tensors["__metadata__"] = np.arange(3)  # The format itself uses this name.
    before = {name: array.copy() for name, array in tensors.items()}
    directory = tmp_path_factory.mktemp("files")
    tensor_files.write(directory, "x", tensors, data)
    saved = tensor_files.newest(directory, "x")
    shutil.rmtree(directory)
    assert saved.data == data
    assert list(saved.tensors) == list(tensors)
    for name, array in saved.tensors.items():
        given = before[name]
        assert array.dtype == given.dtype.newbyteorder("=")
        assert array.shape == given.shape
        assert array.tobytes() == given.astype(array.dtype).tobytes()
        assert tensors[name].tobytes() == given.tobytes()  # Ours is as it was.
        array[...] = 0  # Its memory is its own.


def test_another_program_reads_the_tensors_and_checks_the_sums(tmp_path):
    path = write(tmp_path, 3)
    loaded = safetensors.numpy.load_file(path / "tensors.safetensors")
    np.testing.assert_array_equal(loaded["w"], np.full((2, 3), 3, np.float32))
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=path, check=True)


def test_nothing_is_found_where_nothing_was_written(tmp_path):
    assert tensor_files.newest(tmp_path / "absent", "ps-0") is None
    tensor_files.write(tmp_path, "ps-0.1", {})
    tensor_files.write(tmp_path, "ps-01", {})
    assert tensor_files.newest(tmp_path, "ps-0") is None


def test_the_last_two_are_kept_and_files_are_private(tmp_path):
    directory = tmp_path / "made" / "here"
    for step in range(1, 5):
        write(directory, step)
    assert folders(directory) == ["ps-0.000003", "ps-0.000004"]
    assert newest_step(directory) == 4
    with tensor_files.claim(directory, "ps-0", 1.0):
        modes = {path.name: path.stat().st_mode & 0o777 for path in directory.rglob("*")}
    assert {modes.pop(name) for name in ("ps-0.000003", "ps-0.000004")} == {0o700}
    assert modes == dict.fromkeys((*FILES, "ps-0.lock"), 0o600)
    assert directory.stat().st_mode & 0o777 == 0o700


HARMS = {
    "flip": lambda path: flip(path, path.stat().st_size // 2),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "missing": Path.unlink,
}


@pytest.mark.parametrize(("harm", "file"), [*zip(HARMS, FILES * 2, strict=False)])
def test_a_broken_generation_is_set_aside_and_the_one_before_taken(tmp_path, caplog, harm, file):
    write(tmp_path, 1)
    HARMS[harm](write(tmp_path, 2) / file)
    with caplog.at_level(logging.WARNING, "ndistribute"):
        assert newest_step(tmp_path) == 1
    assert "ps-0.000002 is damaged" in caplog.text
    write(tmp_path, 3)
    # The broken one keeps its number and does not count among the two.
    assert folders(tmp_path) == ["ps-0.000001", "ps-0.000002.broken", "ps-0.000003"]
    assert newest_step(tmp_path) == 3


HOSTILE = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: path.symlink_to(path.parents[1] / "ps-0.000001" / path.name),
    "folder": Path.mkdir,
    "hole": lambda path: path.touch() or os.truncate(path, 40 << 30),
}


@pytest.mark.parametrize("kind", [*HOSTILE, "appended hole"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_of_ours_is_refused_by_name_and_unread(tmp_path, name, kind):
    write(tmp_path, 1)
    file = write(tmp_path, 2) / name
    if kind == "appended hole":
        os.truncate(file, 40 << 30)
    else:
        file.unlink()
        HOSTILE[kind](file)
    with pytest.raises(CheckpointCorruptError, match=str(file)):
        tensor_files.read(file.parent)
    assert len(tensor_files.written(tmp_path)) == 2
    assert newest_step(tmp_path) == 1


def test_what_is_no_generation_and_no_lock_is_refused(tmp_path):
    """Reading a link in a loop never ended."""
    write(tmp_path, 1)
    os.mkfifo(tmp_path / "ps-0.000002")
    (tmp_path / "ps-0.000003").symlink_to("ps-0.000003")
    (tmp_path / "ps-0.000004").symlink_to("ps-0.000009")
    assert newest_step(tmp_path) == 1
    os.mkfifo(tmp_path / "ps-0.lock")
    (tmp_path / "x.lock").write_text("mine")
    for name, says in (("ps-0", ""), ("x", ".* has 4 bytes")):
        with pytest.raises(CheckpointCorruptError, match=rf"did not write .*{name}\.lock{says}"):
            tensor_files.claim(tmp_path, name, 9.0)
    assert (tmp_path / "x.lock").read_text() == "mine"


@pytest.mark.parametrize("other", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_file_that_is_replaced_while_it_is_read_is_not_opened(tmp_path, monkeypatch, other):
    file, safe_open = write(tmp_path, 1) / "tensors.safetensors", safetensors.safe_open

    def late(*args, **kwargs):
        file.unlink()
        other(file)
        return safe_open(*args, **kwargs)

    monkeypatch.setattr(safetensors, "safe_open", late)
    assert newest_step(tmp_path) == 1


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, code):
    def refused(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(OSError, match=r"file system with locks \(flock\): '.*/x\.lock'") as found:
        tensor_files.claim(tmp_path, "x", 9.0)
    assert found.value.errno == code


def forked(act):
    """Return a process that calls a function and is then killed, or ends after a failure."""
    process = os.fork()
    if not process:
        try:
            act()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    return process


def ended(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_a_fork_of_a_killed_process_keeps_no_series_locked(tmp_path):
    """It did for as long as it lived."""
    ours, its = os.pipe()

    def be_killed_in_the_block():
        with tensor_files.exclusive(tmp_path, "x"):
            forked(lambda: (os.close(its), os.read(ours, 1)))  # Until the other end is closed.
            os.kill(os.getpid(), signal.SIGKILL)

    saver = forked(be_killed_in_the_block)
    try:
        assert ended(saver) == -signal.SIGKILL
        tensor_files.claim(tmp_path, "x.writing", 30.0).close()
    finally:
        os.close(its)
        os.close(ours)


def test_a_fork_that_leaves_the_block_lets_nobody_in(tmp_path):
    """It removed the file of its parent's lock."""

    def leave():
        with tensor_files.exclusive(tmp_path, "x"):
            if (child := os.fork()) == 0:
                return
            assert ended(child) == -signal.SIGKILL
            with pytest.raises(OSError, match="Another process"):
                tensor_files.claim(tmp_path, "x.writing", 0)
        tensor_files.claim(tmp_path, "x.writing", 0).close()

    assert ended(forked(leave)) == -signal.SIGKILL


def test_a_folder_may_be_reached_by_a_link(tmp_path):
    path = write(tmp_path / "real", 1)
    (tmp_path / "latest").symlink_to(path)
    assert tensor_files.read(tmp_path / "latest").data["step"] == 1


def test_each_flipped_byte_is_noticed(tmp_path):
    path = write(tmp_path, 1)
    for file in FILES:
        for at in range((path / file).stat().st_size):
            flip(path / file, at)
            with pytest.raises(CheckpointCorruptError, match=r"from the beginning.*000001"):
                tensor_files.newest(tmp_path, "ps-0")  # It is no fresh start.
            flip(path / file, at)
    assert newest_step(tmp_path) == 1


@pytest.mark.parametrize(
    ("found", "error", "says"),
    [
        ({"format": 2}, DistributeError, "format 2"),
        ({"dtypes": {"gone": "int8"}}, CheckpointCorruptError, "gone"),
        ({"saved_at": None}, CheckpointCorruptError, "contents are invalid"),
    ],
)
def test_a_whole_generation_of_another_form_is_refused(tmp_path, found, error, says):
    path = write(tmp_path, 1)
    text = json.dumps(json.loads((path / "data.json").read_text()) | found).encode()
    (path / "data.json").write_bytes(text)
    sums = [f"{sha256((path / name).read_bytes()).hexdigest()}  {name}\n" for name in FILES[:0:-1]]
    (path / "SHA256SUMS").write_text("".join(sums))
    with pytest.raises(error, match=says):
        tensor_files.newest(tmp_path, "ps-0")
    assert folders(tmp_path) == ["ps-0.000001"]


def test_what_can_not_be_stored_is_refused_before_anything_is_written(tmp_path):
    for tensors, data in (
        ({"x": np.array(["text"])}, None),
        ({"x": np.array([None])}, None),
        ({}, float("nan")),
        ({}, {"x": {1}}),
    ):
        with pytest.raises((TypeError, ValueError)):
            tensor_files.write(tmp_path / "x", "ps-0", tensors, data)
        assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("tensors", "data"), [({"w": np.zeros(1_000_000)}, 0), ({}, "x" * 1_000_000)]
)
def test_a_file_that_can_not_grow_harms_no_earlier_generation(tmp_path, tensors, data):
    """The system refuses a write, as it does on a full disk."""
    write(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            tensor_files.write(tmp_path, "ps-0", tensors, data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert folders(tmp_path) == ["ps-0.000001"]
    assert newest_step(tmp_path) == 1


def test_a_second_process_waits_for_the_first_one(tmp_path):
    with python(ENDLESS, str(tmp_path)) as process:
        process.stdout.readline()
        with pytest.raises(OSError, match=r"ps-0.*its own directory"):
            tensor_files.claim(tmp_path, "ps-0", 0.1)
        tensor_files.claim(tmp_path, "ps-1", 0.1).close()
        process.send_signal(signal.SIGKILL)
        tensor_files.claim(tmp_path, "ps-0", 10.0).close()
    tensor_files.claim(tmp_path, "ps-0", 0.1).close()


def test_writing_and_reading_do_not_copy_the_tensors(tmp_path):
    source = f"""
import resource
import numpy as np
from ndistribute import tensor_files
tensors = {{str(i): np.full(8 << 20, i, np.uint8) for i in range(16)}}
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
tensor_files.write({str(tmp_path)!r}, "x", tensors)
print(peak() - before)
del tensors
saved = tensor_files.newest({str(tmp_path)!r}, "x")
print(peak() - before)
"""
    with python(source) as process:
        growth = [int(line) for line in process.stdout]
    assert len(growth) == 2
    assert max(growth) < 32  # MiB, where there are 128 of them.
