"""What is kept on disk comes back as it was written or not at all, whatever happens to files."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roam import cli
from roam.disk_cache import DiskCache, Usage, cache_folder, disk_cache

CONTENT = bytes(range(256)) * 4
WRITER = """
import sys
from pathlib import Path
from roam.disk_cache import DiskCache
cache = DiskCache(Path(sys.argv[1]), int(sys.argv[2]))
print("ready", flush=True)
for turn in range(int(sys.argv[3])):
    key = str(turn % 7)
    cache.put("plan", key, key.encode() * 200_000)
    found = cache.get("plan", key)
    assert found in (None, key.encode() * 200_000), "another content"
"""


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "made" / "when needed")


def entry(cache: DiskCache) -> Path:
    (path,) = cache.folder.iterdir()
    return path


def writer(folder: Path, most_bytes: int, turns: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), str(most_bytes), str(turns)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_an_entry_comes_back_by_its_kind_and_key(cache: DiskCache) -> None:
    assert cache.get("plan", "a") is None
    assert cache.usage() == Usage({}, 0)
    cache.put("plan", "a", CONTENT)
    assert cache.get("plan", "a") == CONTENT
    assert cache.get("plan", "b") is None
    assert cache.get("kernels", "a") is None
    cache.put("plan", "a", b"")
    assert cache.get("plan", "a") == b""
    cache.drop("plan", "a")
    cache.drop("plan", "a")
    assert cache.get("plan", "a") is None


def test_no_changed_byte_and_no_missing_or_further_one_is_taken(cache: DiskCache) -> None:
    cache.put("plan", "a", CONTENT)
    path = entry(cache)
    data = path.read_bytes()
    changed = [
        data[:place] + bytes([data[place] ^ bits]) + data[place + 1 :]
        for place in range(len(data))
        for bits in (1, 0x80, 0xFF)
    ]
    cut = [data[:length] for length in range(len(data))]
    for wrong in (*changed, *cut, data + b"\0", data + data, b"\0" * len(data)):
        path.write_bytes(wrong)
        assert cache.get("plan", "a") is None
        assert not path.exists(), "what is damaged is removed"
    path.write_bytes(data)
    assert cache.get("plan", "a") == CONTENT


def test_an_entry_is_not_taken_for_another(cache: DiskCache) -> None:
    cache.put("plan", "a", CONTENT)
    data = entry(cache).read_bytes()
    cache.put("plan", "b", b"other")
    (other,) = [path for path in cache.folder.iterdir() if path.read_bytes() != data]
    other.write_bytes(data)
    assert cache.get("plan", "b") is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_no_pipe_and_no_folder_keeps_the_process_waiting(cache: DiskCache) -> None:
    cache.put("plan", "a", CONTENT)
    path = entry(cache)
    path.unlink()
    os.mkfifo(path)
    assert cache.get("plan", "a") is None
    path.unlink(missing_ok=True)
    (path / "inside").mkdir(parents=True)
    assert cache.get("plan", "a") is None
    cache.put("plan", "a", CONTENT)
    assert cache.get("plan", "a") is None


def test_a_file_too_large_to_be_an_entry_is_not_read(cache: DiskCache) -> None:
    cache.put("plan", "a", CONTENT)
    with entry(cache).open("r+b") as file:
        file.truncate(2**40)  # it takes no room on disk
    assert cache.get("plan", "a") is None


def test_the_least_recently_used_go_where_all_are_too_large(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 40_000)
    content = {str(number): os.urandom(4_000) for number in range(9)}
    for place, (key, value) in enumerate(content.items()):
        cache.put("plan", key, value)
        path = cache._path("plan", key)
        os.utime(path, (place, place))
    assert cache.usage().entries == {"plan": 9}
    assert cache.get("plan", "0") == content["0"]  # used last now
    cache.put("plan", "9", os.urandom(4_000))
    left = {key for key in content if cache.get("plan", key) is not None}
    assert left == set(content) - {"1", "2"}
    assert cache.usage().size_bytes <= 36_000


def test_what_takes_a_quarter_of_the_folder_is_left_out(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 40_000)
    cache.put("plan", "a", os.urandom(10_001))
    assert cache.usage() == Usage({}, 0)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1_000)
    mine = tmp_path / "thesis.txt"
    mine.write_bytes(b"x" * 5_000)
    old = tmp_path / f"{'0' * 32}.unfinished"
    old.write_bytes(b"x" * 100)
    long_ago = time.time() - 7200
    os.utime(old, (long_ago, long_ago))
    young = tmp_path / f"{'1' * 32}.unfinished"
    young.write_bytes(b"x" * 100)
    for key in "abcdefgh":
        cache.put("plan", key, os.urandom(100))
    assert not old.exists(), "what a killed process left goes"
    assert young.exists()
    cache.clear()
    assert list(tmp_path.iterdir()) == [mine]


def test_processes_that_are_killed_leave_nothing_wrong(tmp_path: Path) -> None:
    """Killed at some moment of writing, again and again; another one writes all the while."""
    steady = writer(tmp_path, 2**20, 2_000)
    try:
        for turn in range(8):
            doomed = writer(tmp_path, 2**20, 10**9)
            assert doomed.stdout is not None
            assert doomed.stdout.readline() == "ready\n"
            time.sleep(0.01 + 0.007 * turn)
            doomed.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))
            _, error = doomed.communicate()
            assert error == ""
            cache = DiskCache(tmp_path, 2**20)
            for key in "0123456":
                assert cache.get("plan", key) in (None, key.encode() * 200_000)
        _, error = steady.communicate(timeout=120)
        assert (steady.returncode, error) == (0, "")
    finally:
        steady.kill()
        steady.wait()
    cache = DiskCache(tmp_path, 2**20)
    cache.put("plan", "a", CONTENT)
    assert cache.get("plan", "a") == CONTENT


KILLED = """
import os, signal, sys
from pathlib import Path
from roam import disk_cache

