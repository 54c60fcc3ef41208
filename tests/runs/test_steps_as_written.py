"""Steps as people write them, one script each, have the bits of eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from newer import needs_2_15
from steps import Block, Net, adamw, batches, both, images, same_by_plan, squares_step
from training import plain_step

functional = torch.nn.functional


class TestStepsAsUsersWriteThem:
    """One script a line of what is captured, against eager."""

    def check(
        self,
        make_step: Callable[[Any], Any],
        optimizer: Callable[..., Any] = adamw,
        model: Any = Net,
    ) -> None:
        def script(wrap):
            net = model()
            chosen = optimizer(net)
            step = wrap(make_step(net))
            returned = [step(net, chosen, x, y) for x, y in batches(4)]
            return [returned, net.state_dict(), chosen.state_dict()]

        both(script)

    def test_statistics_whose_results_nothing_uses(self) -> None:
        def make(net):
            def step(model, optimizer, x, y):
                loss = plain_step(model, optimizer, x, y)
                torch.batch_norm_update_stats(x, mean, var, 0.1)
                return loss, mean + 0, var + 0

            mean, var = torch.zeros(6), torch.ones(6)
            return step

        self.check(make)

    def test_views_in_inference_mode(self) -> None:
        @torch.inference_mode()
        def statistics(scores, y, model):
            right = (scores.argmax(1) == y).view(1, -1)
            halves = right.expand(2, -1).t().split(2)
            count = torch.zeros(4)
            count.view(2, 2)[0].add_(right.sum())  # a view of what is made in this mode
            seen.view(2, 2)[1:].add_(1)
            weight = next(model.parameters()).detach()[:2]
            return right, halves[0] * 2, count, weight.sum(), weight.unsqueeze(0).squeeze_(0) + 0

        def make(net):
            def step(model, optimizer, x, y):
                loss = plain_step(model, optimizer, x, y)
                return loss, statistics(model(x), y, model), (model(x).sum() * seen).sum().detach()

            seen.zero_()
            return step

        seen = torch.zeros(4)
        self.check(make)

    def test_values_in_inference_mode(self) -> None:
        """There, autograd does not take operators apart that consist of others."""
        norm = torch.nn.InstanceNorm1d(3, track_running_stats=True)
        seen = {"right": 0, "loss": 0.0}

        @torch.inference_mode()
        def validated(model, x, y):
            scores = model(x)
            norm(scores[None].transpose(1, 2))  # changes its running statistics
            seen["right"] += (scores.argmax(1) == y).sum().item()
            loss = functional.cross_entropy(scores, y, label_smoothing=0.1)
            seen["loss"] += loss.item()
            return loss * 2, y.tolist()

        def script(wrap):
            norm.reset_running_stats()
            seen.update(right=0, loss=0.0)
            net = Net()
            chosen = adamw(net)

            @wrap
            def step(model, optimizer, x, y):
                return plain_step(model, optimizer, x, y), validated(model, x, y)

            returned = [step(net, chosen, x, batches(1)[0][1]) for x, _ in batches(4)]
            return [returned, net.state_dict(), chosen.state_dict(), norm.state_dict(), dict(seen)]

        both(script)

    def test_a_view_in_inference_mode_of_what_changes_is_refused(self) -> None:
        net = Net()

        def step(model, optimizer, x, y):
            with torch.inference_mode():
                weight = next(model.parameters()).view(-1)
            return plain_step(model, optimizer, x, y), weight

        with pytest.raises(roam.CaptureError, match="a view that it made under") as caught:
            roam.compile(step)(net, adamw(net), *batches(1)[0])
        assert caught.value.code == "result"

    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_both_forms_of_zero_grad(self, momentum: float, set_to_none: bool) -> None:
        def make(net):
            def step(model, optimizer, x, y):
                optimizer.zero_grad(set_to_none=set_to_none)
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                return loss

            return step

        self.check(make, lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum))

    def test_gradients_of_cumulative_products(self) -> None:
        """Autograd computes them in another way where an element is zero: here in every second
        step, as rays through solid matter have them.
        """

        def script(wrap):
            net = Net()
            chosen = adamw(net)

            @wrap
            def step(model, optimizer, x, y, solid):
                optimizer.zero_grad()
                opacity = torch.sigmoid(model(x))
                through = torch.cumprod((1 - opacity) * solid, -1)
                loss = (through * opacity).sum(-1).square().mean()
                loss.backward()
                optimizer.step()
                return loss

            returned = []
            for number, (x, y) in enumerate(batches(6)):
                solid = torch.ones(3)
                solid[1] = number % 2
                returned.append(step(net, chosen, x, y, solid))
            return [returned, net.state_dict(), chosen.state_dict()]

        both(script)

    @pytest.mark.parametrize(
        "values",
        [
            torch.linalg.svdvals,
            lambda m: torch.linalg.matrix_norm(m, 2),
            lambda m: torch.linalg.cond(m.T @ m),
            lambda m: torch.linalg.eigvalsh(m.T @ m),
            lambda m: torch.linalg.eigvals(m.T @ m).abs(),
            lambda m: torch.func.vmap(torch.linalg.svdvals)(m.view(2, -1, m.shape[1])),
            lambda m: torch.func.grad(lambda n: torch.linalg.svdvals(n.detach()).sum() * n.sum())(
                m
            ),
            torch.inference_mode()(torch.linalg.svdvals),
        ],
        ids=["svd", "norm", "cond", "symmetric", "eig", "vmap", "grad", "inference"],
    )
    def test_singular_values_and_eigenvalues(self, values: Callable[[Any], Any]) -> None:
        """PyTorch computes them of fake tensors in another way than of real ones."""

        def make(net):
            def step(model, optimizer, x, y):
                torch.linalg.svdvals(model.first.weight).sum().backward()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                return values(model.first.weight.detach())

            return step

        self.check(make)

    def test_zero_grad_at_the_end(self) -> None:
        def make(net):
            def step(model, optimizer, x, y):
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            return step

        self.check(make)

    def test_gradients_that_nobody_zeroes(self) -> None:
        def make(net):
            def step(model, optimizer, x, y):
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                return loss

            return step

        self.check(make)

    def test_several_losses_and_metrics(self) -> None:
        def make(net):
            def step(model, optimizer, x, y):
                optimizer.zero_grad()
                logits = model(x)
                first = functional.cross_entropy(logits, y)
                second = logits.square().mean()
                first.backward(retain_graph=True)
                (0.1 * second).backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                right = (logits.detach().argmax(-1) == y).sum()
                return {
                    "losses": (first, second),
                    "norm": norm,
                    "right": right.item(),
                    "rate": optimizer.param_groups[0]["lr"],
                }

            return step

        self.check(make)

    def test_clipping_by_value(self) -> None:
        def make(net):
            def step(model, optimizer, x, y):
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()

            return step

        self.check(make)

    def test_views_and_in_place_operators(self) -> None:
        class Twisted(Net):
            def forward(self, x):
                hidden = self.first(x)
                hidden[:, :4].mul_(2)
                left, right = hidden.chunk(2, dim=1)
                both = torch.cat([left.t().contiguous().t(), right.flip(0)], 1)
                both += hidden.view(-1)[:8]
                return self.second(
                    torch.nn.functional.relu(both, inplace=True).transpose(0, 1).reshape(8, -1).t()
                )

        self.check(lambda net: plain_step, model=Twisted)

    def test_tensors_that_change_their_own_shape(self) -> None:
        class Shaped(Net):
            def forward(self, x):
                hidden = self.first(x)
                hidden.unsqueeze_(0).transpose_(1, 2).mul_(2)
                return self.second(hidden[0].t())

        self.check(lambda net: plain_step, model=Shaped)

    def test_tensors_that_are_resized_to_their_size(self) -> None:
        """As PyTorch's observers for quantization do in each call, after their first."""

        class Observed(Net):
            def __init__(self):
                super().__init__()
                self.register_buffer("least", torch.zeros(3))
                self.register_buffer("most", torch.zeros(3))

            def forward(self, x):
                result = self.second(torch.relu(self.first(x)))
                least, most = torch.aminmax(result.detach(), dim=0)
                self.least.resize_(least.shape).copy_(torch.minimum(least, self.least))
                self.most.resize_as_(most).copy_(torch.maximum(most, self.most))
                return result / (self.most - self.least)

        self.check(lambda net: plain_step, model=Observed)

    def test_buffers_and_attributes_that_are_replaced(self) -> None:
        class Replacing(Net):
            def __init__(self):
                super().__init__()
                self.register_buffer("average", torch.zeros(3))
                self.last = torch.zeros(5, 3)

            def forward(self, x):
                result = self.second(torch.relu(self.first(x))) + 0.1 * self.last
                self.average = 0.9 * self.average + 0.1 * result.detach().mean(0)
                self.last = result.detach()
                return result - self.average

        self.check(lambda net: plain_step, model=Replacing)

    def test_losses_whose_kernels_keep_more_than_their_result(self) -> None:
        def make(net):
            def step(model, optimizer, x, y):
                optimizer.zero_grad()
                wanted = functional.one_hot(y, 3).float()
                result = model(x)
                losses = [
                    functional.mse_loss(result, wanted),
                    functional.smooth_l1_loss(result, wanted),
                ]
                losses.append(functional.binary_cross_entropy(result.sigmoid(), wanted))
                losses.append(functional.soft_margin_loss(result, wanted * 2 - 1))
                sum(losses).backward()
                optimizer.step()
                return losses

            return step

        self.check(make)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_attention(self, dtype: torch.dtype) -> None:
        class Attending(Net):
            def __init__(self):
                super().__init__()
                self.into = torch.nn.Linear(6, 24)
                self.to(dtype)

            def forward(self, x):
                parts = self.into(x.to(dtype))[None].chunk(3, -1)
                heads = [part.reshape(1, -1, 2, 4).transpose(1, 2) for part in parts]
                mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
                return self.second(mixed.transpose(1, 2).reshape(-1, 8)).float()

        self.check(lambda net: plain_step, model=Attending)

    def test_channels_last(self) -> None:
        class Convolutions(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.body = torch.nn.Sequential(
                    torch.nn.Conv2d(2, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(inplace=True),
                    torch.nn.MaxPool2d(2), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 3),
                ).to(memory_format=torch.channels_last)  # fmt: skip

            def forward(self, x):
                images = (
                    x.repeat(1, 12).view(-1, 2, 6, 6).contiguous(memory_format=torch.channels_last)
                )
                return self.body(images)

        self.check(lambda net: plain_step, model=Convolutions)

    def test_frozen_and_unused_parameters(self) -> None:
        class Partial(Net):
            def __init__(self):
                super().__init__()
                self.unused = torch.nn.Linear(3, 3)
                self.first.weight.requires_grad_(False)

        self.check(lambda net: plain_step, model=Partial)

    def test_tied_weights(self) -> None:
        class Tied(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.into = torch.nn.Linear(6, 6, bias=False)
                self.out = torch.nn.Linear(6, 6, bias=False)
                self.out.weight = self.into.weight

            def forward(self, x):
                return self.out(torch.tanh(self.into(x)))

        self.check(lambda net: plain_step, model=Tied)

    def test_several_parameter_groups(self) -> None:
        def optimizer(net):
            return torch.optim.AdamW(
                [
                    {"params": net.first.parameters(), "lr": 0.1, "weight_decay": 0.0},
                    {"params": net.second.parameters(), "betas": (0.8, 0.9)},
                ],
                lr=0.01,
                amsgrad=True,
            )

        self.check(lambda net: plain_step, optimizer)

    def test_closures_bound_methods_and_globals(self) -> None:
        class Trainer:
            def __init__(self):
                self.model = Net()
                self.optimizer = adamw(self.model)
                self.weights = [torch.tensor([1.0, 2.0, 0.5])]

            def step(self, batch, *, scale):
                self.optimizer.zero_grad()
                loss = (
                    functional.cross_entropy(
                        self.model(batch["x"]), batch["more"][0], weight=self.weights[0]
                    )
                    * scale
                )
                loss.backward()
                self.optimizer.step()
                return loss

        def script(wrap):
            trainer = Trainer()
            step = wrap(trainer.step)
            returned = [
                step({"x": x, "more": [y]}, scale=0.5 + place)
                for place, (x, y) in enumerate(batches(4))
            ]
            return [returned, trainer.model.state_dict(), trainer.optimizer.state_dict()]

        both(script)

    def test_a_constant_written_in_the_step(self) -> None:
        def make(net):
            def step(model, optimizer, x, y):
                optimizer.zero_grad()
                weight = torch.tensor([1.0, 2.0, 0.25])
                weight += torch.arange(3)
                loss = functional.cross_entropy(model(x), y, weight=weight)
                loss.backward()
                optimizer.step()
                return loss

            return step

        self.check(make)

    def test_autocast(self) -> None:
        def make(net):
            def step(model, optimizer, x, y):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                return loss

            return step

        self.check(make)

    @pytest.mark.auto
    def test_a_scheduler_that_looks_at_the_loss(self) -> None:
        def script(wrap):
            net = Net()
            optimizer = adamw(net)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, factor=0.5, threshold=0.5
            )

            def train_step(x, y):
                loss = plain_step(net, optimizer, x, y)
                scheduler.step(loss.detach())
                return loss

            step = wrap(train_step)
            returned = []
            for x, y in batches(6):
                returned += [step(x, y), optimizer.param_groups[0]["lr"]]
            return [returned, net.state_dict(), scheduler.state_dict()["num_bad_epochs"]]

        both(script)


class TestStepsAsPeopleWriteThem:
    def test_a_bound_method_that_closes_over_its_parts(self) -> None:
        def script(wrap):
            class Trainer:
                def __init__(self) -> None:
                    self.model = Block()
                    self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

                def step(self, x):
                    self.optimizer.zero_grad()
                    result = self.model(x)
                    loss = result.square().mean()
                    loss.backward()
                    self.optimizer.step()
                    return {
                        "loss": loss.detach(),
                        "largest": result.detach().abs().amax(),
                        "rows": len(result),
                    }

            trainer = Trainer()
            step = wrap(trainer.step)
            return [[step(x) for x in images()], trainer.model.state_dict()]

        same_by_plan(script)

    @needs_2_15
    def test_a_module_that_is_compiled(self) -> None:
        def script(wrap):
            model = torch.compile(Block(), backend="eager")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = wrap(squares_step(model, optimizer))

            return [[step(torch.randn(4, 6)) for _ in range(3)], model.state_dict()]

        same_by_plan(script)

    def test_freezing_from_step_to_step(self) -> None:
        def script(wrap):
            model = Block()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            step = wrap(squares_step(model, optimizer))

            losses = []
            for index, x in enumerate(images(5)):
                model.first.requires_grad_(index % 2 == 0)
                losses.append(step(x))
            return [losses, model.state_dict(), optimizer.state_dict()]

        same_by_plan(script)

    def test_two_players(self) -> None:
        def script(wrap):
            generator, critic = Block(), torch.nn.Linear(6, 1)
            optimizers = [
                torch.optim.Adam(part.parameters(), lr=0.01) for part in (generator, critic)
            ]

            @wrap
            def step(real):
                fake = generator(torch.randn_like(real))
                optimizers[1].zero_grad()
                critic_loss = functional.softplus(critic(fake.detach())).mean()
                critic_loss = critic_loss + functional.softplus(-critic(real)).mean()
                critic_loss.backward()
                optimizers[1].step()
                optimizers[0].zero_grad()
                loss = functional.softplus(-critic(fake)).mean()
                loss.backward()
                optimizers[0].step()
                return loss.detach(), critic_loss.detach()

            losses = [step(x) for x in images(4)]
            return [
                losses,
                generator.state_dict(),
                critic.state_dict(),
                [o.state_dict() for o in optimizers],
            ]

        same_by_plan(script)

    def test_averages_of_the_weights(self) -> None:
        def script(wrap):
            model = Block()
            teacher = copy.deepcopy(model).requires_grad_(False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            @wrap
            def step(x):
                optimizer.zero_grad()
                with torch.no_grad():
                    target = teacher(x)
                loss = functional.mse_loss(model(x), target + 1)
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for average, weight in zip(
                        teacher.parameters(), model.parameters(), strict=True
                    ):
                        average.lerp_(weight, 0.1)
                return loss

            return [[step(x) for x in images(4)], model.state_dict(), teacher.state_dict()]

        same_by_plan(script)

    @pytest.mark.parametrize("decay", [None, 0.9])
    def test_averages_by_pytorchs_own_class(self, decay: float | None) -> None:
        def script(wrap):
            model = Block()
            average = None if decay is None else torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
            averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            @wrap
            def step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                averaged.update_parameters(model)
                return loss

            return [[step(x) for x in images(4)], model.state_dict(), averaged.state_dict()]

        same_by_plan(script)


class TestDefaults:
    """Tensors among the defaults of a function are its own, like what it closes over."""

    def test_that_the_step_uses_and_that_nobody_touches(self) -> None:
        def script(wrap):
            weight = torch.nn.Parameter(torch.randn(3))
            optimizer = torch.optim.SGD([weight], lr=0.1)

            def scaled(x, counted=torch.zeros(()), scale=torch.tensor(2.0), *, shift=torch.ones(3)):  # noqa: B008
                counted += 1
                return x * scale * counted + shift

            def unused(x, scale=torch.tensor(3.0)):  # noqa: B008
                return x * scale

            @wrap
            def step(x, functions=(scaled, unused)):
                optimizer.zero_grad()
                loss = functions[0](x * weight).square().mean()
                loss.backward()
                optimizer.step()
                return loss

            losses = []
            for index in range(4):
                if index == 2:
                    scaled.__defaults__[1].fill_(0.5)
                losses.append(step(torch.randn(3)))
            return [losses, weight.data, *scaled.__defaults__]

        same_by_plan(script)

    def test_of_another_function_are_found(self) -> None:
        def scaled(x, scale=torch.tensor(2.0)):  # noqa: B008
            return x * scale

        step = roam.compile(lambda x: scaled(x), on_change="raise")
        before = scaled.__defaults__
        step(torch.ones(2))
        assert scaled.__defaults__ is before
        scaled.__defaults__ = (torch.tensor(3.0),)
        assert step(torch.ones(2)).tolist() == [3.0, 3.0]
        scaled.__defaults__ = (3.0,)
        with pytest.raises(roam.ExecutionError, match="__defaults__"):
            step(torch.ones(2))
