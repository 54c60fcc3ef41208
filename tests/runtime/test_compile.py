"""A compiled step keeps its promises: references, guards, gradients, failure, interruption."""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import forked
import roam
from steps import Breaking, Net, adamw, batches, both, kernel_of
from training import TRAININGS, assert_same_bits, plain_step, run, state_of, tensors_and_numbers

functional = torch.nn.functional


@functools.cache
def twenty_steps() -> list[Any]:
    return run(TRAININGS["gpt2"], 20, roam.compile)[0]


class TestReferences:
    def test_a_rate_changed_by_hand_takes_effect_at_once(self) -> None:
        captures = []

        def script(wrap):
            net = Net()
            optimizer = adamw(net)
            step = wrap(plain_step)
            returned = []
            for place, (x, y) in enumerate(batches(6)):
                optimizer.param_groups[0]["lr"] = 0.1 / (place + 1)
                returned.append(step(net, optimizer, x, y))
            captures.append(getattr(step, "plans", None))
            return [returned, net.state_dict()]

        both(script)
        assert (
            len(captures[1]) == 2
        )  # the first step and the steady one; no rate is frozen in either

    def test_a_scheduler_outside_of_the_step_does_not_warn(self) -> None:
        def script(wrap):
            net = Net()
            optimizer = adamw(net)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.1, total_steps=10, cycle_momentum=False
            )
            step = wrap(plain_step)
            returned = []
            for x, y in batches(5):
                returned.append(step(net, optimizer, x, y))
                scheduler.step()
            return [returned, net.state_dict(), optimizer.param_groups[0]["lr"]]

        both(script)

    def test_load_state_dict_between_steps(self) -> None:
        def script(wrap):
            net = Net()
            optimizer = adamw(net)
            step = wrap(plain_step)
            data = batches(6)
            for x, y in data[:3]:
                step(net, optimizer, x, y)
            file = io.BytesIO()
            torch.save([net.state_dict(), optimizer.state_dict()], file)
            for x, y in data[3:]:
                step(net, optimizer, x, y)
            file.seek(0)
            model_state, optimizer_state = torch.load(file)
            net.load_state_dict(model_state)
            optimizer.load_state_dict(optimizer_state)
            returned = [step(net, optimizer, x, y) for x, y in data[3:]]
            return [returned, net.state_dict(), optimizer.state_dict()]

        both(script)

    def test_evaluation_between_steps(self) -> None:
        def script(wrap):
            net = Net()
            optimizer = adamw(net)
            step = wrap(plain_step)
            returned = []
            for x, y in batches(4):
                returned.append(step(net, optimizer, x, y))
                net.eval()
                with torch.no_grad():
                    returned.append(net(x))
                net.train()
            return returned

        both(script)

    @pytest.mark.sweep
    @pytest.mark.parametrize("form", ["planned", "eager"])
    def test_save_stop_load_and_go_on_in_a_new_process(self, form: str, tmp_path: Path) -> None:
        """Two processes of ten steps are one run of twenty, whichever way the first ten were
        run."""
        straight = twenty_steps()
        program = Path(__file__).parents[1] / "resume.py"
        for part in (0, 1):
            disable = {"ROAM_DISABLE": "1"} if form == "eager" and part == 0 else {}
            done = forked.python(
                str(program), str(part), str(tmp_path), environment={**os.environ, **disable}
            )
            assert done.returncode == 0, done.stderr
        losses = torch.load(tmp_path / "losses-0.pt") + torch.load(tmp_path / "losses-1.pt")
        assert_same_bits(straight[:20], losses)
        assert_same_bits(straight[20:], torch.load(tmp_path / "end.pt", weights_only=False))


