"""The command: what it prints for people and programs, and its exit codes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import forked
import roam
from roam import cli, zoo
from roam.report import Progress, format_bytes, progress
from roam.tracing.cuda_estimate import absent

FIGURES = (
    "program_order_peak_bytes",
    "peak_bytes",
    "pool_bytes",
    "pool_peak_bytes",
    "outside_bytes",
    "persistent_bytes",
    "total_bytes",
    "lower_bound_bytes",
    "total_lower_bound_bytes",
    "gap",
    "fragmentation",
    "status",
)


def two_branches() -> roam.Graph:
    """Two branches that program order makes side by side; one after the other they need less."""
    builder = roam.GraphBuilder("two branches")
    weight = builder.tensor("weight", 4096, kind="parameter", residency="persistent")
    results, larges = [], []
    for branch in ("left", "right"):
        large = builder.tensor(f"{branch} large", 65536)
        builder.operator(
            f"make {branch}",
            reads=[weight],
            creates=[large],
            file="net.py",
            line=7,
            module="net.body",
        )
        larges.append(large)
    for large, branch in zip(larges, ("left", "right"), strict=True):
        small = builder.tensor(f"{branch} small", 64)
        builder.operator(f"shrink {branch}", reads=[large], creates=[small])
        results.append(small)
    loss = builder.tensor("loss", 4, kind="output", residency="leaves")
    builder.operator("join", reads=results, creates=[loss], workspace_bytes=128, phase="loss")
    return builder.build()


@pytest.fixture
def graph_file(tmp_path: Path) -> str:
    path = str(tmp_path / "graph.json")
    two_branches().save(path)
    return path


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = str(tmp_path / "plan.json")
    roam.optimize(two_branches()).save(path)
    return path


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "roam", *arguments], capture_output=True, text=True, **options
    )


def assert_one_line(text: str, *words: str) -> None:
    assert text.startswith("roam: ")
    assert text.count("\n") == 1
    assert all(word in text for word in words)


def test_a_graph_file_is_planned_for_programs(
    graph_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", graph_file, "--json"]) == 0
    captured = capsys.readouterr()
    values = json.loads(captured.out)
    plan = roam.optimize(two_branches())
    assert {name: values[name] for name in FIGURES} == {
        name: getattr(plan, name) for name in FIGURES
    }
    assert values["peak_bytes"] < values["program_order_peak_bytes"]
    saved = values["saved_by_order_bytes"] + values["saved_by_reuse_bytes"]
    assert saved == values["program_order_peak_bytes"] - values["peak_bytes"]
    assert values["model"] == graph_file
    assert (values["operators"], values["tensors"]) == (5, 6)
    assert values["verified"] is True
    assert values["capture_s"] is None
    assert values["plan_s"] > 0
    assert values["peak_rss_bytes"] > 2**20
    assert values["timings_s"].keys() == plan.timings_s.keys()
    assert values["peak_operator"]["live_bytes"] == values["peak_bytes"]
    assert (values["peak_operator"]["file"], values["peak_operator"]["line"]) in {
        ("net.py", 7),
        ("", 0),
    }
    assert captured.err == ""


def test_a_graph_file_is_planned_for_people(
    graph_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", graph_file]) == 0
    text = capsys.readouterr().out
    plan = roam.optimize(two_branches())
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert text.startswith(f"{graph_file}: 5 operators, 6 tensors\n")
    assert f"{plan.program_order_peak_bytes:,}" in lines["peak in program order"]
    assert f"{plan.total_bytes:,}" in lines["total"]
    assert f"{plan.lower_bound_bytes:,}" in lines["lower bound of the peak"]
    assert f"{plan.total_lower_bound_bytes:,}" in lines["lower bound of the total"]
    assert f"{plan.gap:.2%}" in lines["gap"]
    assert lines["verified"].endswith("yes")
    assert "at the peak" in lines
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_a_plan_can_do_without_reuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = roam.GraphBuilder()
    first, second = builder.tensor("first", 1024), builder.tensor("second", 1024)
    builder.operator("make", creates=[first])
    builder.operator("relu", reads=[first], creates=[second], reuse=[(first, second)])
    path = str(tmp_path / "graph.json.gz")
    builder.build().save(path)
    results = []
    for options in ([], ["--no-reuse"]):
        assert cli.main(["plan", path, "--json", *options]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert [values["peak_bytes"] for values in results] == [1024, 2048]
    assert [values["saved_by_reuse_bytes"] for values in results] == [1024, 0]
    assert [values["saved_by_order_bytes"] for values in results] == [0, 0]
    assert [values["peak_operator"]["live_bytes"] for values in results] == [1024, 2048]


def test_an_empty_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "graph.json")
    roam.GraphBuilder().build().save(path)
    assert cli.main(["plan", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total_bytes"] == 0
    assert cli.main(["plan", path]) == 0


def test_what_is_saved_can_be_verified(
    graph_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, plan = str(tmp_path / "copy.json.gz"), str(tmp_path / "plan.json.gz")
    assert cli.main(["plan", graph_file, "--save-graph", graph, "--save-plan", plan]) == 0
    capsys.readouterr()
    assert cli.main(["verify", graph, plan]) == 0
    assert capsys.readouterr().out == f"valid: {plan} is a plan of {graph}\n"
    assert cli.main(["verify", graph, plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["valid"] is True
    assert roam.Graph.load(graph) == two_branches()


def test_an_invalid_plan(
    graph_file: str, plan_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads(Path(plan_file).read_text())
    values["peak_bytes"] += 64
    Path(plan_file).write_text(json.dumps(values))
    assert cli.main(["verify", graph_file, plan_file]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert_one_line(captured.err, "invalid plan")
    assert cli.main(["verify", graph_file, plan_file, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["valid"] is False
    assert answer["code"]
    assert answer["error"]


def test_a_plan_of_another_graph(
    tmp_path: Path, plan_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(tmp_path / "other.json")
    roam.GraphBuilder().build().save(other)
    assert cli.main(["verify", other, plan_file]) == 1
    assert_one_line(capsys.readouterr().err, "invalid plan")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "{tmp}/missing.json"], ["missing.json", "No such file"]),
        (["plan", "{tmp}/folder.json"], ["folder.json"]),
        (["plan", "{tmp}/cut.json"], []),
        (["plan", "{tmp}/text.json.gz"], []),
        (["plan", "{plan}"], []),
        (["plan", "gpt5"], ["'gpt5'", "roam zoo"]),
        (
            ["plan", "{graph}", "--batch", "2", "--step", "first"],
            ["--batch, --step", "captured already"],
        ),
        (["plan", "alexnet", "--seq", "8"], ["no sequence length"]),
        (["plan", "gpt2-tiny", "--seq", "129"], ["2 to 128"]),
        (
            ["plan", "{graph}", "--save-plan", "{tmp}/no/such/plan.json"],
            ["plan.json", "No such file"],
        ),
        (["verify", "{graph}", "{tmp}/missing.json"], ["missing.json", "No such file"]),
        (["verify", "{graph}", "{graph}"], []),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: list[str],
    words: list[str],
    graph_file: str,
    plan_file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "cut.json").write_bytes(Path(graph_file).read_bytes()[:100])
    (tmp_path / "text.json.gz").write_text("not compressed, not JSON")
    named = [text.format(tmp=tmp_path, graph=graph_file, plan=plan_file) for text in arguments]
    assert cli.main(named) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert_one_line(captured.err, *words)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["paint"],
        ["plan"],
        ["plan", "gpt2", "--batch", "0"],
        ["plan", "gpt2", "--seq", "many"],
        ["plan", "gpt2", "--dtype", "int8"],
        ["plan", "gpt2", "--time-limit", "0"],
        ["plan", "gpt2", "--time-limit", "nan"],
        ["plan", "gpt2", "--time-limit", "inf"],
        ["verify", "graph.json"],
        ["plan", "gpt2", "--batch", str(2**63)],
        ["plan", "gpt2", "--memory", "auto"],
        ["report", "gpt2", "--memory", "auto"],
        ["export", "gpt2", "--memory", "auto", "--output", "plan.dot"],
        ["bench", "suite", "--batch", "0"],
        ["bench", "suite", "--step", "second"],
        ["bench", "paper", "--whole-program", "-1"],
        ["bench", "scale", "--work", "0"],
    ],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage: roam" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--streams", "2", "--memory", "80%"], "for plans of one stream"),
        (["--streams", "2", "--memory-curve"], "for plans of one stream"),
        (["--speed", "1.5"], "more than one stream"),
        (["--streams", "65"], "between 1 and 64"),
        (["--baseline", "lescea,tetris"], 'no layout "tetris"'),
        (["--tiles"], "add --memory"),
        (["--tiles", "--memory", "5MiB", "--device", "cuda"], "on the CPU alone"),
        (["--tiles", "--memory", "5MiB", "--no-reuse"], "not with --no-reuse"),
        (["--save-plan", "missing/plan.json"], "missing/plan.json"),
        (["--save-graph", "missing/graph.json"], "missing/graph.json"),
    ],
)
def test_options_of_no_graph_are_told_before_the_capture(
    options: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "subject_of", lambda *_, **__: pytest.fail("it captures"))
    assert cli.main(["plan", "gpt2-tiny", *options]) == 2
    assert_one_line(capsys.readouterr().err, words)


def test_a_refused_limit_says_over_which_plans_it_ranges(
    graph_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", graph_file, "--memory", "1KiB"]) == 2
    assert_one_line(capsys.readouterr().err, "This holds for whole operators")
    assert cli.main(["plan", graph_file, "--memory", "1KiB", "--tiles"]) == 2
    assert_one_line(capsys.readouterr().err, "a graph file does not have the operators")


def test_tiles_are_tried_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within less than whole operators take, and less than the scores."""
    torch = pytest.importorskip("torch")
    from roam.tracing.step import capture_variant

    rows, width, classes = 512, 64, 2048

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    with roam.fake():
        model = torch.nn.Linear(width, classes, bias=False)
        optimizer = torch.optim.SGD(model.parameters())
        batch = torch.randn(rows, width), torch.randint(classes, (rows,))
    variant = capture_variant(step, (model, optimizer, *batch), {})
    monkeypatch.setattr(zoo, "capture_variant", lambda *_, **__: variant)
    limit = 4 * rows * classes
    arguments = ["plan", "gpt2-tiny", "--memory", str(limit)]
    assert cli.main(arguments) == 2
    assert "--tiles tries that" in capsys.readouterr().err
    assert cli.main([*arguments, "--tiles", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["total_bytes"] <= limit
    assert values["cuts"]["gone_bytes"] >= limit
    assert all(tiles > 1 for _, _, tiles in values["cuts"]["rows"])
    assert cli.main([*arguments, "--tiles", "--verbose"]) == 0
    told = capsys.readouterr().out
    assert "never exist whole" in told
    assert "have the bits of whole operators on this machine" in told
    assert "of whole operators takes less" not in told


def test_a_step_that_cannot_be_captured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = zoo.build

    def build_rounding(*args: Any, **kwargs: Any) -> zoo.ZooStep:
        made = build(*args, **kwargs)

        def train_step(model: Any, optimizer: Any, *batch: Any) -> Any:
            loss = made.train_step(model, optimizer, *batch)
            return loss * hash(loss.item())

        return zoo.ZooStep(train_step, made.model, made.optimizer, made.batch)

    monkeypatch.setattr("roam.zoo.catalog.build", build_rounding)
    assert cli.main(["plan", "gpt2-tiny"]) == 3
    assert "roam: cannot capture this step: " in capsys.readouterr().err


def test_a_device_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(
        "torch.version.cuda", None
    )  # a PyTorch that was built for it gives an estimate
    monkeypatch.setattr(absent, "_kept", [])
    assert cli.main(["plan", "gpt2-tiny", "--device", "cuda"]) == 2
    assert "roam: no CUDA device" in capsys.readouterr().err


def test_an_error_of_roam_itself(
    graph_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the planner fell over")

    monkeypatch.setattr(roam, "optimize", fail)
    assert cli.main(["plan", graph_file]) == 4
    text = capsys.readouterr().err
    assert "the planner fell over" in text
    assert text.endswith("please report it with the lines above\n")


def test_an_interrupt(
    graph_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(roam, "optimize", interrupt)
    assert cli.main(["plan", graph_file]) == 130
    assert capsys.readouterr().err == "roam: interrupted\n"


def test_an_interrupted_search_shows_and_saves_its_best_plan(
    graph_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    optimize = roam.optimize
    best = optimize(roam.Graph.load(graph_file))

    def interrupt(graph: Any, **options: Any) -> Any:
        if graph.num_operators == 1:  # by which the options are checked
            return optimize(graph, **options)
        raise roam.PlanningInterrupted(best)

    monkeypatch.setattr(roam, "optimize", interrupt)
    saved = tmp_path / "plan.json"
    assert cli.main(["plan", graph_file, "--json", "--save-plan", str(saved)]) == 130
    output, complaint = capsys.readouterr()
    assert json.loads(output)["total_bytes"] == best.total_bytes
    assert roam.Plan.load(str(saved)) == best
    assert complaint.endswith("roam: interrupted: this is the best plan so far\n")


@pytest.mark.parametrize("fails", [False, True])
def test_a_swallowed_interrupt_counts_all_the_same(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def swallow(*args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        if fails:
            raise ImportError("it was only half imported")

    monkeypatch.setattr(zoo, "capture_variant", swallow)
    assert cli.main(["plan", "gpt2-tiny"]) == 130
    output, complaint = capsys.readouterr()
    assert output == ""
    assert complaint.endswith("roam: interrupted\n")


def test_ctrl_c_during_capture() -> None:
    command = [sys.executable, "-m", "roam", "plan", "gpt2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "roam: capturing gpt2 ...\n"
        process.send_signal(signal.SIGINT)
        output, complaint = process.communicate(timeout=240)
    # The interpreter may end itself by the signal after all is said and done; to a shell both are
    # 130.
    assert process.returncode in (130, -signal.SIGINT)
    assert (output, complaint) == ("", "roam: interrupted\n")


def test_nobody_reads_the_output() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "roam", "zoo"],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert_one_line(done.stderr, "output was closed")


def test_a_graph_file_needs_neither_torch_nor_a_solver(graph_file: str) -> None:
    code = f"import sys; from roam.cli import main; main(['plan', {graph_file!r}]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "roam.cli" in loaded
    assert not loaded & {"torch", "mip", "torchvision", "transformers"}


def test_the_zoo_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["zoo"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(zoo.names())
    assert cli.main(["zoo", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert [model["name"] for model in models] == list(zoo.names())
    assert {"summary", "requires", "default_seq", "max_seq"} < models[0].keys()


def test_version_and_help() -> None:
    assert run("--version", check=True).stdout == f"roam {roam.__version__}\n"
    for command in ([], ["plan"], ["verify"], ["zoo"]):
        assert "exit codes:" in run(*command, "--help", check=True).stdout


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt2-tiny", ["--batch", "2", "--seq", "16"]),
        ("gpt2-tiny", ["--step", "first", "--optimizer", "sgd-momentum"]),
        ("llama-tiny", ["--optimizer", "sgd", "--dtype", "bfloat16"]),
        ("bert-tiny", ["--optimizer", "adam", "--no-reuse"]),
        ("moe-tiny", []),
    ],
)
def test_a_model_of_the_zoo(
    model: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, plan = str(tmp_path / "graph.json.gz"), str(tmp_path / "plan.json.gz")
    assert (
        cli.main(["plan", model, "--json", *options, "--save-graph", graph, "--save-plan", plan])
        == 0
    )
    values = json.loads(capsys.readouterr().out)
    assert values["model"] == model
    assert values["capture_s"] > 0
    assert values["verified"] is True
    assert values["operators"] > 100
    assert values["lower_bound_bytes"] <= values["peak_bytes"] <= values["program_order_peak_bytes"]
    given = dict(zip(options[::2], options[1::2], strict=False))
    assert values["batch"] == int(given.get("--batch", 1))
    assert values["seq"] == int(given.get("--seq", 128))
    assert values["step"] == given.get("--step", "steady")
    assert values["optimizer"] == given.get("--optimizer", "adamw")
    with_options = ["--no-reuse"] if "--no-reuse" in options else []
    assert cli.main(["plan", graph, "--json", *with_options]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {name: again[name] for name in FIGURES} == {name: values[name] for name in FIGURES}
    assert cli.main(["verify", graph, plan]) == 0


@pytest.mark.long
def test_hash_seeds_and_threads_change_no_file(tmp_path: Path) -> None:
    # The process that is copied has a seed by chance.
    code = "import sys; from roam.cli import main; sys.exit(main(sys.argv[1:]))"
    files = []
    for threads in ("1", "4"):
        files.append([tmp_path / f"{part}-{threads}.json" for part in ("graph", "plan")])
        graph, plan = map(str, files[-1])
        command = "plan", "moe-tiny", "--save-graph", graph, "--save-plan", plan
        environment = os.environ | {"RAYON_NUM_THREADS": threads}
        if threads == "1":
            done = forked.python("-c", code, *command, environment=environment)
            assert done.returncode == 0, done.stderr
        else:
            run(*command, check=True, env=environment | {"PYTHONHASHSEED": "12345"})
    for one, other in zip(*files, strict=True):
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.long
def test_gpt2_xl_is_planned_near_its_bound_in_little_memory() -> None:
    values = json.loads(run("plan", "gpt2-xl", "--json", check=True).stdout)
    assert values["operators"] >= 10_000
    assert values["peak_rss_bytes"] < 4e9
    assert values["gap"] <= 0.01
    assert values["verified"] is True


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (3 * 2**30, "3.00 GiB"),
        (2**70, "1024.00 EiB"),
    ],
)
def test_readable_bytes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_silent_at_first() -> None:
    stream = Terminal()
    with Progress("working", stream):
        pass
    assert stream.getvalue() == ""


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_progress_shows_long_work(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.01)
    with Progress("working", stream):
        deadline = time.monotonic() + 10
        while not stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    if stream.isatty():
        assert stream.getvalue().startswith("\rroam: working, 0 s")
        assert stream.getvalue().endswith(f"\r{' ' * len('roam: working, 0 s')}\r")
    else:
        assert stream.getvalue() == "roam: working ...\n"


class Notebook(io.StringIO):
    """What `sys.stderr` is in a notebook, which says that it is no terminal."""


Notebook.__module__ = "ipykernel.iostream"


@pytest.mark.parametrize("kind", [io.StringIO, Terminal, Notebook])
def test_progress_of_a_library_is_for_people_who_watch(
    kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(progress, "_TICK_S", 0.001)
    stream, what = kind(), iter(["capturing", "planning"])
    with Progress(lambda: next(what, "running"), stream, only_live=True):
        deadline = time.monotonic() + 10
        while kind is not io.StringIO and "running" not in stream.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.001)
    shown = stream.getvalue()
    if kind is io.StringIO:
        assert shown == ""
    else:
        assert [shown.index(word) for word in ("capturing", "planning", "running")]
        assert shown.split("\r")[-1] == ""
        assert shown.split("\r")[-2].strip() == "", "the line is blank at the end"


def test_progress_needs_no_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(sys, "stderr", None)
    with Progress("working"):
        time.sleep(0.01)


def test_progress_survives_a_closed_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    stream = Terminal()
    stream.close()
    with Progress("working", stream):
        time.sleep(0.05)


def test_baselines_stand_beside_the_plan(
    graph_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--baseline", "lescea,skyline", "--baseline", "program, caching_allocator"]
    assert cli.main(["plan", graph_file, *asked]) == cli.EXIT_OK
    out = capsys.readouterr().out
    assert "lescea, skyline" in out
    assert "program, caching_allocator" in out
    assert cli.main(["plan", graph_file, "--json", *asked]) == cli.EXIT_OK
    values = json.loads(capsys.readouterr().out)
    lescea, allocator = values["baselines"]
    assert (lescea["order"], lescea["layout"]) == ("lescea", "skyline")
    assert (
        lescea["pool_bytes"] + lescea["outside_bytes"]
        >= values["total_lower_bound_bytes"] - values["persistent_bytes"]
    )
    assert (allocator["outside_bytes"], allocator["pool_bytes"] % 2**21) == (0, 0)
    assert cli.main(["plan", graph_file, "--baseline", "lescea,nowhere"]) == cli.EXIT_BAD_INPUT
    assert "nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["plan", graph_file, "--baseline", "lescea"])


def test_verbose_plan_begins_with_the_graph(
    graph_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "-v", graph_file]) == cli.EXIT_OK
    out = capsys.readouterr().out
    assert out.startswith("two branches on cpu: 5 operators")
    assert "program order" in out


def test_bench_zoo_trains_what_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = ["--output", str(tmp_path)]
    assert cli.main(["bench", "zoo", "--json", "--only", "GPT2", *output]) == cli.EXIT_OK
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["library"], row["outcome"], row["reason"]) == ("transformers", "equal", "")
    assert row["peak_bytes"] <= row["program_order_peak_bytes"]


@pytest.mark.parametrize(
    ("asked", "known"),
    [
        (["zoo", "--only", "GPT2", "--only", "gtp2"], "GPT2, "),
        (["zoo", "--library", "torchvision", "--only", "gtp2"], "resnet18, "),
        (["paper", "--only", "alexnet", "--only", "gtp2"], "alexnet, "),
        (["suite", "--only", "gpt2-tiny", "--only", "gtp2"], "gpt2-tiny"),
        (["scale", "--only", "wide", "--only", "gtp2"], "deep, wide, "),
        (["scale", "--what", "layouts", "--only", "gtp2"], "none of wide, "),
    ],
)
def test_bench_does_nothing_where_one_name_is_wrong(
    asked: list[str], known: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *asked, "--output", str(tmp_path / "out")]) == cli.EXIT_BAD_INPUT
    assert_one_line(capsys.readouterr().err, "--only gtp2", known)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("asked", [[], ["scripts"], ["layout", "a.csv", "--json"]])
def test_bench_says_how_to_install_it(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", *asked]) == cli.EXIT_BAD_INPUT
    assert_one_line(capsys.readouterr().err, "pip install ./benches")
    arguments = cli._parser().parse_args(["bench", *asked])
    with pytest.raises(cli.BenchmarksUnavailable) as missing:
        arguments.run(arguments)
    assert missing.value.code == "benchmarks_unavailable"
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "--help"])
    assert ended.value.code == cli.EXIT_OK
    assert "pip install ./benches" in " ".join(capsys.readouterr().out.split())


def children(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are told by /proc")
def test_ctrl_c_during_a_benchmark_keeps_its_rows_and_leaves_no_process(tmp_path: Path) -> None:
    # Training's layout meets its bound at once, replaced's search ends never.
    names = ["--only", "training", "--only", "replaced"]
    asked = [
        "bench",
        "scale",
        "--largest",
        "1000",
        "--what",
        "layouts",
        *names,
        "--work",
        str(2**62),
    ]
    rows = tmp_path / "scale.rows.jsonl"
    command = [sys.executable, "-m", "roam", *asked, "--output", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while not (
            rows.exists() and rows.read_text().count("\n") == 2 and (child := children(process.pid))
        ):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, complaint = process.communicate(timeout=240)
    assert process.returncode in (130, -signal.SIGINT)
    assert complaint.splitlines()[-1] == "roam: interrupted"
    assert "Traceback" not in complaint
    assert not [one for one in child if Path(f"/proc/{one}").exists()]
    assert [json.loads(line)["family"] for line in rows.read_text().splitlines()[1:]] == [
        "training"
    ]
