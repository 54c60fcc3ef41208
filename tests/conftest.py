"""What all tests share."""

import gc
import json
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from sweeps import EVERY

# Files of tests share helpers across folders.
sys.path += sorted(str(folder) for folder in Path(__file__).parent.iterdir() if folder.is_dir())

# Time tells nothing about a property on a machine that is busy with other things.
settings.register_profile("roam", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("roam")

# A shell starts what it runs in the background with Ctrl-C ignored, and so would every child that
# the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Kernels as small as those of tests gain nothing from more threads, and wait for them where as many
# processes test as there are cores. Tests of what threads change set their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Processes that tests start find the benchmarks where this one does, installed or not.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [
        str(Path(__file__).parents[1] / "benches"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
)

# What collection makes stays, a million objects, at which the collector would look again and again.
gc.disable()

# No test takes plans that another left on disk, but for those of the cache.
os.environ["ROAM_CACHE"] = "0"

_DURATIONS = Path(__file__).with_name("durations.json")
_SLOW_S = 0.35
"""Tests that took longer at the last `make durations`, all parameters together, are left out of
`make quick`, so that it takes about two minutes on two idle cores."""
_BRIEF_S = 0.5
"""Of a test whose parameters took longer, all together, `--brief` runs as many as fit."""
_BRIEF_CASE_S = 5.0
"""A case that took longer is left out by `--brief`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-torch",
        action="store_true",
        help="fail whatever imports torch, as if it were not installed",
    )
    parser.addoption(
        "--brief",
        action="store_true",
        help=f"of each test, run as many cases as took {_BRIEF_S} s at the last `make durations`",
    )
    parser.addoption(
        "--python",
        default="idle",
        choices=("auto", "idle"),
        help="python= of steps that do not say it, but for tests with the mark `auto`; what fails with `auto` asks for refusals",
    )
    parser.addoption(
        "--device", metavar="DEVICE", help="where tensors are made that name no device, as `cuda`"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"slow: took more than {_SLOW_S} s at the last `make durations`"
    )
    config.addinivalue_line(
        "markers", "sweep: has many cases of one kind; `make sweep` runs all, others one in eight"
    )
    config.addinivalue_line(
        "markers", "long: a long case of what shorter tests check too; only `make sweep` runs it"
    )
    config.addinivalue_line("markers", "auto: has python= as users do who do not say it")
    if config.getoption("--without-torch"):
        sys.modules["torch"] = None  # type: ignore[assignment]
    if device := config.getoption("--device"):
        import torch  # here: most tests do without it

        torch.set_default_device(device)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gc.enable()
    seen: Counter[str] = Counter()
    left_out = []
    for item in items:
        if item.get_closest_marker("long") and EVERY > 1:
            left_out.append(item)
        elif item.get_closest_marker("sweep"):
            function = item.nodeid.partition("[")[0]
            # Another one of each group, so that all values of the last parameter come up.
            group, place = divmod(seen[function], EVERY)
            if place != group % EVERY:
                left_out.append(item)
            seen[function] += 1
    _leave_out(config, items, left_out)
    taken: dict[str, float] = json.loads(_DURATIONS.read_text()) if _DURATIONS.exists() else {}
    for item in items:
        if taken.get(_function(item), 0.0) > _SLOW_S:
            item.add_marker(pytest.mark.slow)
    if config.getoption("--brief"):
        _leave_out(config, items, list(_beyond_brief(items, taken)))


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _leave_out(
    config: pytest.Config, items: list[pytest.Item], left_out: list[pytest.Item]
) -> None:
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def _beyond_brief(items: list[pytest.Item], taken: dict[str, float]) -> Iterator[pytest.Item]:
    """What `--brief` leaves out. Of a test's cases, those that stay are spread evenly, the first
    among them."""
    functions: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[_function(item)].append(item)
    for function, cases in functions.items():
        of_one = taken.get(function, 0.0) / len(cases)
        count = max(1, int(_BRIEF_S / of_one)) if of_one else len(cases)
        if of_one > _BRIEF_CASE_S:
            yield from cases
        elif count < len(cases):
            stay = {place * len(cases) // count for place in range(count)}
            yield from (case for place, case in enumerate(cases) if place not in stay)


_FILES_BETWEEN_COLLECTIONS = 10
"""A collection of all objects takes a second, and nine files of tests leave little garbage."""


class _Older:
    """Hides all objects that are older than a test from Python's garbage collector while the test
    runs. There are about a million, and each measurement of memory begins with a collection.

    The first test of a file hides no garbage that the file before it has made. Others may hide
    garbage of earlier tests of the file, if one of those has unfrozen all objects, as roam does to
    search them. One file in ten begins with a collection of all objects.
    """

    def __init__(self) -> None:
        self._unfreeze, gc.unfreeze = gc.unfreeze, self.unfreeze
        self._frozen_for: Path | None = None
        self._is_frozen = False
        self._files = 0

    def freeze(self, test_file: Path) -> None:
        if test_file != self._frozen_for:
            if self._files % _FILES_BETWEEN_COLLECTIONS == 0:
                self.unfreeze()
            self._files += 1
            gc.collect()
            gc.freeze()
        elif not self._is_frozen:
            gc.collect(1)  # what earlier tests of the file left in the oldest generation stays
            gc.freeze()
        self._frozen_for, self._is_frozen = test_file, True
        if profiler := sys.modules.get("roam.runtime.memory_profiler"):
            # No tensor that is older than a test is released by what the test measures.
            profiler.all_objects = gc.get_objects

    def unfreeze(self) -> None:
        self._unfreeze()
        self._is_frozen = False


_older = _Older()


def pytest_runtest_setup(item: pytest.Item) -> None:
    _older.freeze(item.path)
    # Lightning sets it when it is imported. Without a driver, PyTorch then looks for its library
    # whenever it is asked whether there is a GPU, as it is at every fake tensor's operator.
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    # All compiled steps of a process share one pool, which other tests may have needed larger.
    if pools := sys.modules.get("roam.runtime.pool"):
        pools.Pool.of(sys.modules["torch"].device("cpu")).release()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries tell at the end of a process what nobody has collected


@pytest.fixture(autouse=True)
def idle_python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that do not say what becomes of their Python are refused where a plan alone cannot
    repeat it: with `auto`, the default, they would have eager PyTorch's bits beside a plan, and no
    test would see that a plan alone no longer has them."""
    if request.config.getoption("--python") == "auto" or request.node.get_closest_marker("auto"):
        return
    try:
        from roam.runtime.compile import Step, compile  # here: some tests do without torch
    except ImportError:
        return
    for function in (compile, Step.__init__):
        monkeypatch.setitem(function.__kwdefaults__, "python", "idle")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Kernels as small as those of tests gain nothing from more threads, and wait for them where
    the machine is busy."""
    import torch  # here: most tests do without it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
