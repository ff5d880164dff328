"""The modes of files that Umbel writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from umbel import files


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)
    files.set_umask(files.DEFAULT_UMASK)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("system", [0o000, 0o022, 0o077])
@pytest.mark.parametrize(
    ("mask", "file", "folder"),
    [(0o077, 0o600, 0o700), (0o027, 0o640, 0o750), (0o007, 0o660, 0o770), (0, 0o666, 0o777)],
)
def test_modes_do_not_depend_on_the_umask_of_the_system(
    tmp_path: Path, system: int, mask: int, file: int, folder: int
) -> None:
    os.umask(system)
    files.set_umask(mask)
    assert files.make_folders(tmp_path / "a" / "b") == [tmp_path / "a", tmp_path / "a" / "b"]
    for kind in ("wb", "ab", "xb"):
        with files.open_file(tmp_path / "a" / "b" / kind, kind) as opened:
            opened.write(b"x")
        assert mode(tmp_path / "a" / "b" / kind) == file
    assert {mode(tmp_path / "a"), mode(tmp_path / "a" / "b")} == {folder}
    assert files.make_folders(tmp_path / "a") == []


def test_what_is_there_is_opened_as_the_flags_say(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    path.chmod(0o644)
    with files.open_file(path, "ab") as opened:
        opened.write(b" after")
    assert (path.read_bytes(), mode(path)) == (b"before after", 0o644)
    with files.open_file(path, "wb"):  # what is written now is ours
        pass
    assert (path.read_bytes(), mode(path)) == (b"", 0o600)
    with pytest.raises(FileExistsError):
        files.open_file(path, "xb")
    with pytest.raises(FileNotFoundError):
        files.open_file(tmp_path / "nowhere", "rb")
    with pytest.raises(FileNotFoundError):
        files.open_file(tmp_path / "no" / "folder", "wb")


def test_a_file_in_the_way_of_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        files.make_folders(tmp_path / "file")
    with pytest.raises((NotADirectoryError, NotADirectoryError)):
        files.make_folders(tmp_path / "file" / "more")


def test_only_what_is_too_open_is_tightened_and_no_link_is_followed(tmp_path: Path) -> None:
    open_one, closed, target = (tmp_path / name for name in ("open", "closed", "target"))
    for path, bits in ((open_one, 0o664), (closed, 0o400), (target, 0o666)):
        path.touch()
        path.chmod(bits)
    link = tmp_path / "link"
    link.symlink_to(target)
    files.set_umask(0o027)
    files.tighten([open_one, closed, link, tmp_path / "gone"])
    assert [mode(path) for path in (open_one, closed, target)] == [0o640, 0o400, 0o666]


@pytest.mark.parametrize(
    ("value", "mask"), [("077", 0o077), ("0o27", 0o027), (0o027, 0o027), ("0", 0), ("7", 7)]
)
def test_a_umask_is_octal(value: object, mask: int) -> None:
    assert files.read_umask(value) == mask


@pytest.mark.parametrize("value", ["", "9", "777", "100", "-1", -1, 0o100, True, None, 2.5, "rwx"])
def test_a_umask_that_makes_no_sense_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"up to 077, such as '077'"):
        files.read_umask(value)
