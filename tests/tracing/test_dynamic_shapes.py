"""Steps whose shapes and Python numbers come from values that are there before them: eager's bits
whatever the values become."""

from __future__ import annotations

import copy
import functools
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import roam
from newer import needs_2_15
from steps import both
from training import assert_same_bits, tensors_and_numbers

functional = torch.nn.functional
Body = Callable[..., Any]


def train(
    body: Body, batches: Iterable[Any], wrap: Callable[[Any], Any], model: nn.Module, **options: Any
) -> tuple[list[Any], Any]:
    """What training by `body(model, *batch)` returns and leaves, and the step."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(0)

    @wrap
    def step(*batch: Any) -> Any:
        optimizer.zero_grad()
        loss = body(model, *batch)
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(*copy.deepcopy(batch)) for batch in batches]
    return tensors_and_numbers(
        losses, model.state_dict(), optimizer.state_dict(), torch.get_rng_state()
    ), step


def same(body: Body, batches: Iterable[Any], model: nn.Module | None = None) -> Any:
    """Holds a step's bits by plan against eager's; the compiled step."""
    batches, model = list(batches), model or nn.Linear(4, 4)
    eager, _ = train(body, batches, lambda step: step, model)
    planned, step = train(
        body, batches, lambda step: roam.compile(step, pool=True, poison=True), model
    )
    assert_same_bits(eager, planned)
    return step


def refused(body: Body, *batch: Any) -> roam.CaptureError:
    with pytest.raises(roam.CaptureError) as caught:
        train(body, [batch], roam.compile, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    return caught.value


def captures(step: Any) -> int:
    return len(step.kept().plans)


def batches(decide: Callable[[torch.Generator], torch.Tensor], count: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(6, 4, generator=generator), decide(generator)) for _ in range(count)]


MASKS = [
    (torch.arange(24.0).view(6, 4), torch.tensor(mask))
    for mask in (
        [True, False, True, False, False, True],
        [False, True, True, True, False, False],  # as many
        [False] * 6,
        [True] * 6,
    )
]
COUNTS = [(x, torch.tensor(counts)) for (x, _), counts in zip(MASKS, ([1, 2, 0, 1, 0, 3], [3, 0, 1, 0, 2, 1], [1] * 6, [0, 2] * 3), strict=True)]  # fmt: skip


class TestMasksOfTheBatch:
    @pytest.mark.parametrize(
        "select",
        [
            lambda y, mask: y[mask],
            lambda y, mask: y[mask, 1],
            lambda y, mask: y[:, torch.tensor([True, False, True, True])][mask],
            lambda y, mask: y.view(2, 3, 4)[mask.view(2, 3)],
            lambda y, mask: y.masked_select(mask[:, None]),
            lambda y, mask: y[mask.nonzero().squeeze(1)],
            lambda y, mask: y[torch.where(mask)[0]],
            lambda y, mask: y[mask.argwhere()[:, 0]],
            lambda y, mask: y[mask].view(mask.sum(), 2, 2),
            lambda y, mask: y[mask.to(torch.uint8)],
            lambda y, mask: y[: mask.sum()],
            lambda y, mask: y[: mask.sum().item()],
            lambda y, mask: y.narrow(0, 0, int(mask.sum())),
            lambda y, mask: y * torch.arange(mask.sum() + 1).sum(),
            lambda y, mask: torch.cat(
                [y[:0], *(row[None] for row, wanted in zip(y, mask, strict=True) if wanted)]
            ),
        ],
    )
    @pytest.mark.filterwarnings("ignore:indexing with dtype")
    def test_select_rows(self, select: Any) -> None:
        same(lambda model, x, mask: select(model(x), mask).square().sum(), MASKS)

    def test_are_asked_only_what_decides(self) -> None:
        step = same(lambda model, x, mask: model(x)[mask].square().sum(), [*MASKS[:2], *MASKS[:2]])
        assert captures(step) == 1  # as many rows are as many rows

    def test_that_decide_no_shape_are_not_asked(self) -> None:
        def body(model, x, mask):
            y = model(x).clone()
            y[mask] = 0.0
            return y.square().sum() / (mask.sum().item() + 1)

        assert captures(same(body, MASKS)) == 1

    def test_written_in_the_step_before_are_refused(self) -> None:
        error = refused(lambda model, x, mask: model(x)[mask.logical_not_()].sum(), *MASKS[0])
        assert error.code == "data_dependent"

    def test_made_of_constants_ask_nothing(self) -> None:
        def body(model, x):
            similarity = model(x) @ model(x).T
            mask = torch.eye(6, dtype=torch.bool)
            labels = (
                (torch.arange(3).repeat(2)[:, None] == torch.arange(3).repeat(2)[None])
                .float()[~mask]
                .view(6, -1)
            )
            rest = similarity[~mask].view(6, -1)
            return rest[labels.bool()].sum() - rest[~labels.bool()].view(6, -1).logsumexp(1).sum()

        step = same(body, [(torch.randn(6, 4),) for _ in range(3)])
        assert captures(step) == 1


class TestNumbersOfTheBatch:
    @pytest.mark.parametrize(
        "use",
        [
            lambda y, counts: y.repeat_interleave(counts, dim=0).square(),
            lambda y, counts: y[counts.unique()],
            lambda y, counts: y[: len(counts.unique_consecutive())],
            lambda y, counts: y[:1] * torch.unique_consecutive(counts, return_counts=True)[1][:, None],
            lambda y, counts: y[:3] * torch.unique(counts, return_inverse=True, return_counts=True)[1][:3, None],
            lambda y, counts: y[: len(torch.bincount(counts))],
            lambda y, counts: torch.cat([part.square() for part in y.repeat(2, 1)[: counts.sum()].split(counts.tolist())]),
            lambda y, counts: sum(y[step] * step for step in range(int(counts.max()) + 1)),
            lambda y, counts: y if counts[0] else y.square(),
            lambda y, counts: y * float(f"{counts.sum():3d}") if f"{counts.any()}" == "True" else y,
            lambda y, counts: torch.stack([y[count] for count in counts]),
            lambda y, counts: y.sum() * torch.ones(int(counts.sum() * 0.5) + 1).sum(),
        ],
    )  # fmt: skip
    def test_decide(self, use: Any) -> None:
        same(lambda model, x, counts: use(model(x), counts).sum(), COUNTS)

    def test_do_not_decide_where_the_size_is_given(self) -> None:
        def body(model: Any, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            size = int(COUNTS[0][1].sum())
            return model(x).repeat_interleave(counts, dim=0, output_size=size).square().sum()

        x, counts = COUNTS[0]
        assert captures(same(body, [(x, counts.roll(n)) for n in range(3)])) == 1

    def test_that_are_only_calculated_with_are_not_asked(self) -> None:
        step = same(lambda model, x, counts: model(x).sum() / counts.sum().item(), COUNTS)
        assert captures(step) == 1


def _in_place(kept: Any) -> None:
    kept.mask[1] = ~kept.mask[1]


def _by_numpy(kept: Any) -> None:
    kept.mask.numpy()[1] ^= True


def _by_data(kept: Any) -> None:
    kept.mask.data[1] ^= True


def _other_data(kept: Any) -> None:
    kept.mask.data = torch.ones(6, dtype=torch.bool)


def _another(kept: Any) -> None:
    kept.mask = torch.ones(6, dtype=torch.bool)


@pytest.mark.sweep
@pytest.mark.parametrize("change", [_in_place, _by_numpy, _by_data, _other_data, _another])
@pytest.mark.parametrize(
    "use",
    [
        lambda y, mask: y[mask].square(),
        lambda y, mask: y[mask.nonzero()[:, 0]].square() * len(mask.nonzero()),
        lambda y, mask: y[: int(mask.sum())].square(),
        lambda y, mask: y.square() if mask[1] else y,
    ],
)
def test_values_that_are_changed_between_calls_take_effect_at_once(change: Any, use: Any) -> None:
    def run(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        kept: Any = nn.Linear(4, 4)
        kept.register_buffer("mask", torch.tensor([True, False, True, False, False, True]))
        optimizer = torch.optim.SGD(kept.parameters(), lr=0.1)

        @wrap
        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = use(kept(x), kept.mask).sum()
            loss.backward()
            optimizer.step()
            return loss

        losses = []
        for number in range(4):
            losses.append(step(torch.ones(6, 4)))
            if number != 1:
                change(kept)
        return tensors_and_numbers(losses, kept.state_dict())

    assert_same_bits(run(lambda step: step), run(roam.compile))


def test_a_pointer_that_the_step_moves_is_planned_for_each_of_its_values() -> None:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("rows", torch.zeros(12, 4))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

        def forward(self, x: Any) -> Any:
            y, start = self.layer(x), int(self.pointer)
            with torch.no_grad():
                self.rows[start : start + 6] = y
                self.pointer[0] = (start + 6) % 12
            return (y @ self.rows.clone().T).square().mean()

    step = same(lambda model, x: model(x), [(torch.randn(6, 4),) for _ in range(6)], Queue())
    assert captures(step) == 2


LENGTHS = [(torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(n)), torch.tensor(lengths)) for n, lengths in
           enumerate(([5, 3, 2], [2, 5, 3], [4, 4, 1], [5, 3, 2]))]  # fmt: skip


def _packed(model: Any, x: Any, lengths: Any) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    result, hidden = model(packed)
    padded, found = pad_packed_sequence(result, batch_first=True)
    return padded.square().mean() + sum(part.sum() for part in hidden) + found.float().mean()


class TestPackedSequences:
    @pytest.mark.sweep
    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
    def test_of_every_layer(self, kind: Any) -> None:
        same(
            _packed,
            LENGTHS,
            kind(4, 5, num_layers=2, bidirectional=True, dropout=0.3, batch_first=True),
        )

    @pytest.mark.sweep
    @pytest.mark.parametrize(
        "body",
        [
            lambda model, x, lengths: _packed(model, x, lengths.tolist()),
            lambda model, x, lengths: _packed(model, (x * model.weight_ih_l0.mean()).tanh(), lengths),
            lambda model, x, lengths: checkpoint(
                _packed, model, x * model.weight_ih_l0.mean(), lengths, use_reentrant=False
            ),
            lambda model, x, lengths: model(
                pack_sequence([x[row, :length] for row, length in enumerate(lengths.tolist())], enforce_sorted=False)
            )[0].data.sum(),
            lambda model, x, lengths: pad_packed_sequence(
                model(pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False))[0],
                padding_value=-1.0, total_length=6,
            )[0].square().sum(),
        ],
    )  # fmt: skip
    def test_in_every_way(self, body: Any) -> None:
        same(body, LENGTHS[:2], nn.LSTM(4, 5, batch_first="pad" not in body.__code__.co_names))

    def test_gradients_of_gradients(self) -> None:
        def body(model, x, lengths):
            loss = _packed(model, (x * model.weight_ih_l0.mean()).tanh(), lengths)
            return loss + sum(
                g.square().sum()
                for g in torch.autograd.grad(loss, model.parameters(), create_graph=True)
            )

        same(body, LENGTHS[:2], nn.GRU(4, 5, batch_first=True))

    def test_batch_sizes_can_be_read(self) -> None:
        def body(model, x, lengths):
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            sizes = packed.batch_sizes
            assert sizes[0] == 3
            return (
                model(packed)[0].data.sum()
                * (sizes * 2).sum()
                * int(sizes[-1])
                * sum(sizes.tolist())
            )

        same(body, LENGTHS, nn.LSTM(4, 5, batch_first=True))

    def test_batch_sizes_can_be_returned(self) -> None:
        model = nn.Linear(4, 4)

        def step(x, lengths):
            return pack_padded_sequence(model(x), lengths, batch_first=True, enforce_sorted=False)

        compiled = roam.compile(step)
        for batch in LENGTHS:
            eager, planned = step(*batch), compiled(*batch)
            assert_same_bits(tensors_and_numbers(*eager), tensors_and_numbers(*planned))

    def test_batch_sizes_that_the_step_changes_are_refused(self) -> None:
        def body(model, x, lengths):
            rows = model(x.view(15, 4)).view(3, 5, 4)
            packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
            packed.batch_sizes.add_(1)
            return packed.data.sum()

        assert refused(body, *LENGTHS[0]).code == "refused_operator"

    def test_lengths_that_eager_pytorch_refuses_raise_its_error(self) -> None:
        model = nn.LSTM(4, 5, batch_first=True)

        @roam.compile
        def step(x, lengths):
            return _packed(model, x, lengths)

        step(*LENGTHS[0])
        with pytest.raises(RuntimeError, match="has to be greater than 0"):
            step(LENGTHS[0][0], torch.tensor([5, 0, 2]))


class TestCtcLoss:
    @pytest.mark.sweep
    @pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
    @pytest.mark.parametrize("as_given", [lambda lengths: lengths, torch.Tensor.tolist])
    @pytest.mark.parametrize("is_flat", [True, False])
    def test_of_tensors_and_lists(self, reduction: str, as_given: Any, is_flat: bool) -> None:
        def body(model, x, targets, inputs, lengths):
            scores = model(x).log_softmax(-1)
            return functional.ctc_loss(
                scores, targets, inputs, lengths, reduction=reduction, zero_infinity=True
            ).sum()

        generator = torch.Generator().manual_seed(0)
        given = []
        for lengths in ([3, 2, 1], [3, 0, 3], [4, 2, 1]):
            targets = torch.randint(
                1, 7, (sum(lengths),) if is_flat else (3, 4), generator=generator
            )
            sizes = torch.tensor([9, 9, 8]), torch.tensor(lengths)
            given.append(
                (torch.randn(9, 3, 4, generator=generator), targets, *map(as_given, sizes))
            )
        same(body, given, nn.Linear(4, 7))

    def test_only_the_longest_target_decides(self) -> None:
        def body(model, x, labels):
            wanted = labels >= 0
            targets = labels.masked_fill(~wanted, 0)
            return functional.ctc_loss(
                model(x).log_softmax(-1), targets, torch.full((3,), 9), wanted.sum(-1)
            )

        labels = [[[1, 2, -1], [1, 2, 3], [3, -1, -1]], [[1, 3, 2], [1, -1, -1], [3, -1, -1]]]
        step = same(body, [(torch.randn(9, 3, 4), torch.tensor(batch)) for batch in labels])
        assert captures(step) == 1


class TestRefusals:
    @pytest.mark.parametrize(
        "body",
        [
            lambda model, x, mask: model(x)[(x > 0).all(1)].sum(),
            lambda model, x, mask: model(x)[(model(x) > 0).all(1)].sum(),
            lambda model, x, mask: model(x)[torch.rand(6) < 0.5].sum(),
            lambda model, x, mask: model(x)[model[0].weight.argmax(1)].unique().sum(),
        ],
    )
    def test_of_what_no_plan_can_hold_for(self, body: Any) -> None:
        error = refused(body, *MASKS[0])
        assert error.code == "data_dependent"
        assert "use a form with a fixed shape" in str(error)

    @pytest.mark.parametrize(
        ("refused_use", "advised", "instead"),
        [
            (lambda y: y.nonzero(), "nonzero_static", lambda y: torch.nonzero_static(y, size=24)),
            (
                lambda y: y.argmax(1).bincount(),
                "minlength=n",
                lambda y: y.argmax(1).bincount(minlength=4),
            ),
            (
                lambda y: y.repeat_interleave(y.argmax(1) * 0 + 2, dim=0),
                "output_size",
                lambda y: y.repeat_interleave(y.argmax(1) * 0 + 2, dim=0, output_size=12),
            ),
            (
                lambda y: torch.linalg.lstsq(y, y).solution,
                "torch.linalg.pinv(a) @ b",
                lambda y: torch.linalg.pinv(y) @ y,
            ),
            (
                lambda y: y.argmax(1).unique(),
                "torch.sort",
                lambda y: (y.argmax(1).sort().values.diff() != 0).sum(),
            ),
            (lambda y: y[y > 0], "masked_fill", lambda y: y.masked_fill(y <= 0, 0.0)),
        ],
    )
    def test_tell_what_works_instead(self, refused_use: Any, advised: str, instead: Any) -> None:
        def body(use: Any) -> Any:
            return lambda model, x: use(model(x)).sum() * 0.5 + model(x).sum()

        error = refused(body(refused_use), MASKS[0][0])
        assert error.code == "data_dependent"
        assert advised in str(error)
        assert captures(same(body(instead), [(torch.randn(6, 4),) for _ in range(3)])) == 1

    @pytest.mark.parametrize("bins", [2, 4, 5])
    @pytest.mark.parametrize("is_weighted", [False, True])
    def test_bins_may_hold_what_the_step_computes(self, bins: int, is_weighted: bool) -> None:
        """With two bins some batches need more; then the step's own function runs."""

        def body(model: Any, x: torch.Tensor) -> torch.Tensor:
            y = model(x)
            weights = y[:, 0].detach() if is_weighted else None
            counts = torch.bincount(y.argmax(1), weights, minlength=bins)
            return (y.sum() * counts[:2].max()) * len(counts)

        found = same(body, [(torch.randn(6, 4) + (place % 3),) for place in range(8)])
        assert captures(found) == 1

    def test_more_bins_than_planned_are_found_before_anything_changes(self) -> None:
        def script(wrap: Any) -> Any:
            model = nn.Linear(4, 4)

            def step(x: torch.Tensor) -> torch.Tensor:
                loss = model(x).square().mean()
                loss.backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(parameter.grad)
                        parameter.grad = None
                return torch.bincount((x.detach() * loss.detach() * 0 + x).argmax(1), minlength=2)

            compiled = wrap(step)
            counts = []
            for place in (0, 0, 3, 0, 2, 1):
                x = torch.zeros(6, 4)
                x[:, place] = 1
                counts.append(compiled(x))
            return counts, model.state_dict()

        both(script)

    def test_of_fakes_whose_values_nobody_knows(self) -> None:
        with roam.fake():
            model, x, mask = nn.Linear(4, 4), torch.randn(6, 4), torch.zeros(6, dtype=torch.bool)
        with pytest.raises(roam.CaptureError) as caught:
            roam.capture(lambda model, x, mask: model(x)[mask].sum(), model, x, mask)
        assert caught.value.code == "data_dependent"

    @pytest.mark.parametrize(
        ("draw", "code"),
        [
            (lambda: hash(torch.randint(0, 2, ()).item()), "value_reached_python"),
            (lambda: random.random() < 0.5, "moved"),
            (lambda: np.random.random() < 0.5, "moved"),
        ],
    )
    def test_of_layers_that_chance_leaves_out_name_the_option(self, draw: Any, code: str) -> None:
        error = refused(
            lambda model, x, mask: (model(x) if draw() else x * model[0].weight.sum()).sum(),
            *MASKS[0],
        )
        assert error.code == code
        assert "turn off the option by which chance decides what runs" in str(error)


