"""The JSON forms: round trips, stable bytes, and what hostile files meet."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import roam
from strategies import graphs

GRAPH_TEXT = b"""\
{"format":"roam.graph","version":1,
"name":"two layers",
"device":"cpu",
"alignment_bytes":64,
"tensors":[
{"name":"x","size_bytes":4096,"kind":"input","residency":"enters"},
{"name":"h \\"\\u0001\xc3\xa9","size_bytes":4096,"kind":"activation","residency":"step_local"},
{"name":"g","size_bytes":4096,"kind":"temporary","residency":"step_local","alignment_bytes":128},
{"name":"y","size_bytes":4,"kind":"output","residency":"leaves"},
{"name":"w","size_bytes":9,"kind":"parameter","residency":"persistent"}],
"operators":[
{"name":"relu","position":1,"phase":"forward","reads":[1],"creates":[2],"reuse":[[1,2]],\
"source":{"module":"act","file":"train.py","line":12}},
{"name":"view","position":0,"phase":"forward","reads":[0],"creates":[1]},
{"name":"sum","position":2,"phase":"loss","reads":[2],"creates":[3],"mutates":[4],"workspace_bytes":7,\
"sequence":"random","region":1}],
"control":[
[0,2],
[1,0]],
"regions":[
{"name":"outer","predicate":0},
{"name":"inner","predicate":0,"parent":0}]}
"""


def small_graph() -> roam.Graph:
    builder = roam.GraphBuilder("two layers")
    builder.tensor("x", 4096, kind="input", residency="enters")
    builder.tensor('h "\x01é', 4096, kind="activation")
    builder.tensor("g", 4096, alignment_bytes=128)
    builder.tensor("y", 4, kind="output", residency="leaves")
    builder.tensor("w", 9, kind="parameter", residency="persistent")
    builder.region("outer", 0)
    builder.region("inner", 0, parent=0)
    builder.operator(
        "relu",
        reads=[1],
        creates=[2],
        reuse=[(1, 2)],
        module="act",
        file="train.py",
        line=12,
        position=1,
    )
    builder.operator("view", reads=[0], creates=[1], position=0)
    builder.operator(
        "sum",
        reads=[2],
        creates=[3],
        mutates=[4],
        workspace_bytes=7,
        sequence="random",
        region=1,
        phase="loss",
        position=2,
    )
    builder.control(1, 0)
    builder.control(0, 2)
    builder.control(0, 2)
    return builder.build()


def small_plan() -> roam.Plan:
    return roam.optimize(small_graph(), time_limit_s=1000.0)


def test_the_bytes_of_a_graph_do_not_change() -> None:
    graph = small_graph()
    assert graph.to_json() == GRAPH_TEXT
    assert roam.Graph.from_json(GRAPH_TEXT) == graph
    assert graph.digest == "1e25818df8d93387d6922a8d03251edbfde11ee36ae4deb594a092855f5a3253"


def test_the_digest_is_of_the_canonical_text() -> None:
    assert small_graph().digest == hashlib.sha256(GRAPH_TEXT).hexdigest()


def test_the_documents_examples_are_true() -> None:
    document = (Path(__file__).parents[2] / "docs/reference/formats.md").read_text(encoding="utf-8")
    graph_text, plan_text = re.findall(r"```json\n(.*?)```", document, flags=re.DOTALL)
    graph = roam.Graph.from_json(graph_text.encode())
    assert graph.to_json().decode() == graph_text
    plan = roam.Plan.from_json(plan_text.encode())
    roam.verify(graph, plan)
    made, shown = json.loads(roam.optimize(graph).to_json()), json.loads(plan_text)
    assert made.keys() == shown.keys()
    # What was tried is the planner's matter; here it is the shape that counts.
    assert made.pop("candidates")[0].keys() == shown.pop("candidates")[0].keys()
    assert made == shown


@given(graphs())
def test_graphs_round_trip(graph: roam.Graph) -> None:
    text = graph.to_json()
    again = roam.Graph.from_json(text)
    assert again == graph
    assert again.to_json() == text
    assert json.loads(text)["format"] == "roam.graph"


@given(graphs(), st.booleans())
@settings(max_examples=50)
def test_plans_round_trip(graph: roam.Graph, reuse: bool) -> None:
    plan = roam.optimize(graph, reuse=reuse)
    text = plan.to_json()
    again = roam.Plan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert again.timings_s == {}
    roam.verify(graph, again)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_files_round_trip(tmp_path: Path, suffix: str) -> None:
    for thing, kind in [(small_graph(), roam.Graph), (small_plan(), roam.Plan)]:
        path, again = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
        thing.save(path)
        loaded = kind.load(str(path))
        assert loaded == thing
        loaded.save(again)
        assert path.read_bytes() == again.read_bytes()
        content = path.read_bytes()
        assert (gzip.decompress(content) if suffix.endswith("gz") else content) == thing.to_json()


def test_compression_is_recognized_whatever_the_name(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_bytes(gzip.compress(GRAPH_TEXT))
    assert roam.Graph.load(path) == small_graph()
    assert (
        roam.Graph.from_json(gzip.compress(GRAPH_TEXT[:100]) + gzip.compress(GRAPH_TEXT[100:]))
        == small_graph()
    )


def test_compressed_files_tell_neither_time_nor_name(tmp_path: Path) -> None:
    path = tmp_path / "graph.json.gz"
    small_graph().save(path)
    # RFC 1952: no flags, modification time 0.
    assert path.read_bytes()[3:8] == bytes(5)


def test_key_order_and_white_space_are_free_after_the_header() -> None:
    value = json.loads(GRAPH_TEXT)
    header = {key: value.pop(key) for key in ("format", "version")}
    backwards = header | dict(reversed(value.items()))
    backwards["tensors"] = [dict(reversed(tensor.items())) for tensor in backwards["tensors"]]
    assert roam.Graph.from_json(json.dumps(backwards, indent=3).encode()) == small_graph()


def test_system_errors_are_pythons_own(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        roam.Graph.load(tmp_path / "missing.json")
    assert caught.value.filename == str(tmp_path / "missing.json")
    with pytest.raises(IsADirectoryError):
        roam.Plan.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        small_graph().save(tmp_path / "no" / "such" / "directory.json")
    with pytest.raises(OSError, match="No space left"):
        small_graph().save("/dev/full")


def graph_value(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The small graph's JSON after a change."""
    value = json.loads(GRAPH_TEXT)
    change(value)
    return json.dumps(value).encode()


def replaced(old: bytes, new: bytes) -> bytes:
    assert GRAPH_TEXT.count(old) == 1
    return GRAPH_TEXT.replace(old, new)


HOSTILE: list[tuple[str, str, bytes]] = [
    ("empty", "syntax", b""),
    ("white space", "syntax", b" \n"),
    ("no JSON", "syntax", b"hello"),
    ("not UTF-8", "syntax", replaced(b"two layers", b"\xff\xfe")),
    ("lone surrogate", "syntax", replaced(b"two layers", b"\\ud800")),
    ("a list", "syntax", b"[1]"),
    ("a number", "syntax", b"1" * 5000),
    ("deeply nested", "wrong_format", b'{"a":' * 100_000),
    ("deeply nested list", "syntax", b"[" * 100_000),
    ("deeply nested inside", "syntax", replaced(b'"cpu"', b"[" * 100_000)),
    ("format missing", "wrong_format", b"{}"),
    ("format not first", "wrong_format", b'{"version":1,"format":"roam.graph"}'),
    ("another format", "wrong_format", b'{"format":"roam.plan","version":1}'),
    ("version missing", "syntax", b'{"format":"roam.graph"}'),
    ("another version", "wrong_version", b'{"format":"roam.graph","version":3,"news":[]}'),
    ("version of another type", "syntax", b'{"format":"roam.graph","version":"1"}'),
    ("missing key", "syntax", graph_value(lambda v: v.pop("control"))),
    ("unknown key", "syntax", graph_value(lambda v: v.update(colour="red"))),
    (
        "unknown key of a tensor",
        "syntax",
        graph_value(lambda v: v["tensors"][0].update(colour="red")),
    ),
    (
        "unknown key of an operator",
        "syntax",
        graph_value(lambda v: v["operators"][0].update(colour="red")),
    ),
    (
        "unknown key of a source",
        "syntax",
        graph_value(lambda v: v["operators"][0]["source"].update(colour="red")),
    ),
    (
        "unknown key of a region",
        "syntax",
        graph_value(lambda v: v["regions"][0].update(colour="red")),
    ),
    ("doubled key", "syntax", replaced(b'"device":"cpu"', b'"device":"cpu","device":"cpu"')),
    (
        "doubled format",
        "syntax",
        replaced(b'"device":"cpu"', b'"device":"cpu","format":"roam.graph"'),
    ),
    (
        "doubled key of a tensor",
        "syntax",
        replaced(b'"size_bytes":9', b'"size_bytes":9,"size_bytes":9'),
    ),
    (
        "tensor as a list",
        "syntax",
        graph_value(lambda v: v.update(tensors=[["x", 1, "input", "enters", 0]])),
    ),
    (
        "source as a list",
        "syntax",
        graph_value(lambda v: v["operators"][0].update(source=["", "", 1])),
    ),
    ("tensors as an object", "syntax", graph_value(lambda v: v.update(tensors={}))),
    ("negative size", "syntax", replaced(b'"size_bytes":9', b'"size_bytes":-9')),
    ("fractional size", "syntax", replaced(b'"size_bytes":9', b'"size_bytes":9.0')),
    ("exponent", "syntax", replaced(b'"size_bytes":9', b'"size_bytes":1e3')),
    ("size of 2^64", "syntax", replaced(b'"size_bytes":9', b'"size_bytes":18446744073709551616')),
    (
        "size with 10000 digits",
        "syntax",
        replaced(b'"size_bytes":9', b'"size_bytes":' + b"9" * 10_000),
    ),
    ("number of 2^32", "syntax", replaced(b'"mutates":[4]', b'"mutates":[4294967296]')),
    ("null size", "syntax", replaced(b'"size_bytes":9', b'"size_bytes":null')),
    ("NaN", "syntax", replaced(b'"size_bytes":9', b'"size_bytes":NaN')),
    ("unknown kind", "syntax", replaced(b'"kind":"parameter"', b'"kind":"weight"')),
    ("control triple", "syntax", replaced(b"[0,2]", b"[0,2,1]")),
    ("control single", "syntax", replaced(b"[0,2]", b"[0]")),
    ("reuse triple", "syntax", replaced(b"[[1,2]]", b"[[1,2,2]]")),
    ("trailing text", "syntax", GRAPH_TEXT + b"x"),
    ("two objects", "syntax", GRAPH_TEXT + GRAPH_TEXT),
    ("trailing comma", "syntax", replaced(b"[1,0]]", b"[1,0],]")),
    ("gzip of nothing", "syntax", gzip.compress(b"")),
    ("gzip in gzip", "syntax", gzip.compress(gzip.compress(GRAPH_TEXT))),
    ("gzip header only", "compression", b"\x1f\x8b"),
    ("text after gzip", "compression", gzip.compress(GRAPH_TEXT) + b"more"),
    ("damaged check sum", "compression", gzip.compress(GRAPH_TEXT)[:-8] + bytes(8)),
    # Of the documented shape, but no graph:
    (
        "size of 2^63",
        "out_of_range",
        replaced(b'"size_bytes":9', b'"size_bytes":9223372036854775808'),
    ),
    ("unknown tensor", "unknown_tensor", replaced(b'"mutates":[4]', b'"mutates":[4294967295]')),
    ("unknown operator", "unknown_operator", replaced(b"[0,2]", b"[0,4294967295]")),
    ("cycle", "cycle", replaced(b"[0,2]", b"[2,1]")),
    ("position taken", "position_taken", replaced(b'"position":2', b'"position":1')),
]


@pytest.mark.parametrize(
    ("code", "data"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE]
)
def test_hostile_graphs_are_refused(tmp_path: Path, code: str, data: bytes) -> None:
    for read in (roam.Graph.from_json, lambda data: load_bytes(tmp_path, data)):
        with pytest.raises((roam.FormatError, roam.GraphError)) as caught:
            read(data)
        assert caught.value.code == code
        assert isinstance(caught.value, ValueError)
        if code == "syntax":
            assert " at line " in str(caught.value)
            assert len(str(caught.value)) < 1000


def load_bytes(folder: Path, data: bytes) -> roam.Graph:
    path = folder / "hostile"
    path.write_bytes(data)
    return roam.Graph.load(path)


PLAN_CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "negative offset": lambda v: v["offsets"].__setitem__(1, -64),
    "offset of 2^63": lambda v: v["offsets"].__setitem__(1, 2**63),
    "negative figure": lambda v: v.update(peak_bytes=-1),
    "figure of 2^63": lambda v: v.update(peak_bytes=2**63),
    "negative time limit": lambda v: v["settings"].update(time_limit_s=-1),
    "time limit that is no number": lambda v: v["settings"].update(time_limit_s="1"),
    "infinite time limit": lambda v: v["settings"].update(time_limit_s=float("inf")),
    "nan time limit": lambda v: v["settings"].update(time_limit_s=float("nan")),
    "unknown status": lambda v: v.update(status="great"),
    "unknown bound route": lambda v: v.update(bound_route="hope"),
    "unknown exact setting": lambda v: v["settings"].update(exact="maybe"),
    "unknown exact status": lambda v: v["exact"].update(status="great"),
    "missing exact reason": lambda v: v["exact"].pop("reason"),
    "exact report as a list": lambda v: v.update(exact=["off", 0, 0, 0, 0, None]),
    "unknown setting": lambda v: v["settings"].update(speed=1),
    "unknown key": lambda v: v.update(timings_s={}),
    "missing bound operator": lambda v: v.pop("bound_operator"),
    "missing order": lambda v: v.pop("order"),
    "settings as a list": lambda v: v.update(settings=[1, True, None]),
    "candidate with a surplus key": lambda v: v["candidates"][0].update(x=1),
    "a graph": lambda v: v.update(format="roam.graph"),
    "another version": lambda v: v.update(version=0),
}


