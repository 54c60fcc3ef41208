"""What a step puts in its objects: attributes that it sets at every call, and what it sets up at
its first."""

from __future__ import annotations

import time
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import roam
from newer import needs_2_15
from steps import both, inputs

pytestmark = pytest.mark.usefixtures("one_thread")
Pair = namedtuple("Pair", "first second")
STATE: Any = None
KEPT: Any = object()
"""Stands for what the last step has left."""


def descended(net: Any, loss: torch.Tensor) -> torch.Tensor:
    """The loss, once the net's weight has gone down its gradient."""
    net.zero_grad()
    loss.backward()
    with torch.no_grad():
        net.weight.sub_(net.weight.grad)
    return loss


class Trainer:
    """A step that is a method; what it does beside training is a function's of the user."""

    def __init__(self, does: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        self.net = torch.nn.Linear(6, 3)
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.does = does

    def step(self, x: torch.Tensor) -> Any:
        out = self.net(x)
        self.optimizer.zero_grad()
        out.square().mean().backward()
        self.optimizer.step()
        return self.does(self, x, out)


def steps(
    does: Callable[[Any, torch.Tensor, torch.Tensor], Any],
    after: Callable[[Any], Any] = lambda trainer: None,
    count: int = 4,
    sizes: tuple[int, ...] = (4,),
) -> list[Any]:
    """Trains eagerly and by plan, and compares what each step returns and what `after` finds; the
    compiled steps."""
    compiled = []

    def script(wrap: Any) -> Any:
        trainer = Trainer(does)
        step = wrap(trainer.step)
        compiled.append(step)
        return [(step(x), after(trainer)) for x in inputs(count, sizes)], trainer.net.state_dict()

    both(script)
    return compiled[1:]


class TestAttributesThatTheStepSetsBeforeItLooksAtThem:
    def test_hold_what_eager_leaves_there(self) -> None:
        def does(self, x, out):
            self.out = out
            self.losses = {"sum": out.sum(), "parts": [out.min(), (out.max(), 2, "x")], "n": 3}
            self.pair = Pair(self.out, out * 2)
            self.empty = []
            self.number = out.sum().item()
            self.x, self.flag = x, True
            return self.losses["sum"]

        def after(self):
            assert type(self.pair) is Pair
            found = [
                self.out,
                self.losses,
                tuple(self.pair),
                self.empty,
                self.number,
                self.x,
                self.flag,
            ]
            return [
                value.detach() if isinstance(value, torch.Tensor) else value for value in found
            ], list(vars(self))

        (step,) = steps(does, after)
        assert len(step._captures) == 1
        assert step._known.settling == 0

    def test_may_be_ordered_dictionaries(self) -> None:
        def does(self, x, out):
            terms = OrderedDict()
            for name, term in [("mean", out.mean()), ("largest", out.detach().max())]:
                terms[name] = term.item()
            terms["parts"] = OrderedDict(out=out.detach(), first={"n": 1})
            terms.move_to_end("mean")
            self.log_dict = terms
            return out.sum()

        def after(self):
            assert type(self.log_dict) is type(self.log_dict["parts"]) is OrderedDict
            return list(self.log_dict), list(self.log_dict.values())

        (step,) = steps(does, after)
        assert len(step._captures) == 1

    def test_are_refused_if_they_are_ordered_dictionaries_with_attributes(self) -> None:
        def does(self, x, out):
            self.log_dict = OrderedDict(mean=out.mean().item())
            self.log_dict.note = "kept"  # type: ignore[attr-defined]

        with pytest.raises(roam.CaptureError, match=r"log_dict changed from nothing"):
            roam.compile(Trainer(does).step)(next(iter(inputs(1))))

    def test_are_named_if_they_come_from_a_clock(self) -> None:
        def does(self, x, out):
            self.elapsed_s = time.perf_counter()

        with pytest.raises(
            roam.CaptureError, match=r"they left [\d.]+ and [\d.]+ at self.elapsed_s"
        ):
            roam.compile(Trainer(does).step)(next(iter(inputs(1))))

    def test_make_no_plan_for_what_they_held_before(self) -> None:
        def does(self, x, out):
            self.out = out
            return out.sum()

        (step,) = steps(does, lambda self: self.out.detach(), count=8, sizes=(4, 5, 4, 4, 5, 5))
        assert len(step._captures) == 2

    def test_are_the_very_tensors_that_were_put_there(self) -> None:
        def does(self, x, out):
            self.x, self.same, self.weight = x, out, self.net.weight
            return out

        trainer = Trainer(does)
        step = roam.compile(trainer.step)
        for x in inputs(3):
            result = step(x)
            assert trainer.x is x
            assert trainer.same is result
            assert trainer.weight is trainer.net.weight

    def test_may_be_slots(self) -> None:
        class Slotted:
            __slots__ = ("last", "net", "number")

            def step(self, x):
                self.last, self.number = self.net(x), 7
                return self.last.sum()

        def script(wrap):
            holder = Slotted()
            holder.net = torch.nn.Linear(6, 3)
            step = wrap(holder.step)
            return [(step(x), holder.last.detach(), holder.number) for x in inputs(3)]

        both(script)

    def test_may_be_a_modules(self) -> None:
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(6, 3)

            def forward(self, x):
                self.hidden = self.linear(x)
                self.maps = [self.hidden, self.hidden.softmax(-1)]
                return self.hidden

        def script(wrap):
            net = Net()

            @wrap
            def step(x):
                loss = net(x).square().mean() + net.maps[1].std()
                net.zero_grad()
                loss.backward()
                return loss

            return [(step(x), net.hidden.detach(), net.maps[1].detach()) for x in inputs(4, (4, 5))]

        both(script)

    def test_count_where_another_way_through_the_step_looks_at_them(self) -> None:
        def does(self, x, out):
            total = out.sum() + (self.kept if self.looks else 0)
            self.kept = out.detach().mean()
            return total

        def script(wrap):
            trainer = Trainer(does)
            step = wrap(trainer.step)
            returned = []
            for index, x in enumerate(inputs(6)):
                trainer.looks = index % 3 == 2
                returned.append(step(x))
            return returned

        both(script)

    def test_are_gone_where_the_step_takes_them_away_again(self) -> None:
        def does(self, x, out):
            self.between = out
            total = self.between.sum()
            del self.between
            return total

        def script(wrap):
            trainer = Trainer(does)
            step = wrap(trainer.step)
            returned = [step(x) for x in inputs(2)]
            trainer.between = 3
            return [*returned, *(step(x) for x in inputs(2)), hasattr(trainer, "between")]

        both(script)

    def test_that_share_a_list_with_the_result_are_refused(self) -> None:
        def does(self, x, out):
            self.found = [out]
            return self.found

        trainer = Trainer(does)
        step = roam.compile(trainer.step)
        with pytest.raises(roam.CaptureError, match=r"self\.found") as refusal:
            list(map(step, inputs(4)))
        assert refusal.value.code == "moved"


class TestWhatTheFirstCallSetsUp:
    """The first call is the user's function's, and the next is captured."""

    def check(self, does: Any, after: Any = lambda self: None) -> None:
        (step,) = steps(does, after)
        assert len(step._captures) == 1

    def test_an_average_that_begins_with_the_first_loss(self) -> None:
        def does(self, x, out):
            loss = out.detach().mean()
            self.average = 0.9 * self.average + 0.1 * loss if hasattr(self, "average") else loss
            return self.average

        self.check(does)

    def test_statistics_of_the_first_batch(self) -> None:
        def does(self, x, out):
            if not self.net.__dict__.get("is_set"):
                self.net.shift, self.net.is_set = x.mean(0), True
            return (out.sum() + self.net.shift.sum()).detach()

        self.check(does)

    def test_hooks(self) -> None:
        def does(self, x, out):
            if not hasattr(self, "handle"):
                self.handle = self.net.register_forward_hook(
                    lambda module, args, result: result * 2
                )
            return out.sum()

        self.check(does)

    def test_a_buffer(self) -> None:
        def does(self, x, out):
            if not hasattr(self.net, "mask"):
                self.net.register_buffer(
                    "mask", torch.tril(torch.ones(out.shape)), persistent=False
                )
            return (out * self.net.mask).sum()

        self.check(does)

    def test_a_tensor_that_a_weight_gives_to_its_layer(self) -> None:
        def does(self, x, out):
            if hasattr(self.net.weight, "scale"):
                self.net.scale = self.net.weight.scale
                del self.net.weight.scale
            return (out * self.net.scale).sum()

        def script(wrap: Any) -> Any:
            trainer = Trainer(does)
            trainer.net.weight.scale = torch.tensor(0.5)
            step = wrap(trainer.step)
            return [step(x) for x in inputs(4)], trainer.net.state_dict()

        both(script)

    def test_a_tensor_that_stays_with_a_weight_is_refused_at_the_second_call(self) -> None:
        trainer = Trainer(lambda self, x, out: out.sum())
        trainer.net.weight.scale = torch.tensor(0.5)
        step = roam.compile(trainer.step)
        step(inputs(1)[0])
        with pytest.raises(roam.CaptureError) as refusal:
            step(inputs(1)[0])
        assert refusal.value.code == "tensor_attribute"

    def test_entries_of_a_dictionary(self) -> None:
        seen: list[dict[str, Any]] = []

        def does(self, x, out):
            found = self.__dict__.setdefault("found", {})
            found["loss"], found["calls"] = out.detach().sum(), found.get("calls", 0) + 1
            return out.sum()

        self.check(does, lambda self: seen.append(dict(self.found)) or dict(self.found))

    @pytest.mark.parametrize(
        "kept",
        [
            lambda out: [out.detach(), out.mean()],
            lambda out: {"mean": out.mean(), "all": [out.detach(), "x"], "count": 3},
        ],
        ids=["list", "dict"],
    )
    @pytest.mark.parametrize("place", ["entry", "attribute"])
    @needs_2_15
    @pytest.mark.auto
    def test_lists_that_hooks_replace(
        self, place: str, kept: Callable[[torch.Tensor], Any]
    ) -> None:
        def script(wrap):
            found: dict[str, Any] = {}
            trainer = Trainer(lambda self, x, out: out.sum())

            def hook(module, args, out):
                if place == "entry":
                    found["net"] = kept(out)
                else:
                    module.found = kept(out)
                module.mean = out.mean().item()

            trainer.net.register_forward_hook(hook)
            step = wrap(trainer.step)
            compiled.append(step)
            seen = []
            for x in inputs(5):
                loss = step(x)
                now = found["net"] if place == "entry" else trainer.net.found
                seen.append((loss, now, trainer.net.mean))
            assert len({id(now) for _, now, _ in seen}) == len(seen)
            return seen

        compiled: list[Any] = []
        both(script)
        assert len(compiled[-1].plans) <= 2

    def test_is_not_what_a_refusal_names(self) -> None:
        """A tensor in the place of nothing is allowed, so the message names the other change."""

        def does(self, x, out):
            vars(self).update(last=out.detach(), range=(out.min().item(), out.max().item()))

        trainer = Trainer(does)
        with pytest.raises(roam.CaptureError) as refusal:
            roam.compile(trainer.step)(inputs(1)[0])
        assert "range changed from nothing to (a number, a number)" in str(refusal.value)

    def test_is_compared(self) -> None:
        trainer = Trainer(
            lambda self, x, out: vars(self).setdefault("first", out.detach()).sum() + out.sum()
        )
        assert roam.compare(trainer.step, inputs(1)[0]).equal
        assert not hasattr(trainer, "first")
        one = roam.compare(
            trainer.step, inputs(1)[0], steps=1
        )  # nothing of which would run by plan
        assert one.outcome == "refused"
        assert one.error.code == "moved"

    def test_what_changes_again_is_refused_before_anything_runs(self) -> None:
        def grows(self, x, out):
            vars(self).setdefault("history", []).insert(0, out.detach())
            return out.sum()

        def flips(self, x, out):
            self.mode = {"a": "b", "b": "a"}[getattr(self, "mode", "a")]
            return out.sum() * len(self.mode)

        for does in (grows, flips):
            trainer = Trainer(does)
            trainer.history = []
            weight = trainer.net.weight.clone()
            with pytest.raises(roam.CaptureError) as refusal:
                roam.compile(trainer.step)(inputs(1)[0])
            assert refusal.value.code == "moved"
            assert torch.equal(weight, trainer.net.weight)
            assert not trainer.history


@needs_2_15
@pytest.mark.auto
class TestNoneThatTheStepReplaces:
    """A state that the caller sets to None before a call, and that the step makes anew: the first
    calls run as they are, and later ones beside a plan, if each makes it anew."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda x, out: torch.zeros(4, 3), lambda x, out: out.detach() * 2, lambda x, out: out, lambda x, out: x,
            lambda x, out: [out.detach(), torch.ones(3)], lambda x, out: {"h": (out.detach(), x)},
            lambda x, out: (out.detach(), 2),
        ],
        ids=["constant", "detached", "history", "argument", "list", "dictionary", "pair"],
    )  # fmt: skip
    @pytest.mark.parametrize("every", [1, 3])
    def test_hold_what_eager_leaves_there(self, make: Any, every: int) -> None:
        def script(wrap):
            torch.manual_seed(0)
            cell: Any = SimpleNamespace(state=None)
            net = torch.nn.Linear(6, 3)

            @wrap
            def step(x):
                out = net(x)
                if cell.state is None:
                    cell.state = make(x, out)
                tensors = map(torch.as_tensor, torch.utils._pytree.tree_leaves(cell.state))
                loss = out.square().mean() + sum(tensor.detach().sum() for tensor in tensors)
                return descended(net, loss)

            returned = []
            for place, x in enumerate(inputs(14)):
                if place % every == 0:
                    cell.state = None
                returned.append(step(x))
                left = torch.utils._pytree.tree_map_only(
                    torch.Tensor, torch.Tensor.detach, cell.state
                )
                returned.append([left, type(cell.state) is list])
            return returned

        both(script)

    @pytest.mark.parametrize("place", ["global", "closure", "dictionary", "buffer"])
    def test_may_be_anywhere(self, place: str) -> None:
        def script(wrap):
            torch.manual_seed(0)
            net, held = torch.nn.Linear(6, 3), {"state": None}
            state = None
            if place == "buffer":
                net.register_buffer("state", None)

            def step(x):
                global STATE
                nonlocal state
                if place == "global":
                    STATE = net(x) if STATE is None else STATE * 2
                    return STATE.detach().sum()
                if place == "closure":
                    state = net(x) if state is None else state * 2
                    return state.detach().sum()
                if place == "dictionary":
                    held["state"] = net(x) if held["state"] is None else held["state"] * 2
                    return held["state"].detach().sum()
                net.state = net(x).detach() if net.state is None else net.state * 2
                return net.state.sum()

            global STATE
            wrapped, returned = wrap(step), []
            for x in inputs(11):
                STATE = state = held["state"] = net.state = None
                returned.append([wrapped(x), state is None, net.state_dict()])
            return returned

        both(script)

    @pytest.mark.parametrize(
        "values", [[0.0], [0.0, KEPT, KEPT], [0, 1.0], [0.0, -0.0], [None, 0.0, KEPT]]
    )
    @pytest.mark.parametrize("asks", [False, True])
    def test_may_be_a_number(self, values: list[Any], asks: bool) -> None:
        """As the membrane potential of the neurons of `spikingjelly`, which begins at 0.0."""

        def script(wrap):
            torch.manual_seed(0)
            cells = {"state": None}
            net = torch.nn.Linear(6, 3)

            @wrap
            def step(x):
                out, state = net(x), cells["state"]
                if state is None or (asks and not isinstance(state, torch.Tensor)):
                    state = torch.full_like(out, -0.5 if state is None else state)
                cells["state"] = (state / 2 + out).detach()
                loss = (out + cells["state"]).square().mean()
                return descended(net, loss)

            returned = []
            for place, x in enumerate(inputs(14)):
                value = values[place % len(values)]
                if value is not KEPT:
                    cells["state"] = value
                returned.append([step(x), dict(cells), net.state_dict()])
            return returned

        both(script)


class TestPlacesThatHoldOneTensor:
    """A step that puts another tensor in one of them leaves two."""

    @pytest.mark.parametrize("read", ["a", "b", "ab"])
    @pytest.mark.parametrize("written", ["a", "b", "ab"])
    def test_hold_what_eager_leaves_there(self, read: str, written: str) -> None:
        def script(wrap):
            kept = {"a": torch.ones(())}
            kept["b"] = kept["a"]
            net = torch.nn.Linear(6, 3)

            @wrap
            def step(x):
                total = sum(kept[key] for key in read)
                new = net(x).detach().sum()
                for key in written:
                    kept[key] = new
                return total

            return [(step(x), dict(kept), kept["a"] is kept["b"]) for x in inputs(4)]

        both(script)


@needs_2_15
@pytest.mark.auto
class TestListsThatTheStepReplaces:
    """Who else holds the old list must not see new tensors in it, so each run puts a new one in its
    place, as the step does."""

    @staticmethod
    def both(does: Callable[..., Any], kept: Callable[[], Any]) -> list[Any]:
        """Runs a trainer whose step replaces what it keeps, eagerly and by plan; its plans."""
        steps: list[Any] = []

        def script(wrap):
            trainer = Trainer(does)
            trainer.kept = kept()
            step = wrap(trainer.step)
            steps.append(step)
            losses, held = [], []
            for x in inputs(12):
                held.append(trainer.kept)
                losses.append(step(x))
            return losses, held, trainer.kept, trainer.net.state_dict()

        both(script)
        return steps[-1].plans

    @pytest.mark.parametrize("kind", ["list", "nested", "dict", "in a tuple", "in a list"])
    def test_are_other_lists_after_each_run(self, kind: str) -> None:
        forms = {
            "list": lambda a, b: [a, b],
            "nested": lambda a, b: [[a], {"b": (b, "text")}],
            "dict": lambda a, b: {"a": a, "b": [b, 3]},
            "in a tuple": lambda a, b: ([a], [b]),
            "in a list": lambda a, b: [(a, [b])],
        }
        leaves = torch.utils._pytree.tree_leaves

        def does(self, x, out):
            a, b = (leaf for leaf in leaves(self.kept) if isinstance(leaf, torch.Tensor))
            self.kept = forms[kind](a + out.detach().mean(), b * 0.5)
            return a.clone()

        plans = self.both(does, lambda: forms[kind](torch.zeros(()), torch.ones(())))
        assert len(plans) <= 2  # the first step's, and that of all others

    def test_with_the_same_tensors_are_other_lists_too(self) -> None:
        def script(wrap):
            def does(self, x, out):
                self.kept = list(self.kept)
                return self.kept[0] + self.kept[1]

            trainer = Trainer(does)
            trainer.kept = [torch.zeros(()), torch.ones(())]
            step, found = wrap(trainer.step), []
            for x in inputs(8):
                old = trainer.kept
                step(x)
                found.append((trainer.kept is old, trainer.kept[0] is old[0]))
                old[0] = torch.full((), 7.0)
                found.append(trainer.kept[0].clone())
            return found

        both(script)

    def test_in_variables_of_the_caller(self) -> None:
        def script(wrap):
            net = torch.nn.Linear(6, 6)
            hidden = [torch.zeros(4, 6), torch.ones(4, 6)]

            @wrap
            def step(x):
                nonlocal hidden
                made = [net(x + state) for state in hidden]
                loss = sum(state.square().mean() for state in made)
                loss.backward()
                hidden = [state.detach() for state in made]
                return loss

            return [step(x) for x in inputs(12)], hidden, [p.grad for p in net.parameters()]

        both(script)

    def test_that_become_longer_at_first(self) -> None:
        def does(self, x, out):
            self.kept = [*self.kept, out.detach().mean()][-4:]
            return sum(self.kept)

        self.both(does, lambda: [torch.zeros(())])

    @pytest.mark.parametrize("both_places", [True, False], ids=["both", "one"])
    def test_in_two_places_are_one_list_where_eager_has_one(self, both_places: bool) -> None:
        def script(wrap):
            def does(self, x, out):
                self.kept = [self.kept[1], out.detach().mean()]
                if both_places:
                    self.other = self.kept
                return self.kept[0] + self.other[1]

            trainer = Trainer(does)
            trainer.kept = trainer.other = [torch.zeros(()), torch.ones(())]
            step = wrap(trainer.step)
            return [(step(x), trainer.kept is trainer.other) for x in inputs(8)], trainer.kept

        both(script)

    @pytest.mark.parametrize("what", ["changed", "returned"])
    def test_are_refused_where_a_run_would_leave_another_list(self, what: str) -> None:
        def does(self, x, out):
            if what == "changed":
                self.kept[0] = out.detach().mean()
            self.kept = [self.kept[1], self.kept[0]]
            if what == "returned":
                return self.kept
            return self.kept[0].clone()

        trainer = Trainer(does)
        trainer.kept = [torch.zeros(()), torch.ones(())]
        step = roam.compile(trainer.step, python="idle")
        with pytest.raises(roam.CaptureError, match="list") as caught:
            list(map(step, inputs(12)))
        assert caught.value.code == "moved"


def test_a_tensor_that_the_first_step_makes_and_every_step_changes() -> None:
    def script(wrap):
        def does(self, x, out):
            if not hasattr(self, "seen"):
                self.seen = torch.zeros(())
            self.seen.add_(2)
            return self.seen.clone()

        trainer = Trainer(does)
        step = wrap(trainer.step)
        return [step(x) for x in inputs(4)], trainer.seen

    both(script)
