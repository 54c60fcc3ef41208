"""A step that runs out of the static pool keeps every promise; dead ranges are poisoned, so that a
stray read shows."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import logging
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import roam
from roam.runtime import pool as pools
from roam.runtime import strategy as choosing
from roam.runtime.executor import Executor
from roam.runtime.memory_profiler import measure_peak, observed
from roam.runtime.pool import Pool
from roam.tracing.step import capture_step
from steps import Breaking, Net, Script, adamw, batches, kernel_of
from training import assert_same_bits, plain_step, tensors_and_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
functional = torch.nn.functional
pooled = functools.partial(roam.compile, pool=True, poison=True)


def both(script: Script) -> None:
    """Runs a user's script with eager steps and with steps out of the pool; everything it returns
    must have the same bits."""
    outcomes = []
    for wrap in (lambda step: step, pooled):
        torch.manual_seed(0)
        outcomes.append(tensors_and_numbers(script(wrap), torch.get_rng_state()))
    assert_same_bits(*outcomes)


def pool_of(step: Any) -> Pool:
    pool: Pool = step._last._pool
    assert step.memory().uses_pool
    return pool


def lies_in(pool: Pool, tensor: torch.Tensor) -> bool:
    start = pool._storage.data_ptr()
    return start <= tensor.untyped_storage().data_ptr() < start + pool.nbytes


def tensors_of(*values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def train(
    net: torch.nn.Module, **options: Any
) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer, list[Any]]:
    """A step that has run twice out of the pool, and data for more."""
    torch.manual_seed(0)
    optimizer = adamw(net)
    step = pooled(plain_step, **options)
    data = batches(6)
    for x, y in data[:2]:
        step(net, optimizer, x, y)
    return step, net, optimizer, data[2:]


@pytest.fixture
def trained() -> tuple[Any, torch.nn.Module, torch.optim.Optimizer, list[Any]]:
    return train(Net())


class Misplaced:
    """A plan with other offsets."""

    def __init__(self, plan: roam.Plan, offsets: Any, pool_bytes: int) -> None:
        self.offsets = offsets
        self.pool_bytes = pool_bytes
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)


class TestPoison:
    """Plans that are wrong on purpose, given to the executor past the verifier."""

    def prepared(self, train_step: Callable[..., Any]) -> tuple[Any, Any, Callable[..., list[Any]]]:
        """The captured step, a right plan, and how to run it: parameters afterwards and what is
        returned."""
        torch.manual_seed(0)
        layers = [
            layer for width in (6, 8, 8) for layer in (torch.nn.Linear(width, 8), torch.nn.Tanh())
        ]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        arguments = (model, optimizer, torch.randn(5, 6))
        variant = capture_step(train_step, arguments, {}).steady
        (choice,) = choosing.choose([variant], pool=True, time_limit_s=None)
        pool = Pool.of(torch.device("cpu"))
        before = copy.deepcopy(model.state_dict())

        def outcome(offsets: Any, poison: bool) -> list[Any]:
            size = choice.plan.pool_bytes + 4096
            wrong = Misplaced(choice.plan, offsets, size)
            executor = Executor(choice.program, choice.placed, wrong, pool=pool, poison=poison)  # type: ignore[arg-type]
            leaves = pytree.tree_leaves(arguments)
            outcomes = []
            for run in ("run_checked", "run"):
                model.load_state_dict(before)
                inputs = [
                    leaves[reference.index] if reference.kind == "input" else reference.get()
                    for reference, _ in choice.program.referenced
                ]
                inputs += [tensor for tensor, _ in choice.program.constants]
                with pool.held(size), torch.no_grad():
                    result, *_ = getattr(executor, run)(inputs)
                outcomes.append(tensors_and_numbers(result, model.state_dict()))
            assert_same_bits(*outcomes)
            return outcomes[1]

        return choice.program, choice.plan, outcome

    def lives(self, program: Any, plan: Any) -> dict[int, tuple[int, int]]:
        """First and last step of every tensor in the pool."""
        lives: dict[int, tuple[int, int]] = {}
        for step, index in enumerate(plan.order.tolist()):
            call = program.calls[index]
            for slot in (*call.refs(), *(slot for slot in call.outputs if slot is not None)):
                storage = program.storage_of(slot)
                if storage >= 0 and plan.offsets[storage] >= 0:
                    lives[storage] = lives.get(storage, (step, step))[0], step
        return lives

    def test_a_wrong_plan_whose_numbers_are_right_by_chance_is_found(self) -> None:
        def step(model, optimizer, x):
            optimizer.zero_grad()
            hidden = model(x)
            kept = hidden.exp()  # the backward pass reads it
            with torch.no_grad():
                equal = (hidden * 1).exp() == kept  # the same numbers, soon dead
            kept.sum().backward()
            optimizer.step()
            return equal

        program, plan, outcome = self.prepared(step)
        right = outcome(plan.offsets, True)
        twins = [
            program.storage_of(call.outputs[0])
            for call in program.calls
            if call.name == "aten.exp.default"
            and plan.offsets[program.storage_of(call.outputs[0])] >= 0
        ]
        assert len(twins) == 2
        wrong = plan.offsets.copy()
        wrong[twins] = plan.pool_bytes  # behind everything else
        assert_same_bits(right, outcome(wrong, False))
        assert any(tensor.isnan().any() for tensor in tensors_of(outcome(wrong, True)))

    def test_every_pair_of_tensors_that_share_memory_wrongly_is_found(self) -> None:
        def step(model, optimizer, x):
            optimizer.zero_grad()
            loss = model(x).exp().square().mean()
            loss.backward()
            optimizer.step()
            return loss

        program, plan, outcome = self.prepared(step)
        right = outcome(plan.offsets, True)
        lives = self.lives(program, plan)
        donors = {old for old, _ in plan.reuse}  # their memory lives on, so it is not poisoned
        found = []
        for one, other in itertools.combinations(lives.keys() - donors, 2):
            (start, end), (other_start, other_end) = lives[one], lives[other]
            if end == other_end or max(start, other_start) > min(end, other_end):
                continue
            wrong = plan.offsets.copy()
            wrong[other] = wrong[one]
            try:
                result = outcome(wrong, True)
            except RuntimeError:  # PyTorch itself saw that an argument and a result overlap
                continue
            assert any(tensor.isnan().any() for tensor in tensors_of(result)), (one, other)
            found.append((one, other))
        assert len(found) >= 5
        assert_same_bits(right, outcome(plan.offsets, True))


class TestAllocation:
    def test_a_pool_that_no_memory_suffices_for(self) -> None:
        pool = Pool(torch.device("cpu"))
        with (
            pytest.raises(roam.ExecutionError, match="no memory for a pool") as caught,
            pool.held(1 << 60),
        ):
            pass
        assert caught.value.code == "out_of_memory"
        with pool.held(1 << 10):
            assert pool.nbytes == 1 << 10

    def test_out_of_memory_changes_nothing_and_is_got_over(
        self, trained: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step, net, optimizer, data = trained
        before = tensors_and_numbers(
            net.state_dict(), optimizer.state_dict(), torch.get_rng_state()
        )
        step.release()
        assert pool_of(step).nbytes == 0
        resize = torch.UntypedStorage.resize_

        def refuse(storage: Any, size_bytes: int) -> Any:
            if size_bytes:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return resize(storage, size_bytes)

        with monkeypatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "resize_", refuse)
            for _ in range(2):
                with pytest.raises(roam.ExecutionError, match="nothing has been changed") as caught:
                    step(net, optimizer, *data[0])
                assert caught.value.code == "out_of_memory"
        assert_same_bits(
            before,
            tensors_and_numbers(net.state_dict(), optimizer.state_dict(), torch.get_rng_state()),
        )
        twin, twin_optimizer = self.twin(net, optimizer)
        generator = torch.get_rng_state()
        loss = step(net, optimizer, *data[0])
        torch.set_rng_state(generator)
        assert_same_bits([loss], [plain_step(twin, twin_optimizer, *data[0]).detach()])
        assert_same_bits(tensors_of(net.state_dict()), tensors_of(twin.state_dict()))

    def twin(self, net: Net, optimizer: torch.optim.Optimizer) -> tuple[Net, torch.optim.Optimizer]:
        other = copy.deepcopy(net)
        other_optimizer = adamw(other)
        other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return other, other_optimizer

    def test_a_pool_that_grows_keeps_earlier_plans_valid(self) -> None:
        steps = []

        def script(wrap):
            net = Net()
            optimizer = adamw(net)
            step = wrap(plain_step)
            steps.append(step)
            sizes = []
            returned = []
            for size in (4, 4, 64, 4, 256, 64, 4):
                returned += [step(net, optimizer, x, y) for x, y in batches(2, size)]
                sizes.append(pool_of(step).nbytes if wrap is pooled else 0)
            assert sizes == sorted(sizes)
            assert len(set(sizes)) == (3 if wrap is pooled else 1)
            return [returned, net.state_dict()]

        both(script)
        assert pool_of(steps[1]).nbytes == max(plan.pool_bytes for _, plan in steps[1].plans)

    def test_two_steps_share_one_model_and_one_pool(self) -> None:
        steps = []

        def script(wrap):
            net = Net()
            optimizer = adamw(net)
            steps[:] = [wrap(plain_step), wrap(lambda *args: plain_step(*args) * 2)]
            returned = [
                steps[place % 2](net, optimizer, x, y) for place, (x, y) in enumerate(batches(6))
            ]
            return [returned, net.state_dict(), optimizer.state_dict()]

        both(script)
        assert pool_of(steps[0]) is pool_of(steps[1])

    @pytest.mark.parametrize("releases", [True, False])
    def test_evaluation_between_steps(self, releases: bool) -> None:
        def script(wrap):
            net = Net()
            optimizer = adamw(net)
            step = wrap(plain_step)
            returned = []
            for x, y in batches(5):
                returned.append(step(net, optimizer, x, y))
                if wrap is pooled and releases:
                    step.release()
                    assert pool_of(step).nbytes == 0
                net.eval()
                with torch.no_grad():
                    returned.append(net(x))
                net.train()
            return [returned, net.state_dict(), optimizer.state_dict()]

        both(script)

    def test_the_pool_goes_with_the_last_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Steps of other tests may be about, and share theirs.
        monkeypatch.setattr(pools, "_pools", weakref.WeakValueDictionary())
        step, *_ = train(Net())
        pool = weakref.ref(pool_of(step))
        assert Pool.of(torch.device("cpu")) is pool()
        del step, _
        gc.collect()
        assert pool() is None

    @pytest.mark.parametrize("keep_grads", [False, True])
    def test_the_model_goes_when_nobody_holds_it(
        self, caplog: pytest.LogCaptureFixture, *, keep_grads: bool
    ) -> None:
        caplog.set_level(logging.INFO, logger="roam")  # whoever keeps records keeps no model
        step, net, *_ = train(Net(), keep_grads=keep_grads)
        gone = [weakref.ref(net), *map(weakref.ref, net.parameters())]
        del step, net, _
        gc.collect()
        held = [reference() for reference in gone if reference() is not None]
        assert not held, [str(holder)[:300] for holder in gc.get_referrers(held[0])]

    def test_a_thousand_steps_neither_grow_nor_drift(self) -> None:
        def training() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)
            )
            return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), *batches(1)[0]

        call = training()
        step = pooled(plain_step)
        with observed():
            for _ in range(4):
                step(*call)
        size = pool_of(step).nbytes
        objects = self.objects()
        for _ in range(896):
            step(*call)
        assert self.objects() <= objects

        def hundred() -> None:
            for _ in range(100):
                step(*call)

        trace = measure_peak(hundred)
        assert trace.end_bytes == trace.unseen_freed_bytes == 0
        assert pool_of(step).nbytes == size
        eager = training()
        for _ in range(1000):
            plain_step(*eager)
        assert_same_bits(
            *(
                tensors_and_numbers(part[0].state_dict(), part[1].state_dict())
                for part in (call, eager)
            )
        )

    def objects(self) -> int:
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


class TestWhatIsReturned:
    def test_nothing_that_outlives_a_step_lies_in_the_pool(self) -> None:
        def step_with_results(model, optimizer, x, y):
            optimizer.zero_grad()
            logits = model(x)
            loss = functional.cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            return {
                "loss": loss,
                "first": logits[:, 0],
                "turned": logits.t(),
                "last": logits[-1:],
                "right": logits.argmax(-1),
            }

        steps = []

        def script(wrap):
            net = Net()
            optimizer = adamw(net)
            step = wrap(step_with_results)
            steps.append(step)
            results = [step(net, optimizer, x, y) for x, y in batches(5)]
            if wrap is pooled:
                alive = tensors_of(results, net.state_dict(), optimizer.state_dict())
                assert not any(lies_in(pool_of(step), tensor) for tensor in alive)
                # Views of one result are views of one tensor, as eager PyTorch returns them.
                assert (
                    results[0]["first"].untyped_storage().data_ptr()
                    == results[0]["turned"].untyped_storage().data_ptr()
                )
            return [
                results,
                net.state_dict(),
            ]  # results of earlier steps, looked at after later ones

        both(script)
        with pool_of(steps[1]).held(1):
            pool_of(steps[1]).range(0, pool_of(steps[1]).nbytes).fill_(0xAB)

    def test_results_survive_the_pool(self, trained: Any) -> None:
        step, net, optimizer, data = trained
        losses = [step(net, optimizer, x, y) for x, y in data]
        values = [loss.clone() for loss in losses]
        pool = pool_of(step)
        with pool.held(1):
            pool.range(0, pool.nbytes).fill_(0xFF)
        step.release()
        assert_same_bits(losses, values)

    def test_kept_gradients_are_outside(self) -> None:
        torch.manual_seed(0)
        net = Net()
        step = pooled(plain_step, keep_grads=True)
        optimizer = adamw(net)
        for x, y in batches(3):
            step(net, optimizer, x, y)
        gradients = [parameter.grad for parameter in net.parameters()]
        assert all(
            gradient is not None and not lies_in(pool_of(step), gradient) for gradient in gradients
        )

    def test_copies_of_the_model_are_its_own(self, trained: Any) -> None:
        step, net, optimizer, data = trained
        copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        copies.append(torch.load(file, weights_only=False))
        before = tensors_and_numbers(net.state_dict())
        step(net, optimizer, *data[0])
        for other in copies:
            assert_same_bits(before, tensors_and_numbers(other.state_dict()))
            assert all(
                tensor.untyped_storage().nbytes() == tensor.nbytes
                and not lies_in(pool_of(step), tensor)
                for tensor in tensors_of(other.state_dict())
            )


class TestChanges:
    @pytest.mark.parametrize("is_told", [True, False], ids=["optimizer told", "optimizer not told"])
    @pytest.mark.parametrize("way", ["parameter", "assign"])
    def test_parameters_replaced_behind_our_back(self, way: str, is_told: bool) -> None:
        def replace(net: Net) -> None:
            if way == "parameter":
                net.second.weight = torch.nn.Parameter(torch.ones(3, 8))
            else:
                halves = {name: tensor.clone() for name, tensor in net.state_dict().items()}
                halves["first.weight"] *= 0.5
                net.load_state_dict(halves, assign=True)

        def script(wrap):
            net = Net()
            optimizer = adamw(net)
            step = wrap(plain_step)
            returned = []
            for place, (x, y) in enumerate(batches(6)):
                if place == 3:
                    replace(net)
                    if is_told:
                        optimizer.param_groups[0]["params"] = list(net.parameters())
                returned.append(step(net, optimizer, x, y))
            return [returned, net.state_dict(), len(optimizer.state)]

        both(script)

    def test_state_deleted_behind_our_back(self) -> None:
        def script(wrap):
            net = Net()
            optimizer = adamw(net)
            step = wrap(plain_step)
            returned = []
            for place, (x, y) in enumerate(batches(6)):
                if place == 3:
                    del optimizer.state[net.first.weight]
                returned.append(step(net, optimizer, x, y))
            return [returned, net.state_dict(), optimizer.state_dict()]

        both(script)

    def test_a_step_that_fails_before_any_update(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Batch norm would write its statistics before the last operator of the forward pass.
        step, net, optimizer, data = train(
            torch.nn.Sequential(
                torch.nn.Dropout(0.1), torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
            )
        )
        before = tensors_and_numbers(
            net.state_dict(), optimizer.state_dict(), torch.get_rng_state()
        )
        with monkeypatch.context() as patch:
            Breaking(patch, step, torch.ops.aten.tanh, RuntimeError("out of memory"))
            with pytest.raises(roam.ExecutionError, match="Nothing had been") as caught:
                step(net, optimizer, *data[0])
        assert caught.value.code == "failed"
        assert_same_bits(
            before,
            tensors_and_numbers(net.state_dict(), optimizer.state_dict(), torch.get_rng_state()),
        )
        self.goes_on_as_eager_would(step, net, optimizer, data)

    def test_a_step_that_fails_in_mid_update(
        self, trained: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step, net, optimizer, data = trained
        states = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
        with monkeypatch.context() as patch:
            Breaking(patch, step, torch.ops.aten.addcdiv_, RuntimeError("out of memory"))
            with pytest.raises(roam.ExecutionError, match="Already updated") as caught:
                step(net, optimizer, *data[0])
        assert caught.value.code == "torn"
        with pytest.raises(roam.ExecutionError, match="again first"):
            step(net, optimizer, *data[0])
        net.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        self.goes_on_as_eager_would(step, net, optimizer, data)

    def goes_on_as_eager_would(
        self, step: Any, net: torch.nn.Module, optimizer: Any, data: list[Any]
    ) -> None:
        twin = copy.deepcopy(net)
        twin_optimizer = adamw(twin)
        twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        generator = torch.get_rng_state()
        for x, y in data:
            step(net, optimizer, x, y)
        torch.set_rng_state(generator)
        for x, y in data:
            plain_step(twin, twin_optimizer, x, y)
        assert_same_bits(
            tensors_and_numbers(net.state_dict()), tensors_and_numbers(twin.state_dict())
        )

    def test_an_interrupt_waits_for_the_end_of_the_step(
        self, trained: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step, net, optimizer, data = trained
        globals_, name = kernel_of(step, torch.ops.aten.addcdiv_)
        kernel = globals_[name]

        def pressed(*args: Any, **kwargs: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            return kernel(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setitem(globals_, name, pressed)
            with pytest.raises(KeyboardInterrupt):
                step(net, optimizer, *data[0])
        assert {int(entry["step"]) for entry in optimizer.state.values()} == {3}
        self.goes_on_as_eager_would(step, net, optimizer, data[1:])


class TestThreads:
    def test_one_step_at_a_time_is_in_the_pool(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first, second = self.trainings()
        first_is_inside, second_has_begun = threading.Event(), threading.Event()
        seen: list[bool] = []

        def hold(*args: Any, **kwargs: Any) -> Any:
            if not first_is_inside.is_set():
                first_is_inside.set()
                seen.append(second_has_begun.wait(0.5))  # it would, at once, if nothing kept it out
            return kernel(*args, **kwargs)

        def begin(*args: Any, **kwargs: Any) -> Any:
            second_has_begun.set()
            return other_kernel(*args, **kwargs)

        globals_, name = kernel_of(first[0], torch.ops.aten.tanh)
        kernel = globals_[name]
        monkeypatch.setitem(globals_, name, hold)
        globals_, name = kernel_of(second[0], torch.ops.aten.tanh)
        other_kernel = globals_[name]
        monkeypatch.setitem(globals_, name, begin)
        self.at_once(
            lambda: self.steps(first, 1), lambda: first_is_inside.wait(10) and self.steps(second, 1)
        )
        assert seen == [False]
        assert second_has_begun.is_set()

    def test_two_steps_at_the_same_time_have_eagers_bits(self) -> None:
        planned, eager = self.trainings(), self.trainings(eager=True)
        self.at_once(*(functools.partial(self.steps, training, 30) for training in planned))
        for training in eager:
            self.steps(training, 30)
        assert_same_bits(
            *(tensors_and_numbers([t[1].state_dict() for t in side]) for side in (planned, eager))
        )

    def trainings(self, eager: bool = False) -> list[tuple[Any, ...]]:
        made = []
        for size in (16, 48):
            torch.manual_seed(size)
            model = torch.nn.Sequential(
                torch.nn.Linear(6, size), torch.nn.Tanh(), torch.nn.Linear(size, 3)
            )
            training = (
                plain_step if eager else pooled(plain_step),
                model,
                adamw(model),
                *batches(1, size)[0],
            )
            self.steps(training, 2)
            made.append(training)
        return made

    def steps(self, training: tuple[Any, ...], count: int) -> None:
        step, *arguments = training
        for _ in range(count):
            step(*arguments)

    def at_once(self, *works: Callable[[], Any]) -> None:
        errors: list[BaseException] = []

        def guarded(work: Callable[[], Any]) -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - a thread's exception is the test's
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        if errors:
            raise errors[0]


def forms() -> Iterator[tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]]:
    """What a model may do between its two layers: hidden values [5, 8] and a weight [8] to hidden
    values of the same shape."""

    def channels_last(hidden, weight):
        images = hidden.view(5, 2, 2, 2).contiguous(memory_format=torch.channels_last)
        images = functional.gelu(images * weight.view(2, 2, 2)) + images
        return functional.silu(images).reshape(5, 8)

    def as_strided(hidden, weight):
        windows = (hidden * weight).as_strided((4, 8), (8, 1), 8)
        return torch.cat([windows.exp(), hidden[:1]], 0) * hidden.as_strided((5, 8), (8, 1))

    def expanded(hidden, weight):
        wide = weight.sum().expand(5, 8)
        return hidden * wide + weight.expand(5, 8).sin() + hidden[:, :1].expand(5, 8).tanh()

    def empty(hidden, weight):
        nothing = (hidden[:0] * weight).exp()
        return torch.cat([nothing, hidden.tanh(), nothing]) + nothing.sum()

    def complex_valued(hidden, weight):
        turned = torch.complex(hidden, weight.expand(5, 8).clone())
        turned = (
            turned * turned.conj()
            + turned.exp() * 0.1
            + torch.view_as_complex(hidden.view(5, 4, 2)).abs().sum()
        )
        return turned.real + turned.imag.tanh() + turned.abs()

    def other_dtypes(hidden, weight):
        small = hidden.to(torch.bfloat16) * weight.to(torch.bfloat16)
        return hidden.double().exp().to(torch.float32) * (hidden > 0) + small.float().tanh()

    def in_place(hidden, weight):
        changed = hidden * weight
        changed[1:3].mul_(2)
        changed.t()[0].add_(changed[:, 1])
        return functional.relu(changed, inplace=True)

    def fft(hidden, weight):
        return torch.fft.irfft(torch.fft.rfft(hidden * weight), n=8)

    def random(hidden, weight):
        return functional.dropout(hidden * weight, 0.3) + torch.rand_like(hidden) * torch.randn(8)

    def sorted_and_gathered(hidden, weight):
        values, places = (hidden * weight).sort(-1)
        return values.gather(1, places.flip(1)) + hidden.cumsum(0).topk(8, -1).values.softmax(-1)

    yield from ((form.__name__, form) for form in (
        channels_last, as_strided, expanded, empty, complex_valued, other_dtypes, in_place, fft, random, sorted_and_gathered,
    ))  # fmt: skip


class Formed(torch.nn.Module):
    def __init__(self, form: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.weight = torch.nn.Parameter(torch.randn(8))
        self.second = torch.nn.Linear(8, 3)
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.form(self.first(x), self.weight))


@pytest.mark.parametrize("pool", [None, True])
def test_a_kernel_that_is_given_a_tensor_twice_does_not_write_over_it(pool: bool | None) -> None:
    order, size = torch.randperm(256), 256

    def step(weight: torch.Tensor) -> Any:
        h = weight * 2
        h = torch.scatter_reduce(h, 0, order.expand(size, size), h, reduce="sum")
        h = h.index_put((order,), h)
        places = (weight > 0).long() * 7
        places = places.gather(0, places)
        solved = weight[:64, :64] + 64 * torch.eye(64)
        solved = torch.linalg.solve_ex(solved, solved).result
        solved = torch.linalg.solve_triangular(solved, solved, upper=True)
        weight.add_(h.mean())
        return h.sum(), places.sum(), solved.sum()

    outcomes = []
    for wrap in (lambda step: step, functools.partial(roam.compile, pool=pool, poison=True)):
        torch.manual_seed(0)
        weight, compiled = torch.randn(size, size), wrap(step)
        outcomes.append(tensors_and_numbers([compiled(weight) for _ in range(3)], weight))
    assert_same_bits(*outcomes)


def test_deterministic_mode_fills_what_has_no_values_yet() -> None:
    def step(weight: torch.Tensor) -> Any:
        y = weight * 2
        made = [
            torch.empty(64, 64),
            torch.empty_like(y),
            torch.empty_like(y, dtype=torch.int64),
            y.new_empty(64, 64, dtype=torch.bool),
            y.new_empty_strided((64, 64), (1, 64)),
            torch.empty_strided((64, 64), (1, 64), dtype=torch.complex64),
            torch.empty_permuted((64, 64), (1, 0), dtype=torch.bfloat16),
        ]
        for tensor in made:
            tensor[:32] = y[:32]
        weight.add_(y.mean())
        return [tensor.clone() for tensor in made], torch.isnan(made[0] * 2).sum()

    torch.use_deterministic_algorithms(True)
    try:
        outcomes = []
        for wrap in (lambda step: step, pooled):
            weight, compiled = torch.ones(64, 64), wrap(step)
            outcomes.append(tensors_and_numbers([compiled(weight) for _ in range(3)], weight))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(*outcomes)
    assert compiled.memory().pool_bytes > 0


@pytest.mark.parametrize("form", [pytest.param(form, id=name) for name, form in forms()])
def test_tensors_of_every_form(form: Callable[..., Any]) -> None:
    def script(wrap):
        net = Formed(form)
        optimizer = adamw(net)
        step = wrap(plain_step)
        returned = [step(net, optimizer, x, y) for x, y in batches(4)]
        if wrap is pooled:
            assert step.memory().pool_bytes > 0
        return [returned, net.state_dict(), optimizer.state_dict()]

    both(script)


class Complex(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


def inputs_of_every_layout() -> Iterator[Any]:
    x, y = batches(1)[0]
    wide = torch.randn(10, 12)
    yield pytest.param(x.t().contiguous().t(), y, id="transposed")
    yield pytest.param(wide[::2, ::2], y, id="strided")
    yield pytest.param(wide.as_strided((5, 6), (12, 2), 1), y, id="as_strided")
    yield pytest.param(x[:1].expand(5, 6), y, id="expanded")
    yield pytest.param(x[:0], y[:0], id="empty")


@pytest.mark.parametrize(("x", "y"), list(inputs_of_every_layout()))
@pytest.mark.parametrize(
    "model",
    [
        Complex,
        lambda: torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.GELU(), torch.nn.Linear(4, 3)),
    ],
)
def test_inputs_of_every_layout(model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    def script(wrap):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        step = wrap(plain_step)
        return [
            [step(net, optimizer, x, y) for _ in range(3)],
            net.state_dict(),
            optimizer.state_dict(),
        ]

    both(script)


def test_results_that_are_copied_into_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ways to use the pool, the one that copies every result there that no kernel can write
    there."""
    copy_choices = choosing._copy_choices
    monkeypatch.setattr(choosing, "_copy_choices", lambda *args: list(copy_choices(*args))[:1])

    class Copied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(6)
            self.turn = torch.nn.Conv1d(1, 4, 3)
            self.out = torch.nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turned = self.turn(self.norm(x)[:, None]).transpose(1, 2)
            mixed = functional.scaled_dot_product_attention(turned, turned, turned)
            return self.out(functional.relu(mixed, inplace=True).flatten(1))

    steps = []

    def script(wrap):
        net = Copied()
        optimizer = adamw(net)
        steps.append(wrap(plain_step))
        return [
            [steps[-1](net, optimizer, x, y) for x, y in batches(4)],
            net.state_dict(),
            optimizer.state_dict(),
        ]

    both(script)
    executor = steps[1]._last._executor
    copied = {
        call.name
        for index, call in enumerate(executor.program.calls)
        if executor.bindings.way(index) == "copy_in"
    }
    assert {"aten.native_layer_norm.default", "aten.convolution.default"} <= copied


def test_a_pool_that_grows_gives_back_what_the_allocator_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_back: list[int] = []
    pool = Pool(torch.device("cpu"))
    monkeypatch.setattr(pools, "give_back_freed", lambda: given_back.append(pool.nbytes))
    for size_bytes in (64, 32, 64, 128):
        with pool.held(size_bytes):
            assert pool.nbytes >= size_bytes
    assert given_back == [0, 0]  # before it has memory of its own
