"""How analyst and owners reach each other: gRPC with mutual TLS."""

from __future__ import annotations

import datetime
import ipaddress
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pymc_dp.errors import OwnerUnavailable, PrivacyError
from pymc_dp.owners.teller import METHODS, Teller

_SERVICE = "pymc_dp.Owner"
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
#: Names of the files of a party: who vouches for all, its certificate, its key.
_FILES = ("ca.pem", "certificate.pem", "key.pem")
#: Seconds that a call may take, before it is made again, and between two tries at most.
_TIMEOUT, _LONGEST_PAUSE = 120.0, 5.0
#: Seconds for which an owner is told that a run has ended.
_AT_THE_END = 10.0
#: Largest message in bytes: two scalings of nine hundred parameters, in decimal digits.
_LARGEST = 2**25
_OPTIONS = [
    ("grpc.max_receive_message_length", _LARGEST),
    ("grpc.max_send_message_length", _LARGEST),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.so_reuseport", 0),  # or a second server could listen on the same port
]
_NO_PROXY = ("grpc.enable_http_proxy", 0)  # what is not encrypted stays on this machine
#: Calls that an owner takes on at a time.
_AT_ONCE = 64


def _grpc() -> Any:
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # processes of chains do not use it
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        import grpc
    except ImportError:
        raise ImportError(
            "Owners on other machines need gRPC. Install it: pip install 'pymc_dp[owners]'."
        ) from None
    return grpc


def _credentials(folder: Path) -> tuple[bytes, bytes, bytes]:
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"certificates={str(folder)!r} lacks {', '.join(missing)}. Make test certificates with "
            "`pymc_dp certificates`, or ask whoever runs the study for yours."
        )
    authority, certificate, key = ((folder / name).read_bytes() for name in _FILES)
    return authority, certificate, key


def _refuse_open(address: str, what: str) -> None:
    """ValueError unless an address is of this machine alone."""
    host = address.rpartition(":")[0]
    if host not in _LOOPBACK:
        raise ValueError(
            f"{what} {address} needs certificates, as others can read what is sent there. Give "
            "certificates, or use localhost."
        )


# -- the owner's side -----------------------------------------------------------------------------


def start_server(teller: Teller, listen: str, certificates: Path | None = None) -> tuple[Any, int]:
    """Serve an owner; the server, and the port that it listens on.

    Parameters
    ----------
    teller : Teller
    listen : str
        Host and port, ``"0.0.0.0:5000"``; port 0 for any that is free.
    certificates : Path, optional
        Folder of this owner's certificate.  Without, only this machine is served.

    Raises
    ------
    ImportError
        If gRPC is not installed.
    ValueError
        If others could read what is sent, files are missing, or the address is in use.
    """
    grpc = _grpc()

    def answering(method: str) -> Callable[[bytes, Any], bytes]:
        return lambda data, context: teller.handle(method, data)

    handlers = {
        method: grpc.unary_unary_rpc_method_handler(answering(method)) for method in METHODS
    }
    server = grpc.server(ThreadPoolExecutor(4), options=_OPTIONS, maximum_concurrent_rpcs=_AT_ONCE)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    try:
        if certificates is None:
            _refuse_open(listen, "Listening on")
            port = server.add_insecure_port(listen)
        else:
            authority, certificate, key = _credentials(certificates)
            credentials = grpc.ssl_server_credentials(
                [(key, certificate)], root_certificates=authority, require_client_auth=True
            )
            port = server.add_secure_port(listen, credentials)
    except RuntimeError:
        raise ValueError(f"{listen} cannot be listened on. Is it in use?") from None
    server.start()
    return server, int(port)


# -- the analyst's side ---------------------------------------------------------------------------


