"""Establish which kernels may write into a plan's memory, and write
`python/roam/kernels/kernels.json`.

    # Everything; up to an hour.
    OMP_WAIT_POLICY=passive python benches/kernel_table.py
    # A part of it, reported and not written.
    python benches/kernel_table.py --ops add softmax --steps --dry
    # Every 20th operator, in processes side by side (0/20 to 19/20); then all of them together.
    python benches/kernel_table.py --device cuda --part 3/20 --dry > part-3.json
    python benches/kernel_table.py --device cuda --join part-*.json

Calls are harvested from the samples that PyTorch tests its own operators with, forward and
backward, and from training steps of the zoo. Each call is repeated with its tensors laid out in
other ways, and once for every argument whose memory a result could take. A kernel is cleared, per
layouts and dtypes, if all its calls give the ordinary result byte for byte in a view of a poisoned
pool, touch nothing else, and allocate no more than the ordinary call does beyond its result. What a
kernel takes for itself all the same, `roam.kernels.workspace` finds out.

On CUDA, trials of small tensors prove less. How many blocks of a kernel run before others have read
their part depends on the size and on the device, so only pointwise results may take an argument's
memory. Which number an element draws depends on the size too, so no random kernel stands for
another.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from roam import zoo
from roam.kernels.fused import CROSS_ENTROPY_BACKWARD
from roam.kernels.rows import piece_bytes
from roam.kernels.table import (
    TABLE,
    Placement,
    candidate,
    capability,
    dtypes_of,
    layouts_of,
    named,
    placement,
)
from roam.kernels.trial import Ordinary, Unusable, in_place_pairs, try_in_place, try_placed
from roam.program.bits import copied
from roam.runtime.memory_profiler import Block, measure_peak

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
ON_CUDA = (*DTYPES, torch.float16)
STEPS = (
    "gpt2-tiny",
    "bert-tiny",
    "llama-tiny",
    "moe-tiny",
    "lstm-tiny",
    "darts-tiny",
    "randwire-tiny",
    "resnet18",
)
MOST_BYTES = 1 << 20
"""Larger calls show nothing new and take long; each is tried once with large tensors of its own."""
CRASHING = ("aten::adaptive_max_pool3d_backward",)
"""Overloads that die of a segmentation fault on expanded or permuted tensors (PyTorch 2.15)."""
MOST_WORKSPACE_BYTES = 6 << 30
MOST_CALLS = 100
"""Of an overload and dtypes, where the calls are made for it."""
LARGE = {0: 2048, 1: 2048, 2: 256, 3: 40, 4: 16, 5: 9}
"""Size of all dimensions of large tensors, by how many there are."""
TOO_SMALL = "small trials only"
LEAST_IN_PLACE = 1024
"""Elements that some trial must have had before results are cleared to take an argument's memory.
"""


@dataclass(slots=True)
class Findings:
    """What trials of one overload found: the first thing that was wrong, or nothing."""

    kernel: Placement
    placed: dict[tuple[str, str], str] = field(default_factory=dict)
    """By (dtypes, layouts)."""
    in_place: dict[tuple[str, tuple[str, int]], str] = field(default_factory=dict)
    """By (dtypes, (argument, result))."""
    largest: dict[Any, Ordinary] = field(default_factory=dict)
    """Per layouts, and per (dtypes, (argument, result)), the call with the largest results."""

    def generalize(self, target: OpOverload) -> None:
        """Refuse in all dtypes what one dtype shows to read an element after others are written.

        Where elements do not depend on each other, a dtype's fault is its own. Else it may have
        gone unseen in other dtypes because a library happened to copy: it does so for some sizes.
        """
        if torch.Tag.pointwise not in target.tags:
            faults = {
                pair: wrong
                for (_, pair), wrong in sorted(self.in_place.items())
                if wrong not in ("", TOO_SMALL)
            }
            for cell in self.in_place:
                note(self.in_place, cell, faults.get(cell[1], ""))

    def add(self, entry: dict[str, Any]) -> None:
        """Adds what trials in another process found: a fault counts more than a clearance, which
        counts more than a trial that was too small.
        """
        found: dict[Any, str] = {
            (dtypes, layouts): ""
            for joined, cleared in entry["cleared"].items()
            for dtypes in joined.split()
            for layouts in cleared
        }
        found |= {
            (dtypes, (argument, result)): ""
            for joined, pairs in entry["in_place"].items()
            for dtypes in joined.split()
            for argument, result in pairs
        }
        for key, wrong in entry["refused"].items():
            dtypes, *rest = key.split()
            is_pair = len(rest) > 1  # in place, argument, result
            found[dtypes, (rest[-2], int(rest[-1])) if is_pair else rest[0]] = wrong
        for cell, wrong in found.items():
            record: dict[Any, str] = self.placed if isinstance(cell[1], str) else self.in_place
            if wrong == TOO_SMALL:
                record.setdefault(cell, wrong)
            else:
                record[cell] = wrong or record.get(cell, "").replace(TOO_SMALL, "")

    def entry(self) -> dict[str, Any]:
        """What the file says of the overload."""
        cleared = grouped(self.placed)
        refused = {
            f"{dtypes} {layouts}": wrong
            for (dtypes, layouts), wrong in sorted(self.placed.items())
            if wrong
        }
        for (dtypes, (argument, result)), wrong in sorted(self.in_place.items()):
            if wrong:
                refused[f"{dtypes} in place {argument} {result}"] = wrong
        in_place = grouped(self.in_place) if cleared else {}
        return {
            "kernel": self.kernel.name,
            "cleared": cleared,
            "in_place": in_place,
            "refused": refused,
        }


def grouped(record: dict[tuple[str, Any], str]) -> dict[str, list[Any]]:
    """What nothing was wrong with, by dtypes; those with the same go together."""
    right: dict[str, list[Any]] = {}
    for (dtypes, key), wrong in sorted(record.items()):
        if not wrong:
            right.setdefault(dtypes, []).append(key)
    joined: dict[tuple[Any, ...], list[str]] = {}
    for dtypes, keys in right.items():
        joined.setdefault(tuple(keys), []).append(dtypes)
    return {" ".join(dtypes): list(keys) for keys, dtypes in joined.items()}


class Trials:
    """Tries calls and keeps what was found, per overload."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.found: dict[OpOverload, Findings] = {}

    def __call__(self, target: OpOverload, args: Any, kwargs: Any, number: int) -> None:
        """Try the overload's call of this number in every layout."""
        kernel = candidate(target, self.device)
        if target.name() in CRASHING or not kernel.applies(target, args, kwargs):
            return
        if draws_otherwise(target, self.device):
            return
        for layout_args, layout_kwargs in variants(args, kwargs, number):
            if self.device == "cuda" and is_out_of_range(target, layout_args, layout_kwargs):
                continue
            try:
                ordinary = Ordinary.run(target, layout_args, layout_kwargs)
            except Unusable:
                continue
            if kernel.rows is not None and not kernel.splits(layout_args, layout_kwargs):
                continue
            self._try(self.found.setdefault(target, Findings(kernel)), ordinary)

    def _try(self, findings: Findings, ordinary: Ordinary) -> None:
        kernel = findings.kernel.kernel
        inputs = tensors((ordinary.args, ordinary.kwargs))
        layouts = layouts_of(inputs, ordinary.results)
        dtypes = dtypes_of(inputs, ordinary.results)
        wrong = try_placed(ordinary, kernel)
        if wrong == "other bits" and not ordinary.is_reproducible():
            return
        note(findings.placed, (dtypes, layouts), wrong)
        if wrong:
            return
        keep_larger(findings.largest, layouts, ordinary)
        pairs = in_place_pairs(ordinary) if may_be_in_place(ordinary.target, self.device) else ()
        for pair in pairs:
            wrong = try_in_place(ordinary, kernel, *pair)
            if wrong == "other bits" and not ordinary.is_reproducible():
                continue
            note(findings.in_place, (dtypes, pair), wrong)
            if not wrong:
                keep_larger(findings.largest, (dtypes, pair), ordinary)

    def measure(self) -> None:
        """Refuse what allocates as much as it would without being given memory."""
        for target, findings in self.found.items():
            findings.generalize(target)
            for cell in findings.in_place:
                _, (_, result) = cell
                if (
                    cell in findings.largest
                    and findings.largest[cell].results[result].numel() < LEAST_IN_PLACE
                ):
                    note(findings.in_place, cell, TOO_SMALL)
        cases = [
            (target, key) for target, findings in self.found.items() for key in findings.largest
        ]
        for start in range(0, len(cases), 500):
            self._measure(cases[start : start + 500])

    def _measure(self, cases: list[tuple[OpOverload, Any]]) -> None:
        works = []
        for target, key in cases:
            findings = self.found[target]
            works += allocating(
                findings.largest[key],
                findings.kernel.kernel,
                key[1] if isinstance(key, tuple) else None,
            )
        memory = allocated(works, self.device)
        for (target, key), ordinary, placed in zip(cases, memory[::2], memory[1::2], strict=True):
            findings = self.found[target]
            call = findings.largest[key]
            made_bytes, claimed_bytes = total_bytes(call.results), 0
            ordinary_bytes, placed_bytes = ordinary.sum_bytes, placed.sum_bytes
            if (rows := findings.kernel.rows) is not None:
                # Pieces come one after the other.
                claimed_bytes = piece_bytes(rows(*call.args, **call.kwargs), made_bytes)
                ordinary_bytes, placed_bytes = ordinary.peak_bytes, placed.peak_bytes
            # Numbers become tensors of a few bytes in one way and not in the other.
            if 16 * (placed_bytes + made_bytes - ordinary_bytes - claimed_bytes) > made_bytes:
                wrong = f"allocates {placed_bytes} of {ordinary_bytes}"
                if isinstance(key, tuple):
                    note(findings.in_place, key, wrong)
                else:
                    for cell in findings.placed:
                        if cell[1] == key:
                            note(findings.placed, cell, wrong)