@pytest.mark.parametrize("change", PLAN_CHANGES.values(), ids=PLAN_CHANGES)
def test_hostile_plans_are_refused(change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(small_plan().to_json())
    change(value)
    with pytest.raises(roam.FormatError):
        roam.Plan.from_json(json.dumps(value).encode())


@pytest.mark.parametrize("compress", [False, True])
def test_truncation_anywhere_is_refused(compress: bool) -> None:
    for text, read in [
        (GRAPH_TEXT, roam.Graph.from_json),
        (small_plan().to_json(), roam.Plan.from_json),
    ]:
        data = gzip.compress(text) if compress else text
        # A file without its last line break is whole.
        for length in range(len(data) - (0 if compress else 1)):
            with pytest.raises(roam.FormatError):
                read(data[:length])


@given(
    st.lists(
        st.tuples(st.integers(0, len(GRAPH_TEXT) - 1), st.integers(0, 255)), min_size=1, max_size=4
    )
)
@settings(max_examples=1000)
def test_flipped_bytes_never_do_more_than_raise(flips: list[tuple[int, int]]) -> None:
    data = bytearray(GRAPH_TEXT)
    for place, byte in flips:
        data[place] = byte
    try:
        graph = roam.Graph.from_json(bytes(data))
    except (roam.FormatError, roam.GraphError):
        return
    roam.verify(graph, roam.optimize(graph))


@given(st.data())
@settings(max_examples=300)
def test_flipped_bytes_of_compressed_files_never_do_more_than_raise(data: st.DataObject) -> None:
    file = bytearray(gzip.compress(GRAPH_TEXT, mtime=0))
    file[data.draw(st.integers(0, len(file) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        graph = roam.Graph.from_json(bytes(file))
    except roam.FormatError:
        return
    assert graph == small_graph()  # The check sum lets no change of the content pass.


@given(st.data())
@settings(max_examples=300)
def test_flipped_bytes_of_plans_never_do_more_than_raise(data: st.DataObject) -> None:
    graph, text = small_graph(), bytearray(small_plan().to_json())
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] = data.draw(st.integers(0, 255))
    try:
        plan = roam.Plan.from_json(bytes(text))
        for figure in (plan.gap, plan.fragmentation, plan.offsets, plan.order, repr(plan)):
            assert figure is not None
        roam.verify(graph, plan)
    except (roam.FormatError, roam.PlanError):
        pass


def test_readers_stop_at_their_limit() -> None:
    exact = len(GRAPH_TEXT)
    for data in (GRAPH_TEXT, gzip.compress(GRAPH_TEXT)):
        assert roam.Graph.from_json(data, max_bytes=exact) == small_graph()
        with pytest.raises(roam.FormatError, match=f"more than {exact - 1} bytes") as caught:
            roam.Graph.from_json(data, max_bytes=exact - 1)
        assert caught.value.code == "too_large"


def test_plans_of_version_1_are_read() -> None:
    plan = small_plan()
    assert plan.to_json().startswith(b'{"format":"roam.plan","version":2,')
    assert roam.Plan.from_json(plan.to_json().replace(b'"version":2', b'"version":1', 1)) == plan

    def read(status: str, exact: dict[str, Any]) -> str:
        value = json.loads(plan.to_json())
        value.update(version=1, status=status, exact=value["exact"] | exact)
        return roam.Plan.from_json(json.dumps(value).encode()).exact["status"]

    # Of what it did not tell apart.
    assert read("optimal", {"status": "not_needed"}) == "not_needed"
    assert read("feasible", {"status": "not_needed"}) == "not_tried"
    assert read("feasible", {"status": "used", "programs": 2, "failed": 1}) == "used"
    assert (
        read("feasible", {"status": "used", "programs": 2, "failed": 1, "timed_out": 1})
        == "no_answer"
    )


MEGABYTE = 1 << 20
# (what stands before, one megabyte of what follows again and again, how many of them, the reader's
# limit)
BOMBS: dict[str, tuple[bytes, bytes, int, int | None]] = {
    "white space": (b'{"format":"roam.graph","version":1', b" " * MEGABYTE, 600, None),
    "one long name": (
        b'{"format":"roam.graph","version":1,"name":"',
        b"a" * MEGABYTE,
        40,
        32 * MEGABYTE,
    ),
    "many control edges": (
        GRAPH_TEXT[: GRAPH_TEXT.index(b"[0,2]")],
        b"[0,0],\n" * (MEGABYTE // 7),
        40,
        32 * MEGABYTE,
    ),
    "many tensors": (
        GRAPH_TEXT[: GRAPH_TEXT.index(b'{"name":"x"')],
        b'{"name":"","size_bytes":0,"kind":"input","residency":"enters"},' * (MEGABYTE // 63),
        40,
        32 * MEGABYTE,
    ),
}

READ_WITHIN_LIMITS = """
import resource, sys, roam
data, limit = open(sys.argv[1], "rb").read(), int(sys.argv[2]) or None
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (256 << 20),) * 2)
try:
    roam.Graph.from_json(data, max_bytes=limit)
except roam.FormatError as error:
    print(error.code)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory as Linux does")
@pytest.mark.parametrize(("before", "filling", "repeats", "limit"), BOMBS.values(), ids=BOMBS)
def test_gzip_bombs_are_stopped(
    tmp_path: Path, before: bytes, filling: bytes, repeats: int, limit: int | None
) -> None:
    # A gzip file may consist of several streams, so a large one is quickly made.
    data = gzip.compress(before) + gzip.compress(filling) * repeats
    assert len(data) < MEGABYTE
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(data)
    command = [sys.executable, "-c", READ_WITHIN_LIMITS, str(path), str(limit or 0)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "too_large\n", "")


READ_WITHIN = 16 * MEGABYTE
# Bytes of memory per byte read, and what a process may take besides.
MULTIPLE, BESIDE = 16, 8 * MEGABYTE
_EMPTY = {"tensors": [], "operators": [], "control": [], "regions": []}
_PERSISTENT = {"name": "", "size_bytes": 0, "kind": "input", "residency": "persistent"}


def filled(head: dict[str, Any], key: str, item: Callable[[int], str]) -> bytes:
    """A file of at most the limit's size, one of whose lists holds as many items as fit."""
    before = (json.dumps(head, separators=(",", ":"))[:-1] + f',"{key}":[').encode()
    count = (READ_WITHIN - len(before)) // (len(item(1_000_000)) + 1)
    return before + ",".join(map(item, range(count))).encode() + b"]}"


def filled_graph(key: str, item: Callable[[int], str], tensors: int = 0) -> bytes:
    header = {"format": "roam.graph", "version": 1, "name": "", "device": "", "alignment_bytes": 1}
    head = header | _EMPTY | {"tensors": [_PERSISTENT] * tensors}
    head.pop(key, None)
    return filled(head, key, item)


def filled_plan(key: str, item: str) -> bytes:
    head = json.loads(small_plan().to_json())
    head.pop(key)
    return filled(head, key, lambda _: item)


def operator(position: int, rest: str = "") -> str:
    return f'{{"name":"","position":{position},"phase":"loss"{rest}}}'


def accesses(reads: int, mutates: int) -> bytes:
    """A graph whose operators list 100 tensors each: so many read them, then so many mutate them,
    and so on."""
    tensors = ",".join(map(str, range(100)))

    def item(at: int) -> str:
        role = "reads" if at % (reads + mutates) < reads else "mutates"
        return operator(at, f',"{role}":[{tensors}]')

    return filled_graph("operators", item, 100)


# What takes the most memory for its length, of everything that a file can repeat.
FILLED: dict[str, Callable[[], bytes]] = {
    "offsets": lambda: filled_plan("offsets", "0"),
    "candidates": lambda: filled_plan(
        "candidates", '{"order":"a","layout":"a","peak_bytes":0,"pool_bytes":0,"outside_bytes":0}'
    ),
    "notes": lambda: filled_graph("notes", lambda _: '["a","a"]'),
    "operators": lambda: filled_graph("operators", operator),
    "operators of one place": lambda: filled_graph("operators", lambda _: operator(0)),
    "sources": lambda: filled_graph(
        "operators", lambda at: operator(at, ',"source":{"module":"a","file":"a"}')
    ),
    "readers": lambda: accesses(1, 0),
    "mutators": lambda: accesses(0, 1),
    "readers and mutators": lambda: accesses(8, 1),
    "regions": lambda: filled_graph("regions", lambda _: '{"name":"a","predicate":0}', 1),
}

PEAK_OF_READING = """
import sys, roam
def peak():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["VmHWM"].split()[0]) << 10
before = peak()
try:
    getattr(roam, sys.argv[1]).load(sys.argv[2])
except (roam.FormatError, roam.GraphError):
    pass
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="measures a process's memory as Linux does")
@pytest.mark.parametrize("make", FILLED.values(), ids=FILLED)
def test_memory_is_in_proportion_to_what_is_read(tmp_path: Path, make: Callable[[], bytes]) -> None:
    data = make()
    assert READ_WITHIN * 0.8 < len(data) <= READ_WITHIN
    path = tmp_path / "filled.json"
    path.write_bytes(data)
    kind = "Plan" if b"roam.plan" in data[:40] else "Graph"
    done = subprocess.run(
        [sys.executable, "-c", PEAK_OF_READING, kind, str(path)], capture_output=True, check=True
    )
    assert MEGABYTE < int(done.stdout) <= MULTIPLE * READ_WITHIN + BESIDE


def test_pickles_and_files_hold_no_timings() -> None:
    plan = small_plan()
    assert plan.timings_s
    assert b"timings" not in plan.to_json()
    assert roam.Plan.from_json(plan.to_json()) == plan