class There:
    """An owner at an address.

    A call is made again when no answer has come: an owner gives the same answer again, so nothing
    is paid or answered twice.  `OwnerUnavailable` after `patience` seconds.
    """

    def __init__(self, address: str, certificates: Path | None, patience: float) -> None:
        self.name = self.address = address
        self._patience = patience
        grpc = _grpc()
        if certificates is None:
            _refuse_open(address, "The owner at")
            self._channel = grpc.insecure_channel(address, options=[*_OPTIONS, _NO_PROXY])
        else:
            authority, certificate, key = _credentials(certificates)
            credentials = grpc.ssl_channel_credentials(authority, key, certificate)
            self._channel = grpc.secure_channel(address, credentials, options=_OPTIONS)
        self._asked = 0
        self._questions: SimpleQueue[tuple[int, bytes, Future[bytes]]] = SimpleQueue()
        threading.Thread(target=self._ask, daemon=True).start()
        self._calls = {
            method: self._channel.unary_unary(f"/{_SERVICE}/{method}") for method in METHODS
        }

    def call(self, method: str, data: bytes) -> Callable[[], bytes]:
        """Begin a call; the function returned waits for the answer."""
        call = self._calls[method]
        if method != "ask":
            begun = call.future(data, timeout=_TIMEOUT)
            return lambda: self._answer(method, data, begun.result)
        # asked all the time: gRPC would begin a thread for each call that is not waited for
        answer: Future[bytes] = Future()
        self._asked += 1
        self._questions.put((self._asked, data, answer))
        return answer.result

    def _ask(self) -> None:
        while True:
            number, data, answer = self._questions.get()
            try:
                first = partial(self._calls["ask"], data, timeout=_TIMEOUT)
                answer.set_result(self._answer("ask", data, first, number))
            except BaseException as error:
                answer.set_exception(error)

    def _answer(
        self,
        method: str,
        data: bytes,
        first: Callable[[], Any],
        number: int | None = None,
    ) -> bytes:
        """The answer to the first call, or to the same one made again, until the next question."""
        patience = min(self._patience, _AT_THE_END) if method == "close" else self._patience
        grpc, begin, pause, attempt = _grpc(), time.monotonic(), 0.1, first
        while True:
            try:
                return bytes(attempt())
            except grpc.RpcError as error:
                if "larger than max" in str(error.details()):
                    raise PrivacyError(
                        f"A message to {self.name} is larger than {_LARGEST / 1e6:.0f} MB. Use a "
                        "model with fewer parameters."
                    ) from None
                if time.monotonic() - begin > patience or number not in (None, self._asked):
                    raise OwnerUnavailable(
                        f"{self.name} ({self.address}) does not answer: {error.details()}. Is it "
                        "served, at this address, with certificates of the same study? Draws made "
                        "before are not lost, and can be released."
                    ) from None
            time.sleep(pause)
            pause = min(2.0 * pause, _LONGEST_PAUSE)
            attempt = partial(self._calls[method], data, timeout=_TIMEOUT)

    def close(self) -> None:
        """Let go of the connection."""
        self._channel.close()


# -- certificates for tests -----------------------------------------------------------------------


def make_certificates(folder: Path, hosts: Sequence[str], days: int = 30) -> list[Path]:
    """Certificates for an analyst and for the owners at some hosts, in a folder each.

    One authority, whose key is thrown away, vouches for all of them and for nobody else.

    Parameters
    ----------
    folder : Path
        Must not exist, or be empty.
    hosts : sequence of str
        Names or addresses by which the analyst reaches the owners.
    days : int, default 30
        How long they are valid.

    Returns
    -------
    list of Path
        The analyst's folder, and one for each host.

    Raises
    ------
    ImportError
        If cryptography is not installed.
    ValueError
        If the folder holds something, or there are no hosts.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError:
        raise ImportError(
            "Certificates need cryptography. Install it: pip install 'pymc_dp[owners]'."
        ) from None
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder.")
    if not hosts or len({*hosts, "analyst"}) < len(hosts) + 1:
        raise ValueError("Name at least one host, each once, and none of them 'analyst'.")
    now = datetime.datetime.now(datetime.UTC)

    def name(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def signed(subject: str, of: Any, by: Any, extensions: Sequence[tuple[Any, bool]]) -> Any:
        builder = (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("pymc_dp study"))
            .public_key(of.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=days))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(by, hashes.SHA256())

    def pem(certificate: Any) -> bytes:
        return bytes(certificate.public_bytes(serialization.Encoding.PEM))

    authority = ec.generate_private_key(ec.SECP256R1())
    ca = signed(
        "pymc_dp study", authority, authority, [(x509.BasicConstraints(True, path_length=0), True)]
    )
    folders = []
    for party in ("analyst", *hosts):
        key = ec.generate_private_key(ec.SECP256R1())
        role = (
            ExtendedKeyUsageOID.CLIENT_AUTH
            if party == "analyst"
            else ExtendedKeyUsageOID.SERVER_AUTH
        )
        extensions: list[tuple[Any, bool]] = [
            (x509.BasicConstraints(False, None), True),
            (x509.ExtendedKeyUsage([role]), True),  # owners do not ask each other
        ]
        if party != "analyst":
            extensions.append((x509.SubjectAlternativeName([_general_name(party)]), False))
        own = folder / party.replace(":", "_")
        own.mkdir(parents=True, mode=0o700)
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        contents = pem(ca), pem(signed(party, key, authority, extensions)), private
        for file, content in zip(_FILES, contents, strict=True):
            (own / file).touch(mode=0o600)
            (own / file).write_bytes(content)
        folders.append(own)
    return folders


def _general_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
