"""Tensors whose gradient history was made before the step: one that only replaces them, or that no
backward pass takes into their history, is as in eager PyTorch; any other is refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import roam
from newer import needs_2_15
from training import assert_same_bits, tensors_and_numbers

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
nn = torch.nn


# -- attributes that each forward pass makes anew


class Every(prune.BasePruningMethod):  # type: ignore[misc]
    """A method of the user's own."""

    PRUNING_TYPE = "unstructured"

    def __init__(self, distance: int) -> None:
        self.distance = distance

    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        mask = default_mask.clone()
        mask.view(-1)[:: self.distance] = 0
        return mask


MADE_ANEW: dict[str, Callable[[Any], Any]] = {
    "l1_unstructured": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "random_unstructured": lambda layer: prune.random_unstructured(layer, "weight", 0.3),
    "ln_structured": lambda layer: prune.ln_structured(layer, "weight", 0.25, n=2, dim=0),
    "custom_from_mask": lambda layer: prune.custom_from_mask(layer, "bias", torch.arange(8) % 2),
    "a method of one's own": lambda layer: Every.apply(layer, "weight", 3),
    "several methods": lambda layer: (
        prune.l1_unstructured(layer, "weight", 0.3),
        prune.ln_structured(layer, "weight", 0.25, n=1, dim=1),
    ),
    "weight_norm": nn.utils.weight_norm,
    "weight_norm of all": lambda layer: nn.utils.weight_norm(layer, dim=None),
    "spectral_norm": nn.utils.spectral_norm,
}


def seen_by_autograd(net: nn.Module) -> list[Any]:
    """Each tensor that a module holds, as it is and as autograd sees it, whether it is registered
    or not."""
    found: list[Any] = []
    for module in net.modules():
        held = {**vars(module), **module._parameters, **module._buffers}
        for name in sorted(name for name, value in held.items() if isinstance(value, torch.Tensor)):
            tensor = held[name]
            found += [
                name,
                tensor.requires_grad,
                tensor.is_leaf,
                type(tensor).__name__,
                tensor.detach().clone(),
            ]
    return found


