"""One model trained in one way, in this process alone; started by `training.py`, once for every
row.

    python benches/training_way.py REQUEST REPLY

REQUEST is JSON; REPLY is the file that the findings are written to, again after every phase: what
was measured before a process died or ran out of time is not lost.

1. The model is made from a seed, and the first step's memory is measured.
2. From the third step on it is steady: a plan's first run of its own checks every kernel. The
  memory of steps 3 to k is measured. A CUDA graph is recorded in the fourth.
3. Losses and parameters after step k are compared, bit for bit, with those that eager PyTorch left
  on disk.
4. Steps are timed, each beside one of eager PyTorch on a second model where there is memory for
  two: each with a wait for the device before and after, and several in a row without, as in a
  user's loop.
5. With a folder for traces, one step is profiled: its trace, and its kernels' and operators' times.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch.utils.checkpoint import checkpoint
from training_models import Missing, Training, build

import roam
from roam.runtime.memory_profiler import measure_peak, observed

OURS: dict[str, dict[str, Any]] = {
    "roam": {},
    "roam-pool": {"pool": True},
    "roam-no-pool": {"pool": False},
    "roam-inductor": {"kernels": "inductor"},
    "roam-cuda-graph": {"cuda_graph": True},
    "roam-streams": {"streams": 2},
    "roam-75%": {"memory": "75%"},
    "roam-50%": {"memory": "50%"},
    "roam-25%": {"memory": "25%"},
    "roam-host-50%": {"memory": "50%", "offload": "host"},
    "roam-host-33%": {"memory": "33%", "offload": "host"},
}
"""Our ways, with the options that each is compiled with."""
REFERENCE = "eager"
"""The way that the others are compared with."""
_ALONE = ("eager", "eager-again", "eager-expandable")
"""Ways that eager PyTorch beside them would tell nothing about."""
_IN_A_ROW = 10
"""Steps that run without a wait between them when this is timed."""
_MOST_TIMED = 40
_FEWEST_TIMED = 5


class OneEach:
    """An optimizer for every parameter, stepped as soon as the parameter's gradient is complete.

    Stands where the optimizer would, so that the training function stays what it is.
    """

    def __init__(self, parameters: Any, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self._optimizers = {parameter: make([parameter]) for parameter in parameters}
        for parameter in self._optimizers:
            parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: torch.Tensor) -> None:
        self._optimizers[parameter].step()
        self._optimizers[parameter].zero_grad()

    def zero_grad(self) -> None:
        """Gradients are gone already."""

    def step(self) -> None:
        """Updates are done already."""


class Way:
    """A training and how its steps are run."""

    def __init__(self, request: dict[str, Any], way: str) -> None:
        torch.manual_seed(request["seed"])
        self.training: Training = build(
            request["model"], batch=request["batch"], seq=request["seq"], image=request["image"],
            dtype=request["dtype"], device=request["device"],
        )  # fmt: skip
        self.parameters = list(self.training.model.parameters())
        options = {"foreach=False": {"foreach": False}, "fused": {"fused": True}, "default": {}}[
            request["optimizer"]
        ]

        def make(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, lr=1e-3, **options)

        self.optimizer: Any = (
            OneEach(self.parameters, make) if way == "in-backward" else make(self.parameters)
        )
        self.model: Any = self.training.model
        if way.startswith("torch-compile"):
            share = way.removeprefix("torch-compile").strip("-%")
            torch._functorch.config.activation_memory_budget = int(share or 100) / 100
            self.model = torch.compile(self.training.model)
        train_step = self.training.train_step
        if way == "checkpoint":
            checkpoint_blocks(self.training.model)
        self.compiled = roam.compile(train_step, **OURS[way]) if way in OURS else None
        self._step = self.compiled or train_step

    def step(self) -> torch.Tensor:
        """One step; the loss."""
        loss: torch.Tensor = self._step(self.model, self.optimizer, *self.training.batch)
        return loss


def checkpoint_blocks(model: torch.nn.Module) -> None:
    """Runs every block of a model again in the backward pass, as `torch.utils.checkpoint` does."""
    for blocks in model.modules():
        if isinstance(blocks, (torch.nn.ModuleList, torch.nn.Sequential)) and len(blocks) > 4:
            for block in blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


class Row:
    """The findings about one way, on disk after every phase."""

    def __init__(self, request: dict[str, Any], reply: Path) -> None:
        self.request = request
        self.way: str = request["way"]
        self.on_cuda = request["device"] == "cuda"
        self.reply = reply
        self.values: dict[str, Any] = {"status": "died", "phase": "start"}

    def say(self, phase: str, **values: Any) -> None:
        """Writes what is known, and which phase comes next."""
        self.values |= {"phase": phase, **values}
        # Renamed into place, so that a process that dies while it writes leaves no half answer.
        partial = self.reply.with_suffix(".part")
        partial.write_text(json.dumps(self.values))
        partial.rename(self.reply)

    def run(self) -> None:
        """All phases."""
        request = self.request
        self.say("making the model", library_bytes=library_bytes() if self.on_cuda else 0)
        with observed_on(self.on_cuda):
            way = Way(request, self.way)
        count = sum(parameter.numel() for parameter in way.parameters)
        self.say("first step", parameters=count, parameter_tensors=len(way.parameters))

        torch.manual_seed(request["seed"] + 1)
        start = time.perf_counter()
        losses, first = self.memory(way, 1)
        self.say("second step", first_call_s=time.perf_counter() - start, memory_first=first)
        with observed_on(self.on_cuda):
            losses.append(way.step().item())
        self.say("steady steps")
        more, steady = self.memory(way, request["steps"] - 2)
        self.say("comparing", memory=steady)
        if way.compiled is not None:
            used_bytes = steady.get("requested_bytes", steady["allocated_bytes"])
            self.say(
                "comparing", **planned(way.compiled, used_bytes - self.values["library_bytes"])
            )
        self.compare(losses + more, way.parameters)
        if self.way != "eager-again":
            self.say("timing")
            self.time(way)
        if self.request.get("traces"):
            self.say("tracing")
            self.trace(way, Path(self.request["traces"]))
        if self.way == "roam" and way.compiled is not None:
            self.say("sharing out the saving")
            self.say("sharing out the saving", shares=shares(way.compiled))
        self.say("done", status="ok")

    def memory(self, way: Way, steps: int) -> tuple[list[float], dict[str, int]]:
        """Losses of some steps, and the most memory during them, with what was there before."""

        def work() -> list[float]:
            return [way.step().item() for _ in range(steps)]

        if not self.on_cuda:
            trace = measure_peak(work)
            without = trace.peak_without_workspace_bytes or 0
            return trace.value, {
                "allocated_bytes": trace.peak_total_bytes,
                "start_bytes": trace.start_bytes,
                "workspace_bytes": trace.peak_bytes - without,
                "unseen_freed_bytes": trace.unseen_freed_bytes or 0,
            }
        gc.collect()
        torch.cuda.synchronize()
        # What the allocator kept from before is none of these steps' need.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses = work()
        torch.cuda.synchronize()
        return losses, {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            # Without what the allocator rounds up, and rests of blocks that it does not split off.
            "requested_bytes": torch.cuda.memory_stats()["requested_bytes.all.peak"],
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "start_bytes": before,
        }

    def compare(self, losses: list[float], parameters: list[torch.Tensor]) -> None:
        """Losses and parameters against the reference's; the reference writes its own."""
        path = Path(self.request["reference"])
        finals = [parameter.detach() for parameter in parameters]
        if self.way == REFERENCE:
            torch.save({"losses": losses, "parameters": [final.cpu() for final in finals]}, path)
            self.say("compared", losses=losses)
            return
        if not path.exists():
            self.say("compared", losses=losses, bits="no reference")
            return
        reference = torch.load(path, mmap=True, weights_only=True)
        largest = max(
            map(
                difference,
                torch.tensor(losses).double(),
                torch.tensor(reference["losses"]).double(),
            )
        )
        same = repr(losses) == repr(reference["losses"])
        for final, expected in zip(finals, reference["parameters"], strict=True):
            mine = final.cpu()
            if not torch.equal(as_bytes(mine), as_bytes(expected)):
                same = False
                largest = max(largest, difference(mine, expected))
        bits = "equal" if same else "differ"
        self.say("compared", losses=losses, bits=bits, largest_difference=0.0 if same else largest)

    def time(self, way: Way) -> None:
        """Seconds of a step; where memory allows, each beside one of eager PyTorch on a model of
        its own.
        """
        twin = self.twin(way)
        mine: list[tuple[float, float]] = []
        other: list[tuple[float, float]] = []
        end = time.perf_counter() + self.request["timed_s"]
        while len(mine) < _MOST_TIMED and (len(mine) < _FEWEST_TIMED or time.perf_counter() < end):
            mine.append(self.one(way))
            if twin is not None:
                other.append(self.one(twin))
        values = timing(mine)
        values["unwaited_step_s"] = self.unwaited(way)
        if other:
            values["beside_eager"] = timing(other)
            values["beside_eager"]["unwaited_step_s"] = unwaited_s = self.unwaited(twin)
            values["unwaited_speed_of_eager"] = unwaited_s / values["unwaited_step_s"]
            # Neighbours in time share the machine's troubles.
            values["speed_of_eager"] = statistics.median(
                b[0] / a[0] for a, b in zip(mine, other, strict=True)
            )
        if operators := self.values.get("operators"):
            if self.on_cuda:  # where a call returns before the device is done
                values["host_us_per_operator"] = values["host_s"] / operators * 1e6
            if other:
                more_s = statistics.median(a[0] - b[0] for a, b in zip(mine, other, strict=True))
                values["more_us_per_operator"] = more_s / operators * 1e6
        self.say("timed", speed=values)

    def twin(self, way: Way) -> Way | None:
        """Eager PyTorch on a second model, warm; None where it would tell nothing or does not
        fit.
        """
        if self.way in _ALONE or not self.has_room():
            return None
        with contextlib.suppress(torch.OutOfMemoryError):
            return self.warm_twin(way)
        gc.collect()
        torch.cuda.empty_cache()
        return None

    def warm_twin(self, way: Way) -> Way:
        """Both have run beside each other."""
        twin = Way(self.request, REFERENCE)
        for one in (twin, twin, way):
            one.step()
        return twin

    def has_room(self) -> bool:
        """Whether eager PyTorch fits beside what is here: a step that runs out of memory half-way
        could not be timed any more.
        """
        peak = int(self.values["memory"]["allocated_bytes"])
        eager = 1.1 * max(peak, self.values.get("program_order_bytes", 0))
        if self.on_cuda:
            return peak + eager < 0.95 * torch.cuda.get_device_properties(0).total_memory
        return eager < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def one(self, way: Way) -> tuple[float, float]:
        """Seconds of one step, and of these the seconds until the call returned."""
        self.wait()
        start = time.perf_counter()
        way.step()
        returned = time.perf_counter()
        self.wait()
        return time.perf_counter() - start, returned - start

    def unwaited(self, way: Way) -> float:
        """Seconds of a step among several in a row, between which nothing waits for the device."""
        self.wait()
        start = time.perf_counter()
        for _ in range(_IN_A_ROW):
            way.step()
        self.wait()
        return (time.perf_counter() - start) / _IN_A_ROW

    def trace(self, way: Way, folder: Path) -> None:
        """Profiles one step into two files of the folder: a trace for a viewer, and a table."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.on_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.wait()
        with torch.profiler.profile(activities=activities) as profiled:
            way.step()
            self.wait()
        folder.mkdir(parents=True, exist_ok=True)
        names = ("model", "dtype", "optimizer", "way")
        name = "-".join(str(self.request[name]) for name in names).replace("/", "-")
        profiled.export_chrome_trace(str(folder / f"{name}.json.gz"))
        by = "self_device_time_total" if self.on_cuda else "self_cpu_time_total"
        table = profiled.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=60)
        (folder / f"{name}.txt").write_text(table)

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.on_cuda:
            torch.cuda.synchronize()


def library_bytes() -> int:
    """What cuBLAS takes at its first use, and keeps as long as the process lives."""
    one = torch.ones(64, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    made = one @ one
    return torch.cuda.memory_allocated() - before - made.untyped_storage().nbytes()


def observed_on(on_cuda: bool) -> Any:
    """On the CPU, what the measurement must have seen being made."""
    return contextlib.nullcontext() if on_cuda else observed()


def timing(steps: list[tuple[float, float]]) -> dict[str, Any]:
    """Medians."""
    step_s = statistics.median(seconds for seconds, _ in steps)
    return {
        "step_s": step_s,
        "steps_per_s": 1 / step_s,
        "host_s": statistics.median(host for _, host in steps),
        "timed_steps": len(steps),
    }


def planned(step: Any, measured_bytes: int) -> dict[str, Any]:
    """What the steady step's plan promised, and how much of it was measured."""
    runner = step._captures[0].runners[-1]
    choice, memory = runner.choice, runner.memory
    return {
        "operators": choice.graph.num_operators,
        "planned_bytes": choice.total_bytes,
        "measured_share_of_planned": measured_bytes / choice.total_bytes,
        "uses_pool": choice.uses_pool,
        "pool_bytes": choice.plan.pool_bytes if choice.uses_pool else 0,
        "persistent_bytes": choice.plan.persistent_bytes,
        "program_order_bytes": choice.eager_bytes,
        "totals": [list(total) for total in choice.totals],
        "read_bytes": dict(memory.read_bytes),
        "written_bytes": dict(memory.written_bytes),
        "offloaded_bytes": memory.offloaded_bytes,
        "least_moved_bytes": memory.least_moved_bytes,
        "planned_extra_s": memory.extra_s,
        "planned_step_s": memory.step_s,
    }


