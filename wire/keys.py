"""Secret files, the fleet key and its key tree, and node identities.

One pre-shared key (PSK) makes a fleet. No key is used for two things: every purpose has its own 32 bytes,
BLAKE2b(key=PSK, person=purpose, salt=key id), so that a leak or a nonce mistake in one plane can't touch another.
The telemetry branch hangs below one node of the tree, so a dashboard can hold that node and nothing else:

    PSK ── HELLO, WELCOME, SESSION, BUS_FLEET, CURVE_SERVER, CURVE_CLIENT
     └──── BUS_TELEMETRY (the telemetry key, may live in a file of its own)
             ├── CURVE_BUS      (admission to the bus)
             └── seal key       (what readers of telemetry may open)

The key id is public (it names a PSK during a rotation). A PSK that can be guessed can be tested against it offline:
use 32 random bytes (:meth:`FleetKey.generate`), not a phrase.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from nacl import bindings
from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from wire.errors import AuthenticationError, ConfigError, LocalProtocolError, SecretFileError
from wire.files import (
    NotRegularFile,
    make_private_folder,
    open_folder_of,
    open_regular,
    read_at_most,
    write_private_file,
)

KEY_BYTES: Final = 32
KEY_ID_BYTES: Final = 8
PSK_BYTES_MIN: Final = 16
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
KEY_RING_HEADER: Final = b"# kakeya fleet keys, newest first"
"""First line of a file that holds several PSKs, one a line (wire.keyring)."""
_MADE_KEY: Final = re.compile(rb"[0-9a-fA-F]{%d,}" % (2 * PSK_BYTES_MIN))
"""A line that `kakeya key new` or `openssl rand -hex` has made."""
SIGNATURE_BYTES: Final = 64
SECRET_FILE_BYTES_MAX: Final = 64 * 1024
"""No secret is larger; keeps a wrong path (a model, a log) from being read into memory."""

ABSENT_KEY: Final = "copy it from a machine that has it, or pass the right path"
ABSENT_FLEET_KEY: Final = (
    "the first machine of a fleet makes it with `kakeya key new`; copy it from there, or pass the right path"
)

DAMAGED_KEY: Final = "copy it again from where it works, or remove it and make a new one"
DAMAGED_FLEET_KEY: Final = "copy it again from a machine where it works, or remove it and run `kakeya key new`"
_DAMAGED_TELEMETRY_KEY: Final = "run `kakeya key telemetry` where the fleet key is, and copy it from there"
_DAMAGED_TENANT_KEY: Final = "put a copy of it back, or remove it: a new one is made, which other machines do not know"
_DAMAGED_IDENTITY: Final = (
    "put its own backup back; or remove it with the node stopped, and run `kakeya key forget NODE` on the other machines"
)

_PERSON_KEY_ID: Final = b"kz key id"
_PERSON_LONG_PSK: Final = b"kz long psk"
_PERSON_TELEMETRY_SEAL: Final = b"kz telemetry sea"
_PERSON_CLIENT_TO_SERVER: Final = b"kz session c>s"
_PERSON_SERVER_TO_CLIENT: Final = b"kz session s>c"
_SALT_BYTES: Final = 16


class Purpose(StrEnum):
    """What a derived key is for; the value personalises the hash (at most 16 bytes)."""

    HELLO = "kz hello"
    WELCOME = "kz welcome"
    SESSION = "kz session"
    BUS_FLEET = "kz bus fleet"
    BUS_TELEMETRY = "kz bus telemetry"
    CURVE_SERVER = "kz curve server"
    CURVE_CLIENT = "kz curve client"
    CURVE_BUS = "kz curve bus"


# --- secret files ------------------------------------------------------------------------------------------------


def read_secret_file(
    path: Path, *, minimum_bytes: int, what: str, absent: str = ABSENT_KEY, damaged: str = DAMAGED_KEY
) -> bytes:
    """Read a secret, without outer whitespace, from a file that only its owner can read.

    The checks are made on the opened file, not on the name, so the file can't be swapped between check and use. Whoever may
    write to the folder could put another of our own secrets in its place, so not everybody may: neither where the name is,
    nor, of a symbolic link, where the file is.

    Args:
        path: the file; a symbolic link is followed.
        minimum_bytes: fewest bytes that count as a secret.
        what: what it holds, for the error line, e.g. "fleet key".
        absent: the remedy when there is no file.
        damaged: the remedy when it is empty or too short.

    Raises:
        SecretFileError: missing, unreadable, not a regular file, empty, too short, too long, open to others, owned by
            another user, or in a folder that everybody may write to.
    """
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        raise SecretFileError(f"the {what} file {path} does not exist", remedy=absent) from None
    except NotRegularFile:
        raise SecretFileError(f"the {what} file {path} is not a regular file", remedy="pass the right path") from None
    except OSError as error:
        reason = error.strerror or "unknown error"
        raise SecretFileError(
            f"the {what} file {path} cannot be opened: {reason}", remedy="make it readable for this user"
        ) from None
    try:
        _check_secret_file(os.fstat(descriptor), path, what)
        if (folder := open_folder_of(path)) is not None:
            text = f"the {what} file {path} is in a folder that everybody may write to"
            raise SecretFileError(text, remedy=f"chmod o-w {folder}")
        data = read_at_most(descriptor, SECRET_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise SecretFileError(f"the {what} file {path} cannot be read: {error.strerror or 'unknown error'}") from None
    finally:
        os.close(descriptor)
    if len(data) > SECRET_FILE_BYTES_MAX:
        raise SecretFileError(f"the {what} file {path} is too large to be a secret", remedy="pass the right path")
    data = data.strip()
    if len(data) < minimum_bytes:
        state = "is empty" if not data else f"holds {len(data)} bytes, fewer than {minimum_bytes}"
        raise SecretFileError(f"the {what} file {path} {state}", remedy=damaged)
    return data


def read_fleet_key_file(path: Path) -> bytes:
    """The text of a file with one PSK or several.

    Raises:
        SecretFileError: see :func:`read_secret_file`.
    """
    remedies = {"absent": ABSENT_FLEET_KEY, "damaged": DAMAGED_FLEET_KEY}
    return read_secret_file(path, minimum_bytes=PSK_BYTES_MIN, what="fleet key", **remedies)


def _check_secret_file(status: os.stat_result, path: Path, what: str) -> None:
    if os.name != "posix":
        return
    if status.st_uid != os.geteuid():
        raise SecretFileError(f"the {what} file {path} belongs to another user", remedy=f"chown it to this user: {path}")
    if status.st_mode & 0o077:
        raise SecretFileError(f"the {what} file {path} is open to other users", remedy=f"chmod 600 {path}")


def write_secret_file(path: Path, data: bytes, *, replace: bool = False) -> None:
    """Write a secret file with mode 0600; missing parent folders are made with mode 0700.

    The file appears whole or not at all (written beside its name, then linked to it), so two daemons that start together
    can't read half a key; an existing file is overwritten only with ``replace``.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    try:
        make_private_folder(path.parent)
        write_private_file(path, data, replace=replace)
    except FileExistsError:
        raise ConfigError(f"{path} exists and is not overwritten", remedy="remove it first, or choose another") from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror or 'unknown error'}", remedy="choose a writable local folder"
        ) from None


