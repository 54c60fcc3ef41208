"""Operators that look at data and raise an error: a plan raises eager PyTorch's, before it has
changed anything, or leaves the call to the step's own `except`."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributions

import roam
from bad_values import error_inputs, judged, judged_at_first, samples, without_elements
from newer import needs_2_15
from operators import op_db
from training import assert_same_bits, tensors_and_numbers

linalg, functional = torch.linalg, torch.nn.functional
EYE, ONES = torch.eye(3), torch.ones(3, 3)


def trained(
    body: Callable[..., Any], batches: list[Any], wrap: Callable[[Any], Any]
) -> tuple[list[Any], list[Any]]:
    """What steps by `body(weight, *batch)` leave, and what each has returned or raised."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.tensor(2.0))
    norm = torch.nn.BatchNorm1d(3)
    optimizer = torch.optim.Adam([weight], lr=0.01)

    @wrap
    def step(*batch: torch.Tensor) -> Any:
        optimizer.zero_grad()
        noise = functional.dropout(norm(torch.rand(4, 3)), 0.5).mean()
        loss = body(weight, *batch).abs().float().mean() + 0 * noise
        loss.backward()
        optimizer.step()
        return loss.detach()

    outcomes: list[Any] = []
    left: list[Any] = []
    for batch in batches:
        try:
            outcomes.append(step(*batch).item())
        except RuntimeError as error:
            outcomes.append((type(error), str(error)))
        left += tensors_and_numbers(
            weight.detach(), norm.state_dict(), optimizer.state_dict(), torch.get_rng_state()
        )
    return outcomes, left


def same(body: Callable[..., Any], batches: list[Any]) -> list[Any]:
    """Holds steps by plan against eager ones; the eager outcomes."""
    outcomes, left = trained(body, batches, lambda step: step)
    by_plan, left_by_plan = trained(
        body, batches, functools.partial(roam.compile, pool=True, poison=True)
    )
    assert by_plan == outcomes
    assert_same_bits(left, left_by_plan)
    return outcomes