lines = 0

def count(frame, event, arg):
    global lines
    if frame.f_code.co_filename != disk_cache.__file__:
        return None
    lines += event == "line"
    if lines == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return count

for last in range(1, 10_000):
    child = os.fork()
    if child == 0:
        cache = disk_cache.DiskCache(Path(sys.argv[1]), 2_000)
        lines = 0
        sys.settrace(count)
        cache.put("plan", "a", bytes([last % 256]) * 500 + os.urandom(400))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = disk_cache.DiskCache(Path(sys.argv[1]), 2_000).get("plan", "a")
    assert found is None or (len(found) == 900 and len(set(found[:500])) == 1), found
    if status == 0:
        print(last, found is not None)
        break
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_process_that_is_killed_at_any_line_of_writing_leaves_nothing_wrong(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "kept"
    command = [sys.executable, "-c", KILLED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines, is_there = done.stdout.split()
    assert int(lines) > 30
    assert is_there == "True"
    cache = DiskCache(folder, 2_000)
    long_ago = time.time() - 7200
    for path in folder.glob("*.unfinished"):
        os.utime(path, (long_ago, long_ago))
    cache.put("plan", "b", b"")
    assert list(folder.glob("*.unfinished")) == []


def test_two_processes_that_share_a_small_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    both = [writer(tmp_path, 3_000, 300) for _ in range(2)]
    for one in both:
        _, error = one.communicate(timeout=120)
        assert (one.returncode, error) == (0, "")
    assert DiskCache(tmp_path).usage().size_bytes <= 3_000


@pytest.fixture
def no_folder(tmp_path: Path) -> Path:
    """A place where no folder can be made, not even by an administrator."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "cache"


def test_a_folder_that_cannot_be_made_is_told_once(
    no_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = DiskCache(no_folder)
    with caplog.at_level(logging.INFO, "roam"):
        for key in "ab":
            cache.put("plan", key, CONTENT)
            assert cache.get("plan", key) is None
    (record,) = caplog.records
    assert "ROAM_CACHE_DIR" in record.getMessage()


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="an administrator may write anywhere"
)
def test_a_folder_that_is_only_read_serves_what_it_has(cache: DiskCache) -> None:
    cache.put("plan", "a", CONTENT)
    cache.folder.chmod(0o500)
    try:
        cache.put("plan", "b", CONTENT)
        assert cache.get("plan", "a") == CONTENT
        assert cache.get("plan", "b") is None
    finally:
        cache.folder.chmod(0o700)


@pytest.mark.skipif(sys.platform == "win32", reason="files have no limit there")
def test_a_full_disk_leaves_an_entry_out(tmp_path: Path) -> None:
    """The system refuses to write more than so many bytes into a file."""
    code = """
import resource, signal, sys
from pathlib import Path
from roam.disk_cache import DiskCache
cache = DiskCache(Path(sys.argv[1]))
cache.put("plan", "small", b"x")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
import os
cache.put("plan", "large", os.urandom(5000))
print(cache.get("plan", "small"), cache.get("plan", "large"), cache.usage().entries)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "b'x' None {'plan': 1}\n"
    assert os.strerror(errno.EFBIG) in done.stderr
    assert len(list(tmp_path.iterdir())) == 1, "nothing unfinished is left"


def test_ctrl_c_while_an_entry_is_written_leaves_nothing(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("roam.disk_cache.os.replace", press)
        with pytest.raises(KeyboardInterrupt):
            cache.put("plan", "a", CONTENT)
    assert list(cache.folder.iterdir()) == []


class TestFolder:
    @pytest.fixture(autouse=True)
    def _unset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("ROAM_CACHE", "ROAM_CACHE_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)

    def test_the_environment_says_where(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(Path, "home", lambda: tmp_path)
        assert cache_folder() == tmp_path / ".cache" / "roam"
        monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
        assert cache_folder() == tmp_path / ".cache" / "roam"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
        assert cache_folder() == tmp_path / "shared" / "roam"
        monkeypatch.setenv("ROAM_CACHE_DIR", str(tmp_path / "own"))
        assert cache_folder() == tmp_path / "own"

    def test_without_a_home_there_is_no_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def homeless() -> Path:
            raise RuntimeError("no home")

        monkeypatch.setattr(Path, "home", homeless)
        assert disk_cache() is None

    def test_roam_cache_0_turns_it_off(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("ROAM_CACHE_DIR", str(tmp_path))
        assert disk_cache() is not None
        monkeypatch.setenv("ROAM_CACHE", "0")
        assert disk_cache() is None


class TestCommand:
    @pytest.fixture(autouse=True)
    def _kept(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("ROAM_CACHE", raising=False)
        monkeypatch.setenv("ROAM_CACHE_DIR", str(tmp_path))
        cache = DiskCache(tmp_path)
        cache.put("plan", "a", CONTENT)
        cache.put("plan", "b", CONTENT)

    def test_lists_and_clears(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert cli.main(["cache"]) == 0
        shown = capsys.readouterr().out
        size_bytes = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert str(tmp_path) in shown
        assert f"{size_bytes} bytes of 268,435,456" in shown
        assert cli.main(["cache", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)
        assert listed == {
            "folder": str(tmp_path),
            "cleared": False,
            "entries": {"plan": 2},
            "size_bytes": size_bytes,
            "most_bytes": 2**28,
        }
        assert cli.main(["cache", "--clear"]) == 0
        assert "removed" in capsys.readouterr().out
        assert list(tmp_path.iterdir()) == []

    def test_says_that_it_is_off(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ROAM_CACHE", "0")
        assert cli.main(["cache"]) == 2
        assert "ROAM_CACHE is 0" in capsys.readouterr().err