def _load_or_create_hex(path: Path, what: str, damaged: str) -> bytes:
    """32 random bytes kept as hexadecimal text."""
    if not path.exists():
        # Lost the race against another process that creates it: use that one.
        try:
            write_secret_file(path, secrets.token_hex(KEY_BYTES).encode("ascii") + b"\n")
        except ConfigError:
            if not path.exists():
                raise
    return _read_hex(path, what, damaged)


def _read_hex(path: Path, what: str, damaged: str) -> bytes:
    text = read_secret_file(path, minimum_bytes=2 * KEY_BYTES, what=what, damaged=damaged)
    try:
        data = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        data = b""
    if len(data) != KEY_BYTES:
        raise SecretFileError(f"the {what} file {path} does not hold {2 * KEY_BYTES} hexadecimal digits", remedy=damaged)
    return data


def load_or_create_tenant_key(path: Path) -> bytes:
    """The 32-byte key of a tenant's block hashes, made on first use.

    Raises:
        SecretFileError: the file is not a proper secret file (see :func:`read_secret_file`).
        ConfigError: it cannot be created.
    """
    return _load_or_create_hex(path, "tenant key", _DAMAGED_TENANT_KEY)


# --- key tree --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CurvePair:
    """A Curve25519 key pair, 32 raw bytes each, as pyzmq's CURVE options and X25519 take them."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def from_secret(cls, secret: bytes) -> CurvePair:
        """The pair of a 32-byte secret (clamped inside the curve code, so any bytes do)."""
        return cls(public=bindings.crypto_scalarmult_base(secret), secret=secret)


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """The two keys of one control session, one a direction, 32 bytes each."""

    client_to_server: bytes = field(repr=False)
    server_to_client: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class TelemetryKey:
    """The branch of the key tree that readers of telemetry hold: it opens telemetry and admits to the bus, nothing else."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise ConfigError(f"a telemetry key has {KEY_BYTES} bytes, not {len(self.secret)}")

    @classmethod
    def load(cls, path: Path) -> TelemetryKey:
        """Read it from its file (:meth:`to_text`).

        Raises:
            SecretFileError: see :func:`read_secret_file`.
        """
        return cls(_read_hex(path, "telemetry key", _DAMAGED_TELEMETRY_KEY))

    def to_text(self) -> bytes:
        """What its file holds: hexadecimal digits."""
        return self.secret.hex().encode("ascii")

    def bus_curve(self) -> CurvePair:
        """Key pair that both ends of the bus use in the CURVE handshake."""
        return CurvePair.from_secret(_blake2b(self.secret, Purpose.CURVE_BUS.encode()))

    @property
    def seal_key(self) -> bytes:
        """32 bytes that seal telemetry on the bus."""
        return _blake2b(self.secret, _PERSON_TELEMETRY_SEAL)