def _or(good: torch.Tensor, bad: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    return lambda is_good: torch.where(is_good, good, bad)


definite, regular = _or(EYE, -EYE), _or(EYE, ONES)
CHECKED: dict[str, Callable[[Any, Any], Any]] = {
    "cholesky": lambda w, ok: linalg.cholesky(w * definite(ok)),
    "cholesky of several": lambda w, ok: linalg.cholesky(w * definite(ok).expand(2, 3, 3)),
    "inv": lambda w, ok: linalg.inv(w * regular(ok)),
    "torch.inverse": lambda w, ok: torch.inverse(w * regular(ok)),
    "solve": lambda w, ok: linalg.solve(w * regular(ok), torch.ones(3)),
    "lu_factor": lambda w, ok: linalg.lu_factor(w * regular(ok))[0],
    "ldl_factor": lambda w, ok: w * linalg.ldl_factor(w.detach() * _or(EYE, 0 * EYE)(ok))[0],
    "matrix_power": lambda w, ok: linalg.matrix_power(w * regular(ok), -2),
    "tensorinv": lambda w, ok: linalg.tensorinv(w * regular(ok), ind=1),
    "tensorsolve": lambda w, ok: linalg.tensorsolve(w * regular(ok), torch.ones(3)),
    "normal with a precision": lambda w, ok: distributions.MultivariateNormal(
        torch.zeros(3), precision_matrix=w * definite(ok), validate_args=False
    ).log_prob(torch.ones(3)),
    "normal with a covariance": lambda w, ok: distributions.MultivariateNormal(
        torch.zeros(3), w * definite(ok), validate_args=False
    ).rsample(),
    "one_hot too large": lambda w, ok: w * functional.one_hot(torch.where(ok, 1, 5)[None], 3),
    "one_hot negative": lambda w, ok: w * functional.one_hot(torch.where(ok, 1, -1)[None], 3),
    "quantile": lambda w, ok: (w * EYE).quantile(torch.where(ok, 0.5, 1.5)),
    "nanquantile": lambda w, ok: (w * EYE).nanquantile(torch.where(ok, 0.5, -0.5)),
    "cov": lambda w, ok: torch.cov(w * EYE, aweights=w.detach() * torch.where(ok, 1, -1) * ONES[0]),
    "cov with counts": lambda w, ok: torch.cov(w * EYE, fweights=(w.detach() > 0) * torch.where(ok, 1, -1) * torch.ones(3).long()),
    "an assertion": lambda w, ok: (torch._assert_async(w * torch.where(ok, 1, 0)), w)[1],
}  # fmt: skip
GOOD, WRONG = (torch.tensor(True),), (torch.tensor(False),)


IN_CPP = ("cov", "cov with counts")
"""Code in C++ asks for a value, and goes on or raises."""


@pytest.mark.parametrize("name", [name for name in CHECKED if name not in IN_CPP])
def test_a_failing_check_raises_what_eager_raises(name: str) -> None:
    outcomes = same(CHECKED[name], [GOOD, WRONG, GOOD, WRONG, GOOD])
    assert [type(outcome) for outcome in outcomes] == [float, tuple, float, tuple, float]


def _window(w: Any, ok: Any) -> Any:
    spectrum = torch.complex(w * torch.ones(9, 12), torch.zeros(9, 12))
    return torch.istft(spectrum, 16, window=torch.where(ok, w.detach(), 0) * torch.ones(16))


def _phase(w: Any, ok: Any) -> Any:
    u = linalg.svd(torch.complex(w * ONES.tril(), w * EYE.flip(0)))[0]
    return torch.where(ok, u.abs().sum(), u.real.sum())


@pytest.mark.auto
@needs_2_15
@pytest.mark.parametrize("body", [_window, *map(CHECKED.get, IN_CPP)])
def test_what_code_in_cpp_asks_is_answered_beside_plans(body: Callable[..., Any]) -> None:
    outcomes = same(body, [GOOD, GOOD, WRONG, GOOD, WRONG, WRONG])
    assert [type(outcome) for outcome in outcomes] == [float, float, tuple, float, tuple, tuple]
    with pytest.raises(roam.CaptureError) as caught:
        trained(body, [GOOD] * 2, functools.partial(roam.compile, python="idle"))
    assert caught.value.code == "value_reached_python"


def test_a_check_of_autograds_passes_in_plans() -> None:
    outcomes = same(_phase, [GOOD, GOOD, WRONG, GOOD, WRONG, WRONG])
    assert [type(outcome) for outcome in outcomes] == [float, float, tuple, float, tuple, tuple]


def test_jitter_after_a_failed_cholesky(caplog: Any) -> None:
    def body(w: Any, x: Any) -> Any:
        kernel = torch.exp(-0.5 * ((x[:, None] - x[None]) / w) ** 2)
        for jitter in (0.0, 1e-6, 1e-4, 1e-2):
            try:
                factor = linalg.cholesky(kernel + jitter * torch.eye(len(x)))
            except linalg.LinAlgError:
                torch.rand(())
                continue
            return factor
        raise RuntimeError("not positive definite")

    spread, close = torch.arange(6.0) * 9, torch.linspace(0, 1e-3, 6)
    with caplog.at_level(logging.INFO, "roam"):
        outcomes = same(body, [(x,) for x in (spread, close, spread, close, close)])
    assert all(type(outcome) is float for outcome in outcomes)
    said = [record.levelname for record in caplog.records if "does not pass" in record.message]
    assert said == ["WARNING", "INFO", "INFO"]


def test_a_check_among_updates_leaves_what_eager_leaves() -> None:
    """As in an optimizer that preconditions each parameter in its turn."""

    def script(wrap: Callable[[Any], Any]) -> Iterator[Any]:
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(3, 3)) for _ in range(3)]
        factors = [torch.eye(3) for _ in weights]
        counts = [0]

        @wrap
        def step(x: torch.Tensor) -> torch.Tensor:
            counts[0] += 1
            loss = sum((x @ weight).square().mean() for weight in weights)
            loss.backward()
            with torch.no_grad():
                for weight, factor in zip(weights, factors, strict=True):
                    factor.add_(weight.grad @ weight.grad.T)
                    weight.sub_(linalg.solve(factor, weight.grad), alpha=0.1)
                    weight.grad = None
            linalg.cholesky(x.sum() * EYE)
            return loss.detach()

        for x in (torch.ones(2, 3), -torch.ones(2, 3), torch.full((2, 3), 0.5), torch.zeros(2, 3)):
            try:
                yield step(x)
            except linalg.LinAlgError as error:
                yield len(str(error))
            yield from (*weights, *(weight.grad for weight in weights), *factors, counts[0])

    eager, planned = (
        tensors_and_numbers(list(script(wrap))) for wrap in (lambda step: step, roam.compile)
    )
    assert_same_bits(eager, planned)