def may_be_in_place(target: OpOverload, device: str) -> bool:
    """Whether trials can show that a result may take an argument's memory."""
    return device == "cpu" or torch.Tag.pointwise in target.tags


def draws_otherwise(target: OpOverload, device: str) -> bool:
    """Whether a kernel would stand for another that draws random numbers on CUDA."""
    is_random = torch.Tag.nondeterministic_seeded in target.tags
    return device == "cuda" and is_random and candidate(target, device).way == "substitute"


def is_out_of_range(target: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether the CPU says that an index is out of range; a CUDA kernel would end the process's use
    of the device.
    """
    args, kwargs = pytree.tree_map_only(Tensor, Tensor.cpu, (args, kwargs))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    try:
        target(*args, **kwargs)
    except IndexError:
        return True
    except Exception as error:  # noqa: BLE001 - there may be no such kernel on the CPU
        return "out of range" in str(error) or "out of bounds" in str(error)
    return False


def note(record: dict[Any, str], key: Any, wrong: str) -> None:
    """Keep the first thing that was wrong."""
    record[key] = record.get(key) or wrong


def keep_larger(record: dict[Any, Ordinary], key: Any, ordinary: Ordinary) -> None:
    """Keep the call with the larger results, up to a size."""
    known = record.get(key)
    if known is None or total_bytes(known.results) < total_bytes(ordinary.results) <= MOST_BYTES:
        record[key] = ordinary


def allocating(
    ordinary: Ordinary, kernel: Any, pair: tuple[str, int] | None
) -> list[Callable[[], Any]]:
    """The ordinary call and the placed one, on arguments and outs that exist already."""
    args, kwargs = copied((ordinary.args, ordinary.kwargs))
    outs = list(copied(ordinary.results))
    placed_args, placed_kwargs = copied((args, kwargs))
    if pair is not None:
        outs[pair[1]] = named(ordinary.target, placed_args, placed_kwargs)[pair[0]]
    return [
        lambda: ordinary.target(*args, **kwargs),
        lambda: kernel(outs, *placed_args, **placed_kwargs),
    ]


@dataclass(frozen=True, slots=True)
class Allocated:
    """What a work allocates: all told, and at most at once."""

    sum_bytes: int
    peak_bytes: int


def allocated(works: list[Callable[[], Any]], device: str) -> list[Allocated]:
    """What each work allocates."""
    if device == "cuda":
        return [allocated_cuda(work) for work in works]
    # A block of a size that nothing else has stands between one work and the next.
    mark_bytes = 987_654_321

    def run() -> None:
        with torch.no_grad():
            for work in works:
                torch.empty(mark_bytes, dtype=torch.uint8)
                work()

    found: list[list[Block]] = []
    for block in measure_peak(run).blocks:
        if block.size_bytes == mark_bytes:
            found.append([])
        else:
            found[-1].append(block)
    return [
        Allocated(sum(block.size_bytes for block in blocks), peak_bytes(blocks)) for blocks in found
    ]


def peak_bytes(blocks: list[Block]) -> int:
    """The most bytes of blocks that are there at once."""
    made = [(block.made_at, block.size_bytes) for block in blocks]
    freed = [(block.freed_at, -block.size_bytes) for block in blocks if block.freed_at is not None]
    return max(itertools.accumulate((size for _, size in sorted(made + freed)), initial=0))


def allocated_cuda(work: Callable[[], Any]) -> Allocated:
    counter = "requested_bytes.all"
    before = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    work()
    after = torch.cuda.memory_stats()
    return Allocated(
        after[f"{counter}.allocated"] - before[f"{counter}.allocated"],
        after[f"{counter}.peak"] - before[f"{counter}.current"],
    )


def total_bytes(results: Iterable[Tensor]) -> int:
    return sum(result.untyped_storage().nbytes() for result in results)


def tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]


def variants(args: Any, kwargs: Any, number: int) -> Iterator[tuple[Any, Any]]:
    """The call as it is and laid out in other ways: all tensors alike, kinds mixed, one tensor
    twice, large.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def changed(values: Iterable[Tensor]) -> tuple[Any, Any]:
        found = dict(zip(places, values, strict=False))
        return pytree.tree_unflatten(
            [found.get(place, leaf) for place, leaf in enumerate(leaves)], spec
        )

    given = [leaves[place].detach() for place in places]
    yield changed(given)
    is_first = number == 0 and given and all(tensor.numel() for tensor in given)
    # Few samples have images.
    images = [[enlarged(tensor, (3, 4, 5, 6)) for tensor in given]] if is_first else []
    for base in (given, *images):
        seen = set()
        for pattern in patterns(len(base), number):
            made = [laid_out(tensor, letter) for tensor, letter in zip(base, pattern, strict=True)]
            key = tuple((tensor.stride(), tensor.storage_offset()) for tensor in made)
            if key not in seen:
                seen.add(key)
                yield changed(made)
    for place, tensor in enumerate(given[1:], 1):
        if (tensor.shape, tensor.dtype) == (given[0].shape, given[0].dtype):
            yield changed(
                [given[0] if other == place else item for other, item in enumerate(given)]
            )
    if is_first:
        dims = [tensor.dim() for tensor in given]
        # A kernel that broadcasts may have been called with no two tensors of one shape, or with
        # single numbers.
        for wanted in dict.fromkeys((tuple(dims), (max(dims),) * len(dims), (2,) * len(dims))):
            size = LARGE.get(max(wanted), 4)
            many = [
                enlarged(tensor, (size,) * dim) for tensor, dim in zip(given, wanted, strict=True)
            ]
            yield changed(many)
            yield changed([laid_out(tensor, "P") for tensor in many])


def patterns(count: int, number: int) -> Iterator[Iterable[str]]:
    """A letter for each of so many tensors."""
    yield from (letter * count for letter in "COLPSE")
    if count > 1:
        for pair in itertools.combinations("CLPSE", 2):
            first, rest = pair if number % 2 else pair[::-1]
            yield first + rest * (count - 1)
    if count > 2:
        threes = itertools.permutations("CPSE", 3) if number == 0 else ["CPE", "PSC", "CLE", "ECS"]
        yield from ("".join(three) + "C" * (count - 3) for three in threes)


def enlarged(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Values of the tensor, drawn at random."""
    return tensor.reshape(-1)[torch.randint(tensor.numel(), shape, device=tensor.device)]


def laid_out(tensor: Tensor, letter: str) -> Tensor:
    """The same values in a layout (see `roam.kernels.table.layout`; O is contiguous at an odd
    offset).

    An expanded tensor repeats its first values; where a layout does not exist for a shape, a
    contiguous tensor.
    """
    dims = tensor.dim()
    if letter == "L" and dims in (4, 5):
        form = torch.channels_last if dims == 4 else torch.channels_last_3d
        return tensor.clone(memory_format=form)
    if letter == "P" and dims > 1:
        turned = (dims - 1, *range(dims - 1))
        back = (*range(1, dims), 0)
        return tensor.permute(turned).contiguous().clone().permute(back)
    if letter == "S" and dims > 0:
        room = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] * 2 + 1))
        return room[..., 1::2].copy_(tensor)
    if letter == "O":
        return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
    if letter == "E":
        for dim, size in enumerate(tensor.shape):
            if size > 1:
                return tensor.narrow(dim, 0, 1).clone().expand(tensor.shape)
    return tensor.clone(memory_format=torch.contiguous_format)


class Harvest(TorchDispatchMode):
    """Shows the first calls of each overload, a bounded number for each of its dtypes."""

    def __init__(
        self, show: Callable[[OpOverload, Any, Any, int], None], device: str, most: int
    ) -> None:
        super().__init__()
        self.show = show
        self.device = device
        self.most = most
        self.calls: Counter[Any] = Counter()
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        if candidate(func, self.device).way != "copy_in":
            inputs, outputs = tensors((args, kwargs)), tensors(returned)
            shape = repr(
                pytree.tree_map_only(
                    Tensor, lambda t: (t.shape, t.stride(), t.dtype), (args, kwargs)
                )
            )
            key = func, dtypes_of(inputs, outputs)
            is_small = (
                sum(item.numel() * item.element_size() for item in (*inputs, *outputs))
                <= MOST_BYTES
            )
            if is_small and (func, shape) not in self.seen and self.calls[key] < self.most:
                self.seen.add((func, shape))
                self.show(func, args, kwargs, self.calls[key])
                self.calls[key] += 1
        return returned


def operator_samples(
    names: list[str] | None,
    dtypes: Iterable[torch.dtype],
    device: str,
    most: int,
    part: tuple[int, int],
) -> Iterator[Any]:
    """PyTorch's own samples: (operator, sample, whether to run backward)."""
    from torch.testing._internal.common_methods_invocations import op_db

    chosen = [op for op in op_db if names is None or op.name in names]
    for op in chosen[part[0] :: part[1]]:
        for dtype in dtypes:
            if dtype not in op.supported_dtypes(device):
                continue
            backward = op.supports_autograd and dtype in op.supported_backward_dtypes(device)
            torch.manual_seed(0)
            try:
                yield from (
                    (op, item, backward)
                    for item in itertools.islice(op.sample_inputs(device, dtype, backward), most)
                )
            except Exception as error:  # noqa: BLE001 - a library that is not installed here
                sys.stderr.write(f"{op.name} has no samples: {error}\n")


def run_sample(op: Any, sample: Any, backward: bool) -> None:
    """Run an operator on a sample; what it does not support is passed over."""
    try:
        results = [
            item
            for item in tensors(op(sample.input, *sample.args, **sample.kwargs))
            if item.requires_grad
        ]
        if backward and results:
            torch.autograd.backward(results, [torch.randn_like(item) for item in results])
    except Exception as error:  # noqa: BLE001 - see above
        sys.stderr.write(f"{op.name}: {str(error).splitlines()[:1]}\n")


def run_fused(dtypes: Iterable[torch.dtype], device: str) -> None:
    """Call the operators that stand for several of PyTorch's."""
    for dtype, rows, classes, weighted, reduction in itertools.product(
        dtypes, (1, 7, 300), (5, 1003), (False, True), (0, 1, 2)
    ):
        torch.manual_seed(rows + classes)
        if not dtype.is_floating_point:
            continue
        weight = torch.rand(classes, device=device).to(dtype) if weighted else None
        output = torch.randn(rows, classes, device=device).log_softmax(1).to(dtype)
        target = torch.randint(classes, (rows,), device=device)
        target[rows // 2] = -100
        _, total = torch.ops.aten.nll_loss_forward(output, target, weight, reduction, -100)
        grad = torch.randn((rows,) if reduction == 0 else (), device=device).to(dtype)
        CROSS_ENTROPY_BACKWARD(grad, output, target, weight, reduction, -100, total)


def run_rows(dtypes: Iterable[torch.dtype], device: str) -> None:
    """Call the operators that go by rows with as many, and in such forms, as samples do not
    have.
    """
    sizes = ((2, 32, 32, 16), (5, 37, 48, 16), (3, 197, 197, 8), (2, 256, 64, 8))
    for dtype, (samples, queries, keys, width) in itertools.product(dtypes, sizes):
        if dtype.is_floating_point:
            torch.manual_seed(0)
            for masked, causal in (
                (None, False), (None, True), ((samples, 1), False), ((1, 3), False), ((samples, 3), False),
            ):  # fmt: skip
                run_attention(samples, queries, keys, width, dtype, device, masked, causal)


def run_attention(
    samples: int,
    queries: int,
    keys: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    masked: Any,
    causal: bool,
) -> None:
    """Heads lie side by side, as projections make them."""
    query, key, value = (
        torch.randn(samples, size, 3, width, device=device)
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for size in (queries, keys, keys)
    )
    mask = None if masked is None else torch.randn(*masked, queries, keys, device=device).to(dtype)
    result = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal
    )
    result.backward(torch.randn_like(result))


def establish(arguments: argparse.Namespace) -> Trials:
    """Harvest and try everything that is asked for."""
    trials = Trials(arguments.device)
    harvest = Harvest(trials, arguments.device, arguments.calls)
    place, count = arguments.part
    for name in arguments.steps[place::count]:
        sys.stderr.write(f"{name}\n")
        torch.manual_seed(0)
        seq = None if zoo.entry(name).max_seq is None else 16
        step = zoo.build(name, batch=2, seq=seq, device=arguments.device)
        with harvest:
            step.train_step(step.model, step.optimizer, *step.batch)
    if place == 0:
        with harvest:
            run_fused(arguments.dtypes, arguments.device)
        with Harvest(trials, arguments.device, MOST_CALLS):
            run_rows(arguments.dtypes, arguments.device)
    names = None
    for op, sample, backward in operator_samples(
        arguments.ops, arguments.dtypes, arguments.device, arguments.samples, arguments.part
    ):
        if op.name != names:
            names = op.name
            sys.stderr.write(f"{names}\n")
        with harvest:
            run_sample(op, sample, backward)
    sys.stderr.write("measuring\n")
    gc.freeze()
    trials.measure()
    return trials


def overload(name: str) -> Any:
    """The operator of a name such as ``aten::add.Tensor``; None if there is none."""
    namespace, _, full = name.partition("::")
    packet, _, rest = full.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), rest or "default", None)