@dataclass(frozen=True, slots=True)
class FleetKey:
    """The fleet's pre-shared key, root of all keys but identities and tenant keys.

    Args:
        psk: at least 16 bytes.

    Raises:
        ConfigError: too short.
    """

    psk: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.psk) < PSK_BYTES_MIN:
            raise ConfigError(
                f"a fleet key has at least {PSK_BYTES_MIN} bytes, not {len(self.psk)}", remedy="generate a new one"
            )

    @classmethod
    def load(cls, path: Path) -> FleetKey:
        """Read the PSK from its file; the text itself, without outer whitespace, is the key.

        Of a file with several keys (:mod:`wire.keyring`) it is the oldest, which every node admits until it is retired.

        Raises:
            SecretFileError: see :func:`read_secret_file`.
        """
        data = read_fleet_key_file(path)
        try:
            return cls(split_keys(data)[-1])
        except ConfigError as error:
            raise SecretFileError(f"the fleet key file {path} is not usable: {error.message}", remedy=error.remedy) from None

    @staticmethod
    def generate() -> bytes:
        """A new PSK: 32 random bytes as 64 hexadecimal digits."""
        return secrets.token_hex(KEY_BYTES).encode("ascii")

    @property
    def key_id(self) -> bytes:
        """8 public bytes that name this PSK."""
        return hashlib.blake2b(key=self._root(), person=_PERSON_KEY_ID, digest_size=KEY_ID_BYTES).digest()

    def derive(self, purpose: Purpose) -> bytes:
        """32 bytes for one purpose."""
        if purpose is Purpose.CURVE_BUS:
            # Hangs below the telemetry key, so that its holder can compute it too.
            return self.telemetry_key().bus_curve().secret
        return _blake2b(self._root(), purpose.encode(), salt=self.key_id.ljust(_SALT_BYTES, b"\0"))

    def curve_server(self) -> CurvePair:
        """CURVE key pair of bound control sockets."""
        return CurvePair.from_secret(self.derive(Purpose.CURVE_SERVER))

    def curve_client(self) -> CurvePair:
        """CURVE key pair of connecting control sockets: the only client key the gate admits."""
        return CurvePair.from_secret(self.derive(Purpose.CURVE_CLIENT))

    def curve_bus(self) -> CurvePair:
        """CURVE key pair of the bus, see :meth:`TelemetryKey.bus_curve`."""
        return self.telemetry_key().bus_curve()

    def telemetry_key(self) -> TelemetryKey:
        """The branch that may be given to readers of telemetry."""
        return TelemetryKey(self.derive(Purpose.BUS_TELEMETRY))

    def _root(self) -> bytes:
        # BLAKE2b takes keys up to 64 bytes.
        if len(self.psk) <= hashlib.blake2b.MAX_KEY_SIZE:
            return self.psk
        return hashlib.blake2b(self.psk, person=_PERSON_LONG_PSK).digest()


