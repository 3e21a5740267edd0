"""Secret files, the key tree and identities."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from nacl import bindings

from wire.errors import AuthenticationError, ConfigError, LocalProtocolError, SecretFileError
from wire.keyring import KeyRing
from wire.keys import (
    CurvePair,
    FleetKey,
    NodeIdentity,
    Purpose,
    TelemetryKey,
    derive_session_keys,
    load_or_create_tenant_key,
    read_secret_file,
    write_secret_file,
)

PSK = bytes(range(32))


def secret_file(folder: Path, data: bytes, mode: int = 0o600) -> Path:
    path = folder / "psk"
    path.write_bytes(data)
    path.chmod(mode)
    return path


class TestSecretFiles:
    def test_outer_whitespace_is_stripped(self, tmp_path: Path) -> None:
        path = secret_file(tmp_path, b" \n" + PSK.hex().encode() + b"\r\n")
        assert read_secret_file(path, minimum_bytes=16, what="fleet key") == PSK.hex().encode()

    def test_minimum_is_inclusive(self, tmp_path: Path) -> None:
        path = secret_file(tmp_path, b"x" * 16)
        assert len(read_secret_file(path, minimum_bytes=16, what="fleet key")) == 16
        with pytest.raises(SecretFileError, match="holds 16 bytes, fewer than 17"):
            read_secret_file(path, minimum_bytes=17, what="fleet key")

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o601, 0o620, 0o666])
    def test_open_to_others_is_refused_with_the_remedy(self, tmp_path: Path, mode: int) -> None:
        path = secret_file(tmp_path, PSK.hex().encode(), mode)
        with pytest.raises(SecretFileError, match="open to other users") as caught:
            read_secret_file(path, minimum_bytes=16, what="fleet key")
        assert caught.value.remedy == f"chmod 600 {path}"
        assert "\n" not in str(caught.value)
        assert PSK.hex() not in str(caught.value)

    @pytest.mark.parametrize(("data", "message"), [(b"", "is empty"), (b" \n\t", "is empty"), (b"abc\n", "holds 3 bytes")])
    def test_empty_and_short(self, tmp_path: Path, data: bytes, message: str) -> None:
        with pytest.raises(SecretFileError, match=message):
            read_secret_file(secret_file(tmp_path, data), minimum_bytes=16, what="fleet key")

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(SecretFileError, match="does not exist"):
            read_secret_file(tmp_path / "none", minimum_bytes=16, what="fleet key")

    def test_folder_and_fifo_are_refused_without_hanging(self, tmp_path: Path) -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo, 0o600)
        for path in (tmp_path, fifo):
            with pytest.raises(SecretFileError, match="not a regular file"):
                read_secret_file(path, minimum_bytes=16, what="fleet key")

    def test_a_huge_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SecretFileError, match="too large"):
            read_secret_file(secret_file(tmp_path, b"x" * 70_000), minimum_bytes=16, what="fleet key")

    def test_another_owner_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = secret_file(tmp_path, PSK.hex().encode())
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        with pytest.raises(SecretFileError, match="belongs to another user"):
            read_secret_file(path, minimum_bytes=16, what="fleet key")

    def test_a_link_is_followed_and_what_it_leads_to_is_checked(self, tmp_path: Path) -> None:
        for name in ("there", "here"):
            (tmp_path / name).mkdir(mode=0o700)
        target = secret_file(tmp_path / "there", PSK.hex().encode())
        link = tmp_path / "here" / "psk"
        link.symlink_to(target)
        assert read_secret_file(link, minimum_bytes=16, what="fleet key") == PSK.hex().encode()
        target.chmod(0o644)
        with pytest.raises(SecretFileError, match="open to other users"):
            read_secret_file(link, minimum_bytes=16, what="fleet key")
        target.chmod(0o600)
        for name in ("there", "here"):
            folder = tmp_path / name
            folder.chmod(0o777)
            with pytest.raises(SecretFileError, match="everybody may write") as caught:
                read_secret_file(link, minimum_bytes=16, what="fleet key")
            assert caught.value.remedy == f"chmod o-w {folder}"
            folder.chmod(0o1777)  # as /tmp is
            assert read_secret_file(link, minimum_bytes=16, what="fleet key")
        target.unlink()
        with pytest.raises(SecretFileError, match="does not exist"):
            read_secret_file(link, minimum_bytes=16, what="fleet key")

    def test_write_is_private_and_never_overwrites(self, tmp_path: Path) -> None:
        path = tmp_path / "a" / "b" / "key"
        write_secret_file(path, b"one")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700
        with pytest.raises(ConfigError, match="exists and is not overwritten"):
            write_secret_file(path, b"two")
        assert path.read_bytes() == b"one"
        assert [each.name for each in path.parent.iterdir()] == ["key"]

    def test_write_below_a_file_is_a_config_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(ConfigError):
            write_secret_file(tmp_path / "file" / "key", b"x")


class TestFleetKey:
    def test_every_purpose_has_its_own_key(self) -> None:
        fleet = FleetKey(PSK)
        keys = {fleet.derive(purpose) for purpose in Purpose}
        keys |= {fleet.telemetry_key().seal_key, PSK, fleet.key_id.ljust(32, b"\0")}
        assert len(keys) == len(Purpose) + 3
        assert all(len(key) == 32 for key in keys)
        assert all(len(purpose.encode()) <= 16 for purpose in Purpose)

    def test_derivation_is_stable(self) -> None:
        # Nodes of different releases must agree: these values may never change.
        fleet = FleetKey(PSK)
        assert fleet.key_id.hex() == "51d0fcf67313bb66"
        assert fleet.derive(Purpose.HELLO).hex() == "d53be91f47965ed77e46e30624c4a07da00eccff079bdb2513d856307c869685"
        assert fleet.curve_bus().public.hex() == "fce2eeded2165dc0a5f1b7cc68cc2cfae78997cf2186254ccdd308bfe8ad0008"

    def test_other_psk_other_keys(self) -> None:
        one, two = FleetKey(PSK), FleetKey(PSK[:-1] + b"x")
        assert one.key_id != two.key_id
        assert not {one.derive(each) for each in Purpose} & {two.derive(each) for each in Purpose}

    def test_long_psk_uses_all_its_bytes(self) -> None:
        assert FleetKey(b"a" * 100).key_id != FleetKey(b"a" * 99 + b"b").key_id
        assert FleetKey(b"a" * 64).key_id != FleetKey(b"a" * 65).key_id

    def test_too_short(self) -> None:
        with pytest.raises(ConfigError, match="at least 16"):
            FleetKey(b"x" * 15)

    def test_load_uses_the_text_as_key(self, tmp_path: Path) -> None:
        text = FleetKey.generate()
        assert len(bytes.fromhex(text.decode())) == 32
        assert FleetKey.load(secret_file(tmp_path, text + b"\n")) == FleetKey(text)

    def test_a_key_with_a_nul_byte_is_refused(self, tmp_path: Path) -> None:
        for data in (b"0123456789abcdef\0", PSK, FleetKey.generate().decode().encode("utf-16-le")):
            path = secret_file(tmp_path, data)
            for load in (FleetKey.load, KeyRing.load):
                with pytest.raises(SecretFileError, match="NUL byte") as caught:
                    load(path)
                assert "`kakeya key new`" in caught.value.remedy
                assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("count", [2, 3])
    @pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n"])
    def test_several_keys_without_the_header_of_a_ring_are_refused(self, tmp_path: Path, count: int, end: bytes) -> None:
        path = secret_file(tmp_path, b"".join(FleetKey.generate() + end for _ in range(count)))
        for load in (FleetKey.load, KeyRing.load):
            with pytest.raises(SecretFileError, match=f"it holds {count} keys without the header of a ring") as caught:
                load(path)
            assert "keep the one line" in caught.value.remedy
            assert "`kakeya key rotate`" in caught.value.remedy
            assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        "text",
        [
            b"a phrase of\nseveral lines, as it is",
            b"61" * 30 + b"\n" + b"61" * 2,  # xxd -p -l 32
            b"61 62 63 64 65 66 67 68 69 6a 6b 6c 6d 6e 6f 70\n61 62 63 64 65 66 67 68 69 6a 6b 6c 6d 6e 6f 70",  # od -tx1
            b"YWJj" * 16 + b"\n" + b"YWJj" * 6,  # openssl rand -base64 64
            bytes(range(1, 33)),
            b"6" * 64,
        ],
    )
    def test_every_other_text_is_the_key_it_was(self, tmp_path: Path, text: bytes) -> None:
        path = secret_file(tmp_path, text + b"\n")
        assert FleetKey.load(path).psk == text.strip()
        assert KeyRing.load(path).keys == (FleetKey(text.strip()),)

    def test_nothing_secret_in_reprs(self) -> None:
        fleet = FleetKey(b"a very secret psk")
        for value in (fleet, fleet.telemetry_key(), fleet.curve_server(), NodeIdentity(PSK)):
            assert "secret psk" not in repr(value)
            assert "secret=" not in repr(value)
        assert "psk=" not in repr(fleet)

    def test_curve_pairs_match(self) -> None:
        fleet = FleetKey(PSK)
        pairs = [fleet.curve_server(), fleet.curve_client(), fleet.curve_bus()]
        assert len({pair.public for pair in pairs}) == 3
        for pair in pairs:
            assert pair.public == bindings.crypto_scalarmult_base(pair.secret)
        assert fleet.derive(Purpose.CURVE_BUS) == fleet.curve_bus().secret

    def test_the_telemetry_key_alone_reaches_the_bus(self, tmp_path: Path) -> None:
        fleet = FleetKey(PSK)
        path = tmp_path / "telemetry"
        write_secret_file(path, fleet.telemetry_key().to_text())
        reader = TelemetryKey.load(path)
        assert reader.bus_curve() == fleet.curve_bus()
        assert reader.seal_key == fleet.telemetry_key().seal_key
        assert reader.seal_key != reader.bus_curve().secret

    def test_a_telemetry_file_that_is_no_key(self, tmp_path: Path) -> None:
        with pytest.raises(SecretFileError, match="hexadecimal"):
            TelemetryKey.load(secret_file(tmp_path, b"g" * 64))
        with pytest.raises(ConfigError):
            TelemetryKey(b"short")


class TestSessionKeys:
    def test_both_sides_agree_and_directions_differ(self) -> None:
        one, two = CurvePair.from_secret(b"1" * 32), CurvePair.from_secret(b"2" * 32)
        keys = derive_session_keys(PSK, one, two.public, b"h" * 32, b"w" * 32)
        assert keys == derive_session_keys(PSK, two, one.public, b"h" * 32, b"w" * 32)
        assert keys.client_to_server != keys.server_to_client
        assert keys != derive_session_keys(PSK, one, two.public, b"H" * 32, b"w" * 32)
        assert keys != derive_session_keys(PSK, one, two.public, b"h" * 32, b"W" * 32)
        assert keys != derive_session_keys(PSK[::-1], one, two.public, b"h" * 32, b"w" * 32)

    def test_a_weak_point_is_refused(self) -> None:
        with pytest.raises(AuthenticationError, match="weak point"):
            derive_session_keys(PSK, CurvePair.from_secret(b"1" * 32), bytes(32), b"h" * 32, b"w" * 32)


class TestIdentity:
    def test_sign_and_verify(self) -> None:
        identity = NodeIdentity.generate()
        signature = identity.sign(b"data")
        NodeIdentity.verify(identity.public_key, b"data", signature)
        for key, data, bad in (
            (identity.public_key, b"datb", signature),
            (identity.public_key, b"data", bytes(64)),
            (identity.public_key, b"data", signature[:-1]),
            (NodeIdentity.generate().public_key, b"data", signature),
            (bytes(32), b"data", signature),
            (b"short", b"data", signature),
        ):
            with pytest.raises(AuthenticationError):
                NodeIdentity.verify(key, data, bad)

    def test_made_once(self, tmp_path: Path) -> None:
        path = tmp_path / "nodes" / "a" / "identity"
        first = NodeIdentity.load_or_create(path)
        assert NodeIdentity.load_or_create(path).public_key == first.public_key
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o644)
        with pytest.raises(SecretFileError):
            NodeIdentity.load_or_create(path)

    def test_wrong_seed_length(self) -> None:
        with pytest.raises(LocalProtocolError):
            NodeIdentity(b"short")

    def test_tenant_key_is_made_once(self, tmp_path: Path) -> None:
        key = load_or_create_tenant_key(tmp_path / "tenant")
        assert len(key) == 32
        assert load_or_create_tenant_key(tmp_path / "tenant") == key
