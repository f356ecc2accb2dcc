"""Finds the secret that the processes of a job share, and by which they know each other.

The environment names it. Where every process is on this host and nothing was set, a file of the
user's own serves, so that a local run needs no set-up; beyond this host nothing is assumed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ndistribute.errors import AuthenticationError
from ndistribute.transport.address import is_loopback, split_address
from ndistribute.transport.failure_detector import silence_seconds
from ndistribute.transport.handshake import Hello
from ndistribute.transport.tls import TlsFiles, tls_files
from ndistribute.version import __version__

__all__ = ["MINIMUM_SECRET_LENGTH", "Credentials", "credentials_of", "find_secret"]

MINIMUM_SECRET_LENGTH = 16
_MAXIMUM_FILE_BYTES = 65536
_MAKE_ONE = 'python -c "import secrets; print(secrets.token_hex(32))"'
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class Credentials:
    """What a process of a job shows to the others.

    Args:
        secret: what all of them know, and nobody else.
        job: the identity of the job, so that two jobs of one user never mix.
        tls: the files of this process's certificate, where the job uses TLS.
    """

    secret: bytes
    job: str
    tls: TlsFiles | None = None

    def signed(self, hello: Hello) -> Hello:
        """Return a hello with the job's identity and the package's version."""
        return msgspec.structs.replace(
            hello, job=self.job, version=__version__, silence=silence_seconds()
        )


def credentials_of(
    addresses: Sequence[str], environ: Mapping[str, str] | None = None
) -> Credentials:
    """Return what this process shows to the others of its job.

    Args:
        addresses: ``host:port`` of every process of the job. Its identity is made of them where
            nobody has set `NDISTRIBUTE_JOB_ID`, as launchers do.
        environ: where the secret, the identity and the TLS files are named.

    Raises:
        AuthenticationError: there is no secret, or an unsafe one.
        ValueError: an address is not one, or only some of the TLS files are named.

    >>> credentials_of(["localhost:1"], {"NDISTRIBUTE_JOB_ID": "blue"}).job
    'blue'
    """
    environ = os.environ if environ is None else environ
    described = hashlib.sha256(json.dumps(list(addresses)).encode()).hexdigest()[:16]
    job = environ.get("NDISTRIBUTE_JOB_ID") or f"of addresses {described}"
    return Credentials(find_secret(addresses, environ), job, tls_files(environ))


def find_secret(addresses: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """Return the job's secret, the same in each of its processes.

    Args:
        addresses: ``host:port`` of every process of the job.
        environ: the environment. ``NDISTRIBUTE_SECRET`` holds the secret itself, else
            ``NDISTRIBUTE_SECRET_FILE`` names a file that only its owner may read. Where neither is
            set and all addresses are loopback, a file in the user's state folder is read, or made.

    Returns:
        At least 16 bytes, without the white space around them.

    Raises:
        AuthenticationError: when there is no secret, or an unsafe one.
        ValueError: when an address is not one.

    >>> find_secret(["node1:1234"], {"NDISTRIBUTE_SECRET": "correct horse battery"})
    b'correct horse battery'
    """
    hosts = [split_address(address)[0] for address in addresses]
    if "NDISTRIBUTE_SECRET" in environ:
        return _checked(os.fsencode(environ["NDISTRIBUTE_SECRET"]), "NDISTRIBUTE_SECRET")
    if "NDISTRIBUTE_SECRET_FILE" in environ:
        return _from_named_file(environ["NDISTRIBUTE_SECRET_FILE"])
    away = next((host for host in hosts if not is_loopback(host)), None)
    if away is not None:
        raise AuthenticationError(
            f"The processes of this job must share a secret, because {away!r} is not this host "
            f"alone. Make one with\n    {_MAKE_ONE}\nand set NDISTRIBUTE_SECRET to it in the "
            "environment of every process, or NDISTRIBUTE_SECRET_FILE to a file that holds it "
            "(mode 600)."
        )
    return _own_secret(environ)


def _checked(secret: bytes, source: str) -> bytes:
    secret = secret.strip()
    if len(secret) < MINIMUM_SECRET_LENGTH:
        what = "is empty" if not secret else f"has {len(secret)} characters"
        raise AuthenticationError(
            f"The secret in {source} {what}, and a secret needs at least {MINIMUM_SECRET_LENGTH}. "
            f"Make one with\n    {_MAKE_ONE}"
        )
    return secret


def _from_named_file(name: str) -> bytes:
    source = f"the file of NDISTRIBUTE_SECRET_FILE ({name!r})"
    try:
        # A named pipe must not stop the start of a job: it is opened without waiting, then refused.
        handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise AuthenticationError(
            f"Cannot read {source}: {error}. Make it with\n    {_MAKE_ONE} > FILE; chmod 600 FILE"
        ) from error
    return _read(handle, name, source)


def _read(handle: int, name: str, source: str) -> bytes:
    """Return a secret from a file that is open, and close it; the checks are of that very file."""
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise AuthenticationError(f"Cannot take the secret from {source}: it is no plain file.")
        if status.st_mode & _OTHERS:
            raise AuthenticationError(
                f"Others than its owner may use {source}: its mode is "
                f"{stat.S_IMODE(status.st_mode):o}. Run\n    chmod 600 {shlex.quote(name)}"
            )
        return _checked(os.read(handle, _MAXIMUM_FILE_BYTES), source)
    finally:
        os.close(handle)


def _own_secret(environ: Mapping[str, str]) -> bytes:
    """Return the secret of this user on this host; the first process that asks makes it."""
    problems = []
    for directory in _own_directories(environ):
        try:
            _make_private(directory)
            return _read_or_create(directory / "secret")
        except AuthenticationError:
            raise
        except OSError as error:
            problems.append(f"{directory}: {error}")
    raise AuthenticationError(
        "Found no folder for this user's secret (" + "; ".join(problems) + "). Set "
        f"NDISTRIBUTE_SECRET in every process, to what this prints:\n    {_MAKE_ONE}"
    )


def _own_directories(environ: Mapping[str, str]) -> list[Path]:
    """Return where a user's secret may live, the best place first."""
    temporary = Path(tempfile.gettempdir(), f"ndistribute-{os.geteuid()}")
    state = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):  # The XDG specification says to ignore any other.
        return [Path(state, "ndistribute"), temporary]
    home = environ.get("HOME") or os.path.expanduser("~")
    if os.path.isabs(home):
        return [Path(home, ".local", "state", "ndistribute"), temporary]
    return [temporary]


def _make_private(directory: Path) -> None:
    """Make a folder that only this user may use.

    Raises:
        PermissionError: when it is there and another user's, as anybody can arrange in a folder
            for temporary files.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError("it is not this user's own folder")
    if status.st_mode & _OTHERS:
        directory.chmod(0o700)


def _read_or_create(path: Path) -> bytes:
    try:
        return _read_own(path)
    except FileNotFoundError:
        _create(path)
        return _read_own(path)


def _read_own(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    return _read(handle, str(path), f"{str(path)!r}")


def _create(path: Path) -> None:
    """Put a new secret in place, whole or not at all, unless another process was faster."""
    handle, name = tempfile.mkstemp(prefix=".secret-", dir=path.parent)
    try:
        with open(handle, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        try:
            os.link(name, path)
        except FileExistsError:
            return
    finally:
        os.unlink(name)