CAUGHT: dict[str, tuple[Body, Any, Any]] = {
    "bincount": (
        lambda model, places: torch.bincount(places), torch.tensor([0, 3]), torch.tensor([0, -1])
    ),
    "repeat_interleave": (
        lambda model, places: torch.repeat_interleave(torch.arange(2), places),
        torch.tensor([1, 3]), torch.tensor([1, -1]),
    ),
    "pack_padded_sequence": (
        lambda model, lengths: pack_padded_sequence(torch.ones(2, 4, 1), lengths, True).data,
        torch.tensor([4, 2]), torch.tensor([4, 0]),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("operator", "good", "bad"), CAUGHT.values(), ids=list(CAUGHT))
@pytest.mark.parametrize(
    "order", [(0, 0, 1, 0, 1), (1, 1, 0, 1, 0)], ids=["good first", "bad first"]
)
def test_an_error_that_the_step_catches_is_asked_for_again(
    operator: Body, good: Any, bad: Any, order: tuple[int, ...]
) -> None:
    def body(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
        try:
            made = operator(model, given).float().sum()
        except RuntimeError:
            made = torch.tensor(-1.0)
        return (model(torch.ones(2, 4)) * made).square().mean()

    step = same(body, [((good, bad)[number],) for number in order])
    assert len({name for name, _ in step.plans}) <= 2
    assert len(step.plans) <= 4


def test_many_plans_for_one_reason_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    step = roam.compile(lambda x, mask: model(x)[mask].sum().backward())
    with caplog.at_level(logging.WARNING, logger="roam"):
        for count in range(12):
            step(torch.ones(12, 4), torch.arange(12) < count)
    warnings = [record.message for record in caplog.records if "bucketing" in record.message]
    assert all("queue.index_copy_(" in message for message in warnings)
    assert len(warnings) == 1
    assert "test_dynamic_shapes.py" in warnings[0]


def _encoded(enable_nested_tensor: bool) -> Callable[..., torch.Tensor]:
    """A step whose encoder, in evaluation mode, packs sequences into a nested tensor if it may."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=enable_nested_tensor).eval()

    def step(x: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return encoder(x, src_key_padding_mask=is_padding)

    return step


def _ragged(x: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x[0], x[1, 1:]]).to_padded_tensor(0.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("step", [_encoded(True), _ragged])
def test_nested_tensors_are_refused_with_what_to_change(step: Callable[..., torch.Tensor]) -> None:
    x, is_padding = torch.randn(2, 3, 4), torch.tensor([[False] * 3, [False, False, True]])
    with pytest.raises(roam.CaptureError, match="enable_nested_tensor=False") as caught:
        roam.compile(step)(x, is_padding)
    assert caught.value.code == "refused_operator"
    other = _encoded(False)
    assert torch.equal(other(x, is_padding), roam.compile(other)(x, is_padding))


@needs_2_15
@pytest.mark.parametrize("python", ["idle", "auto"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("MulticlassAccuracy", {"num_classes": 4}),
        ("MulticlassAccuracy", {"num_classes": 4, "validate_args": False}),
        ("BinaryAUROC", {}),
        ("BinaryCalibrationError", {}),
    ],
)
@pytest.mark.parametrize("call", ["update", "forward"])
def test_metrics_whose_shapes_depend_on_what_the_step_computes(
    kind: str, options: dict[str, Any], call: str, python: Any
) -> None:
    metrics = pytest.importorskip("torchmetrics").classification
    is_planned = options.get("validate_args") is False

    def script(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(4, 4))
        metric = getattr(metrics, kind)(**options)

        @wrap
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            scores = x @ weight
            scores.square().sum().backward()
            scores = scores.detach()
            if kind == "MulticlassAccuracy":
                getattr(metric, call)(scores.argmax(1), y)
            else:
                getattr(metric, call)(scores[:, 0].sigmoid(), y % 2)
            return scores

        seen = [step(torch.randn(6, 4), torch.randint(0, 4, (6,))) for _ in range(4)]
        return [*seen, metric.compute()]

    compiled = functools.partial(roam.compile, python=python)
    if python == "idle" and not is_planned:
        with pytest.raises(roam.CaptureError):
            script(compiled)
    else:
        plain, planned = script(lambda step: step), script(compiled)
        assert_same_bits(tensors_and_numbers(plain), tensors_and_numbers(planned))
