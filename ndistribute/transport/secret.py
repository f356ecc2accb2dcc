"""The secret that the processes of a job share, and the TLS files of a process.

Environment variables name both. If all processes are on this host and no secret is set, they use a
file of the user, so local runs need no set-up. Jobs on several hosts must set a secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shlex
import socket
import ssl
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ndistribute.errors import AuthenticationError
from ndistribute.transport.address import is_loopback, split_address
from ndistribute.transport.codec import Buffer

_MINIMUM_LENGTH = 16
_MAXIMUM_FILE_BYTES = 65536
_MAKE_ONE = 'python -c "import secrets; print(secrets.token_hex(32))"'
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_VARIABLES = ("NDISTRIBUTE_TLS_CERT", "NDISTRIBUTE_TLS_KEY", "NDISTRIBUTE_TLS_CA")


class TlsFiles(NamedTuple):
    """The PEM files of a process: certificate, private key without a passphrase, and CA."""

    cert: str
    key: str
    ca: str


@dataclass(frozen=True)
class Credentials:
    """The secret, the job identity and the TLS files of a process; they keep jobs apart."""

    secret: bytes
    job: str
    tls: TlsFiles | None = None


def credentials_of(
    addresses: Sequence[str], environ: Mapping[str, str] = os.environ
) -> Credentials:
    """Return the credentials of this process in a job whose processes have these addresses."""
    # Launchers set an identity; otherwise it is derived from the addresses.
    described = hashlib.sha256(json.dumps(list(addresses)).encode()).hexdigest()[:16]
    job = environ.get("NDISTRIBUTE_JOB_ID") or f"of addresses {described}"
    return Credentials(find_secret(addresses, environ), job, tls_files(environ))


def find_secret(addresses: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """Return the secret of the job whose processes have these addresses.

    It is the value of ``NDISTRIBUTE_SECRET``, or the content of the file that
    ``NDISTRIBUTE_SECRET_FILE`` names and only its owner may read. If neither is set and all
    processes are on this host, it is the content of a file in the user's state folder.

    >>> find_secret(["node1:1234"], {"NDISTRIBUTE_SECRET": "correct horse battery"})
    b'correct horse battery'
    """
    hosts = [split_address(address)[0] for address in addresses]
    if "NDISTRIBUTE_SECRET" in environ:
        return _checked(os.fsencode(environ["NDISTRIBUTE_SECRET"]), "NDISTRIBUTE_SECRET")
    if "NDISTRIBUTE_SECRET_FILE" in environ:
        name = environ["NDISTRIBUTE_SECRET_FILE"]
        source = f"the file of NDISTRIBUTE_SECRET_FILE ({name!r})"
        try:
            return _read(name, source)
        except AuthenticationError:
            raise
        except (OSError, ValueError) as error:
            what = f"Cannot read {source}: {error}."
            how = f"Make it with\n    {_MAKE_ONE} > FILE; chmod 600 FILE"
            raise AuthenticationError(f"{what} {how}") from error
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
    if len(secret) < _MINIMUM_LENGTH:
        what = "is empty" if not secret else f"has {len(secret)} characters"
        problem = f"The secret in {source} {what}, and a secret needs at least {_MINIMUM_LENGTH}."
        raise AuthenticationError(f"{problem} Make one with\n    {_MAKE_ONE}")
    return secret


def _read(path: str | Path, source: str, flags: int = 0) -> bytes:
    """Return the secret in a file; all checks use the open file, which cannot be replaced."""
    # A named pipe must not block the start of a job, so open without waiting, and then refuse it.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise AuthenticationError(
                f"Cannot take the secret from {source}: it is not a regular file."
            )
        if status.st_mode & _OTHERS:
            raise AuthenticationError(
                f"Users other than the owner may use {source}, because its mode is "
                f"{stat.S_IMODE(status.st_mode):o}. Run\n    chmod 600 {shlex.quote(str(path))}"
            )
        return _checked(os.read(handle, _MAXIMUM_FILE_BYTES), source)
    finally:
        os.close(handle)


def _own_secret(environ: Mapping[str, str]) -> bytes:
    """Return the secret of this user on this host; the first process creates it."""
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # The XDG specification says to ignore relative paths.
        state = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local", "state")
    folders = [Path(state, "ndistribute")] if os.path.isabs(state) else []
    problems = []
    for folder in [*folders, Path(tempfile.gettempdir(), f"ndistribute-{os.geteuid()}")]:
        try:
            return _secret_in(folder)
        except AuthenticationError:
            raise
        except OSError as error:
            problems.append(f"{folder}: {error}")
    raise AuthenticationError(
        "Cannot use any folder for this user's secret (" + "; ".join(problems) + "). Set "
        f"NDISTRIBUTE_SECRET in every process to the output of:\n    {_MAKE_ONE}"
    )


def _secret_in(folder: Path) -> bytes:
    """Return the secret in a folder of this user; create both if they are missing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    # In a folder for temporary files, another user may have created this folder first.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError("it is not this user's own folder")
    if status.st_mode & _OTHERS:
        folder.chmod(0o700)
    path = folder / "secret"
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", prefix=".secret-", dir=folder) as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            with contextlib.suppress(FileExistsError):  # Another process created it first.
                os.link(file.name, path)
    return _read(path, f"{str(path)!r}", os.O_NOFOLLOW)


def tls_files(environ: Mapping[str, str]) -> TlsFiles | None:
    """Return the TLS files that the environment names, or None if it names none."""
    values = TlsFiles(*[environ.get(name, "") for name in _VARIABLES])
    missing = [name for name, value in zip(_VARIABLES, values, strict=True) if not value]
    if missing and any(values):
        what = f"TLS needs {', '.join(_VARIABLES)}; not set: {', '.join(missing)}."
        raise ValueError(f"{what} Set all three, or none to work without TLS.")
    return None if missing else values


def tls_context(files: TlsFiles, *, server: bool) -> ssl.SSLContext:
    """Return a TLS context that presents this process's certificate and verifies the peer's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Certificates name no host, because processes move between hosts; the job's CA is verified.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_passphrase)
        context.load_verify_locations(files.ca)
    except (OSError, ValueError) as error:
        named = ", ".join(map("=".join, zip(_VARIABLES, files, strict=True)))
        raise AuthenticationError(
            f"Cannot use the TLS files {named}: {error}. They must be a certificate, its private "
            "key, and the certificate of the authority that signed it, in PEM."
        ) from error
    if server:
        context.num_tickets = 0  # Sessions are never resumed.
    return context


class NonBlockingTls:
    """Gives a TLS socket the interface of a plain non-blocking socket.

    OpenSSL allows one thread at a time in a connection; the lock is never held while waiting.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._tls = sock
        self._lock = threading.Lock()
        self.fileno, self.close, self.getsockopt = sock.fileno, sock.close, sock.getsockopt

    def sendmsg(self, buffers: Sequence[Buffer], *_: object) -> int:
        return self._try(self._tls.send, buffers[0])

    def recvmsg_into(self, views: Sequence[memoryview], *_: object) -> tuple[int, tuple[()]]:
        return self._try(self._tls.recv_into, views[0]), ()

    def _try(self, operation: Callable[..., int], buffer: Buffer) -> int:
        try:
            with self._lock:
                return operation(buffer)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLZeroReturnError:
            return 0

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self._tls, how)  # SSLSocket.shutdown would also end reading.


def _no_passphrase() -> str:
    raise ValueError(
        "the private key has a passphrase, and nobody is there to type it: use a key without one"
    )