def test_a_tensor_of_places_to_split_at() -> None:
    def body(w: Any, x: Any, places: Any) -> Any:
        return sum(part.sum() ** 2 for part in torch.tensor_split(w * x, places))

    x = torch.rand(7)
    same(body, [(x, torch.tensor(places)) for places in ([2, 4], [2, 4], [1, 6], [3, 3])])
    same(lambda w, x: body(w, x, torch.tensor([2, 5])), [(x,)] * 2)
    with pytest.raises(roam.CaptureError) as caught:
        trained(lambda w, x: body(w, x, w.long()[None]), [(x,)] * 2, roam.compile)
    assert caught.value.code == "value_reached_python"


def _looked_up(w: Any, index: Any) -> Any:
    return functional.embedding(index, w * EYE)


def _tried(w: Any, index: Any) -> Any:
    try:
        return _looked_up(w, index)
    except IndexError:
        return w * 3


def _tried_around(w: Any, index: Any) -> Any:
    try:
        with torch.enable_grad():
            row = _looked_up(w, index)
    except IndexError:
        row = w * torch.rand(3)
    finally:
        w = w * 1
    return row


def steps_in(
    body: Callable[..., Any], norm: Callable[[Any], Any], wrap: Callable[[Any], Any]
) -> Iterator[Any]:
    """What steps on indices leave, of which some are out of range."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.tensor(2.0))

    @wrap
    def step(index: torch.Tensor) -> Any:
        loss = (norm(torch.ones(2, 3)).sum() + body(weight, index)).square().mean()
        loss.backward()
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.01)
        weight.grad = None
        return loss.detach()

    for index in (1, 2, 7, 0, 7, 1):
        yield step(torch.tensor([index]))
        yield from (weight.detach().clone(), torch.get_rng_state())


def _suppressed(w: Any, index: Any) -> Any:
    row = w * 3
    with contextlib.suppress(IndexError):
        row = _looked_up(w, index)
    return row


@pytest.mark.parametrize("body", [_tried, _tried_around, _suppressed])
def test_a_kernel_that_fails_inside_a_try_leaves_the_call_to_the_step(
    body: Callable[..., Any],
) -> None:
    eager, planned = (
        tensors_and_numbers(list(steps_in(body, lambda x: x, wrap)))
        for wrap in (lambda step: step, roam.compile)
    )
    assert_same_bits(eager, planned)


@pytest.mark.parametrize(
    ("body", "code"),
    [(_tried, "torn"), (_suppressed, "torn"), (_looked_up, "failed_as_eager")],
)
def test_only_an_error_outside_of_a_try_is_said_to_leave_what_eager_leaves(
    body: Callable[..., Any], code: str
) -> None:
    with pytest.raises(roam.ExecutionError) as caught:
        list(steps_in(body, torch.nn.BatchNorm1d(3), roam.compile))
    assert caught.value.code == code


OUT_OF_MEMORY = {"nn.functional.ctc_loss", "_segment_reduce"}
"""Operators that read or write outside of their arguments if an index is out of range, in eager
PyTorch too."""
OPERATORS = {
    f"{op.name} {op.variant_test_name}".strip(): op
    for op in op_db
    if "jiterator" not in op.name and op.name not in OUT_OF_MEMORY
}
TYPICAL = (
    *("linalg.cholesky", "gather", "nn.functional.one_hot", "linalg.solve", "quantile"),
    *("nn.functional.embedding", "nn.functional.nll_loss", "linalg.eigvals", "multinomial"),
)
"""What `make ci` looks at too."""
MOST_SAMPLES = 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [name if name in TYPICAL else pytest.param(name, marks=pytest.mark.long) for name in OPERATORS],
)
def test_no_operator_goes_on_where_eager_raises(name: str, one_thread: None) -> None:
    op = OPERATORS[name]
    floats = torch.float32 in op.dtypes
    wrong = [
        f"{dtype}: {fault}"
        for dtype in (torch.float32, torch.complex64, torch.int64, torch.bool)
        if dtype in op.dtypes and (dtype.is_floating_point or dtype.is_complex or not floats)
        for arguments in samples(op, dtype, 1 if name in TYPICAL else MOST_SAMPLES)
        for fault in judged(op.op, arguments)
    ]
    assert not wrong


TYPICALLY_DROPPED = ("gather", "linalg.eigh", "linalg.svd", "nn.functional.embedding")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        name if name in TYPICALLY_DROPPED else pytest.param(name, marks=pytest.mark.long)
        for name in OPERATORS
    ],
)
def test_no_operator_goes_on_whose_result_nobody_reads(name: str, one_thread: None) -> None:
    op = OPERATORS[name]
    wrong = [
        f"{dtype}: {fault}"
        for dtype in (torch.float32, torch.complex64, torch.int64, torch.bool)
        if dtype in op.dtypes
        for arguments in samples(op, dtype, 1 if name in TYPICALLY_DROPPED else MOST_SAMPLES)
        for fault in judged(op.op, arguments, drops=True)
    ]
    assert not wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        name if name in TYPICALLY_DROPPED else pytest.param(name, marks=pytest.mark.long)
        for name, op in OPERATORS.items()
        if op.error_inputs_func is not None
    ],
)
def test_what_an_operator_refuses_is_refused(name: str, one_thread: None) -> None:
    op = OPERATORS[name]
    assert not list(
        filter(None, (judged_at_first(op.op, arguments) for arguments in error_inputs(op)))
    )


CRASHING = {
    *("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
    *("nn.functional.embedding_bag", "nn.functional.pdist"),
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
}
"""Operators by which eager PyTorch ends the process, where a tensor has no elements."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        name if name in TYPICALLY_DROPPED else pytest.param(name, marks=pytest.mark.long)
        for name, op in OPERATORS.items()
        if op.name not in CRASHING and op.dtypes
    ],
)
def test_no_operator_differs_on_tensors_without_elements(name: str, one_thread: None) -> None:
    op = OPERATORS[name]
    dtype = next(dtype for dtype in (torch.float32, torch.int64, *op.dtypes) if dtype in op.dtypes)
    wrong = [
        judged_at_first(op.op, empty)
        for arguments in samples(op, dtype, 1)
        for empty in without_elements(arguments)
    ]
    assert not list(filter(None, wrong))


