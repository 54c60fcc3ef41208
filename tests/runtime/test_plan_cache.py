"""A plan that an earlier process left on disk is the one that would have been made, and is
verified."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

import forked
import roam
from roam import _core
from roam.disk_cache import DiskCache, disk_cache
from roam.runtime import plan_cache, strategy
from roam.runtime.plan_cache import keep_plan, kept_plan
from strategies import graphs

STEP = """
def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DiskCache:
    """A cache of its own for each test, which keeps plans however little time they took."""
    monkeypatch.delenv("ROAM_CACHE")
    monkeypatch.setenv("ROAM_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(strategy, "WORTH_S", -1.0)
    forget(monkeypatch)
    found = disk_cache()
    assert found is not None
    return found


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process, which has made no plans."""
    monkeypatch.setattr(strategy, "_known", type(strategy._known)())


def train(source: str = STEP, width: int = 16, **options: Any) -> tuple[Any, roam.Step]:
    """The loss of the second call of a step of this source, and the step."""
    names: dict[str, Any] = {"torch": torch}
    exec(compile(source, "train.py", "exec"), names)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.GELU(), torch.nn.Linear(width, 8), torch.nn.GELU()
    )
    optimizer = torch.optim.AdamW(model.parameters())
    step = roam.compile(names["train_step"], **options)
    x, y = torch.randn(64, 8), torch.randn(64, 8)
    losses = [step(model, optimizer, x, y) for _ in range(2)]
    return losses[-1], step


def stage(step: roam.Step) -> tuple[int, int]:
    """How many plans were made, and how many came from disk."""
    assert step.timings is not None
    return step.timings.plan.count, step.timings.plan.from_disk


def without_digest(plan: roam.Plan) -> dict[str, Any]:
    return {
        key: value for key, value in json.loads(plan.to_json()).items() if key != "graph_digest"
    }


def changed(cache: DiskCache, change: Any) -> None:
    """Changes what entries of plans hold, so that their checksums are right. There may be others,
    of kernels that no test of this process has tried before.
    """
    found = [
        (key, cache.get("plan", key)) for key in (keys[p.name] for p in cache.folder.iterdir())
    ]
    plans = [(key, content) for key, content in found if content is not None]
    assert plans
    for key, content in plans:
        cache.put("plan", key, change(content))


keys: dict[str, str] = {}


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch, cache: DiskCache) -> None:
    """Notes the key of every file that is written."""
    put = DiskCache.put

    def noting(self: DiskCache, kind: str, key: str, content: bytes) -> None:
        keys[self._path(kind, key).name] = key
        put(self, kind, key, content)

    monkeypatch.setattr(DiskCache, "put", noting)


@pytest.mark.parametrize(
    "options", [{}, {"pool": True}, {"pool": False}, {"memory": "90%"}, {"memory": "1GiB"}]
)
def test_a_later_process_takes_the_same_plan_and_gives_the_same_bits(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, first = train(**options)
    made, from_disk = stage(first)
    assert made > 0
    assert from_disk == 0
    forget(monkeypatch)
    verified = []
    verify = _core.verify
    monkeypatch.setattr(_core, "verify", lambda *given: (verified.append(given), verify(*given)))
    again, second = train(**options)
    assert stage(second) == (0, made)
    assert len(verified) >= made
    assert torch.equal(loss, again)
    plans = [[json.loads(plan.to_json()) for _, plan in step.plans] for step in (first, second)]
    assert plans[0] == plans[1]
    assert f"{made} from disk" in str(second.timings)


def test_an_edited_comment_and_a_moved_function_are_no_miss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, first = train()
    made, _ = stage(first)
    forget(monkeypatch)
    edited = "# a comment\n\n\n" + STEP.replace("loss.backward()", "loss.backward()  # here")
    _, second = train(edited)
    assert stage(second) == (0, made)
    for (_, one), (_, other) in zip(first.plans, second.plans, strict=True):
        assert one.graph_digest != other.graph_digest
        assert without_digest(one) == without_digest(other)


@pytest.mark.parametrize(
    "edited",
    [
        {"source": STEP.replace("mse_loss", "l1_loss")},
        {"width": 17},
        {"keep_grads": True},
    ],
)
def test_edited_code_and_other_sizes_are_misses(
    edited: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    train()
    forget(monkeypatch)
    _, step = train(**edited)
    made, from_disk = stage(step)
    assert (made > 0, from_disk) == (True, 0)


def test_each_setting_has_a_plan_of_its_own(cache: DiskCache) -> None:
    graph = a_graph()
    plan = roam.optimize(graph, exact="off")
    settings = (1, 0, 0, None)
    keep_plan(graph, settings, plan)
    assert kept_plan(graph, settings) == plan
    for other in [(2, 0, 0, None), (1, 1, 0, None), (1, 0, 1, None), (1, 0, 0, 1), (1, 0, None, 0)]:
        assert kept_plan(graph, other) is None


def test_another_build_of_the_planner_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    train()
    forget(monkeypatch)
    monkeypatch.setattr(plan_cache, "build", lambda: "another")
    _, step = train()
    made, from_disk = stage(step)
    assert (made > 0, from_disk) == (True, 0)


def test_plans_with_a_time_limit_are_neither_kept_nor_taken(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(time_limit_s=60.0)
    assert set(cache.usage().entries) <= {"kernels"}  # which no test before has tried
    train()
    forget(monkeypatch)
    _, step = train(time_limit_s=60.0)
    assert stage(step)[1] == 0


def test_a_plan_that_was_cut_short_is_not_kept(cache: DiskCache) -> None:
    graph = _core.synthetic_step("branching", 3000)
    plan = roam.optimize(graph, exact="off", time_limit_s=0.0)
    assert plan.status == "timed_out"
    keep_plan(graph, (1, 0, 0, None), plan)
    assert cache.usage().entries == {}


def test_what_takes_no_time_to_plan_is_not_kept(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "WORTH_S", 60.0)
    train()
    assert set(cache.usage().entries) <= {"kernels"}  # which no test before has tried


def test_roam_cache_0_keeps_and_takes_nothing(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    train()
    kept = cache.usage()
    assert kept.entries["plan"] > 0
    forget(monkeypatch)
    monkeypatch.setenv("ROAM_CACHE", "0")
    _, step = train()
    assert stage(step)[1] == 0
    assert cache.usage() == kept


def swapped(content: bytes) -> bytes:
    """A plan whose first operators are in another order."""
    plan = json.loads(content)
    plan["order"][:2] = reversed(plan["order"][:2])
    return json.dumps(plan).encode()


@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"",
        lambda content: content[:-20],
        lambda content: content.replace(b"roam.plan", b"roam.graph"),
        lambda content: content.replace(b'"total_bytes":', b'"total_bytes":1'),
        lambda content: content.replace(b'"order":[', b'"order":[0,'),
        lambda content: b"\x80\x04K\x01.",  # a pickle
        lambda content: b"[" * 100_000,
    ],
)
def test_content_that_is_no_plan_is_planned_anew(
    change: Any, cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, first = train()
    changed(cache, change)
    forget(monkeypatch)
    again, second = train()
    assert stage(second) == stage(first)
    assert torch.equal(loss, again)
    forget(monkeypatch)
    _, third = train()
    assert stage(third) == (0, stage(first)[0]), "what was wrong has been replaced"


@pytest.mark.usefixtures("remembered")
def test_a_plan_of_another_order_does_not_pass_the_verifier(cache: DiskCache) -> None:
    graph = a_graph()
    settings = (1, 0, 0, None)
    keep_plan(graph, settings, roam.optimize(graph, exact="off"))
    changed(cache, swapped)
    assert kept_plan(graph, settings) is None
    assert cache.usage().entries == {}, "it is removed"


def test_a_folder_that_is_none_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROAM_CACHE_DIR", str(tmp_path / "file" / "folder"))
    loss, _ = train()
    monkeypatch.setenv("ROAM_CACHE", "0")
    forget(monkeypatch)
    assert torch.equal(loss, train()[0])


def test_graphs_of_torch_compile_are_kept_too(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradient() -> Any:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        torch.compile(model, backend="roam")(torch.randn(4, 8)).square().sum().backward()
        return model[0].weight.grad

    one = gradient()
    kept = cache.usage()
    assert kept.entries["plan"] >= 2
    forget(monkeypatch)
    monkeypatch.setattr(DiskCache, "put", lambda *_: pytest.fail("all plans are there"))
    assert torch.equal(one, gradient())


def test_a_new_process_starts_without_planning(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import torch, roam
        from roam.runtime import strategy
        strategy.WORTH_S = -1.0
        {textwrap.indent(STEP, " " * 8).strip()}
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = roam.compile(train_step)
        loss = step(model, optimizer, torch.randn(4, 8), torch.randn(4, 8))
        plan = step.timings.plan
        print(plan.count, plan.from_disk, loss.item().hex())
    """)
    both = forked.together([["-c", code]] * 2, [os.environ] * 2)
    outputs = [one.stdout.split() for one in both]
    assert [one.returncode for one in both] == [0, 0], [one.stderr for one in both]
    done = forked.python("-c", code)
    assert done.returncode == 0, done.stderr
    count, from_disk, loss = done.stdout.split()
    assert count == "0"
    assert int(from_disk) > 0
    assert {output[2] for output in outputs} == {loss}


