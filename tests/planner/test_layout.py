"""Buffers without a graph: files, packings with gaps, fixed offsets and hints, limits, errors, and
their benchmarks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import roam
from roam import cli, layout
from roam._core import synthetic_buffers, synthetic_step
from roam.layout import Buffers
from roam_bench import scale, scale_child

INSTANCES = Path(__file__).parents[2] / "benches/layout"
FULL = """\
id,lower,upper,size,alignment,hint,gaps,offset
a,5,10,8,4,16,6-7 8-10@2:5,12
b,0,2,1,1,-1,,
"""


def needed(buffers: Buffers, at: int) -> list[tuple[int, range]]:
    """Per time of a buffer's life its own bytes that it needs, from the gaps themselves."""
    cells = []
    for time in range(buffers.lower[at], buffers.upper[at]):
        own = range(buffers.size_bytes[at])
        for gap in buffers.gaps[at]:
            if gap[0] <= time < gap[1]:
                own = range(gap[2], gap[3]) if len(gap) == 4 else range(0)
        cells.append((time, own))
    return cells


def assert_no_byte_is_shared(buffers: Buffers, packing: layout.Packing) -> None:
    taken: set[tuple[int, int]] = set()
    for at, offset in enumerate(packing.offsets.tolist()):
        for time, own in needed(buffers, at):
            cells = {(time, offset + byte) for byte in own}
            assert not cells & taken
            taken |= cells


@st.composite
def tiny_buffers(draw: st.DrawFn, fixed: bool = True) -> Buffers:
    """Up to six buffers of up to 12 bytes, with gaps, windows, alignments, hints and, if wanted,
    fixed offsets apart from each other."""
    count = draw(st.integers(0, 6))
    lower, upper, sizes, alignments, gaps, offsets, hints = [], [], [], [], [], [], []
    for at in range(count):
        times = sorted(draw(st.sets(st.integers(0, 9), min_size=2, max_size=6)))
        lower.append(times[0])
        upper.append(times[-1])
        size = draw(st.integers(0, 12))
        sizes.append(size)
        alignments.append(draw(st.sampled_from([1, 1, 2, 4])))
        of_one: list[tuple[int, ...]] = []
        for begin, end in zip(times[1:-1:2], times[2:-1:2], strict=False):
            window = tuple(sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))))
            of_one.append((begin, end, *window) if draw(st.booleans()) else (begin, end))
        gaps.append(of_one)
        offsets.append(16 * at if fixed and draw(st.integers(0, 3)) == 0 else None)
        hints.append(draw(st.none() | st.integers(0, 40)))
    return Buffers(
        lower, upper, sizes, alignment_bytes=alignments, gaps=gaps, offsets=offsets, hints=hints
    )


@given(tiny_buffers())
@settings(deadline=None)
def test_every_packing_is_one(buffers: Buffers) -> None:
    packing = layout.pack(buffers, work=20_000)
    layout.verify(buffers, packing)
    assert_no_byte_is_shared(buffers, packing)
    ends = packing.offsets + buffers.size_bytes
    assert packing.pool_bytes == (ends.max() if len(buffers) else 0)
    assert not (packing.offsets % buffers.alignment_bytes).any()
    assert all(
        fixed in (None, offset)
        for fixed, offset in zip(buffers.offsets, packing.offsets, strict=True)
    )
    assert packing.live_bytes <= packing.lower_bound_bytes <= packing.pool_bytes
    assert (packing.status == "optimal") == (packing.gap == 0)


@given(tiny_buffers())
@settings(deadline=None)
def test_gaps_never_make_the_bound_larger(buffers: Buffers) -> None:
    solid = Buffers(
        buffers.lower,
        buffers.upper,
        buffers.size_bytes,
        alignment_bytes=buffers.alignment_bytes,
        offsets=buffers.offsets,
    )
    with_gaps, without = layout.pack(buffers, work=1000), layout.pack(solid, work=1000)
    assert with_gaps.live_bytes <= without.live_bytes
    assert with_gaps.lower_bound_bytes <= without.lower_bound_bytes