def test_a_kernel_that_raises_comes_before_changes_that_do_not_need_it() -> None:
    """Memory alone would have it after them: its result is large, and nothing frees its inputs."""
    weight = torch.nn.Parameter(torch.ones(4096))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    @roam.compile
    def step(table: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        rows = table.gather(0, index.expand(4096))
        loss = weight.exp().tanh().sum()
        loss.backward()
        optimizer.step()
        return loss.detach(), rows

    table = torch.rand(8)
    step(table, torch.tensor([0]))
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match="out of bounds"):
        step(table, torch.tensor([9]))
    assert torch.equal(before, weight)


def test_dropout_at_a_constant_rate_orders_nothing() -> None:
    """Each mask of a deep model would come before each change of a counter or running mean."""
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4), torch.nn.Dropout(0.1)] * 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    count = torch.zeros(())

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        count.add_(1)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        count.add_(1)
        return loss.detach()

    graph = roam.capture(step, torch.rand(2, 4))
    names = [operator.name for operator in graph.operators]
    masks = {index for index, name in enumerate(names) if name.startswith("aten.bernoulli")}
    assert masks
    assert not [edge for edge in graph.control if edge[0] in masks and edge[1] not in masks]


@pytest.mark.parametrize("draw", [torch.Tensor.bernoulli_, lambda x, p: x.normal_(0, p)])
def test_a_rate_out_of_range_changes_nothing(draw: Callable[..., Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    @roam.compile
    def step(rate: float) -> torch.Tensor:
        optimizer.zero_grad()
        noise = draw(torch.empty(64), rate)
        weight.exp().sum().backward()
        optimizer.step()
        return noise

    for rate in (0.5, 0.25, 0.75):
        step(rate)
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"expects p to be|expects std"):
        step(-1.0)
    assert torch.equal(before, weight)


def _of(kind: type, **given: torch.Tensor) -> tuple[type, dict[str, torch.Tensor]]:
    return kind, given


RATE, MATRIX = torch.tensor([0.5, 0.75]), torch.tensor([[2.0, 0.5], [0.5, 1.5]])
SQUARE = MATRIX.tril()
DISTRIBUTIONS = [
    *(_of(getattr(distributions, name), probs=RATE) for name in ("Bernoulli", "Geometric", "ContinuousBernoulli")),
    *(_of(getattr(distributions, name), logits=RATE) for name in ("Categorical", "OneHotCategorical")),
    *(_of(getattr(distributions, name), probs=RATE) for name in ("Categorical", "OneHotCategoricalStraightThrough")),
    *(_of(getattr(distributions, name), loc=RATE, scale=RATE) for name in ("Cauchy", "Gumbel", "Laplace", "LogNormal", "Normal")),
    *(_of(getattr(distributions, name), scale=RATE) for name in ("HalfCauchy", "HalfNormal")),
    *(_of(getattr(distributions, name), concentration=RATE, rate=RATE) for name in ("Gamma", "InverseGamma")),
    _of(distributions.Beta, concentration1=RATE, concentration0=RATE),
    _of(distributions.Chi2, df=RATE + 2),
    _of(distributions.Dirichlet, concentration=RATE),
    _of(distributions.Exponential, rate=RATE),
    _of(distributions.FisherSnedecor, df1=RATE + 2, df2=RATE + 2),
    _of(distributions.GeneralizedPareto, loc=RATE, scale=RATE, concentration=RATE),
    _of(distributions.Kumaraswamy, concentration1=RATE, concentration0=RATE),
    _of(distributions.LKJCholesky, dim=2, concentration=RATE),
    _of(distributions.LogisticNormal, loc=RATE, scale=RATE),
    _of(distributions.LowRankMultivariateNormal, loc=RATE, cov_factor=SQUARE, cov_diag=RATE),
    _of(distributions.Multinomial, total_count=3, probs=RATE),
    *(_of(distributions.MultivariateNormal, loc=RATE, **{name: matrix}) for name, matrix in (
        ("covariance_matrix", MATRIX), ("precision_matrix", MATRIX), ("scale_tril", SQUARE))),
    _of(distributions.NegativeBinomial, total_count=RATE + 3, probs=RATE),
    _of(distributions.Pareto, scale=RATE, alpha=RATE),
    _of(distributions.Poisson, rate=RATE),
    *(_of(getattr(distributions, name), temperature=RATE[0], probs=RATE) for name in ("RelaxedBernoulli", "RelaxedOneHotCategorical")),
    _of(distributions.StudentT, df=RATE + 2, loc=RATE, scale=RATE),
    _of(distributions.Uniform, low=RATE, high=RATE + 1),
    _of(distributions.Weibull, scale=RATE, concentration=RATE),
    *(_of(distributions.Wishart, df=torch.tensor(3.0), **{name: matrix}) for name, matrix in (
        ("covariance_matrix", MATRIX), ("precision_matrix", MATRIX), ("scale_tril", SQUARE))),
]  # fmt: skip
"""All of PyTorch's but those that draw without an end where a parameter is bad, eagerly too:
Binomial, VonMises."""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_validated", [False, True])
@pytest.mark.parametrize(
    ("kind", "given"),
    DISTRIBUTIONS,
    ids=[f"{kind.__name__} {'-'.join(given)}" for kind, given in DISTRIBUTIONS],
)
def test_no_distribution_goes_on_where_eager_raises(
    kind: Any, given: dict[str, Any], is_validated: bool, one_thread: None
) -> None:
    value = kind(**given).sample()

    def drawn(value: torch.Tensor, **given: Any) -> list[torch.Tensor]:
        made = kind(**given, validate_args=is_validated)
        return [made.log_prob(value), made.rsample() if made.has_rsample else made.sample()]

    trained = {
        name: one.clone().requires_grad_() if isinstance(one, torch.Tensor) else one
        for name, one in given.items()
    }
    assert not judged(drawn, ((value,), trained))