def a_graph() -> roam.Graph:
    builder = roam.GraphBuilder("two chains")
    ends = []
    for _ in range(2):
        held = builder.tensor("x", 64, kind="input", residency="persistent")
        for _ in range(2):
            made = builder.tensor("h", 4096)
            builder.operator("relu", reads=[held], creates=[made])
            held = made
        ends.append(held)
    out = builder.tensor("y", 64, residency="leaves")
    builder.operator("add", reads=ends, creates=[out])
    return builder.build()


def renamed(graph: roam.Graph) -> roam.Graph:
    """The same structure under other names, from another file."""
    found = json.loads(graph.to_json())
    found["name"] = "another"
    for number, tensor in enumerate(found["tensors"]):
        tensor["name"] = f"t{number}"
    for operator in found["operators"]:
        operator["source"] = {"module": "a.b", "file": "other.py", "line": 7}
    return roam.Graph.from_json(json.dumps(found).encode())


@given(graphs())
def test_graphs_of_one_structure_have_one_plan(graph: roam.Graph) -> None:
    other = renamed(graph)
    assert other.structure_digest == graph.structure_digest
    plans = [roam.optimize(one, exact="off") for one in (graph, other)]
    assert without_digest(plans[0]) == without_digest(plans[1])


def test_the_structure_is_all_that_plans_depend_on() -> None:
    graph = a_graph()
    found = json.loads(graph.to_json())
    digests = {graph.structure_digest}
    for path, value in [
        (("device",), "cuda"), (("alignment_bytes",), 128), (("estimate",), "rough"), (("accounting",), "paper"),
        (("tensors", 1, "size_bytes"), 4097), (("tensors", 1, "kind"), "activation"),
        (("tensors", 1, "residency"), "unpooled"), (("tensors", 1, "alignment_bytes"), 256),
        (("operators", 0, "name"), "gelu"), (("operators", 0, "phase"), "backward"),
        (("operators", 0, "workspace_bytes"), 64), (("operators", 0, "flops"), 1), (("operators", 0, "time_ns"), 1),
        (("operators", 0, "repeatable"), True), (("operators", 0, "reads"), []), (("control",), [[0, 2]]),
    ]:  # fmt: skip
        different = json.loads(json.dumps(found))
        different["version"] = 2
        place = different
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        digests.add(roam.Graph.from_json(json.dumps(different).encode()).structure_digest)
    assert len(digests) == 17
