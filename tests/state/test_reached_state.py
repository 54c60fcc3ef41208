"""State that a step reaches on unusual ways: a later call sees what has changed there, or the step
is refused.
"""

from __future__ import annotations

import builtins
import concurrent.futures
import configparser
import contextvars
import dataclasses
import enum
import functools
import importlib
import operator
import optparse
import random
import sys
import threading
import types
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
import pytest
import torch
from transformers.utils import ModelOutput

import roam

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 6
VALUE = 1.0
module = types.ModuleType("settings_of_a_test")
module.value = 1.0  # type: ignore[attr-defined]
sys.modules[module.__name__] = module


def set_global(value: float) -> None:
    global VALUE
    VALUE = value


class Held:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Config(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__


class Values(list):  # type: ignore[type-arg]
    pass


@dataclasses.dataclass
class Case:
    """A factor of a step's loss, and how to change it between calls.

    Attributes:
        factor: what the step calls for its factor, with the arguments.
        change: called with another number before some calls.
        arguments: what the step is given for `factor` at each call.
    """

    factor: Callable[..., Any]
    change: Callable[[float], object]
    arguments: Callable[[], tuple[Any, ...]] = tuple


def losses(case: Case, wrap: Callable[[Any], Any]) -> list[float]:
    case.change(1.0)
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (net(x) * case.factor(*arguments)).pow(2).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    train = wrap(step)
    found = []
    for index in range(STEPS):
        case.change(1.0 + index // 2)
        found.append(train(torch.randn(3, 4), *case.arguments()).item())
    return found


# -- arguments


def dictionary_of_a_class() -> Case:
    config = Config(value=1.0)
    return Case(
        lambda config: config.value,
        lambda value: config.__setitem__("value", value),
        lambda: (config,),
    )


def list_of_a_class_in_a_dictionary() -> Case:
    values = Values([1.0])
    return Case(
        lambda given: given["values"][0],
        lambda value: values.__setitem__(0, value),
        lambda: ({"values": values},),
    )


def dictionary_that_a_closure_holds_too() -> Case:
    config = {"value": 1.0}
    given = iter([config, *({"value": 1.0} for _ in range(STEPS))] * 2)
    return Case(
        lambda one: one["value"] * config["value"],
        lambda value: config.__setitem__("value", value),
        lambda: (next(given),),
    )


class Batch(NamedTuple):
    index: int

    @property
    def value(self) -> float:
        return VALUE


class Batch2(NamedTuple):
    index: int


def property_of_a_named_tuple() -> Case:
    return Case(lambda batch: batch.value, set_global, lambda: (Batch(1),))


def attribute_of_a_named_tuples_class() -> Case:
    return Case(
        lambda batch: batch.value,
        lambda value: setattr(Batch2, "value", value),
        lambda: (Batch2(1),),
    )


@dataclasses.dataclass
class Output(ModelOutput):
    index: int = 1

    @property
    def value(self) -> float:
        return VALUE


def property_of_a_registered_class() -> Case:
    return Case(lambda output: output.value, set_global, lambda: (Output(index=1),))


class Mode(enum.Enum):
    FAST = 1

    def value_now(self) -> float:
        return VALUE


def method_of_an_enumeration() -> Case:
    return Case(lambda mode: mode.value_now(), set_global, lambda: (Mode.FAST,))


def method_of_an_enumeration_in_a_tuple() -> Case:
    modes = (Mode.FAST, 1)
    return Case(lambda: modes[0].value_now(), set_global)


class Meta:
    def value_now(self) -> float:
        return VALUE


class Sample:
    def __init__(self) -> None:
        self.meta = Meta()


def method_of_a_part_of_an_argument() -> Case:
    return Case(lambda sample: sample.meta.value_now(), set_global, lambda: (Sample(),))


def kind_of_a_key() -> Case:
    given: list[Any] = []
    return Case(
        lambda given: 2.0 if isinstance(next(iter(given)), bool) else 1.0,
        lambda value: given.__setitem__(slice(None), [{1: 0.0} if value < 2 else {True: 0.0}]),
        lambda: (given[0],),
    )


# -- what the step's code names


class Weighted:
    def __init__(self) -> None:
        self.value = VALUE


@dataclasses.dataclass
class Scaled:
    value: float

    def __post_init__(self) -> None:
        self.value *= VALUE


class Named:
    def __repr__(self) -> str:
        return f"{VALUE}"


def constructor() -> Case:
    return Case(lambda: Weighted().value, set_global)


def constructor_with_a_closure() -> Case:
    held = [1.0]

    class Made:
        def __init__(self) -> None:
            self.value = held[0]

    return Case(lambda: Made().value, lambda value: held.__setitem__(0, value))


def end_of_a_dataclass_constructor() -> Case:
    return Case(lambda: Scaled(1.0).value, set_global)


def text_of_an_object() -> Case:
    named = Named()
    return Case(lambda: {"1.0": 1.0, "2.0": 2.0, "3.0": 3.0}[repr(named)], set_global)


def name_from_an_import() -> Case:
    def factor() -> Any:
        from settings_of_a_test import value  # type: ignore[import-not-found]

        return value

    return Case(factor, lambda value: setattr(module, "value", value))


def module_from_an_import() -> Case:
    def factor() -> Any:
        import settings_of_a_test

        return settings_of_a_test.value

    return Case(factor, lambda value: setattr(module, "value", value))


def replaced_module() -> Case:
    def factor() -> Any:
        import other_settings_of_a_test as settings  # type: ignore[import-not-found]

        return settings.value

    return Case(factor, replace_module)


def replace_module(value: float = 1.0) -> None:
    """Puts another module in the place of one, as code does that is loaded anew."""
    other = types.ModuleType("other_settings_of_a_test")
    other.value = value  # type: ignore[attr-defined]
    sys.modules[other.__name__] = other


replace_module()


def another_name_of_a_module_in_a_module() -> Case:
    """Two functions read different names of one module by way of another one."""
    package.part.first = package.part.second = 1.0

    def first() -> Any:
        return package.part.first

    def second() -> Any:
        return package.part.second

    return Case(lambda: first() * second(), lambda value: setattr(package.part, "second", value))


def name_of_a_module_as_a_text() -> Case:
    package.part.first = package.part.second = package.part.third = 1.0

    def step() -> Any:
        taken = [vars(package.part)["second"], operator.attrgetter("third")(package.part)]
        return getattr(package.part, "first") * sum(taken)  # noqa: B009

    def change(value: float) -> None:
        for name in ("first", "second", "third"):
            setattr(package.part, name, value)

    return Case(step, change)


TAKEN_BY_ITS_NAME = 1.0


def global_by_its_name() -> Case:
    globals().update(TAKEN_BY_ITS_NAME=1.0)
    return Case(
        lambda: globals()["TAKEN_BY_ITS_NAME"],
        lambda value: globals().update(TAKEN_BY_ITS_NAME=value),
    )


package: Any = types.ModuleType("package_of_a_test")
package.part = types.ModuleType("package_of_a_test.part")


def module_by_its_name() -> Case:
    return Case(
        lambda: importlib.import_module("settings_of_a_test").value,
        lambda value: setattr(module, "value", value),
    )


def module_among_all() -> Case:
    return Case(lambda: sys.modules["other_settings_of_a_test"].value, replace_module)


def name_among_the_builtins() -> Case:
    return Case(
        lambda: value_among_the_builtins,  # type: ignore[name-defined]  # noqa: F821
        lambda value: setattr(builtins, "value_among_the_builtins", value),
    )


def closure_variable_of_an_equal_name() -> Case:
    def make() -> tuple[Callable[[], float], Callable[[float], None]]:
        count = 1.0

        def get() -> float:
            return count

        def put(value: float) -> None:
            nonlocal count
            count = value

        return get, put

    get, put = make()
    count = 0

    def factor() -> float:
        nonlocal count
        count += 1
        return get()

    return Case(factor, put)


# -- objects


def weak_proxy() -> Case:
    owner = Held(value=1.0)
    proxy = weakref.proxy(owner)
    case = Case(lambda: proxy.value, lambda value: setattr(owner, "value", value))
    case.owner = owner  # type: ignore[attr-defined]
    return case


def module_that_an_object_holds() -> Case:
    net = torch.nn.Linear(2, 2)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net.parameters()), 100)
    held = Held(module=module)

    def factor() -> Any:
        scheduler.optimizer.step()
        return held.module.value

    return Case(factor, lambda value: setattr(module, "value", value))


