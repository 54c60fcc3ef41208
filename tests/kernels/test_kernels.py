"""Which kernels may write into planned memory: what the table claims holds, and the known traps are
not in it."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

import kernel_table as bench
import pytest
import torch

import roam
from roam import zoo
from roam.kernels.table import TABLE, candidate, dtypes_of, layout, layouts_of, placement
from roam.kernels.trial import Ordinary, Unusable, in_place_pairs, try_in_place, try_placed
from roam.program.ir import Program
from roam.tracing.step import capture_step

pytestmark = pytest.mark.usefixtures("one_thread")
aten = torch.ops.aten
VERSION: str = json.loads(TABLE.read_text())["cpu"]["torch"]
ENTRIES: dict[str, Any] = json.loads(TABLE.read_text())["cpu"]["kernels"]

# What training steps are mostly made of.
OPERATORS = [
    "add", "mul", "div", "sub", "addcmul", "lerp", "sqrt", "exp", "where", "masked_fill", "clone", "cat", "sum", "mean",
    "cumsum", "softmax", "log_softmax", "mm", "bmm", "addmm", "index_select", "gather", "sigmoid", "tanh", "tril",
    "nn.functional.relu", "nn.functional.gelu", "nn.functional.silu", "nn.functional.embedding",
    "nn.functional.max_pool2d", "nn.functional.nll_loss", "nn.functional.dropout", "nn.functional.batch_norm",
]  # fmt: skip


def overload(name: str) -> Any:
    namespace, _, full = name.rpartition("::")
    packet, _, rest = full.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace or "aten"), packet), rest or "default")


def ordinary(target: Any, *args: Any, **kwargs: Any) -> Ordinary:
    return Ordinary.run(target, args, kwargs)


class TestTable:
    @pytest.mark.skipif(
        not torch.__version__.startswith(VERSION), reason=f"established with {VERSION}"
    )
    def test_every_claim_names_a_kernel_that_this_torch_has(self) -> None:
        ways = Counter(placement(overload(name), "cpu").way for name in ENTRIES)
        assert ways["direct"] > 300
        assert ways["substitute"] > 30
        for name, entry in ENTRIES.items():
            assert candidate(overload(name), "cpu").name == entry["kernel"], name

    @pytest.mark.sweep
    @pytest.mark.parametrize("steps", [[], ["gpt2-tiny"]])
    def test_what_it_claims_holds(self, steps: list[str]) -> None:
        arguments = argparse.Namespace(
            device="cpu",
            ops=[] if steps else OPERATORS,
            steps=steps,
            samples=1,
            calls=1,
            dtypes=[torch.float32],
            part=(0, 1),
        )
        found = bench.establish(arguments).found
        assert len(found) > 20
        for target, findings in found.items():
            claimed = placement(target, "cpu")
            for (dtypes, layouts), wrong in findings.placed.items():
                assert not wrong or layouts not in claimed.cleared.get(dtypes, ()), (
                    f"{target} {dtypes} {layouts}: {wrong}"
                )
            for (dtypes, pair), wrong in findings.in_place.items():
                is_claimed = pair in claimed.in_place.get(dtypes, ())
                assert wrong in ("", bench.TOO_SMALL) or not is_claimed, (
                    f"{target} {dtypes} {pair}: {wrong}"
                )

    @pytest.mark.parametrize(
        ("name", "argument"),
        [("mm", "self"), ("mm", "mat2"), ("bmm", "self"), ("addmm", "mat1"), ("addmm", "mat2"), ("sum.dim_IntList", "self"),
         ("index_select", "self"), ("gather", "self"), ("max_pool2d_with_indices", "self"), ("cat", "tensors")],
    )  # fmt: skip
    def test_results_do_not_take_the_memory_of_what_is_still_read(
        self, name: str, argument: str
    ) -> None:
        found = placement(overload(name), "cpu")
        assert found.way == "direct"
        assert found.cleared
        assert not any((argument, 0) in pairs for pairs in found.in_place.values())

    @pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
    def test_a_softmax_is_not_written_into_a_permuted_result(self, name: str) -> None:
        x = torch.randn(4, 6)
        found = placement(overload(name), "cpu")
        assert found.clears([x], [x])
        assert found.clears([x.T], [x])
        assert not found.clears([x.T], [x.T])
        assert ("self", 0) in found.in_place["float32"]

    def test_generated_overloads_that_copy_are_not_taken(self) -> None:
        assert placement(aten.native_layer_norm.default, "cpu").way == "copy_in"
        assert placement(aten.convolution.default, "cpu").way == "copy_in"
        assert "copies" in placement(aten.convolution.default, "cpu").reason
        assert placement(aten.relu.default, "cpu").name == "aten::clamp_min.out"

    def test_an_equal_kernel_is_equal_in_the_dtypes_that_it_is_used_for(self) -> None:
        grad, indices = torch.ones(3, 4), torch.tensor([0, 1, 1])
        found = placement(aten.embedding_dense_backward.default, "cpu")
        assert found.clears([grad, indices], [grad])
        assert not found.clears([grad.bfloat16(), indices], [grad.bfloat16()])
        assert found.applies(
            aten.embedding_dense_backward.default, (grad, indices, 4, -1, False), {}
        )
        assert not found.applies(
            aten.embedding_dense_backward.default, (grad, indices, 4, -1, True), {}
        )

    @pytest.mark.parametrize(
        ("target", "reason"),
        [(aten.add_.Tensor, "argument"), (aten.view.default, "argument"), (aten._foreach_add.List, "not all tensors"),
         (float.__add__, "no tensor"), (aten.convolution_overrideable.default, "copies")],
    )  # fmt: skip
    def test_what_is_not_placed_says_why(self, target: Any, reason: str) -> None:
        found = placement(target, "cpu")
        assert found.way == "copy_in"
        assert reason in found.reason

    def test_nothing_is_cleared_for_a_device_that_was_not_tested(self) -> None:
        assert placement(aten.add.Tensor, "xpu").way == "copy_in"


def test_layouts() -> None:
    x = torch.empty(2, 3, 4, 5)
    letters = {
        "C": [x, x[0], x[:, :1, :1, :1].clone(), torch.empty(0, 3).T, torch.empty(()), x.new_empty(1, 3, 1, 1), x[1:]],
        "L": [x.to(memory_format=torch.channels_last), torch.empty(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)],
        "P": [x.transpose(0, 1), x[0, 0].T, x.permute(3, 2, 1, 0)],
        "S": [x[..., 1:], x[:, :, ::2], x[0, 0, :, 0]],
        "E": [x[:, :1].expand(2, 3, 4, 5), torch.ones(1).expand(3), torch.ones(9).as_strided((3, 3), (2, 1))],
    }  # fmt: skip
    for letter, tensors in letters.items():
        assert [layout(tensor) for tensor in tensors] == [letter] * len(tensors), letter
    assert layouts_of([x, x.transpose(0, 1), x], [x]) == "CP>C"
    assert dtypes_of([x, x > 0], [x.long()]) == "bool+float32+int64"


class TestTrial:
    """The trial itself notices whatever a kernel may do wrong."""

    x = torch.tensor([[1.0, -0.0], [float("nan"), 4.0], [5.0, 6.0]])

    def tried(self, kernel: Any) -> str:
        return try_placed(ordinary(aten.neg.default, self.x), kernel)

    def test_right(self) -> None:
        assert self.tried(lambda outs, x: torch.neg(x, out=outs[0])) == ""

    def test_other_bits(self) -> None:
        assert (
            self.tried(lambda outs, x: torch.sub(0, x, out=outs[0])) == "other bits"
        )  # 0 - -0 is 0

    def test_beside_its_result(self) -> None:
        def kernel(outs: Any, x: torch.Tensor) -> None:
            torch.neg(x, out=outs[0].as_strided((3, 2), (2, 1)))
            outs[0].as_strided((7,), (1,))[6] = 0

        assert self.tried(kernel) == "wrote beside its results"

    def test_changed_argument(self) -> None:
        assert (
            self.tried(lambda outs, x: torch.neg(x, out=outs[0]) + x.zero_())
            == "changed an argument"
        )

    def test_resized(self) -> None:
        assert (
            self.tried(lambda outs, x: outs[0].set_(-x))
            == "did not keep the memory that it was given"
        )
        assert self.tried(lambda outs, x: torch.neg(x[:1], out=outs[0])) == "raised UserWarning"

    def test_random_numbers(self) -> None:
        wrong = try_placed(
            ordinary(aten.rand_like.default, self.x),
            lambda outs, x: outs[0].uniform_() + torch.rand(1),
        )
        assert wrong == "drew other random numbers"

    def test_in_place(self) -> None:
        square = torch.randn(256, 256)  # of 8 by 8, MKL takes a copy and nothing is wrong
        call = ordinary(aten.mm.default, square, square.T)
        assert in_place_pairs(call) == [("self", 0)]
        assert try_in_place(call, lambda outs, a, b: torch.mm(a, b, out=outs[0]), "self", 0)
        call = ordinary(aten.sub.Tensor, square, square.clone())
        assert in_place_pairs(call) == [("self", 0), ("other", 0)]
        assert not try_in_place(call, lambda outs, a, b: torch.sub(a, b, out=outs[0]), "other", 0)
        assert not try_in_place(
            ordinary(aten.sub.Tensor, square, square),
            candidate(aten.sub.Tensor, "cpu").kernel,
            "self",
            0,
        )

    def test_a_copy_in_disguise(self) -> None:
        call = ordinary(aten.neg.default, torch.ones(1000))

        def sums(kernel: Any) -> list[int]:
            return [
                memory.sum_bytes
                for memory in bench.allocated(bench.allocating(call, kernel, None), "cpu")
            ]

        assert sums(lambda outs, x: torch.neg(x, out=outs[0])) == [4000, 0]
        assert sums(lambda outs, x: outs[0].copy_(-x)) == [4000, 4000]

    def test_pieces_one_after_the_other(self) -> None:
        def kernel(outs: Any, x: torch.Tensor) -> None:
            for out, part in zip(outs[0].split(250), x.split(250), strict=True):
                out.copy_(-part)

        call = ordinary(aten.neg.default, torch.ones(1000))
        _, placed = bench.allocated(bench.allocating(call, kernel, None), "cpu")
        assert placed == bench.Allocated(sum_bytes=4000, peak_bytes=1000)

    def test_calls_that_a_plan_cannot_place(self) -> None:
        for target, args in [
            (aten.mm.default, (self.x, self.x)),
            (aten._unsafe_view.default, (self.x, [6])),
            (aten.neg.default, (torch.ones(2, dtype=torch.complex64).conj(),)),
        ]:
            with pytest.raises(Unusable):
                ordinary(target, *args)


def placed_shares(program: Program) -> dict[str, float]:
    """Of the bytes that the step's calls make: the share of each way."""
    made: Counter[str] = Counter()
    for index, call in enumerate(program.calls):
        storages = [storage for storage in program.storages if storage.creator == index]
        metas = [program.slots[slot] for slot in call.outputs if slot is not None]
        outputs = [meta for meta in metas if meta is not None]
        inputs = [meta for slot in call.refs() if (meta := program.slots[slot]) is not None]
        found = placement(call.target, "cpu")
        is_placed = (
            storages
            and found.applies(call.target, call.args, call.kwargs)
            and found.clears(inputs, outputs)
        )
        made[found.way if is_placed else "copy_in"] += sum(
            storage.size_bytes for storage in storages
        )
    total = sum(made.values())
    return {way: made[way] / total for way in ("direct", "substitute", "copy_in")}


@pytest.mark.parametrize(
    ("model", "sizes", "direct", "placed"),
    [("gpt2-tiny", {"seq": 64}, 0.8, 0.9), ("resnet18", {}, 0.5, 0.55)],
)
def test_most_of_a_step_is_placed(
    model: str, sizes: dict[str, int], direct: float, placed: float
) -> None:
    with roam.fake("cpu"):
        step = zoo.build(model, batch=2, **sizes)
    captured = capture_step(step.train_step, (step.model, step.optimizer, *step.batch), {})
    shares = placed_shares(captured.steady.program)
    print(model, shares)
    assert shares["direct"] > direct
    assert 1 - shares["copy_in"] > placed