@given(buffers=tiny_buffers())
@settings(deadline=None)
def test_files_hold_everything(buffers: Buffers, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("layout") / "buffers.csv"
    buffers.write_csv(path)
    again = Buffers.read_csv(path)
    assert again == buffers
    assert again.digest == buffers.digest
    packing = layout.pack(buffers, work=1000)
    buffers.write_csv(path, packing)
    fixed = Buffers.read_csv(path)
    assert list(fixed.offsets) == packing.offsets.tolist()
    assert fixed.gaps == buffers.gaps
    # A packing's own file packs to itself, and to nothing less.
    repacked = layout.pack(fixed)
    assert (repacked.pool_bytes, repacked.status) == (packing.pool_bytes, "optimal")


def test_a_file_is_read_as_minimalloc_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "full.csv"
    path.write_text(FULL)
    buffers = Buffers.read_csv(path)
    assert buffers.ids == ("a", "b")
    assert buffers.lower.tolist() == [5, 0]
    assert buffers.upper.tolist() == [10, 2]
    assert buffers.alignment_bytes.tolist() == [4, 1]
    assert buffers.gaps == (((6, 7), (8, 10, 2, 5)), ())
    assert (buffers.offsets, buffers.hints) == ((12, None), (16, None))
    assert not buffers.lower.flags.writeable
    other = tmp_path / "other.csv"
    other.write_text(
        "offset,gaps,size,buffer_id,end,hint,begin,alignment\n12,8-9@2:5 6-6,8,a,9,16,5,4\n,,1,b,1,,0,1\n"
    )
    assert Buffers.read_csv(other) == buffers
    buffers.write_csv(other)
    assert other.read_text() == FULL


def test_the_example_of_minimalloc(tmp_path: Path) -> None:
    path = tmp_path / "output.csv"
    buffers = Buffers.read_csv(INSTANCES / "input.12.csv")
    packing = layout.pack(buffers)
    assert (packing.pool_bytes, packing.status, packing.gap) == (12, "optimal", 0)
    buffers.write_csv(path, packing)
    lines = path.read_text().splitlines()
    assert lines[0] == "id,lower,upper,size,offset"
    assert [line.rsplit(",", 1)[0] for line in lines[1:]] == (
        INSTANCES / "input.12.csv"
    ).read_text().splitlines()[1:]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("id,lower,upper\n", "missing_column"),
        ("id,lower,upper,size,color\n", "unknown_column"),
        ("id,lower,upper,size,end\n", "duplicate_column"),
        ("id,lower,upper,size\na,0,1\n", "fields"),
        ("id,lower,upper,size\na,0,1,x\n", "number"),
        ("id,lower,upper,size,gaps\na,0,9,1,3\n", "gap"),
        ("id,lower,upper,size\n,0,9,1\n", "empty_id"),
        ("id,lower,upper,size\na,0,9,1\na,0,9,1\n", "duplicate_id"),
        (b"\xff", "encoding"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path: Path, text: str | bytes, code: str) -> None:
    path = tmp_path / "wrong.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(roam.FormatError, match=r"wrong\.csv") as caught:
        Buffers.read_csv(path)
    assert caught.value.code == code
    with pytest.raises(FileNotFoundError):
        Buffers.read_csv(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("others", "code"),
    [
        ({"upper": [0, 9]}, "empty_interval"),
        ({"alignment_bytes": [1, 3]}, "alignment"),
        ({"gaps": [[], [(5, 10)]]}, "gap"),
        ({"gaps": [[(1, 3), (2, 4)], []]}, "gap"),
        ({"gaps": [[(1, 3, 2, 5)], []]}, "window"),
        ({"alignment_bytes": [4, 4], "offsets": [2, None]}, "fixed_alignment"),
        ({"offsets": [0, 3]}, "fixed_overlap"),
        ({"size_bytes": [2**63 - 1, 4]}, "too_large"),
    ],
)
def test_what_cannot_be_packed_is_refused(others: dict[str, Any], code: str) -> None:
    columns = {"lower": [0, 0], "upper": [9, 9], "size_bytes": [4, 4], **others}
    with pytest.raises(roam.LayoutError) as caught:
        layout.pack(Buffers(**columns))
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("others", "code"),
    [
        ({"lower": [-1, 0]}, "out_of_range"),
        ({"upper": [9]}, "count"),
        ({"gaps": [[(1, 2, 3)], []]}, "gap"),
        ({"ids": ["a", "a"]}, "id"),
        ({"ids": ["a", "b,c"]}, "id"),
    ],
)
def test_values_that_are_no_buffers_are_refused(others: dict[str, Any], code: str) -> None:
    with pytest.raises(roam.LayoutError) as caught:
        Buffers(**{"lower": [0, 0], "upper": [9, 9], "size_bytes": [4, 4], **others})
    assert caught.value.code == code