def attribute_of_a_scheduler() -> Case:
    net = torch.nn.Linear(2, 2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD(net.parameters()), 100)

    def factor() -> Any:
        scheduler.optimizer.step()
        return 1 + scheduler.eta_min

    return Case(factor, lambda value: setattr(scheduler, "eta_min", value))


def attribute_of_a_replaced_tensor() -> Case:
    held: dict[str, Any] = {}

    def change(value: float) -> None:
        held["tensor"] = torch.ones(4)
        held["tensor"].value = value

    return Case(lambda: held["tensor"] * held["tensor"].value, change)


class Pair(tuple):  # type: ignore[type-arg]
    value: float


def attribute_of_a_replaced_tuple() -> Case:
    held: dict[str, Any] = {}

    def change(value: float) -> None:
        held["pair"] = Pair((1,))
        held["pair"].value = value

    return Case(lambda: held["pair"].value, change)


def attributes_of(kind: type, *arguments: Any) -> Callable[[], Case]:
    def case() -> Case:
        value = type("Of" + kind.__name__, (kind,), {"__module__": __name__})(*arguments)
        return Case(lambda: value.value, lambda number: setattr(value, "value", number))

    return case


def attribute_of_an_array() -> Case:
    array = np.zeros(2).view(type("Array", (np.ndarray,), {"__module__": __name__}))
    return Case(lambda: array.value, lambda value: setattr(array, "value", value))


