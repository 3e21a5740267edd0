"""Files of this program's own: nothing odd in their place is waited for, nothing huge is read, nobody else gets in."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.odd_files import ODD, give_to_another_user, not_blocking
from wire.errors import UnsafeFileError
from wire.files import (
    FileTooLarge,
    NotRegularFile,
    file_state,
    make_private_folder,
    open_regular,
    read_guarded,
    read_regular,
    write_private_file,
)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND | os.O_CREAT], ids=["r", "rw", "a"])
@pytest.mark.parametrize("make", ODD.values(), ids=list(ODD))
def test_what_is_no_regular_file_is_refused_without_waiting(
    tmp_path: Path, make: Callable[[Path], object], flags: int
) -> None:
    path = tmp_path / "odd"
    make(path)
    with not_blocking(), pytest.raises(NotRegularFile) as caught:
        open_regular(path, flags)
    assert (caught.value.strerror, caught.value.filename) == ("it is not a regular file", str(path))


def test_a_link_to_a_device_is_refused_and_one_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "device").symlink_to("/dev/zero")
    with not_blocking(), pytest.raises(NotRegularFile):
        read_regular(tmp_path / "device", 10)
    (tmp_path / "file").write_bytes(b"here")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 4) == b"here"
    with pytest.raises(OSError, match=r"."):
        open_regular(tmp_path / "link", os.O_RDONLY | os.O_NOFOLLOW)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", 4)


def test_what_takes_the_place_of_a_file_after_the_look_at_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    seen = os.stat(path)
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(os, "stat", lambda path, **more: seen)
    with not_blocking(), pytest.raises(NotRegularFile):
        read_regular(path, 4)


def test_no_more_is_read_than_there_is_room_for(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    path.write_bytes(b"1234")
    assert read_regular(path, 4) == b"1234"
    os.truncate(path, 1 << 40)
    with pytest.raises(FileTooLarge) as caught:
        read_regular(path, 4)
    assert caught.value.strerror == "it is larger than 4 bytes"


def test_an_opened_file_waits_as_files_do(tmp_path: Path) -> None:
    descriptor = open_regular(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    assert os.get_blocking(descriptor)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


class TestGuarded:
    """Files that say who may do what."""

    def test_others_may_read_and_nobody_else_may_write(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"text")
        for mode in (0o600, 0o644, 0o755, 0o400):
            path.chmod(mode)
            assert read_guarded(path, 4, "the roster") == b"text"
        for folder_mode, mode in [(0o700, 0o666), (0o750, 0o646), (0o705, 0o664)]:
            tmp_path.chmod(folder_mode)
            path.chmod(mode)
            assert read_guarded(path, 4, "the roster") == b"text", "whom the mode lets write does not get there"
        tmp_path.chmod(0o755)
        for mode in (0o620, 0o602, 0o664, 0o666, 0o777):
            path.chmod(mode)
            with pytest.raises(UnsafeFileError) as caught:
                read_guarded(path, 4, "the roster")
            assert str(caught.value) == f"the roster {path} can be changed by other users (chmod go-w {path})"

    def test_of_this_user_or_of_root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"text")
        give_to_another_user(path, monkeypatch)
        with pytest.raises(UnsafeFileError, match="belongs to another user"):
            read_guarded(path, 4, "the roster")

    def test_a_file_of_root_is_good_for_everybody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        path = Path("/etc/hosts")
        if not path.is_file() or path.stat().st_uid != 0:
            pytest.skip("no file of root here")
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        assert read_guarded(path, 1 << 20, "the roster")

    def test_a_folder_that_everybody_may_write_to_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"text")
        tmp_path.chmod(0o777)
        with pytest.raises(UnsafeFileError) as caught:
            read_guarded(path, 4, "the roster")
        assert caught.value.remedy == f"chmod o-w {tmp_path}"
        tmp_path.chmod(0o1777)  # as /tmp is
        assert read_guarded(path, 4, "the roster") == b"text"

    def test_odd_and_huge_files_are_refused_all_the_same(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo", 0o600)
        with not_blocking(), pytest.raises(NotRegularFile):
            read_guarded(tmp_path / "fifo", 4, "the roster")
        (tmp_path / "file").write_bytes(b"12345")
        with pytest.raises(FileTooLarge):
            read_guarded(tmp_path / "file", 4, "the roster")


def test_the_state_of_a_file_tells_another_mode_and_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert file_state(path) is None
    path.write_bytes(b"1")
    states = [file_state(path)]
    path.chmod(0o666)
    states.append(file_state(path))
    path.write_bytes(b"22")
    states.append(file_state(path))
    path.unlink()
    os.mkfifo(path)
    states.append(file_state(path))
    assert None not in states
    assert len(set(states)) == 4
    assert file_state(path) == states[-1]


def test_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    with umask(0):
        make_private_folder(tmp_path / "a" / "b" / "c")
        make_private_folder(tmp_path / "a" / "b" / "c")
    assert [mode_of(tmp_path / name) for name in ("a", "a/b", "a/b/c")] == [0o700] * 3
    (tmp_path / "a").chmod(0o755)
    make_private_folder(tmp_path / "a" / "d")
    assert mode_of(tmp_path / "a") == 0o755, "what is there is not ours to change"
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        with pytest.raises(OSError, match=r"."):
            make_private_folder(tmp_path / name)


def test_a_file_is_written_whole_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with umask(0):
        write_private_file(path, b"one")
        write_private_file(path, b"two")
    assert (path.read_bytes(), mode_of(path)) == (b"two", 0o600)
    with pytest.raises(FileExistsError):
        write_private_file(path, b"three", replace=False)
    assert (path.read_bytes(), [each.name for each in tmp_path.iterdir()]) == (b"two", ["file"])


def test_writing_takes_the_place_of_a_fifo_and_fails_at_a_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with not_blocking():
        write_private_file(tmp_path / "fifo", b"one")
    assert (tmp_path / "fifo").read_bytes() == b"one"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"."):
        write_private_file(tmp_path / "folder", b"one")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["fifo", "folder"]


def test_a_socket_is_odd(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        with not_blocking(), pytest.raises(NotRegularFile):
            read_regular(tmp_path / "s", 4)
