"""Will it fit: the largest size within a memory limit, checked against every size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import roam
from roam import cli
from roam.report import format_bytes
from roam.runtime.fitting import graphs_of, largest


def train_step(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def make_inputs(batch: int) -> tuple[Any, ...]:
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters()), torch.randn(batch, 64)


def step_of(size: int, fixed: int = 1000, each: int = 10, kept: int = 4) -> roam.Graph:
    """A chain of `kept` activations of `each * size` bytes, which may be made again."""
    builder = roam.GraphBuilder(alignment_bytes=1)
    batch = builder.tensor("batch", fixed, kind="input", residency="persistent")
    acts = [batch]
    for n in range(kept):
        acts.append(builder.tensor(f"act {n}", each * size, kind="activation"))
        builder.operator("forward", reads=[acts[n]], creates=[acts[n + 1]], repeatable=True, flops=10**6)  # fmt: skip
    grad = builder.tensor("grad", each * size, kind="gradient")
    builder.operator("loss", reads=[acts[-1]], creates=[grad], phase="loss")
    for n in reversed(range(kept)):
        new = builder.tensor(f"grad {n}", each * size, kind="gradient")
        builder.operator("backward", reads=[grad, acts[n]], creates=[new], phase="backward")
        grad = new
    return builder.build()


@given(
    st.integers(0, 4000),
    st.integers(1, 60),
    st.integers(900, 9000),
    st.integers(1, 40),
    st.booleans(),
)
def test_the_largest_size_is_that_of_trying_all(
    fixed: int, each: int, limit: int, most: int, steps: bool
) -> None:
    def graphs_at(size: int) -> list[roam.Graph]:
        # Totals that jump now and then are no reason to miss one.
        return [step_of(size // 3 * 3 if steps else size, fixed, each)]

    found = largest(graphs_at, limit, recompute=False, most=most)
    totals = [roam.optimize(graphs_at(size)[0]).total_bytes for size in range(1, most + 1)]
    assert found.size == sum(total <= limit for total in totals)
    assert found.size == 0 or found.plan is not None
    if found.plan is not None:
        assert found.plan.total_bytes == totals[found.size - 1]
    if found.size < most:
        assert found.next is not None
        assert (found.next.size, found.next.fits) == (found.size + 1, False)
        assert found.next.is_proved
    else:
        assert found.next is None


def test_few_sizes_are_planned() -> None:
    found = largest(lambda size: [step_of(size)], 10**9, recompute=False)
    assert found.size > 10**6
    assert len(found.trials) <= 6


def test_with_recomputation_more_fits() -> None:
    plain = largest(lambda size: [step_of(size, kept=8)], 3000, recompute=False)
    again = largest(lambda size: [step_of(size, kept=8)], 3000, recompute=True)
    assert again.size > plain.size
    assert again.plan is not None
    assert again.plan.recomputation is not None
    assert again.plan.total_bytes <= 3000
    for trial in again.trials:
        graph = step_of(trial.size, kept=8)
        if trial.fits:
            assert roam.optimize(graph, memory_limit_bytes=3000).total_bytes == trial.total_bytes
        else:
            with pytest.raises(roam.PlanError) as raised:
                roam.optimize(graph, memory_limit_bytes=3000)
            assert (raised.value.code == "memory_floor") == trial.is_proved


def test_the_largest_of_several_steps_counts() -> None:
    found = largest(lambda size: [step_of(size), step_of(size, fixed=2000)], 4000, recompute=False)
    alone = largest(lambda size: [step_of(size, fixed=2000)], 4000, recompute=False)
    assert found.size == alone.size > 0


def test_a_users_own_step_fits_up_to_the_size_found() -> None:
    found = roam.fit(train_step, make_inputs, memory="2 MiB")
    with roam.fake():
        inputs, larger = (make_inputs(size) for size in (found.size, found.size + 1))
    assert all(roam.optimize(graph).fits("2 MiB") for graph in graphs_of(train_step, inputs))
    assert not all(roam.optimize(graph).fits("2 MiB") for graph in graphs_of(train_step, larger))
    assert found.plan is not None
    for text in (str(found), found._repr_html_()):
        assert (
            f"Within 2.00 MiB, without recomputation: the largest found is {found.size:,}" in text
        )
        assert format_bytes(found.plan.total_bytes) in text


@pytest.mark.long
def test_a_real_model_may_be_given() -> None:
    model, optimizer, _ = make_inputs(1)
    before = [parameter.clone() for parameter in model.parameters()]
    real = roam.fit(
        train_step, lambda batch: (model, optimizer, torch.randn(batch, 64)), memory="2 MiB"
    )
    assert real.size == roam.fit(train_step, make_inputs, memory="2 MiB").size
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state


def test_sizes_make_all_smaller_batches_fit() -> None:
    """The size is how many rows of 12 numbers the batches have at most, of whatever shape."""

    def whole_step(model: Any, optimizer: Any, x: Any) -> Any:
        return train_step(model, optimizer, x.unsqueeze(-1).expand(-1, -1, 64))

    def inputs_of(*shape: int) -> tuple[Any, ...]:
        model = torch.nn.Linear(64, 64)
        return model, torch.optim.SGD(model.parameters()), torch.randn(shape)

    def sizes_at(rows: int) -> dict[str, dict[Any, int]]:
        return {"x": {0: 16, 1: 12, "elements": 12 * rows}}

    def graphs_at(*shape: int) -> list[roam.Graph]:
        with roam.fake():
            inputs = inputs_of(*shape)
        return graphs_of(whole_step, inputs)

    memory = "42 KiB"
    found = roam.fit(whole_step, lambda _: inputs_of(3, 4), memory=memory, sizes=sizes_at, most=4)
    assert found.size == 3
    assert found.plan is not None
    for wide, long in ((3, 12), (16, 2), (9, 4)):
        totals = [roam.optimize(graph).total_bytes for graph in graphs_at(wide, long)]
        assert max(totals) <= found.plan.total_bytes
    assert not all(roam.optimize(graph).fits(memory) for graph in graphs_at(4, 12))


def test_a_mapping_of_sizes_is_as_making_the_largest() -> None:
    def whole_step(model: Any, optimizer: Any, x: Any) -> Any:
        return train_step(model, optimizer, x.flatten(0, 1))

    def made(length: int, **options: Any) -> Any:
        def inputs_of(batch: int) -> tuple[Any, ...]:
            return *make_inputs(1)[:2], torch.randn(batch, length, 64)

        return roam.fit(whole_step, inputs_of, memory="2 MiB", **options)

    short, long = made(3, sizes={"x": {1: 40}}), made(40)
    assert short.size == long.size > 1
    assert short.plan.total_bytes == long.plan.total_bytes


def test_sizes_that_no_plan_holds_for_are_refused(tmp_path: Any) -> None:
    def looping(model: Any, optimizer: Any, x: Any) -> Any:
        return train_step(model, optimizer, sum(x[place : place + 1] for place in range(len(x))))

    def asked(**options: Any) -> Any:
        return roam.fit(
            looping, lambda _: make_inputs(3), memory="2 MiB", sizes={"x": {0: 8}}, **options
        )

    with pytest.raises(roam.CaptureError, match=r"sizes=.*make_inputs") as caught:
        asked()
    assert caught.value.code == "value_reached_python"
    with pytest.raises(ValueError, match="offload="):
        asked(offload=tmp_path)


def test_nothing_fits_into_too_little() -> None:
    found = roam.fit(train_step, make_inputs, memory=1000)
    assert (found.size, found.plan, found.next) == (0, None, found.trials[0])
    assert found.trials[0].is_proved
    assert "no plan can" in str(found)


@pytest.mark.parametrize("memory", ["60%", "auto", 0, "much"])
def test_memory_is_an_amount(memory: Any) -> None:
    plan = roam.optimize(step_of(1))
    for ask in (plan.fits, lambda memory: roam.fit(train_step, make_inputs, memory=memory)):
        with pytest.raises(ValueError, match="memory must be"):
            ask(memory)


def test_a_plan_says_whether_it_fits() -> None:
    plan = roam.optimize(step_of(1))
    assert plan.fits(plan.total_bytes)
    assert not plan.fits(plan.total_bytes - 1)
    assert plan.fits("1 KiB") == (plan.total_bytes <= 1024)


def test_the_command_finds_what_fits_with_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["fit", "gpt2-tiny", "--memory", "2MiB", "--most", "1", "--offload", str(tmp_path)]
    assert cli.main([*asked, "--json"]) == 0
    without, found = json.loads(capsys.readouterr().out)["fits"]
    assert (without["size"], found["size"]) == (0, 1)
    traffic = found["trials"][0]["traffic"]
    assert traffic["folder"] == str(tmp_path)
    assert traffic["read_bytes"] > traffic["written_bytes"] > 0
    assert cli.main([*asked, "--no-recompute"]) == 2
    assert cli.main([*asked, "--device", "cuda"]) == 2
    assert cli.main([*asked[:-1], "host"]) == 2


def test_the_command_finds_what_fits_with_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["fit", "gpt2-tiny", "--device", "cuda", "--memory", "2MiB", "--most", "1"]
    assert cli.main([*asked, "--offload", "host"]) == 0
    assert "with the host's memory, of which a step reads" in capsys.readouterr().out


def test_the_command_finds_the_largest_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["fit", "gpt2-tiny", "--memory", "2500KiB", "--optimizer", "sgd"]
    arguments = [*asked, "--largest", "seq", "--no-recompute", "--json"]
    assert cli.main(arguments) == 0
    (fit,) = json.loads(capsys.readouterr().out)["fits"]
    totals = {trial["size"]: trial["total_bytes"] for trial in fit["trials"]}
    assert totals[fit["size"]] == fit["plan"]["total_bytes"] <= 2500 * 1024
    assert totals.get(fit["size"] + 1, 2**60) > 2500 * 1024
    assert cli.main([*asked[:2], "--memory", "50%"]) == 2
    assert cli.main(["fit", "resnet18", "--memory", "1GiB", "--largest", "seq"]) == 2
    assert cli.main(["fit", "no such model", "--memory", "1GiB"]) == 2
