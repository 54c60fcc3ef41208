"""What roam keeps on disk from one process to the next: plans, and what it learned about kernels.

An entry is one file, named by a hash of its kind and key. It contains a checksum of its name and
its content. It is written under another name and then renamed. So any number of processes may read
and write at once, and a file that a killed process has not finished is never read. A file that
cannot be read, or whose checksum is wrong, counts as missing. If a file cannot be written, a
warning says so once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from roam import _core

MOST_BYTES = 256 * 2**20
"""Bytes of all files of a folder. The least recently used entries go beyond that."""
_LEFT = 0.9
"""The share of that to which the folder shrinks then, so that it does not at every entry."""
_MAGIC = b"roam cache entry, form 1\n"
_MOST_CONTENT_BYTES = 2**29
"""No entry is read that is larger after decompression: it is none of ours."""
_ABANDONED_S = 3600.0
"""A file that is still being written after so long belongs to a process that was killed."""
_ENTRY = re.compile(r"([a-z]+)-[0-9a-f]{64}\.entry")
_UNFINISHED = re.compile(r"[0-9a-f]{32}\.unfinished")

_logger = logging.getLogger("roam")


@dataclass(frozen=True)
class Usage:
    """What a folder holds.

    Attributes:
        entries: how many there are, by kind.
        size_bytes: bytes of all files.
    """

    entries: dict[str, int]
    size_bytes: int


class DiskCache:
    """Entries in one folder, which is made when the first of them is written. No method raises an
    `OSError`, except for `clear`.

    Args:
        folder: files of other names in it are left alone.
        most_bytes: bytes of all entries; see `MOST_BYTES`.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self._has_warned = False

    def get(self, kind: str, key: str) -> bytes | None:
        """The content of an entry, as it was written; None if there is none, or one that is
        damaged.
        """
        path = self._path(kind, key)
        try:
            data = _read(path)
        except OSError:
            return None
        content = None if data is None else _content(path.name, data)
        if content is None:
            self.drop(kind, key)
            return None
        with suppress(OSError):  # gone meanwhile, or of a folder that is only read
            os.utime(path)  # it has been used
        return content

    def put(self, kind: str, key: str, content: bytes) -> None:
        """Writes an entry, replacing an older one; leaves it out where that is not possible, or
        where it takes more than a quarter of the folder.
        """
        path = self._path(kind, key)
        packed = zlib.compress(content, 1)
        data = _MAGIC + _checksum(path.name, packed) + packed
        if len(content) > _MOST_CONTENT_BYTES or len(data) > self.most_bytes // 4:
            return
        unfinished = self.folder / f"{secrets.token_hex(16)}.unfinished"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with open(unfinished, "xb") as file:
                    file.write(data)
                os.replace(unfinished, path)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _logger.warning(
                    "%s: nothing can be kept there (%s), so later processes plan anew; set "
                    "ROAM_CACHE_DIR to a folder that can be written, or ROAM_CACHE=0",
                    self.folder, error.strerror or error,
                )  # fmt: skip
            return
        self._shrink()

    def drop(self, kind: str, key: str) -> None:
        """Removes an entry, if there is one and it can be removed."""
        _remove(self._path(kind, key))

    def usage(self) -> Usage:
        """What the folder holds now."""
        entries: dict[str, int] = {}
        size_bytes = 0
        for path, status in self._files():
            size_bytes += status.st_size
            if match := _ENTRY.fullmatch(path.name):
                entries[match[1]] = entries.get(match[1], 0) + 1
        return Usage(dict(sorted(entries.items())), size_bytes)

    def clear(self) -> Usage:
        """Removes all entries, and what was left unfinished.

        Returns:
            What there was.

        Raises:
            OSError: a file cannot be removed.
        """
        before = self.usage()
        for path, _ in self._files():
            path.unlink(missing_ok=True)
        return before

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()}.entry"

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Files of ours, and what the system says of them."""
        try:
            with os.scandir(self.folder) as found:
                for one in found:
                    if not (_ENTRY.fullmatch(one.name) or _UNFINISHED.fullmatch(one.name)):
                        continue
                    try:
                        status = one.stat(follow_symlinks=False)
                    except OSError:  # gone meanwhile
                        continue
                    if stat.S_ISREG(status.st_mode):
                        yield Path(one.path), status
        except OSError:
            return

    def _shrink(self) -> None:
        """Removes what processes that were killed left unfinished, and, where all files are too
        large together, the entries that were used least recently.
        """
        now, files, size_bytes = time.time(), [], 0
        for path, status in self._files():
            is_entry = _ENTRY.fullmatch(path.name) is not None
            if not is_entry and now - status.st_mtime > _ABANDONED_S:
                _remove(path)
                continue
            size_bytes += status.st_size
            if is_entry:
                files.append((status.st_mtime, path, status.st_size))
        if size_bytes <= self.most_bytes:
            return
        for _, path, file_bytes in sorted(files):
            _remove(path)
            size_bytes -= file_bytes
            if size_bytes <= _LEFT * self.most_bytes:
                return


def _read(path: Path) -> bytes | None:
    """A file's bytes; None if it is none, or one too large to be ours.

    Raises:
        OSError: it cannot be read.
    """
    # A pipe of that name must not keep the process waiting.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    number = os.open(path, flags)
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_CONTENT_BYTES:
            return None
        with open(number, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(number)


def _content(name: str, data: bytes) -> bytes | None:
    """What an entry's file holds; None if it is not as it was written."""
    start = len(_MAGIC)
    found, packed = data[start : start + hashlib.sha256().digest_size], data[start + 32 :]
    if not data.startswith(_MAGIC) or found != _checksum(name, packed):
        return None
    try:
        unpacking = zlib.decompressobj()
        content = unpacking.decompress(packed, _MOST_CONTENT_BYTES)
    except zlib.error:
        return None
    return content if unpacking.eof else None


def _checksum(name: str, packed: bytes) -> bytes:
    return hashlib.sha256(name.encode() + packed).digest()


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def cache_folder() -> Path | None:
    """Where entries are kept: ``ROAM_CACHE_DIR``, or else ``roam`` in ``XDG_CACHE_HOME``, or else
    ``~/.cache/roam``; None if there is no home.
    """
    try:
        if given := os.environ.get("ROAM_CACHE_DIR"):
            return Path(given).absolute()
        if (shared := os.environ.get("XDG_CACHE_HOME")) and os.path.isabs(shared):
            return Path(shared, "roam")
        return Path.home() / ".cache" / "roam"
    except (OSError, RuntimeError):  # a working directory, or a home, that is not there
        return None


def disk_cache() -> DiskCache | None:
    """The cache of this process; None if ``ROAM_CACHE=0`` turns it off, or there is no folder
    for it.
    """
    folder = None if os.environ.get("ROAM_CACHE") == "0" else cache_folder()
    return None if folder is None else _of(folder)


@cache
def _of(folder: Path) -> DiskCache:
    return DiskCache(folder)


@cache
def build() -> str:
    """A hash of the planner that is running: plans of another one are not taken."""
    with open(_core.__file__, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