class TestGuards:
    def test_another_shape_is_planned_once(self) -> None:
        steps = []

        def script(wrap):
            net = Net()
            optimizer = adamw(net)
            step = wrap(plain_step)
            steps.append(step)
            data = [*batches(3), *batches(2, size=3), *batches(3), *batches(1, size=3)]
            return [[step(net, optimizer, x, y) for x, y in data], net.state_dict()]

        both(script)
        assert len(steps[1].plans) == 3

    @pytest.mark.parametrize(
        "change",
        [
            lambda net, optimizer: setattr(net.drop, "p", 0.5),
            lambda net, optimizer: net.norm.eval(),
            lambda net, optimizer: setattr(net, "drop", torch.nn.Identity()),
            lambda net, optimizer: net.first.requires_grad_(False),
            lambda net, optimizer: optimizer.param_groups[0].update(weight_decay=0.3),
            lambda net, optimizer: setattr(
                net.first.weight, "data", net.first.weight.data.clone().mul_(2)
            ),
            lambda net, optimizer: net.second.register_forward_hook(
                lambda module, args, result: result * 2
            ),
            lambda net, optimizer: optimizer.state.clear(),
        ],
        ids=["dropout", "eval", "module", "frozen", "decay", "data", "hook", "state"],
    )
    def test_a_change_behind_the_plan_is_seen(self, change: Callable[[Any, Any], None]) -> None:
        def script(wrap):
            net = Net()
            optimizer = adamw(net)
            step = wrap(plain_step)
            returned = []
            for place, (x, y) in enumerate(batches(5)):
                if place == 3:
                    change(net, optimizer)
                returned.append(step(net, optimizer, x, y))
            return [returned, net.state_dict(), optimizer.state_dict()]

        both(script)

    def test_a_call_that_no_plan_fits_raises_where_wanted(self) -> None:
        net = Net()
        optimizer = adamw(net)
        step = roam.compile(plain_step, on_change="raise")
        x, y = batches(1)[0]
        step(net, optimizer, x, y)
        step(net, optimizer, x, y)
        before = tensors_and_numbers(net.state_dict(), optimizer.state_dict())
        with pytest.raises(roam.ExecutionError, match=r"shape.*\[5, 6\].*\[3, 6\]") as caught:
            step(net, optimizer, x[:3], y[:3])
        assert caught.value.code == "no_plan_fits"
        assert_same_bits(before, tensors_and_numbers(net.state_dict(), optimizer.state_dict()))
        step(net, optimizer, x, y)

    def test_a_call_that_no_plan_fits_runs_eagerly_where_wanted(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def script(wrap):
            net = Net()
            optimizer = adamw(net)
            step = (
                plain_step
                if wrap is not roam.compile
                else roam.compile(plain_step, on_change="eager")
            )
            return [
                [step(net, optimizer, x, y) for x, y in [*batches(3), *batches(2, size=3)]],
                net.state_dict(),
            ]

        with caplog.at_level(logging.INFO, logger="roam"):
            both(script)
        assert "runs eagerly" in caplog.text

    def test_the_log_says_in_one_line_why_a_call_is_planned_anew(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        net = Net()
        optimizer, (x, y) = adamw(net), batches(1)[0]
        step = roam.compile(plain_step)
        with caplog.at_level(logging.INFO, logger="roam.replans"):
            step(net, optimizer, x, y)
            step(net, optimizer, x, y)
            step(net, optimizer, x[:2], y[:2])
            net.eval()
            step(net, optimizer, x[:2], y[:2])
        lines = [record.getMessage() for record in caplog.records if record.name == "roam.replans"]
        assert len(lines) == 2
        assert lines[0].startswith("plain_step is planned anew: the shape of ")
        assert str(x.shape) in lines[0]
        assert str(x[:2].shape) in lines[0]
        assert "training changed from True to False" in lines[1]

    def test_a_wrong_choice_is_refused(self) -> None:
        with pytest.raises(ValueError, match="on_change"):
            roam.compile(plain_step, on_change="perhaps")  # type: ignore[arg-type]

    def test_the_kill_switch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ROAM_DISABLE", "1")
        net = Net()
        step = roam.compile(plain_step)
        assert step(net, adamw(net), *batches(1)[0]).requires_grad
        assert step.plans == []

    def test_a_question_about_the_batch_is_asked_again_at_every_call(self) -> None:
        steps = []

        def asking_step(model, optimizer, x, y):
            optimizer.zero_grad()
            logits = model(x)
            if (y == 0).any():
                logits = logits * torch.tensor([2.0, 1.0, 1.0])
            loss = functional.cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            return loss

        def script(wrap):
            net = Net()
            optimizer = adamw(net)
            step = wrap(asking_step)
            steps.append(step)
            data = [(x, y.clamp_min(place % 2)) for place, (x, y) in enumerate(batches(8))]
            return [[step(net, optimizer, x, y) for x, y in data], net.state_dict()]

        both(script)
        assert len(steps[1].plans) == 3

    def test_padded_batches_of_a_language_model(self) -> None:
        """The library looks at the mask and takes another way where nothing is masked."""
        import transformers

        config = transformers.BertConfig(
            num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=50,
            max_position_embeddings=12,
        )  # fmt: skip

        def padded_step(model, optimizer, batch):
            optimizer.zero_grad()
            output = model(**batch)
            output.loss.backward()
            optimizer.step()
            return output.loss

        def script(wrap):
            model = transformers.BertForSequenceClassification(config).train()
            optimizer = adamw(model)
            step = wrap(padded_step)
            generator = torch.Generator(torch.get_default_device()).manual_seed(3)
            returned = []
            for place in range(6):
                mask = torch.ones(3, 8, dtype=torch.long)
                mask[0, 5:] = place % 3 == 0
                batch = {
                    "input_ids": torch.randint(0, 50, (3, 8), generator=generator),
                    "attention_mask": mask,
                }
                returned.append(step(model, optimizer, batch | {"labels": torch.tensor([0, 1, 0])}))
            return [returned, model.state_dict()]

        both(script)


class TestMemoryIsKnownBeforeStepOne:
    def test_plan_runs_nothing(self) -> None:
        net = Net()
        optimizer = adamw(net)
        before = tensors_and_numbers(
            net.state_dict(), optimizer.state_dict(), torch.get_rng_state()
        )
        step = roam.compile(plain_step)
        plan = step.plan(net, optimizer, *batches(1)[0])
        assert plan.persistent_bytes > 0
        assert plan.total_bytes >= plan.persistent_bytes + plan.peak_bytes
        assert_same_bits(
            before,
            tensors_and_numbers(net.state_dict(), optimizer.state_dict(), torch.get_rng_state()),
        )
        names = [name for name, _ in step.plans]
        step(net, optimizer, *batches(1)[0])
        assert (
            [name for name, _ in step.plans] == names == ["plain_step (first step)", "plain_step"]
        )


class TestExceptionsOfTheUsers:
    class BadBatch(Exception):
        pass

    @pytest.mark.parametrize("first", [0, 2])
    def test_are_raised_with_what_eager_leaves(self, first: int) -> None:
        def script(wrap):
            net = Net()
            optimizer = adamw(net)

            @wrap
            def step(x, y, is_bad):
                optimizer.zero_grad()
                loss = functional.cross_entropy(net(x), y)
                loss.backward()
                if is_bad:
                    raise self.BadBatch("skip it")
                optimizer.step()
                return loss

            returned = []
            for place, (x, y) in enumerate(batches(14)):
                try:
                    returned.append(step(x, y, first <= place < first + 10))
                except self.BadBatch:
                    returned.append(sum(p.grad.sum() for p in net.parameters()))
            return [returned, net.state_dict(), optimizer.state_dict()]

        both(script)

    def test_of_libraries_for_a_later_batch_are_those_of_the_plain_step(self) -> None:
        net = Net()
        optimizer = adamw(net)

        def step(x, target, scale):
            optimizer.zero_grad()
            spread = torch.distributions.Normal(net(x), scale, validate_args=True)
            loss = functional.cross_entropy(spread.mean + spread.stddev, target)
            loss.backward()
            optimizer.step()
            return loss

        (x, y), good = batches(1)[0], torch.tensor(1.0)
        planned = roam.compile(step)
        for _ in range(2):
            planned(x, y, good)
        with pytest.raises(ValueError, match="invalid values"):
            planned(x, y, -good)
        with pytest.raises(ValueError, match="batch_size") as caught:
            planned(x, torch.cat([y, y]), good)
        assert not isinstance(caught.value, roam.RoamError)
        assert planned(x, y, good).isfinite()

    def test_of_libraries_may_be_of_fakes_and_are_refused(self) -> None:
        def step(net, x):
            loss = functional.cross_entropy(net(x), torch.zeros(len(x) + 1, dtype=torch.long))
            loss.backward()

        with pytest.raises(roam.CaptureError) as caught:
            roam.compile(step)(Net(), batches(1)[0][0])
        assert caught.value.code == "step_raised"


class TestFailure:
    def trained(self, net: Any = None) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        net = net or Net()
        optimizer = adamw(net)
        step = roam.compile(plain_step)
        data = batches(4)
        for x, y in data[:2]:
            step(net, optimizer, x, y)
        return step, net, optimizer, data

    def test_before_any_update_leaves_everything_as_it_was(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step, net, optimizer, data = self.trained(
            torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(6, 3))
        )
        before = tensors_and_numbers(
            net.state_dict(), optimizer.state_dict(), torch.get_rng_state()
        )
        with monkeypatch.context() as patch:
            Breaking(patch, step, torch.ops.aten.addmm, RuntimeError("out of memory"))
            with pytest.raises(
                roam.ExecutionError,
                match=r"aten.addmm.default at .*out of memory.*Nothing had been",
            ) as caught:
                step(net, optimizer, *data[2])
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert_same_bits(
            before,
            tensors_and_numbers(net.state_dict(), optimizer.state_dict(), torch.get_rng_state()),
        )
        step(net, optimizer, *data[2])

    def test_in_mid_update_says_what_was_updated_and_waits_for_a_reload(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step, net, optimizer, data = self.trained()
        file = io.BytesIO()
        torch.save([net.state_dict(), optimizer.state_dict()], file)
        with monkeypatch.context() as patch:
            Breaking(patch, step, torch.ops.aten.addcdiv_, RuntimeError("out of memory"))
            with pytest.raises(roam.ExecutionError, match="Already updated") as caught:
                step(net, optimizer, *data[2])
        assert caught.value.code == "torn"
        with pytest.raises(roam.ExecutionError, match="again first"):
            step(net, optimizer, *data[2])
        file.seek(0)
        model_state, optimizer_state = torch.load(file)
        net.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
        step(net, optimizer, *data[2])

    @pytest.mark.parametrize("bad", [(0, 1), (3, 5)])
    @pytest.mark.parametrize("is_accumulating", [False, True])
    def test_of_a_bad_batch_leaves_what_eager_leaves(
        self, is_accumulating: bool, bad: tuple[int, ...]
    ) -> None:
        """Statistics of batch norms are updated and masks of dropout drawn before the labels are
        looked at."""
        codes = []

        def script(wrap):
            torch.manual_seed(0)
            net = torch.nn.Sequential(
                torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.25), torch.nn.ReLU(),
                torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8, momentum=0.2), torch.nn.Linear(8, 3),
            )  # fmt: skip
            optimizer, record = adamw(net), SimpleNamespace(loss=torch.zeros(()))
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

            @wrap
            def step(x, y):
                if not is_accumulating:
                    optimizer.zero_grad()
                loss = functional.cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
                record.loss = loss.detach()
                return loss

            returned = []
            for place, (x, y) in enumerate(batches(7)):
                try:
                    returned.append(step(x, y + 3 if place in bad else y))
                except (IndexError, roam.ExecutionError) as error:
                    codes.append(getattr(error, "code", ""))
                else:
                    scheduler.step()
                returned.append([record.loss, tensors_and_numbers(net.state_dict())])
            return [returned, net.state_dict(), optimizer.state_dict()]

        both(script)
        assert codes == ["", "", "failed_as_eager", "failed_as_eager"]

    def test_of_a_bad_batch_is_torn_if_the_step_has_counted_before(self) -> None:
        net = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3))
        optimizer, counter = adamw(net), SimpleNamespace(seen=0)

        @roam.compile
        def step(x, y):
            optimizer.zero_grad()
            counter.seen += 1
            functional.cross_entropy(net(x), y).backward()
            optimizer.step()

        x, y = batches(1)[0]
        step(x, y)
        with pytest.raises(roam.ExecutionError, match="running_mean") as caught:
            step(x, y + 3)
        assert caught.value.code == "torn"

    def test_of_two_compiled_steps_on_one_model_is_each_its_own(self) -> None:
        def script(wrap):
            net = Net()
            optimizer = adamw(net)
            first, second = wrap(plain_step), wrap(lambda *args: plain_step(*args) * 2)
            returned = []
            for place, (x, y) in enumerate(batches(6)):
                returned.append((first if place % 2 else second)(net, optimizer, x, y))
            return [returned, net.state_dict(), optimizer.state_dict()]

        both(script)

    @pytest.mark.skipif(
        threading.current_thread() is not threading.main_thread(),
        reason="signals need the main thread",
    )
    def test_an_interrupt_waits_for_the_end_of_the_step(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step, net, optimizer, data = self.trained()
        eager, eager_net, eager_optimizer, _ = self.trained()
        plain_step(eager_net, eager_optimizer, *data[2])
        globals_, name = kernel_of(step, torch.ops.aten.addcdiv_)
        kernel = globals_[name]
        torch.manual_seed(5)
        generator = torch.get_rng_state()

        def pressed(*args: Any, **kwargs: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            return kernel(*args, **kwargs)

        monkeypatch.setitem(globals_, name, pressed)
        with pytest.raises(KeyboardInterrupt):
            step(net, optimizer, *data[2])
        monkeypatch.undo()
        assert not torch.equal(generator, torch.get_rng_state())
        counts = {int(entry["step"]) for entry in optimizer.state.values()}
        assert counts == {3}
        step(net, optimizer, *data[3])

    def test_results_are_fresh(self) -> None:
        step, net, optimizer, data = self.trained()
        first = step(net, optimizer, *data[2])
        value = first.clone()
        second = step(net, optimizer, *data[3])
        assert first.requires_grad  # as eagerly; see tests/state/test_requires_grad.py
        assert first.data_ptr() != second.data_ptr()
        assert torch.equal(first, value)


def test_a_kernel_that_differs_from_capture_is_caught_on_the_first_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = adamw(net)
    step = roam.compile(plain_step)
    step.plan(net, optimizer, *batches(1)[0])
    runner = step._captures[0].runners[0]
    index, call = next(
        (index, call)
        for index, call in enumerate(runner._program.calls)
        if call.name == "aten.relu.default"
    )
    runner._executor.bindings.placed[index] = None
    monkeypatch.setattr(call, "target", lambda x: torch.relu(x).t().contiguous().t())
    before = tensors_and_numbers(list(net.parameters()))
    with pytest.raises(roam.ExecutionError, match=r"strides") as caught:
        step(net, optimizer, *batches(1)[0])
    assert getattr(caught.value.__cause__, "code", "") == "differs_from_capture"
    assert_same_bits(before, tensors_and_numbers(list(net.parameters())))


def test_memory_that_is_shared_in_another_way_stops_a_run_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = adamw(net)
    step = roam.compile(plain_step)
    step(net, optimizer, *batches(1)[0])
    step(net, optimizer, *batches(1)[0])
    # The last look, behind all guards.
    inputs = step._last._inputs
    monkeypatch.setattr(inputs, "_sharing", [0] * len(inputs._sharing))
    monkeypatch.setattr(inputs, "_seen", None)
    before = tensors_and_numbers(list(net.parameters()))
    with pytest.raises(roam.ExecutionError) as caught:
        step(net, optimizer, *batches(1)[0])
    assert caught.value.code == "sharing"
    assert_same_bits(before, tensors_and_numbers(list(net.parameters())))


def test_a_report_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    with caplog.at_level(logging.DEBUG, logger="roam"):
        roam.compile(plain_step).plan(net, adamw(net), *batches(1)[0])
    assert "in program order" in caplog.text
    assert json.dumps(caplog.messages)


__all__ = ["state_of"]