def life(
    wrap: Callable[..., Any], change: Callable[[Any], Any], between: dict[int, Callable[[Any], Any]]
) -> list[Any]:
    """Eight steps of a net that was changed, with something else before some of them; all that is
    seen."""
    torch.manual_seed(0)
    my = SimpleNamespace(
        net=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), change=change
    )
    change(my.net[0])
    my.optimizer = torch.optim.AdamW(my.net.parameters(), 1e-2)

    def train(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    my.train, my.step, seen = train, wrap(train), []
    for index in range(8):
        seen.append(between.get(index, lambda my: None)(my))
        loss = my.step(my.net, my.optimizer, torch.randn(4, 6))
        seen += [loss.detach(), loss.requires_grad, *seen_by_autograd(my.net)]
    my.optimizer.zero_grad()
    my.net(torch.randn(4, 6)).square().mean().backward()  # what eager PyTorch makes of what is left
    gradients = [parameter.grad for parameter in my.net.parameters()]
    return tensors_and_numbers(seen, gradients, list(my.net.state_dict()), seen_by_autograd(my.net))


def eagerly(my: Any) -> Any:
    return my.train(my.net, my.optimizer, torch.randn(4, 6)).detach()


def evaluated(my: Any) -> Any:
    with torch.no_grad():
        return my.net.eval()(torch.randn(4, 6)), my.net.train() and None


def loaded(my: Any) -> Any:
    state = {name: value * 0.5 for name, value in my.net.state_dict().items()}
    return str(my.net.load_state_dict(state))


def copied(my: Any) -> Any:
    """Only leaves can be copied; so it is done after an evaluation, which leaves such."""
    try:
        copy.deepcopy(my.net)
    except RuntimeError as error:
        refused = "created explicitly by the user" in str(error)
    else:
        refused = False
    evaluated(my)
    my.net = copy.deepcopy(my.net)
    my.optimizer = torch.optim.AdamW(my.net.parameters(), 1e-2)
    return refused


def looked_at(my: Any) -> Any:
    return my.net[0].weight.detach().norm(), my.net[0].weight.sum().requires_grad


def changed_again(my: Any) -> Any:
    """Pruned further, or normed in the other layer."""
    pruned = isinstance(next(iter(my.net[0]._forward_pre_hooks.values())), prune.BasePruningMethod)
    if pruned:
        prune.l1_unstructured(my.net[0], "weight", 0.2)
    else:
        my.change(my.net[2])
        my.optimizer = torch.optim.AdamW(my.net.parameters(), 1e-2)


def removed(my: Any) -> Any:
    for hook in list(my.net[0]._forward_pre_hooks.values()):
        if isinstance(hook, prune.BasePruningMethod):
            prune.remove(my.net[0], hook._tensor_name)
        elif type(hook).__name__ == "WeightNorm":
            nn.utils.remove_weight_norm(my.net[0])
        else:
            nn.utils.remove_spectral_norm(my.net[0])
    my.optimizer = torch.optim.AdamW(my.net.parameters(), 1e-2)


BETWEEN: dict[str, dict[int, Callable[[Any], Any]]] = {
    "nothing": {},
    "eager steps": {2: eagerly, 5: eagerly},
    "evaluation and a look": {1: looked_at, 3: evaluated, 6: looked_at},
    "state and copies": {2: loaded, 4: copied, 6: eagerly},
    "more of it": {3: changed_again},
    "its end": {2: eagerly, 4: removed},
}


@pytest.mark.sweep
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("name", MADE_ANEW)
def test_what_each_forward_pass_makes_anew_is_as_eagerly(name: str, between: str) -> None:
    eager = life(lambda step: step, MADE_ANEW[name], BETWEEN[between])
    planned = life(
        lambda step: roam.compile(step, keep_grads=True, poison=True),
        MADE_ANEW[name],
        BETWEEN[between],
    )
    assert_same_bits(eager, planned)


def make(
    change: Callable[[Any], Any] = MADE_ANEW["l1_unstructured"],
) -> tuple[Any, Any, Callable[..., Any]]:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    change(net[0])

    def train(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return net, torch.optim.AdamW(net.parameters(), 1e-2), train


@pytest.mark.parametrize("name", ["l1_unstructured", "weight_norm", "spectral_norm"])
def test_compare_puts_the_tensor_back_with_its_history(name: str) -> None:
    net, optimizer, train = make(MADE_ANEW[name])
    train(net, optimizer, torch.randn(4, 6))
    weight, history = net[0].weight, net[0].weight.grad_fn
    comparison = roam.compare(train, net, optimizer, torch.randn(4, 6))
    assert comparison.equal, str(comparison)
    assert net[0].weight is weight
    assert weight.grad_fn is history is not None


@pytest.mark.parametrize("name", ["l1_unstructured", "weight_norm", "spectral_norm"])
def test_the_backend_of_torch_compile(name: str) -> None:
    def losses(backend: str) -> list[Any]:
        torch.manual_seed(0)
        torch.compiler.reset()
        net, optimizer, train = make(MADE_ANEW[name])
        model = torch.compile(net, backend=backend)
        losses = [train(model, optimizer, torch.randn(4, 6)).detach() for _ in range(3)]
        return [*losses, *tensors_and_numbers(net.state_dict())]

    assert_same_bits(losses("aot_eager"), losses("roam"))


def test_a_model_of_fakes_has_the_graph_of_a_real_one() -> None:
    x = torch.randn(4, 6)
    net, optimizer, train = make(MADE_ANEW["custom_from_mask"])
    real = roam.capture(train, net, optimizer, x)
    with roam.fake():
        x = torch.randn(4, 6)
        net, optimizer, train = make(MADE_ANEW["custom_from_mask"])
        net(x)
    bias = net[0].bias
    faked = roam.capture(train, net, optimizer, x)
    assert faked.to_json() == real.to_json()
    assert net[0].bias is bias
    assert type(bias.grad_fn).__name__ == "MulBackward0"


@pytest.mark.parametrize(
    "change", [prune.l1_unstructured, nn.utils.weight_norm, nn.utils.parametrizations.weight_norm]
)
def test_weights_of_recurrent_layers(change: Callable[..., Any]) -> None:
    """As DropConnect does it; the layer keeps its weights in a list, and weak references to
    them."""

    def run(wrap: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        lstm, head = nn.LSTM(5, 7, batch_first=True), nn.Linear(7, 2)
        change(lstm, "weight_hh_l0", *([0.5] if change is prune.l1_unstructured else []))
        optimizer = torch.optim.SGD([*lstm.parameters(), *head.parameters()], 0.1, momentum=0.9)

        def train(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = head(lstm(x)[0][:, -1]).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step, seen = wrap(train), []
        for index in range(5):
            if index == 2:
                seen.append(train(torch.randn(3, 4, 5)))
            if index == 3:
                with torch.no_grad():
                    seen.append(lstm(torch.randn(3, 4, 5))[0])
            seen += [step(torch.randn(3, 4, 5)), *seen_by_autograd(lstm)]
            seen.append(lstm._flat_weights[1] is lstm.weight_hh_l0)
        return [*seen, *tensors_and_numbers(lstm.state_dict(), head.state_dict())]

    assert_same_bits(run(lambda step: step), run(roam.compile))


def test_recurrent_gemma() -> None:
    """It keeps the state of its recurrence, and drops it before the next forward pass reads it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.RecurrentGemmaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1,
        lru_width=32, attention_window_size=16, head_dim=8, bos_token_id=0, eos_token_id=0, pad_token_id=0, use_cache=False,
    )  # fmt: skip

    def run(wrap: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        model = transformers.RecurrentGemmaForCausalLM(config).train()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

        def train(tokens: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        step, seen = wrap(train), []
        for index in range(4):
            if index == 2:
                seen.append(train(torch.randint(61, (2, 9))))
            kept = model.model.layers[0].temporal_block.rg_lru.recurrent_states
            seen += [step(torch.randint(61, (2, 9))), *seen_by_autograd(model), kept is not None]
        return tensors_and_numbers(seen)

    assert_same_bits(run(lambda step: step), run(roam.compile))


# -- what is read


class Kept:
    """An object of the user's with a state that has a history."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
        self.state: Any = None
        self.other = nn.Linear(6, 6)(torch.randn(4, 6))
        self.loss: Any = None
        self.remember(torch.randn(4, 6))

    def remember(self, x: torch.Tensor) -> None:
        """The eager calculation whose history comes from before the step."""
        self.state = self.encoder(x).tanh()


def under_no_grad(my: Kept, x: torch.Tensor) -> Any:
    with torch.no_grad():
        x = x + my.state
    my.head(x).square().sum().backward()


def as_detached(my: Kept, x: torch.Tensor) -> Any:
    my.head(x + my.state.detach()).square().sum().backward()


def as_data(my: Kept, x: torch.Tensor) -> Any:
    my.head(x + my.state.data).square().sum().backward()


def beside_the_loss(my: Kept, x: torch.Tensor) -> Any:
    my.head(x).square().sum().backward()
    return (my.state * x).sum()  # requires a gradient, and nobody goes there


def replaced_by_what_is_detached(my: Kept, x: torch.Tensor) -> Any:
    my.state = (my.state.detach() * 0.5 + my.head(x)).tanh()
    my.state.sum().backward()


def replaced_though_read(my: Kept, x: torch.Tensor) -> Any:
    before, my.state = my.state, my.head(x)
    my.state.square().sum().backward()
    return before.norm().item(), before.requires_grad, before.is_leaf


def written_under_no_grad(my: Kept, x: torch.Tensor) -> Any:
    with torch.no_grad():
        my.state.mul_(0.5).add_(x)
    my.head(my.state.detach()).square().sum().backward()


def assigned_data(my: Kept, x: torch.Tensor) -> Any:
    my.state.data = x * 2
    my.head(my.state.detach()).square().sum().backward()


def gradient_of_the_state(my: Kept, x: torch.Tensor) -> Any:
    """Its history is not gone into: the gradient of a cached representation."""
    return torch.autograd.grad(my.head(my.state * x).square().sum(), my.state)


def gradient_of_what_is_made(my: Kept, x: torch.Tensor) -> Any:
    y = (x * 2).requires_grad_()
    return torch.autograd.grad((my.head(y) * my.state).sum(), y)


def two_states(my: Kept, x: torch.Tensor) -> Any:
    with torch.no_grad():
        my.state, my.other = my.other + x, my.state * 2
    my.head(x).sum().backward()


def with_a_node(my: Kept, x: torch.Tensor) -> Any:
    if my.state.grad_fn is not None and my.state.requires_grad:
        x = x * 2
    my.head(x).sum().backward()


EXACT = [
    under_no_grad, as_detached, as_data, beside_the_loss, replaced_by_what_is_detached, replaced_though_read,
    written_under_no_grad, assigned_data, gradient_of_the_state, gradient_of_what_is_made, two_states, with_a_node,
]  # fmt: skip


def detached_in_place(my: Kept, x: torch.Tensor) -> Any:
    my.state.detach_()
    my.state = my.head(x + my.state).tanh()
    my.state.sum().backward()


def detached_in_place_and_kept(my: Kept, x: torch.Tensor) -> Any:
    my.head(x + my.state.detach_()).sum().backward()


DETACHED = [detached_in_place, detached_in_place_and_kept]


@pytest.mark.parametrize("read", EXACT)
def test_what_is_read_and_no_gradient_flows_through_is_as_eagerly(read: Callable[..., Any]) -> None:
    check_as_eagerly(read)


@pytest.mark.auto
@needs_2_15
@pytest.mark.parametrize("read", DETACHED)
def test_a_history_that_the_step_ends_in_place_is_ended_beside_the_plan(
    read: Callable[..., Any],
) -> None:
    check_as_eagerly(read)


@pytest.mark.parametrize("read", DETACHED)
def test_a_history_that_the_step_ends_in_place_is_refused(read: Callable[..., Any]) -> None:
    my = Kept()
    with pytest.raises(roam.CaptureError, match=r"put x\.detach\(\) in its place") as caught:
        roam.compile(read)(my, torch.randn(4, 6))
    assert caught.value.code == "outer_history"
    assert not my.state.is_leaf
    my.state.sum().backward()  # its history is as it was


def check_as_eagerly(read: Callable[..., Any]) -> None:
    def run(wrap: Callable[..., Any]) -> list[Any]:
        my = Kept()
        optimizer = torch.optim.SGD(my.head.parameters(), 0.1)

        def train(x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            result = read(my, x)
            optimizer.step()
            return result

        step, seen = wrap(train), []
        for index in range(6):
            before = my.state
            if index in (1, 4):
                seen.append(train(torch.randn(4, 6)))
            if index == 3:
                my.remember(torch.randn(4, 6))
            seen.append(step(torch.randn(4, 6)))
            for tensor in (before, my.state, my.other):
                seen += [tensor, tensor.requires_grad, tensor.is_leaf, tensor.grad_fn is None]
            seen = tensors_and_numbers(seen)
        return tensors_and_numbers(
            seen, my.head.state_dict(), [p.grad for p in my.head.parameters()]
        )

    assert_same_bits(
        run(lambda step: step), run(lambda step: roam.compile(step, keep_grads=True, poison=True))
    )


@pytest.mark.parametrize("read", EXACT)
def test_compare_says_so(read: Callable[..., Any]) -> None:
    my = Kept()
    comparison = roam.compare(lambda x: read(my, x), torch.randn(4, 6))
    assert comparison.equal, str(comparison)


# -- what a backward pass goes on into


def flows(my: Kept, x: torch.Tensor) -> Any:
    y = my.head(x)
    (y * my.state).sum().backward()  # here
    return y


def flows_on_a_later_line(my: Kept, x: torch.Tensor) -> Any:
    y = my.state * 2  # here
    loss = (y * my.head(x)).sum()
    loss.backward()


def is_the_root(my: Kept, x: torch.Tensor) -> Any:
    my.state.sum().backward()  # here


def flows_by_grad(my: Kept, x: torch.Tensor) -> Any:
    y = my.head(x) * my.state  # here
    return torch.autograd.grad(y.sum(), list(my.head.parameters()))


def flows_into_one_of_the_inputs(my: Kept, x: torch.Tensor) -> Any:
    y = my.encoder(x) * my.state  # here
    torch.autograd.backward(y.sum(), inputs=[my.encoder.weight])


def from_one_state_to_another(my: Kept, x: torch.Tensor) -> Any:
    y = my.state * my.other  # here
    return torch.autograd.grad(y.sum(), [my.state])


def by_a_checkpoint(my: Kept, x: torch.Tensor) -> Any:
    y = checkpoint(my.head, my.state, use_reentrant=False)  # here
    y.sum().backward()


def by_a_reentrant_checkpoint(my: Kept, x: torch.Tensor) -> Any:
    y = checkpoint(my.head, my.state, use_reentrant=True)
    y.sum().backward()  # here


def through_a_second_gradient(my: Kept, x: torch.Tensor) -> Any:
    x = x.clone().requires_grad_()
    y = x.square() * my.state
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    gradient.sum().backward()  # here


def swallowed(my: Kept, x: torch.Tensor) -> Any:
    try:
        (my.head(x) * my.state).sum().backward()  # here
    except Exception:  # noqa: BLE001
        return x


FLOWS = [
    flows, flows_on_a_later_line, is_the_root, flows_by_grad, flows_into_one_of_the_inputs, from_one_state_to_another, by_a_checkpoint,
    by_a_reentrant_checkpoint, through_a_second_gradient, swallowed,
]  # fmt: skip


@pytest.mark.parametrize("read", FLOWS)
def test_a_backward_pass_into_the_history_is_refused_at_the_line_that_leads_there(
    read: Callable[..., Any],
) -> None:
    my = Kept()
    with pytest.raises(roam.CaptureError, match=r"detach closure my\.(state|other) here") as caught:
        roam.compile(lambda x: read(my, x))(torch.randn(4, 6))
    assert caught.value.code == "outer_history"
    lines, first = inspect.getsourcelines(read)
    (number,) = (first + place for place, line in enumerate(lines) if line.endswith("# here\n"))
    assert caught.value.source.split(" in ")[0].endswith(f"{__file__.rpartition('/')[2]}:{number}")
    assert all(
        parameter.grad is None for parameter in (*my.encoder.parameters(), *my.head.parameters())
    )
    assert roam.compare(lambda x: read(my, x), torch.randn(4, 6)).outcome == "refused"
    my.state.sum().backward()  # its history is as it was


def test_what_is_refused_is_no_exact_step_in_eager_pytorch() -> None:
    """It goes on to parameters behind the state, the first time; then PyTorch refuses it."""
    my = Kept()
    flows(my, torch.randn(4, 6))
    assert my.encoder.weight.grad is not None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        flows(my, torch.randn(4, 6))


def test_a_state_that_is_kept_without_detach_is_refused_at_its_second_call() -> None:
    """As eager PyTorch does, but for the first, which finds no history."""

    def run(wrap: Callable[..., Any]) -> Any:
        my = Kept()
        my.state = torch.zeros(4, 6)

        def train(x: torch.Tensor) -> None:
            my.state = my.head(x + my.state).tanh()
            my.state.sum().backward()

        step = wrap(train)
        step(torch.randn(4, 6))
        left = tensors_and_numbers(my.state, my.head.weight.grad)
        step(torch.randn(4, 6))
        return left

    with pytest.raises(RuntimeError, match="a second time"):
        run(lambda step: step)
    with pytest.raises(
        roam.CaptureError, match=r"detach closure my\.state here, as in x\.detach\(\)"
    ) as caught:
        run(roam.compile)
    assert caught.value.code == "outer_history"


def test_a_view_of_a_parameter_from_before_the_step_is_refused() -> None:
    """Eager PyTorch goes on to the parameter, at every call."""
    weight = nn.Parameter(torch.randn(4, 6))
    rows = weight[:2]

    def step(x: torch.Tensor) -> None:
        (x * rows).sum().backward()

    with pytest.raises(roam.CaptureError, match=r"or calculate it in the step") as caught:
        roam.compile(step)(torch.randn(6))
    assert caught.value.code == "outer_history"
    planned = roam.compile(lambda x: (x * weight[:2]).sum().backward(), keep_grads=True)
    planned(torch.ones(6))
    assert_same_bits([weight.grad], [torch.tensor([[1.0] * 6] * 2 + [[0.0] * 6] * 2)])


def test_an_argument_with_a_history() -> None:
    """Feature extractors that run eagerly around the step."""
    extractor, head = nn.Linear(6, 6), nn.Linear(6, 6)

    def probe(h: torch.Tensor) -> torch.Tensor:
        loss = head(h.detach()).square().sum()
        loss.backward()
        return loss.detach()

    step, x = roam.compile(probe, keep_grads=True), torch.randn(4, 6)
    results = []
    for function in (probe, step, step):
        head.zero_grad()
        h = extractor(x)
        results.append(tensors_and_numbers(function(h), head.weight.grad))
        h.sum().backward()  # the history is still there
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])
    assert len(step.kept().plans) == 1
    with pytest.raises(roam.CaptureError, match=r"detach args\[0\] here") as caught:
        roam.compile(lambda h: head(h).sum().backward())(extractor(x))
    assert caught.value.code == "outer_history"


# -- what else belongs to a tensor with a history


def test_a_gradient_that_a_state_keeps_is_refused_once_it_is_read() -> None:
    my = Kept()
    my.state.retain_grad()
    step = roam.compile(lambda x: my.head(x).sum().backward())
    step(torch.randn(4, 6))  # nobody looks at the state
    with pytest.raises(roam.CaptureError, match=r"retain_grad\(\)") as caught:
        roam.compile(lambda x: my.state.grad)(torch.randn(4, 6))
    assert caught.value.code == "outer_history"


def test_a_gradient_that_a_later_state_keeps_is_refused() -> None:
    my = Kept()

    def train(x: torch.Tensor) -> torch.Tensor:
        return x if my.state.grad is None else x + my.state.grad

    step = roam.compile(train)
    step(torch.randn(4, 6))
    my.state.retain_grad()
    my.state.sum().backward()
    with pytest.raises(roam.CaptureError, match=r"retain_grad\(\)"):
        step(torch.randn(4, 6))


def test_a_step_that_has_a_state_keep_its_gradient_is_refused() -> None:
    my = Kept()
    with pytest.raises(roam.CaptureError, match=r"calls retain_grad") as caught:
        roam.compile(lambda x: my.state.retain_grad())(torch.randn(4, 6))
    assert caught.value.code == "moved"


def test_a_state_whose_gradient_hooks_would_be_called_is_refused() -> None:
    my = Kept()
    my.state.register_hook(lambda gradient: gradient * 2)
    roam.compile(as_detached)(my, torch.randn(4, 6))
    with pytest.raises(roam.CaptureError, match=r"detach .*my\.state here") as caught:
        roam.compile(gradient_of_the_state)(my, torch.randn(4, 6))
    assert caught.value.code == "outer_history"


def test_a_state_that_is_a_leaf_after_the_step_is_refused() -> None:
    my = Kept()

    def step(x: torch.Tensor) -> None:
        state = my.state.detach_().requires_grad_()
        (state * x).sum().backward()

    with pytest.raises(roam.CaptureError) as caught:
        roam.compile(step)(torch.randn(4, 6))
    assert caught.value.code == "outer_history"
    assert not my.state.is_leaf


@pytest.mark.auto
@needs_2_15
def test_gradients_with_a_history() -> None:
    """Of `backward(create_graph=True)` in eager PyTorch; `zero_grad` ends it in place where it
    fills with zeros."""

    def run(wrap: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def train(x: torch.Tensor, zero: bool) -> None:
            if zero:
                optimizer.zero_grad(set_to_none=False)
            net(x).square().sum().backward()
            optimizer.step()

        step, seen = wrap(train), []
        for index in range(6):
            if index in (0, 3):
                net(torch.randn(4, 6)).square().sum().backward(create_graph=True)
            gradient = net.weight.grad
            step(torch.randn(4, 6), index != 3)
            seen += [
                gradient is net.weight.grad,
                net.weight.grad,
                net.weight.grad.requires_grad,
                gradient.requires_grad,
            ]
            seen = tensors_and_numbers(seen, net.weight)
        return seen

    assert_same_bits(run(lambda step: step), run(lambda step: roam.compile(step, keep_grads=True)))


# -- views that require a gradient and get none


def cut_off() -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(8, requires_grad=True)
    with torch.no_grad():
        return weight, weight[:4]


def test_a_view_made_without_gradients_is_refused() -> None:
    _, row = cut_off()
    scale = torch.ones(4, requires_grad=True)

    @roam.compile
    def step():
        (row * scale).sum().backward()

    with pytest.raises(roam.CaptureError, match=r"row is a view .* detach it") as caught:
        step()
    assert caught.value.code == "autograd_node"


def test_such_a_view_does_not_take_the_plan_of_a_leaf() -> None:
    """In eager PyTorch it gets no gradient."""
    _, row = cut_off()
    scale = torch.ones(4, requires_grad=True)

    @roam.compile
    def step(leaf):
        (leaf * scale).sum().backward()

    for _ in range(3):
        step(torch.randn(8)[:4].requires_grad_())
    with pytest.raises(roam.CaptureError, match="it gets no gradient"):
        step(row)
    assert row.grad is None


def test_such_views_of_the_step_are_as_in_eager_pytorch() -> None:
    def script(wrap):
        torch.manual_seed(0)
        net, scale = nn.Linear(4, 4), torch.ones(4, requires_grad=True)

        @wrap
        def step():
            with torch.no_grad():
                row = net.weight[1]
            ((row * scale).sum() + (row * 2).sum() + net(scale).sum()).backward()
            return row

        rows = [step() for _ in range(3)]
        return [
            [(row, row.requires_grad, row.is_leaf) for row in rows],
            net.weight.grad, scale.grad,
        ]  # fmt: skip

    assert_same_bits(
        tensors_and_numbers(script(roam.compile)), tensors_and_numbers(script(lambda f: f))
    )