def shares(step: Any) -> dict[str, int]:
    """Totals by plan: as eager orders the step, then with one thing more at a time, and as the step
    runs.
    """
    captured = step._captures[0]
    choice = captured.runners[-1].choice
    graph = choice.eager_graph
    ordered, reused = roam.optimize(graph, reuse=False), roam.optimize(graph)
    return {
        "program_order": choice.eager_bytes,
        "planned_order": ordered.persistent_bytes + ordered.peak_bytes,
        "planned_order_and_reuse": reused.persistent_bytes + reused.peak_bytes,
        # The first way that is tried: no pool, and pairs of calls as one.
        "joined_calls": dict(choice.totals)["allocator"],
        "what_runs": choice.total_bytes,
    }


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bits, signs of zero and payloads of NaN included."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference; infinite where a number stands against none."""
    most = (one.double() - other.double()).abs().max().item()
    return float("inf") if most != most else most


def describe() -> dict[str, Any]:
    """This process's device and libraries."""
    cuda = torch.cuda.is_available()
    values: dict[str, Any] = {
        "driver": driver() if cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "cuda_available": cuda,
        "roam": roam.__version__,
        "threads": torch.get_num_threads(),
    }
    if cuda:
        properties = torch.cuda.get_device_properties(0)
        values |= {"device_name": properties.name, "device_bytes": properties.total_memory}
        values["capability"] = list(torch.cuda.get_device_capability(0))
    return values