def test_numbers_of_numpy_are_taken() -> None:
    plain = Buffers([0, 1], [2, 3], [4, 5])
    assert (
        Buffers(np.array([0, 1]), np.array([2, 3], np.int32), np.array([4, 5], np.uint8)) == plain
    )
    with pytest.raises(TypeError):
        Buffers([0.5], [2], [3])
    with pytest.raises(OverflowError):
        Buffers([2**63], [2**64], [3])


def test_a_packing_of_other_buffers_is_no_packing(tmp_path: Path) -> None:
    two, three = Buffers([0, 0], [1, 1], [4, 4]), Buffers([0, 0, 0], [1, 1, 1], [4, 4, 4])
    packing = layout.pack(two)
    with pytest.raises(roam.LayoutError) as caught:
        layout.verify(three, packing)
    assert caught.value.code == "count"
    with pytest.raises(roam.LayoutError) as caught:
        Buffers([0, 0], [1, 1], [5, 5]).write_csv(tmp_path / "none.csv", packing)
    assert caught.value.code == "overlap"
    assert not list(tmp_path.iterdir())


def test_limits_end_the_search() -> None:
    buffers = synthetic_buffers("replaced", 2000)
    quick = layout.pack(buffers, time_limit_s=0, work=2**62)
    assert quick.status == "timed_out"
    better = layout.pack(buffers, target_bytes=quick.pool_bytes - 1, work=2**62)
    assert better.pool_bytes < quick.pool_bytes
    assert better.status == "feasible"
    for limit in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="time_limit_s"):
            layout.pack(buffers, time_limit_s=limit)


def test_ctrl_c_brings_the_best_so_far() -> None:
    buffers = synthetic_buffers("replaced", 2000)
    threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt) as caught:
        layout.pack(buffers, work=2**62)
    assert isinstance(caught.value, roam.PackingInterrupted)
    layout.verify(buffers, caught.value.packing)
    assert caught.value.packing.status == "timed_out"


def test_bench_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = tmp_path / "fixed.csv"
    fixed.write_text("id,lower,upper,size,offset\na,0,2,4,2\nb,0,1,3,\n")
    files = [str(INSTANCES / "input.12.csv"), str(fixed)]
    folder = tmp_path / "out"
    arguments = [
        "bench",
        "layout",
        *files,
        "--json",
        "--output",
        str(folder),
        "--packed",
        str(folder / "packed"),
    ]
    assert cli.main(arguments) == cli.EXIT_OK
    rows = json.loads(capsys.readouterr().out)["rows"]
    figures = [(row["instance"], row["buffers"], row["pool_bytes"], row["status"]) for row in rows]
    # Of b no byte fits below a, which lies in [2, 6): b goes on top, to [6, 9), and 7 bytes are
    # live.
    assert figures == [("input.12.csv", 5, 12, "optimal"), ("fixed.csv", 2, 9, "feasible")]
    assert rows[1]["live_bytes"] == 7
    assert (folder / "packed/fixed.csv").read_text().splitlines()[1:] == ["a,0,2,4,2", "b,0,1,3,6"]
    assert rows[0]["digest"] == Buffers.read_csv(INSTANCES / "input.12.csv").digest


