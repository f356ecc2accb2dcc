"""All processes of a job find one secret, and an unsafe one is refused with what to do."""

import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.errors import AuthenticationError
from ndistribute.transport.address import is_loopback, split_address
from ndistribute.transport.secret import find_secret

LOCAL = ["localhost:1", "127.0.0.2:2", "[::1]:3"]
AWAY = ["localhost:1", "node1:2"]
GOOD = "a long enough secret"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return {"HOME": str(tmp_path)}


@pytest.fixture
def folder(tmp_path):
    """Where the secret of a user is kept."""
    return tmp_path / ".local/state/ndistribute"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def named_file(folder: Path, text: str, permissions: int = 0o600) -> dict[str, str]:
    path = folder / "my secret"
    path.write_text(text)
    path.chmod(permissions)
    return {"NDISTRIBUTE_SECRET_FILE": str(path)}


def test_the_environment_or_a_file_that_it_names_holds_the_secret(tmp_path):
    for text in (GOOD, GOOD + "\n"):
        environ = named_file(tmp_path, text)
        for addresses in (LOCAL, AWAY):
            assert find_secret(addresses, environ) == GOOD.encode()
    other = os.fsdecode(b"\xff\xfe is no text in any encoding")
    assert find_secret(AWAY, {**environ, "NDISTRIBUTE_SECRET": other}) == os.fsencode(other)


@pytest.mark.parametrize("permissions", [0o640, 0o601])
def test_a_file_that_others_may_use_is_refused_with_the_command_that_mends_it(
    tmp_path, permissions
):
    environ = named_file(tmp_path, GOOD, permissions)
    with pytest.raises(AuthenticationError) as caught:
        find_secret(LOCAL, environ)
    command = re.search(r"chmod 600 .*", str(caught.value))
    assert command is not None
    subprocess.run(command[0], shell=True, check=True, timeout=60)
    assert find_secret(LOCAL, environ) == GOOD.encode()


@pytest.mark.parametrize("text", ["", "   \n", "fifteen letters"])
def test_an_empty_or_short_secret_is_refused(tmp_path, text):
    for environ in (named_file(tmp_path, text), {"NDISTRIBUTE_SECRET": text}):
        with pytest.raises(AuthenticationError, match=r"at least 16[\s\S]*token_hex"):
            find_secret(LOCAL, environ)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    tmp_path.chmod(0o700)
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "pipe"):
        with pytest.raises(AuthenticationError, match=str(path)):
            find_secret(LOCAL, {"NDISTRIBUTE_SECRET_FILE": str(path)})


def test_beyond_this_host_a_missing_secret_is_an_error_whose_command_makes_one(home):
    with pytest.raises(AuthenticationError, match="NDISTRIBUTE_SECRET_FILE") as caught:
        find_secret(AWAY, home)
    command = re.search(r"python (-c \".*\")", str(caught.value))
    assert command is not None
    command = f"{sys.executable} {command[1]}"
    made = subprocess.run(command, shell=True, check=True, capture_output=True, timeout=60)
    secret = made.stdout.decode().strip()
    assert find_secret(AWAY, {"NDISTRIBUTE_SECRET": secret}) == secret.encode()
    assert not list(Path(home["HOME"]).iterdir())


def test_on_this_host_a_private_file_of_the_user_serves(home, folder):
    folder.mkdir(parents=True, mode=0o755)
    secret, path = find_secret(LOCAL, home), folder / "secret"
    assert re.fullmatch(b"[0-9a-f]{64}", secret)
    assert path.read_bytes().strip() == secret
    assert (mode(path), mode(folder)) == (0o600, 0o700)
    assert [entry.name for entry in folder.iterdir()] == ["secret"]
    assert find_secret(LOCAL, {**home, "XDG_STATE_HOME": "not/absolute"}) == secret
    path.chmod(0o644)  # It is not passed over.
    with pytest.raises(AuthenticationError, match="chmod 600"):
        find_secret(LOCAL, home)
    state = Path(home["HOME"], "state")
    find_secret(LOCAL, {**home, "XDG_STATE_HOME": str(state)})
    assert (state / "ndistribute/secret").exists()


def test_who_loses_the_race_takes_the_winners_secret(home, folder, monkeypatch):
    link = os.link

    def overtaken(source, target):
        Path(target).write_text("the winner was faster")
        Path(target).chmod(0o600)
        link(source, target)

    monkeypatch.setattr(os, "link", overtaken)
    assert find_secret(LOCAL, home) == b"the winner was faster"
    assert [entry.name for entry in folder.iterdir()] == ["secret"]


def test_without_a_home_only_an_own_folder_among_the_temporary_files_serves(home, tmp_path):
    (tmp_path / "no folder").touch()
    environ = {"HOME": str(tmp_path / "no folder")}
    secret = find_secret(LOCAL, environ)
    own = tmp_path / f"temporary/ndistribute-{os.geteuid()}"
    assert mode(own) == 0o700
    assert find_secret(LOCAL, environ) == secret
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")  # As another user may have placed it there.
    with pytest.raises(AuthenticationError, match="Set NDISTRIBUTE_SECRET"):
        find_secret(LOCAL, environ)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_of_another_user_is_not_trusted(home, folder, tmp_path):
    folder.mkdir(parents=True, mode=0o700)
    os.chown(folder, 12345, 12345)
    find_secret(LOCAL, home)
    assert not list(folder.iterdir())
    assert (tmp_path / f"temporary/ndistribute-{os.geteuid()}/secret").exists()


NO_ADDRESSES = (
    ["", "host", "host:", ":1", "host:port", "host:65536", "host:-1", "::1", "::1:80", "[::1]"]
    + ["[host]:1", "[127.0.0.1]:1", "ho st:1", "host:1 ", "host:1\n", "-host:1", "http://host:1"]
    + ["host:1٢"]
)


def test_what_is_no_address_is_an_error_that_shows_one():
    for address in NO_ADDRESSES:
        with pytest.raises(ValueError, match="localhost:12345"):
            find_secret([address], {"NDISTRIBUTE_SECRET": GOOD})


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_ip_address_is_understood(ip, port):
    text = f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"
    assert split_address(text) == (str(ip), port)
    assert is_loopback(str(ip)) == ip.is_loopback


def test_what_may_be_reached_from_elsewhere_is_not_loopback():
    away = ("localhost.example.org", "0.0.0.0", "::", "128.0.0.1", "127.1")
    assert not any(map(is_loopback, away))
    assert all(map(is_loopback, ("localhost", "LOCALHOST", "127.0.0.1", "127.255.255.254", "::1")))