def driver() -> str | None:
    """The version of the GPU's driver, where NVIDIA's tool tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return finished.stdout.strip()


def ending(error: Exception, way: str) -> str:
    """A row's status for what was raised."""
    text = " ".join(str(error).split())[:300]
    package = type(error).__module__
    if isinstance(error, Missing):
        return f"skipped: {text}"
    is_no_graph = getattr(error, "code", "") == "cuda_graph"
    if is_no_graph or isinstance(error, (roam.CaptureError, roam.PlanError)):
        return f"refused: {text}"
    if any(map(is_out_of_memory, (error, error.__cause__))):
        return f"out of memory: {text}"
    cannot = (
        package.startswith(("torch._dynamo", "torch._inductor", "triton"))
        or "compiler" in text.lower()
    )
    if way.startswith("torch-compile") and cannot:
        return f"skipped: torch.compile cannot run here: {type(error).__name__}: {text}"
    return f"failed: {type(error).__name__}: {text}"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether there was not as much memory as something wanted."""
    # The CPU's allocator has no exception of its own.
    return (
        isinstance(error, (torch.OutOfMemoryError, MemoryError))
        or getattr(error, "code", "") == "out_of_memory"
        or "can't allocate memory" in str(error)
    )


def main() -> None:
    """Does what the request says; without one, describes the machine."""
    if sys.argv[1] == "describe":
        print(json.dumps(describe()))
        return
    request, reply = json.loads(sys.argv[1]), Path(sys.argv[2])
    if request["threads"]:
        torch.set_num_threads(request["threads"])
    if request["deterministic"]:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    row = Row(request, reply)
    try:
        row.run()
    except Exception as error:  # noqa: BLE001 - whatever it is, the row says so
        row.say(
            row.values["phase"],
            status=ending(error, row.way),
            traceback=traceback.format_exc()[-4000:],
        )


if __name__ == "__main__":
    main()