@pytest.mark.parametrize(
    ("text", "word"),
    [("id,lower\n", "upper"), ("id,lower,upper,size,offset\na,0,1,4,0\nb,0,1,4,0\n", "fixed")],
)
def test_bench_layout_refuses_in_one_line(
    tmp_path: Path, text: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    assert cli.main(["bench", "layout", str(path), "--output", str(tmp_path)]) == cli.EXIT_BAD_INPUT
    complaint = capsys.readouterr().err.strip().splitlines()[-1]
    assert complaint.startswith("roam: ")
    assert word in complaint


@pytest.mark.parametrize(
    "request_",
    [{"alignment_bytes": [0]}, {"gaps": [[(1, 3, 0, 9)]]}, {"gaps": [[(1, 3, 5, 2)]]}],
)
def test_the_verifier_refuses_what_makes_no_sense(request_: dict[str, Any]) -> None:
    sound = layout.pack(Buffers([0], [4], [8]))
    with pytest.raises(roam.LayoutError, match="has an alignment of 0, or gaps outside"):
        layout.verify(Buffers([0], [4], [8], **request_), sound)


def test_ends_beyond_all_numbers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "last.csv"
    path.write_text(f"id,start,end,size\na,0,{2**63 - 1},1\n")
    with pytest.raises((roam.FormatError, roam.LayoutError), match="end"):
        Buffers.read_csv(path)


def test_bench_layout_takes_empty_files_and_overwrites_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "empty.csv"
    path.write_text("id,lower,upper,size\n")
    output = ["--output", str(tmp_path / "out")]
    assert cli.main(["bench", "layout", str(path), *output]) == cli.EXIT_OK
    assert (
        cli.main(["bench", "layout", str(path), *output, "--packed", str(tmp_path)])
        == cli.EXIT_BAD_INPUT
    )
    assert "overwrite" in capsys.readouterr().err


def test_bench_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--largest",
        "1000",
        "--only",
        "wide",
        "--work",
        "100000",
        "--output",
        str(tmp_path),
        "--json",
    ]
    assert cli.main(["bench", "scale", *arguments]) == cli.EXIT_OK
    step, buffers = json.loads(capsys.readouterr().out)["rows"]
    assert (step["what"], step["family"], buffers["what"], buffers["buffers"]) == (
        "step",
        "wide",
        "layout",
        1000,
    )
    assert 800 <= step["operators"] <= 1100
    assert step["digest"] == synthetic_step("wide", 1000).digest
    assert all(
        figures[f"{stage}_s"] >= 0
        for figures in (step, buffers)
        for stage in ("build", "plan", "verify", "load")
    )
    assert (tmp_path / "scale.svg").exists()


def test_growth_is_told_from_a_tenth_of_the_size() -> None:
    common = {
        "what": "layout",
        "family": "wide",
        "build_s": 0,
        "plan_s": 0,
        "verify_s": 0,
        "save_s": 0,
        "load_s": 0,
    }
    rows = [
        {
            **common,
            "asked": size,
            "buffers": size,
            "plan_cpu_s": seconds,
            "peak_rss_bytes": None,
            "gap": 0,
            "load": load,
        }
        for size, seconds, load in ((10, 2.0, 0.5), (100, 3.0, None), (1000, 300.0, 2.25))
    ]
    record = {"rows": rows, "machine": {"processor": "some", "cores": 2}}
    (row,) = scale.largest_table(record).markdown().splitlines()[2:]
    assert row.startswith("| layout | wide | 1,000 |")
    assert row.endswith("| 2.00 |")
    assert scale.largest_table({"rows": rows[:1]}).markdown().endswith("|  |")
    assert scale.conditions(record) == "some, 2 cores; load 0.5 to 2.2, this benchmark included."


def test_a_child_counts_its_own_memory() -> None:
    """Not that of the process that starts it, which holds torch."""
    code = "from roam_bench.scale_child import peak_rss_bytes; print(peak_rss_bytes())"
    ballast = bytearray(300_000_000)
    ballast[::4096] = b"1" * len(ballast[::4096])
    child = int(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
    )
    own = scale_child.peak_rss_bytes()
    assert own is not None
    assert child < len(ballast) < own


def test_the_names_of_made_up_steps_and_layouts_are_known() -> None:
    for family in scale.FAMILIES:
        assert synthetic_step(family, 200).num_operators > 100
    for style in scale.STYLES:
        assert len(synthetic_buffers(style, 100)) >= 90
    assert (
        synthetic_buffers("wide", 100)
        == synthetic_buffers("wide", 100, seed=1)
        != synthetic_buffers("wide", 100, 2)
    )
    with pytest.raises(ValueError, match="deep, wide, branching"):
        synthetic_step("none", 10)
    with pytest.raises(ValueError, match="dissected"):
        synthetic_buffers("none", 10)


def test_annealing_goes_on_where_the_search_ends_with_a_gap() -> None:
    buffers = Buffers.read_csv(INSTANCES / "J.1048576.csv")
    packing = layout.pack(buffers, work=2_000_000_000)
    assert (packing.pool_bytes, packing.method, packing.status) == (
        1_035_264,
        "annealed",
        "feasible",
    )