def element_of_an_array_of_objects() -> Case:
    array = np.array([{"value": 1.0}], dtype=object)
    return Case(lambda: array[0]["value"], lambda value: array[0].__setitem__("value", value))


def default_factory() -> Case:
    table: defaultdict[str, float] = defaultdict(float)
    return Case(
        lambda: Counter(table)["there"] + table.default_factory(),  # type: ignore[misc]
        lambda value: setattr(table, "default_factory", functools.partial(float, value)),
    )


def order_of_a_set() -> Case:
    numbers = {0, 8}

    def change(value: float) -> None:
        numbers.clear()
        numbers.update([8, 0] if value == 2 else [0, 8])

    return Case(lambda: next(iter(numbers)) + 1, change)


class OnThread(threading.local):
    value = 1.0


def class_of_a_thread_local() -> Case:
    local = OnThread()
    return Case(lambda: local.value, lambda value: setattr(OnThread, "value", value))


class Metaclass(type):
    value: float


class OfMetaclass(metaclass=Metaclass):
    pass


def attribute_of_a_metaclass() -> Case:
    return Case(lambda: OfMetaclass.value, lambda value: setattr(Metaclass, "value", value))


def value_now(self: object, factor: float) -> float:
    return VALUE * factor


class WithMethods:
    partial = functools.partialmethod(value_now, 1.0)

    @functools.singledispatchmethod
    def dispatched(self, number: int) -> float:
        return VALUE


def partial_method() -> Case:
    held = WithMethods()
    return Case(lambda: held.partial(), set_global)


def method_with_single_dispatch() -> Case:
    held = WithMethods()
    return Case(lambda: held.dispatched(1), set_global)


def configuration_file() -> Case:
    parser = configparser.ConfigParser()
    parser.read_dict({"a": {"value": "1.0"}})
    return Case(
        lambda: parser["a"].getfloat("value"), lambda value: parser.set("a", "value", str(value))
    )


def parsed_options() -> Case:
    options = optparse.Values({"value": 1.0})
    return Case(lambda: options.value, lambda value: setattr(options, "value", value))


def result_of_a_future() -> Case:
    future: concurrent.futures.Future[float] = concurrent.futures.Future()
    future.set_result(1.0)
    return Case(lambda: future.result(), lambda value: setattr(future, "_result", value))


def series() -> Case:
    table = pandas.Series({"value": 1.0})
    return Case(lambda: float(table["value"]), lambda value: table.__setitem__("value", value))


def seed_of_a_generator() -> Case:
    generator = torch.Generator()
    return Case(lambda: generator.initial_seed(), lambda value: generator.manual_seed(int(value)))


class OfGlobal(Exception):
    def __init__(self, factor: float = 1.0) -> None:
        self.value = VALUE * factor


def constructor_of_a_class_that_is_raised_and_caught() -> Case:
    def factor() -> float:
        try:
            raise OfGlobal(2.0)
        except OfGlobal as error:
            return error.value

    return Case(factor, set_global)


def constructor_inside_of_a_test() -> Case:
    seen: list[float] = []

    class Noted(OfGlobal):
        def __init__(self, factor: float) -> None:
            super().__init__(factor)
            seen.append(self.value)

    def factor() -> float:
        seen.clear()
        return seen[0] if isinstance(Noted(2.0), Exception) else 0.0

    return Case(factor, set_global)