def as_table(entries: dict[OpOverload, dict[str, Any]]) -> dict[str, Any]:
    """What the file says of a device."""
    found = sorted(entries.items(), key=lambda item: item[0].name())
    kernels = {op.name(): entry for op, entry in found}
    return {
        "torch": torch.__version__.split("+")[0],
        "capability": capability(),
        "kernels": kernels,
    }


def joined(parts: list[Path], device: str) -> dict[str, Any]:
    """The table of what several processes with the same PyTorch found."""
    tables = [json.loads(path.read_text()) for path in parts]
    if len({(table["torch"], str(table["capability"])) for table in tables}) > 1:
        raise SystemExit("the parts were established with different versions of PyTorch or devices")
    found: dict[OpOverload, Findings] = {}
    for name, entry in (item for table in tables for item in table["kernels"].items()):
        target = overload(name)
        assert target is not None, "an operator that was tried"
        if draws_otherwise(target, device):
            continue
        found.setdefault(target, Findings(candidate(target, device))).add(entry)
        if not may_be_in_place(target, device):
            found[target].in_place.clear()
    for target, findings in found.items():
        findings.generalize(target)
    told = {name: tables[0][name] for name in ("torch", "capability")}
    return as_table({op: item.entry() for op, item in found.items()}) | told


def part(text: str) -> tuple[int, int]:
    """``3/20`` as numbers."""
    place, _, count = text.partition("/")
    return int(place), int(count)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--ops", nargs="*", help="operators of PyTorch's own database (default: all)"
    )
    parser.add_argument(
        "--steps", nargs="*", default=STEPS, help="models of the zoo (default: %(default)s)"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=6,
        help="samples of an operator and dtype (default %(default)s)",
    )
    parser.add_argument(
        "--calls", type=int, default=5, help="calls of an overload and dtypes (default %(default)s)"
    )
    parser.add_argument(
        "--dtypes", nargs="*", type=lambda name: getattr(torch, name),
        help="of samples (default: those of most models)",
    )  # fmt: skip
    parser.add_argument(
        "--part",
        type=part,
        default=(0, 1),
        metavar="K/N",
        help="every Nth step and operator from the Kth on; K is 0 to N-1",
    )
    parser.add_argument(
        "--join", nargs="+", type=Path, metavar="FILE", help="what parts wrote, instead of trials"
    )
    parser.add_argument(
        "--merge", action="store_true", help="only add overloads that the file does not know"
    )
    parser.add_argument(
        "--dry", action="store_true", help="write to the screen instead of the file"
    )
    arguments = parser.parse_args()
    arguments.dtypes = arguments.dtypes or (ON_CUDA if arguments.device == "cuda" else DTYPES)
    warnings.simplefilter("ignore")
    if arguments.device == "cpu":
        # Some operator on large tensors asks for all there is; it shall be told so.
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(
            resource.RLIMIT_AS, (used + MOST_WORKSPACE_BYTES, resource.RLIM_INFINITY)
        )
    if arguments.join:
        table = joined(arguments.join, arguments.device)
    else:
        trials = establish(arguments)
        table = as_table({op: item.entry() for op, item in trials.found.items()})
    if arguments.dry:
        json.dump(table, sys.stdout, indent=1)
        return 0
    known = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    if arguments.merge:
        if known[arguments.device]["torch"] != table["torch"]:
            raise SystemExit("the table was established with another PyTorch")
        table["kernels"] = dict(
            sorted({**table["kernels"], **known[arguments.device]["kernels"]}.items())
        )
    TABLE.write_text(text({**known, arguments.device: table}))
    sys.stdout.write(summary(arguments.device) + "\n")
    return 0


def summary(device: str) -> str:
    """How many overloads go each way, and why others land."""
    ways: Counter[tuple[str, str]] = Counter()
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        target = overload(name)
        # What PyTorch composes of others is never captured.
        if target is None or torch._C._dispatch_has_kernel_for_dispatch_key(
            name, "CompositeImplicitAutograd"
        ):
            continue
        found = placement(target, device)
        ways[found.way, found.reason.partition(":")[0]] += 1
        ways["in place", ""] += any(found.in_place.values())
    return "\n".join(
        f"{number:5} {way:10} {reason}" for (way, reason), number in sorted(ways.items())
    )


def text(tables: dict[str, Any]) -> str:
    """The file: one line an overload."""
    parts = []
    for device, table in sorted(tables.items()):
        lines = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in table["kernels"].items()
        )
        parts.append(
            f'{json.dumps(device)}: {{"torch": {json.dumps(table["torch"])}, '
            f'"capability": {json.dumps(table["capability"])}, "kernels": {{\n{lines}\n}}}}'
        )
    return "{" + ",\n".join(parts) + "}\n"


if __name__ == "__main__":
    sys.exit(main())