def split_keys(data: bytes) -> list[bytes]:
    """The PSKs in the text of a key file, newest first: the text itself, or the lines of a ring between header and end.

    A ring that lost its end (half copied, a full disk) must not be taken for a key: its beginning is known to everybody.
    Nor must several keys without their header be taken for one: whoever has written them means a ring.

    Raises:
        ConfigError: it begins like a ring, or with a byte order mark, and is no whole ring; or is several keys, or no text.
    """
    if b"\0" in data:
        remedy = "put a text there: `kakeya key new`, or `openssl rand -hex 32`; it is the same on every machine"
        raise ConfigError("it has a NUL byte, which no text has", remedy=remedy)
    if not data.startswith((b"#", _BYTE_ORDER_MARK)):
        if (count := _keys_without_header(data)) > 1:
            text = f"it holds {count} keys without the header of a ring"
            raise ConfigError(text, remedy="keep the one line that the fleet has; `kakeya key rotate` adds another key")
        return [data]
    header, *keys = [line.strip() for line in data.splitlines() if line.strip()] or [b""]
    if header != KEY_RING_HEADER or not keys or keys[-1] != key_ring_end(len(keys) - 1):
        raise ConfigError("it is damaged or not copied to its end", remedy="copy the whole file again")
    return keys[:-1]


def _keys_without_header(data: bytes) -> int:
    """How many lines there are, where each looks like a key that was made for this; 0: it is something else."""
    lines = [line.strip() for line in data.splitlines() if line.strip()]
    return len(lines) if all(_MADE_KEY.fullmatch(line) for line in lines) else 0


def key_ring_end(count: int) -> bytes:
    """The last line of a ring of ``count`` keys."""
    return b"# end of %d keys" % count


def _blake2b(key: bytes, person: bytes, *, salt: bytes = b"", data: bytes = b"") -> bytes:
    return hashlib.blake2b(data, key=key, person=person, salt=salt, digest_size=KEY_BYTES).digest()


def derive_session_keys(
    session_secret: bytes, own: CurvePair, peer_public_key: bytes, hello_hash: bytes, welcome_hash: bytes
) -> SessionKeys:
    """Both keys of a session: BLAKE2b(key=SESSION key, X25519 secret ‖ hello hash ‖ welcome hash), a person per direction.

    Knowing the PSK is not enough to compute them later (forward secrecy), and without it the exchange is worthless.

    Raises:
        AuthenticationError: the peer's public key is a point of small order.
    """
    try:
        shared = bindings.crypto_scalarmult(own.secret, peer_public_key)
    except RuntimeError:
        # libsodium refuses results that don't depend on our secret; PyNaCl reports that as RuntimeError.
        raise AuthenticationError("the ephemeral key is a weak point") from None
    data = shared + hello_hash + welcome_hash
    return SessionKeys(
        client_to_server=_blake2b(session_secret, _PERSON_CLIENT_TO_SERVER, data=data),
        server_to_client=_blake2b(session_secret, _PERSON_SERVER_TO_CLIENT, data=data),
    )


# --- identity ------------------------------------------------------------------------------------------------------


class NodeIdentity:
    """The Ed25519 key that a node is known by.

    Args:
        seed: 32 secret bytes.
    """

    __slots__ = ("_key", "public_key")

    def __init__(self, seed: bytes) -> None:
        if len(seed) != KEY_BYTES:
            raise LocalProtocolError(f"an identity seed has {KEY_BYTES} bytes, not {len(seed)}")
        self._key = SigningKey(seed)
        self.public_key: bytes = bytes(self._key.verify_key)

    def __repr__(self) -> str:
        return "NodeIdentity()"

    @classmethod
    def generate(cls) -> NodeIdentity:
        """A new random identity, kept nowhere."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def load_or_create(cls, path: Path) -> NodeIdentity:
        """The identity in ``path``, made on first use.

        Raises:
            SecretFileError: the file is not a proper secret file (see :func:`read_secret_file`).
            ConfigError: it cannot be created.
        """
        return cls(_load_or_create_hex(path, "identity key", _DAMAGED_IDENTITY))

    def sign(self, data: bytes) -> bytes:
        """64-byte Ed25519 signature."""
        return bytes(self._key.sign(data).signature)

    @staticmethod
    def verify(public_key: bytes, data: bytes, signature: bytes) -> None:
        """Check a signature.

        Raises:
            AuthenticationError: it does not hold, or key or signature have a wrong length.
        """
        if len(public_key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
            raise AuthenticationError("wrong length of a key or signature")
        try:
            VerifyKey(public_key).verify(data, signature)
        except BadSignatureError:
            raise AuthenticationError("the signature does not hold") from None