def constructor_of_a_class_that_another_function_tests() -> Case:
    class Local:
        def __init__(self) -> None:
            self.value = VALUE

    def made() -> object:
        return Local()

    def factor() -> float:
        one = made()
        return one.value if isinstance(one, Local) else 0.0

    return Case(factor, set_global)


def default_of_a_context_variable() -> Case:
    default = {"value": 1.0}
    variable = contextvars.ContextVar("variable", default=default)
    return Case(lambda: variable.get()["value"], lambda value: default.__setitem__("value", value))


def one_argument_twice() -> Case:
    given = torch.ones(4)
    second = [given]

    def change(value: float) -> None:
        second[0] = given if value < 2 else given.detach()

    def arguments() -> tuple[Any, ...]:
        return given, second[0]

    return Case(lambda one, other: 3.0 if one is other else 1.0, change, arguments)


def argument_that_the_state_holds() -> Case:
    held = Held(last=torch.ones(4))
    given = [held.last]

    def change(value: float) -> None:
        given[0] = held.last if value < 2 else held.last.detach()

    return Case(
        lambda one: (3.0 if one is held.last else 1.0) * held.last, change, lambda: (given[0],)
    )


def tensor_in_two_places() -> Case:
    held = Held()

    def change(value: float) -> None:
        held.one = torch.ones(4)
        held.other = held.one if value < 2 else held.one.detach()

    return Case(lambda: held.one * held.other * (3.0 if held.one is held.other else 1.0), change)


@pytest.mark.parametrize("make", [
    dictionary_of_a_class, list_of_a_class_in_a_dictionary, dictionary_that_a_closure_holds_too,
    property_of_a_named_tuple, attribute_of_a_named_tuples_class, property_of_a_registered_class,
    method_of_an_enumeration, method_of_an_enumeration_in_a_tuple, method_of_a_part_of_an_argument,
    kind_of_a_key, constructor, constructor_with_a_closure,
    end_of_a_dataclass_constructor, text_of_an_object, name_from_an_import, module_from_an_import,
    replaced_module, another_name_of_a_module_in_a_module, name_of_a_module_as_a_text, global_by_its_name,
    module_by_its_name, module_among_all,
    name_among_the_builtins, closure_variable_of_an_equal_name, weak_proxy, module_that_an_object_holds,
    attribute_of_a_scheduler,
    attribute_of_a_replaced_tensor, attribute_of_a_replaced_tuple, attributes_of(set),
    attributes_of(frozenset), attributes_of(random.Random, 0), attribute_of_an_array,
    element_of_an_array_of_objects, default_factory, order_of_a_set, class_of_a_thread_local,
    attribute_of_a_metaclass, partial_method, method_with_single_dispatch, configuration_file,
    parsed_options, result_of_a_future, series, seed_of_a_generator,
    constructor_of_a_class_that_is_raised_and_caught, constructor_inside_of_a_test,
    constructor_of_a_class_that_another_function_tests, default_of_a_context_variable,
    one_argument_twice, argument_that_the_state_holds, tensor_in_two_places,
])  # fmt: skip
def test_a_later_call_sees_the_change(make: Callable[[], Case]) -> None:
    case = make()
    seen = losses(case, lambda step: step)
    assert losses(case, roam.compile) == seen


@pytest.mark.parametrize("package", ["wave", "datasets"])
def test_a_module_of_the_users_may_have_the_name_of_a_library(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{package}.py").write_text(
        "VALUE = 1.0\nclass Config:\n    pass\nconfig = Config()\ndef value(): return VALUE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("roam.state.library_code._installed", {})
    monkeypatch.setitem(
        sys.modules, package, None
    )  # so that the test's end removes what it imports
    del sys.modules[package]
    own = __import__(package)
    config = own.config

    def change(value: float) -> None:
        own.VALUE = config.value = value

    case = Case(lambda: own.value() + config.value, change)
    seen = losses(case, lambda step: step)
    assert losses(case, roam.compile) == seen


def test_what_einx_keeps_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of one of its operations puts another object in the place of its table."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "einx.py").write_text(
        "class Table:\n    pass\n"
        "class Registry:\n    table = Table()\n"
        "registry = Registry()\n"
        "def add(x, y):\n    registry.table = Table()\n    return x + y\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("roam.state.library_code._installed", {})
    monkeypatch.delitem(sys.modules, "einx", raising=False)
    library = importlib.import_module("einx")
    monkeypatch.setitem(sys.modules, "einx", library)
    state = types.SimpleNamespace(value=1.0)
    case = Case(
        lambda: library.add(torch.ones(()), state.value),
        lambda value: setattr(state, "value", value),
    )
    seen = losses(case, lambda step: step)
    assert losses(case, roam.compile) == seen


def test_a_cell_that_the_step_holds_has_the_fake_of_its_tensor() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    (cell,) = (lambda: weight).__closure__ or ()

    def step(x: torch.Tensor) -> torch.Tensor:
        return (weight * x * cell.cell_contents).sum() * (
            3.0 if cell.cell_contents is weight else 1.0
        )

    x = torch.rand(3)
    assert roam.compile(step)(x).item() == step(x).item()


def write_to_an_array() -> Callable[[], Any]:
    array = np.zeros(4, dtype=np.float32)
    return lambda: torch.from_numpy(array).add_(1.0).sum()


def draw_in_secret() -> Callable[[], Any]:
    def factor() -> float:
        state = random.getstate()
        number = random.random()
        random.setstate(state)
        return number

    return factor


def draw_from_numpy_in_secret() -> Callable[[], Any]:
    generator = np.random.default_rng(0)

    def factor() -> float:
        state = generator.bit_generator.state
        number = generator.random()
        generator.bit_generator.state = state
        return float(number)

    return factor


def grow_an_argument() -> Callable[[], Any]:
    values = Values()
    return lambda: values.append(1.0) or len(values)


def change_a_series() -> Callable[[], Any]:
    table = pandas.Series({"count": 0})

    def factor() -> float:
        table["count"] += 1
        return float(table["count"])

    return factor


def put_a_list_in_a_tensors_place() -> Callable[[], Any]:
    held: list[Any] = [torch.zeros(2)]

    def factor() -> Any:
        made = held[0].sum() + 1.0
        held[0] = [2.0]
        return made

    return factor


def give_a_tensor_to_numpy() -> Callable[[], Any]:
    weight = torch.ones(4, requires_grad=True)
    return lambda: float(np.sum((weight * 2).detach().numpy()))


@pytest.mark.parametrize(("make", "code"), [
    (put_a_list_in_a_tensors_place, "moved"),
    (give_a_tensor_to_numpy, "value_reached_python"), (write_to_an_array, "moved"), (draw_in_secret, "unstable"),
    (draw_from_numpy_in_secret, "unstable"), (grow_an_argument, "moved"),
    (change_a_series, "moved"),
])  # fmt: skip
def test_what_a_plan_cannot_do_again_is_refused(make: Callable[[], Any], code: str) -> None:
    with pytest.raises(roam.CaptureError) as caught:
        losses(Case(make(), lambda value: None), roam.compile)
    assert caught.value.code == code


class WithAnchors(torch.optim.SGD):
    """Pulls parameters to anchors, where it has been given some."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if "anchor" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["anchor"], 0.5)
        super().step(closure)


def losses_with_a_change(train: Callable[[Any], float], change: Callable[[], None]) -> list[float]:
    """Those of eight batches, with a change before the fifth."""
    found = []
    for index in range(8):
        if index == 4:
            change()
        found.append(train(torch.randn(3, 4)))
    return found


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_that_appears_is_noticed(momentum: float) -> None:
    def trained(wrap: Callable[[Any], Any]) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 2)
        optimizer = WithAnchors(net.parameters(), lr=0.1, momentum=momentum)

        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        def change() -> None:
            optimizer.state[net.bias]["anchor"] = torch.ones(2)

        train = wrap(step)
        return losses_with_a_change(train, change), train

    seen, _ = trained(lambda step: step)
    found, train = trained(roam.compile)
    assert found == seen
    assert len(train.plans) == (2 if momentum == 0.0 else 3)


def test_how_many_entries_there_are_is_noticed() -> None:
    def trained(wrap: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(0)
        net, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = net(x).pow(2).mean() * (1 + len(optimizer.state))
            loss.backward()
            optimizer.step()
            return loss.item()

        def change() -> None:
            optimizer.state[other.weight]["note"] = torch.ones(2)

        return losses_with_a_change(wrap(step), change)

    assert trained(roam.compile) == trained(lambda step: step)


def test_state_of_no_parameter_is_guarded() -> None:
    class Mine(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.state["shared"] = {"factor": 1.0}  # type: ignore[index]

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    factor = self.state["shared"]["factor"]
                    parameter.add_(parameter.grad, alpha=-group["lr"] * factor)

    def weights(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 4)
        optimizer = Mine(net.parameters())

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            net(x).pow(2).sum().backward()
            optimizer.step()

        train = wrap(step)
        for index in range(STEPS):
            optimizer.state["shared"]["factor"] = 1.0 + index // 2  # type: ignore[index]
            train(torch.ones(3, 4))
        return [parameter.detach() for parameter in net.parameters()]

    for one, other in zip(weights(lambda step: step), weights(roam.compile), strict=True):
        assert torch.equal(one, other)


def test_state_that_is_no_dictionary_is_refused_by_name() -> None:
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[net.weight] = torch.zeros(4, 4)  # type: ignore[assignment]

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(x).pow(2).sum().backward()
        optimizer.step()

    with pytest.raises(roam.CaptureError, match="as a parameter's state") as caught:
        roam.compile(step)(torch.ones(3, 4))
    assert caught.value.code == "optimizer_state"


def test_keys_of_a_group_may_be_of_several_kinds() -> None:
    def weights(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD([{"params": [*net.parameters()], 1: "mine"}], lr=0.1)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            net(x).pow(2).sum().backward()
            optimizer.step()

        train = wrap(step)
        for _ in range(2):
            train(torch.ones(3, 4))
        return [parameter.detach() for parameter in net.parameters()]

    for one, other in zip(weights(lambda step: step), weights(roam.compile), strict=True):
        assert torch.equal(one, other)


def test_a_released_view_of_memory_is_passed_by() -> None:
    view = memoryview(bytearray(4))
    view.release()
    assert losses(Case(lambda: 1.0 if view is None else 2.0, lambda value: None), roam.compile)


def test_another_class_of_an_object_with_slots_is_noticed() -> None:
    class One:
        __slots__ = ("factor",)

        def value(self) -> float:
            return 1.0

    class Two:
        __slots__ = ("factor",)

        def value(self) -> float:
            return 2.0

    held = One()
    held.factor = 3.0

    def change(value: float) -> None:
        held.__class__ = One if value < 2 else Two  # type: ignore[assignment]

    case = Case(lambda: held.value() * held.factor, change)
    seen = losses(case, lambda step: step)
    assert losses(case, roam.compile) == seen


def test_operators_of_another_thread_are_refused_by_name() -> None:
    net = torch.nn.Linear(4, 4)

    def step(x: torch.Tensor) -> None:
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(net(x).sum()))
        thread.start()
        thread.join()
        found[0].backward()

    with pytest.raises(roam.CaptureError, match="run all operators in one thread") as caught:
        roam.compile(step)(torch.ones(3, 4))
    assert caught.value.code == "unknown_tensor"


@functools.lru_cache(maxsize=4)
def factor_of(number: int) -> float:
    return number + 1.0


def result_that_is_made_again() -> Case:
    def change(_: float) -> None:
        for number in range(2, 8):
            factor_of(number)

    return Case(lambda: factor_of(1), change)


def table_with_lists() -> Case:
    table = pandas.DataFrame({"tokens": [[1, 2], [3]], "label": [1, 2]})
    return Case(lambda: len(table), lambda value: None)


def proxy_of_what_is_gone() -> Case:
    proxies = [weakref.proxy(Held())]
    return Case(lambda: len(proxies), lambda value: None)


@pytest.mark.parametrize("make", [
    result_that_is_made_again, table_with_lists, proxy_of_what_is_gone,
])  # fmt: skip
def test_what_does_not_change_needs_no_new_plan(make: Callable[[], Case]) -> None:
    case = make()
    seen = losses(case, lambda step: step)
    steps: list[Any] = []

    def compiled(step: Any) -> Any:
        steps.append(roam.compile(step))
        return steps[-1]

    assert losses(case, compiled) == seen
    assert len(steps[0].plans) == 1


@pytest.mark.parametrize("default", [{"value": 2.0}, torch.ones(4)])
def test_a_context_variable_at_its_default_stays_unset(default: Any) -> None:
    variable = contextvars.ContextVar("variable", default=default)
    is_number = isinstance(default, dict)
    case = Case(
        lambda: variable.get()["value"] if is_number else variable.get(), lambda value: None
    )
    losses(case, roam.compile)
    assert variable not in contextvars.copy_context()


def test_a_namespace_package_of_the_users_may_have_the_name_of_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "own.py").write_text("VALUE = 1.0\ndef value(): return VALUE\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("roam.state.library_code._installed", {})
    own = importlib.import_module("mlflow.own")
    for name in ("mlflow", "mlflow.own"):
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    case = Case(lambda: own.value(), lambda value: setattr(own, "VALUE", value))
    seen = losses(case, lambda step: step)
    assert losses(case, roam.compile) == seen
