"""The planner. Use it through the package `roam`."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, SupportsIndex, TypedDict, final

import numpy as np
import numpy.typing as npt
from torch.fx import GraphModule
from typing_extensions import NotRequired

__all__ = [
    "Buffers",
    "Candidate",
    "Graph",
    "GraphBuilder",
    "Operator",
    "Packing",
    "Plan",
    "ShardingOutcome",
    "ShardingProblem",
    "Tensor",
    "__version__",
    "baseline",
    "baseline_order",
    "caching_allocator_bytes",
    "choose_residency",
    "compare_routes",
    "optimize",
    "pack",
    "synthetic_buffers",
    "synthetic_step",
    "verify",
    "verify_packing",
]

_Kind = Literal[
    "parameter",
    "buffer",
    "optimizer_state",
    "input",
    "gradient",
    "activation",
    "temporary",
    "output",
]
_Residency = Literal["step_local", "unpooled", "enters", "leaves", "persistent"]
_Phase = Literal["forward", "loss", "backward", "update", "collective"]
_Sequence = Literal["random", "collective"]
_Status = Literal["optimal", "feasible", "timed_out"]
_StreamModel = Literal["happens_before", "time_step"]
_BoundRoute = Literal["floor", "cut", "probe", "first", "exhaustive", "integer_program"]
_Exact = Literal["off", "auto", "required"]
_ExactStatus = Literal[
    "off", "not_needed", "not_tried", "too_large", "unavailable", "used", "no_answer"
]
_Path = str | os.PathLike[str]
_Numbers = npt.NDArray[np.int64]

class _Settings(TypedDict):
    streams: int
    reuse: bool
    exact: _Exact
    time_limit_s: float | None
    speed: float | None
    stream_model: _StreamModel

class _ExactReport(TypedDict):
    status: _ExactStatus
    programs: int
    gains: int
    failed: int
    timed_out: int
    reason: str | None

class _Routes(TypedDict):
    program_order: int
    heuristics: int
    search: int
    search_bound: int
    programs: NotRequired[int]
    programs_bound: NotRequired[int]
    report: NotRequired[_ExactReport]

__version__: str

@final
class Operator:
    """One operator of a graph. Read-only."""

    @property
    def id(self) -> int:
        """Its number in the graph."""
    @property
    def name(self) -> str:
        """The kernel, for example ``aten.add.Tensor``."""
    @property
    def position(self) -> int:
        """Its place in program order."""
    @property
    def phase(self) -> _Phase:
        """The part of the step it belongs to."""
    @property
    def reads(self) -> tuple[int, ...]:
        """Numbers of the tensors it reads."""
    @property
    def creates(self) -> tuple[int, ...]:
        """Numbers of the tensors it makes."""
    @property
    def mutates(self) -> tuple[int, ...]:
        """Numbers of the tensors it changes in place."""
    @property
    def workspace_bytes(self) -> int:
        """Bytes that live only while it runs, before rounding."""
    @property
    def flops(self) -> int:
        """Floating-point operations that it takes; 0 if they do not matter or are not known."""
    @property
    def time_ns(self) -> int:
        """Nanoseconds that it was measured to take; 0 if it was not measured."""
    @property
    def repeatable(self) -> bool:
        """Whether it may run again."""
    @property
    def first_only(self) -> tuple[int, ...]:
        """Numbers of the tensors that only its first run touches."""
    @property
    def reuse(self) -> tuple[tuple[int, int], ...]:
        """Pairs (input, output): the output may take the memory of the input where that dies
        here.
        """
    @property
    def sequence(self) -> _Sequence | None:
        """The sequence whose program order it keeps, or None."""
    @property
    def link(self) -> int:
        """For an operator that launches a collective, the number of the link that the collective
        uses.
        """
    @property
    def region(self) -> int | None:
        """Number of its conditional region, or None."""
    @property
    def module(self) -> str:
        """Dotted path of the module it belongs to; empty if unknown."""
    @property
    def file(self) -> str:
        """The user's file; empty if unknown."""
    @property
    def line(self) -> int:
        """The user's line, counted from 1; 0 if unknown."""
    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Tensor:
    """One tensor (a storage, not a view) of a graph. Read-only."""

    @property
    def id(self) -> int:
        """Its number in the graph."""
    @property
    def name(self) -> str:
        """For people; no rule depends on it."""
    @property
    def size_bytes(self) -> int:
        """Bytes of the storage, before rounding."""
    @property
    def counted_bytes(self) -> int:
        """Bytes as counted everywhere: rounded up to the alignment."""
    @property
    def kind(self) -> _Kind:
        """What it is for."""
    @property
    def residency(self) -> _Residency:
        """Whether it is alive before or after the step. Only step-local tensors may live in the
        pool.
        """
    @property
    def alignment_bytes(self) -> int:
        """Its own least alignment; if 0, the graph's."""
    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Graph:
    """A training step: operators, tensors (storages) and ordering constraints. Immutable and valid.

    Make one by :func:`roam.capture` or :class:`GraphBuilder`, or read one by :meth:`load`.
    Operators and tensors are identified by their numbers, which count from 0. If a method takes a
    number, negative numbers count from the end, and a number out of range is an
    :class:`IndexError`. Arrays are read-only and of 64-bit integers.
    """

    @property
    def name(self) -> str:
        """For people."""
    @property
    def device(self) -> str:
        """The device that the step runs on, for example ``cpu``."""
    @property
    def alignment_bytes(self) -> int:
        """Every size is rounded up to a multiple of this wherever bytes are counted."""
    @property
    def estimate(self) -> str:
        """In what the step's figures may be wrong; empty if they are exact."""
    @property
    def accounting(self) -> str:
        """The name of the rules by which tensors are counted, for example ``paper``; empty if they
        are counted as in a real step.
        """
    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """Notes for people, as pairs (topic, text). Digest and equality leave them out."""
    @property
    def num_operators(self) -> int:
        """How many operators there are."""
    @property
    def num_tensors(self) -> int:
        """How many tensors there are."""
    @property
    def persistent_bytes(self) -> int:
        """Sum of all persistent tensors, in bytes."""
    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hexadecimal. A plan has the digest of its graph."""
    @property
    def structure_digest(self) -> str:
        """SHA-256 of the canonical JSON without names and without places in the user's program, in
        hexadecimal. Graphs with the same structure digest have the same plans.
        """
    def operator(self, operator: SupportsIndex) -> Operator:
        """One operator."""
    def tensor(self, tensor: SupportsIndex) -> Tensor:
        """One tensor."""
    @property
    def operators(self) -> tuple[Operator, ...]:
        """All operators, by number."""
    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, by number."""
    @property
    def tensor_sizes_bytes(self) -> _Numbers:
        """Bytes of every tensor's storage, before rounding. Shape [num_tensors]."""
    @property
    def tensor_counted_bytes(self) -> _Numbers:
        """Counted bytes of every tensor: rounded up to its alignment. Shape [num_tensors]."""
    @property
    def workspaces_bytes(self) -> _Numbers:
        """Counted bytes of every operator's workspace: rounded up to the alignment. Shape
        [num_operators].
        """
    @property
    def times_ns(self) -> _Numbers:
        """Nanoseconds that every operator takes: as measured, or else by the cost model. Shape
        [num_operators].
        """
    @property
    def positions(self) -> _Numbers:
        """Every operator's place in program order. Shape [num_operators]."""
    @property
    def program_order(self) -> _Numbers:
        """Numbers of the operators in program order. Shape [num_operators]."""
    def predecessors(self, operator: SupportsIndex) -> tuple[int, ...]:
        """Numbers of the operators that must run before the operator, by program position. These
        are direct constraints only: data, mutation, sequence, control.
        """
    def successors(self, operator: SupportsIndex) -> tuple[int, ...]:
        """Numbers of the operators that must run after the operator, by program position."""
    def users(self, tensor: SupportsIndex) -> tuple[int, ...]:
        """Numbers of the operators that read or mutate the tensor, by program position."""
    def creator(self, tensor: SupportsIndex) -> int | None:
        """Number of the operator that makes the tensor; None if it exists before the step."""
    @property
    def control(self) -> tuple[tuple[int, int], ...]:
        """The caller's own ordering constraints, as pairs (before, after)."""
    @property
    def regions(self) -> tuple[tuple[str, int, int | None], ...]:
        """Conditional regions, as triples (name, predicate tensor, parent region or None)."""
    def live_bytes(self, order: Iterable[SupportsIndex] | None = None) -> _Numbers:
        """Live bytes at every step of an order, without reuse. Shape [num_operators].

        Persistent tensors are left out, workspaces counted.

        Args:
            order: numbers of the operators; program order if None.

        Raises:
            PlanError: the graph does not permit the order.
        """
    def expanded(self, sequence: Iterable[SupportsIndex]) -> Graph:
        """The graph of a step in which operators run more than once.

        What a run reads, or waits for, comes from the latest run before it. Operator i of the
        result is entry i of the sequence. The tensors of this graph keep their numbers; those of
        extra runs follow, by run and then by place in `creates`.

        Args:
            sequence: numbers of operators; each occurs at least once, and runs as often as it
                occurs.

        Raises:
            PlanError: the list is not a valid sequence; `code` tells why.
        """
    def save(self, path: _Path) -> None:
        """Writes the graph to a file, compressed if the path ends in ``.gz``. Equal graphs give
        equal files.

        Raises:
            OSError: the file cannot be written.
        """
    @classmethod
    def load(cls, path: _Path, *, max_bytes: int | None = None) -> Graph:
        """Reads a graph from a file, compressed or not.

        Args:
            max_bytes: the most bytes to take, after decompression; 512 MiB where None.

        Raises:
            FormatError: the file is not of the documented form.
            GraphError: the file has this form, but its graph is not valid.
            OSError: the file cannot be read.
        """
    def summary(self) -> str:
        """A table for people: operators by phase, bytes by kind, which operators keep their order,
        and at which barrier gradients wait for each other.
        """
    @classmethod
    def from_fx(cls, module: GraphModule, *, random_states: bool = False) -> Graph:
        """The graph of a `torch.fx.GraphModule`, one operator for each node that calls a kernel.

        Placeholders and attributes are persistent; results leave the step. Nothing is computed.

        Args:
            module: of nodes that call operators.
            random_states: whether the graph reads the states of random generators, so that plans
                within a memory limit may make random tensors again.

        Raises:
            CaptureError: a node cannot be planned exactly, or its metadata are missing or symbolic.
        """
    def to_json(self) -> bytes:
        """The canonical JSON, see ``docs/reference/formats.md``. Equal graphs give equal bytes."""
    @classmethod
    def from_json(cls, data: bytes, *, max_bytes: int | None = None) -> Graph:
        """Reads a graph from its JSON, compressed or not. Arguments and errors as for
        :meth:`load`.
        """
    def __reduce__(self) -> tuple[Callable[[bytes], Graph], tuple[bytes]]: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class GraphBuilder:
    """Builds a graph by hand.

    The numbers that :meth:`tensor`, :meth:`operator` and :meth:`region` return name what was added.
    Operators may refer to tensors that are added later; everything is checked together by
    :meth:`build`.

    >>> import roam
    >>> b = roam.GraphBuilder("two layers")
    >>> x = b.tensor("x", 4096, kind="input", residency="enters")
    >>> h = b.tensor("h", 4096, kind="activation")
    >>> y = b.tensor("y", 64, kind="output", residency="leaves")
    >>> _ = b.operator("relu", reads=[x], creates=[h])
    >>> _ = b.operator("sum", reads=[h], creates=[y])
    >>> b.build()
    Graph(name="two layers", device="cpu", operators=2, tensors=3, persistent_bytes=0)

    Args:
        name: for people.
        device: the device that the step runs on.
        alignment_bytes: a power of two; if None, 64 on ``cpu`` and 512 elsewhere.
    """

    def __new__(
        cls, name: str = "", device: str = "cpu", alignment_bytes: SupportsIndex | None = None
    ) -> GraphBuilder: ...
    def estimate(self, reason: str) -> None:
        """Marks the graph as an estimate.

        Args:
            reason: in what its figures may be wrong.
        """
    def accounting(self, name: str) -> None:
        """States that tensors are counted by other rules than in a real step.

        Args:
            name: the name of the rules, for example ``paper``.
        """
    def note(self, topic: str, text: str) -> None:
        """Adds a note for people; plans, digests and equality leave it out.

        Args:
            topic: what it is about, in a word or two.
            text: the note.
        """
    def tensor(
        self,
        name: str,
        size_bytes: SupportsIndex,
        *,
        kind: _Kind | str = "temporary",
        residency: _Residency | str = "step_local",
        alignment_bytes: SupportsIndex | None = None,
    ) -> int:
        """Adds a tensor (a storage, not a view) and returns its number.

        Args:
            name: for people.
            size_bytes: bytes of the storage, before rounding.
            kind: what it is for.
            residency: where it is alive beyond the step.
            alignment_bytes: its own least alignment, a power of two; the graph's if None or 0.

        Raises:
            GraphError: a number is out of range, or a word is not one of those allowed.
        """
    def operator(
        self,
        name: str,
        *,
        reads: Iterable[SupportsIndex] | None = None,
        creates: Iterable[SupportsIndex] | None = None,
        mutates: Iterable[SupportsIndex] | None = None,
        workspace_bytes: SupportsIndex | None = None,
        reuse: Iterable[tuple[SupportsIndex, SupportsIndex]] | None = None,
        phase: _Phase | str = "forward",
        sequence: _Sequence | str | None = None,
        region: SupportsIndex | None = None,
        module: str = "",
        file: str = "",
        line: SupportsIndex | None = None,
        position: SupportsIndex | None = None,
        flops: SupportsIndex | None = None,
        time_ns: SupportsIndex | None = None,
        repeatable: bool = False,
        first_only: Iterable[SupportsIndex] | None = None,
        link: SupportsIndex | None = None,
    ) -> int:
        """Adds an operator and returns its number.

        Args:
            name: the kernel.
            reads: numbers of the tensors whose value it uses; one that it mutates need not be
                listed.
            creates: numbers of the tensors that it makes.
            mutates: numbers of the tensors that it changes in place.
            workspace_bytes: bytes that live only while it runs; 0 if None.
            reuse: pairs (input, output): the output may take the memory of the input if the input
                dies here.
            phase: the part of the step it belongs to.
            sequence: operators of one sequence keep their program order among themselves.
            region: number of its conditional region.
            module: dotted path of the module it belongs to.
            file: the user's file.
            line: the user's line, counted from 1; unknown where None or 0.
            position: its place in program order; if None, after all operators that were added
                before.
            flops: floating-point operations that it takes, for the cost model; 0 if None.
            time_ns: nanoseconds that it was measured to take; if None, the cost model gives
                them.
            repeatable: whether it may run again: from the same inputs it makes the same bits, and
                it changes nothing but what it lists.
            first_only: those of the tensors that it reads or mutates that only its first run
                touches, such as the running statistics of a batch norm.
            link: for an operator that launches a collective, the number of the link between ranks
                that the collective uses; 0 if None. The collectives of one link run one after the
                other.

        Raises:
            GraphError: a number is out of range, or a word is not one of those allowed.
        """
    def control(self, before: SupportsIndex, after: SupportsIndex) -> None:
        """Adds the constraint that operator `before` runs before operator `after`."""
    def region(
        self, name: str, predicate: SupportsIndex, parent: SupportsIndex | None = None
    ) -> int:
        """Adds a conditional region and returns its number.

        Files store regions. Planning assumes that every region runs.

        Args:
            name: for people.
            predicate: number of the tensor whose value decides.
            parent: number of the region around this one.
        """
    def build(self) -> Graph:
        """Checks everything and returns the graph. The builder can be used further.

        Raises:
            GraphError: the graph is not a valid training step; `code` tells how, `operator` where.
        """

@final
class Candidate:
    """One order and layout that planning tried. Read-only."""

    @property
    def order(self) -> str:
        """How the order was found, for example ``program`` or ``lescea``."""
    @property
    def layout(self) -> str:
        """How the layout was found."""
    @property
    def peak_bytes(self) -> int:
        """Most live bytes over the steps, persistent tensors left out."""
    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
    @property
    def outside_bytes(self) -> int:
        """Most live bytes over the steps of what is not in the pool (unpooled), workspace
        included.
        """
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Plan:
    """An execution order and a memory layout for one graph, with what they cost.

    Sizes are in bytes, without persistent tensors unless said otherwise. The figures of a plan that
    was read from a file may be wrong until :func:`roam.verify` has checked it. Two plans are equal
    if everything but `timings_s` is.
    """

    @property
    def graph_digest(self) -> str:
        """SHA-256 of the JSON of the graph that the plan is for."""
    @property
    def estimate(self) -> str:
        """In what its figures may be wrong, as the graph says; empty if they are exact."""
    @property
    def settings(self) -> _Settings:
        """What was asked for."""
    @property
    def order(self) -> _Numbers:
        """Numbers of the operators in execution order. Shape [num_operators], read-only."""
    @property
    def offsets(self) -> _Numbers:
        """Offset in the pool per tensor; -1 if it is not in the pool. Shape [num_tensors],
        read-only.
        """
    @property
    def reuse(self) -> tuple[tuple[int, int], ...]:
        """Pairs (input, output): the output takes the memory of the input."""
    @property
    def streams(self) -> _Numbers:
        """The stream of each operator; 0 for all if there is only one. Shape [num_operators],
        read-only.
        """
    @property
    def syncs(self) -> tuple[tuple[int, int], ...]:
        """Pairs (before, after) of operators on different streams: `after` starts when `before` has
        completed.
        """
    @property
    def time_steps(self) -> list[int] | None:
        """Time step per operator in the time-step model, else None."""
    @property
    def makespan_s(self) -> float | None:
        """Seconds that the whole step takes by the cost model; None for one stream."""
    @property
    def serial_s(self) -> float | None:
        """Seconds of all operators one after another, by the cost model; None for one stream."""
    @property
    def critical_path_s(self) -> float | None:
        """Seconds of the longest chain of operators that wait for each other, which no number of
        streams can beat; None for one stream.
        """
    def times_ns(self, graph: Graph) -> tuple[_Numbers, _Numbers]:
        """Start and end of each operator, in nanoseconds from the start of the step, by the cost
        model. Shape [num_operators] each, read-only; [number of runs] if operators run again.

        Args:
            graph: the graph that the plan was made for.

        Raises:
            PlanError: the plan is invalid.
        """
    @property
    def program_order_peak_bytes(self) -> int:
        """Most live bytes over the steps in program order, without reuse."""
    @property
    def peak_bytes(self) -> int:
        """Most live bytes over the steps: pooled and unpooled tensors, workspace."""
    @property
    def pool_peak_bytes(self) -> int:
        """Most live bytes over the steps of the tensors in the pool."""
    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool: the largest offset + counted size."""
    @property
    def outside_bytes(self) -> int:
        """Most live bytes over the steps of what is not in the pool (unpooled), workspace
        included.
        """
    @property
    def persistent_bytes(self) -> int:
        """Bytes of all persistent tensors."""
    @property
    def total_bytes(self) -> int:
        """Persistent + pool + unpooled: `persistent_bytes`, `pool_bytes` and `outside_bytes`."""
    @property
    def lower_bound_bytes(self) -> int:
        """No order can have a lower peak."""
    @property
    def total_lower_bound_bytes(self) -> int:
        """No plan can have a smaller total.

        It is at least `persistent_bytes` + `lower_bound_bytes`, and more if the pool and the
        unpooled bytes must have their peaks at different steps.
        """
    @property
    def bound_operator(self) -> int | None:
        """Number of the operator that sets the lower bound, or None."""
    @property
    def bound_route(self) -> _BoundRoute:
        """How the lower bound was proved.

        ``floor``: the bytes of one operator, of all that enters, or of all that leaves; ``cut``: a
        minimum cut; ``probe``: a series of minimum cuts; ``first``: cuts at several operators, of
        which one runs before the others; ``exhaustive``: a search over all orders;
        ``integer_program``: CBC.
        """
    @property
    def gap(self) -> float:
        """(total - persistent) / (total's lower bound - persistent) - 1; 0 if both are 0."""
    @property
    def fragmentation(self) -> float:
        """(pool - peak of the pool's tensors) / pool; 0 for an empty pool."""
    @property
    def status(self) -> _Status:
        """``optimal`` (no plan can use less), ``feasible``, or ``timed_out`` (feasible, but the
        search was cut short).
        """
    @property
    def exact(self) -> _ExactReport:
        """What integer programs did.

        `status` is ``off``, ``not_needed`` (the plan meets its bound), ``not_tried`` (it does not,
        but no program was made: almost nothing could be gained, the searches had already answered
        the question, or the search had ended), ``too_large`` (every program would have been too
        large), ``unavailable`` (CBC cannot be used: `reason` says why), ``used`` (some were
        answered) or ``no_answer`` (none was). `programs` says how many were given to CBC, `gains`
        how many answers lowered the peak or the pool or raised the bound, and `failed` and
        `timed_out` how many had no answer.
        """
    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """What was tried, in a fixed order."""
    @property
    def recomputation(self) -> dict[str, Any] | None:
        """What runs again so that the plan keeps within its memory limit; None if nothing does.

        Keys: ``sequence`` (the numbers of the operators, as often as they run; see
        `Graph.expanded`), ``extra_s`` (seconds of the extra runs, as measured or by the model of
        time), ``step_s`` (seconds of the step without them), ``least_extra_s`` (no plan within the
        limit has extra runs that take less), ``floor_bytes`` (no plan takes less, however often
        operators run), ``plain_total_bytes`` (total of the plan without extra runs). The order, the
        offsets, the reuse pairs and the lower bounds of such a plan are those of the sequence's
        graph.
        """
    def expanded(self, graph: Graph) -> tuple[Graph, Plan]:
        """Returns the graph in which each run is an operator of its own, and this plan as a plan of
        that graph. If nothing runs again, both are returned unchanged.

        Raises:
            PlanError: the plan is not for this graph.
        """
    @property
    def timings_s(self) -> dict[str, float]:
        """Seconds per stage of planning; empty for a plan that was read from a file."""
    def save(self, path: _Path) -> None:
        """Writes the plan to a file, compressed if the path ends in ``.gz``. Equal plans give equal
        files.

        Raises:
            OSError: the file cannot be written.
        """
    @classmethod
    def load(cls, path: _Path, *, max_bytes: int | None = None) -> Plan:
        """Reads a plan from a file, compressed or not, without verifying it.

        Args:
            max_bytes: the most bytes to take, after decompression; 512 MiB where None.

        Raises:
            FormatError: the file is not of the documented form.
            OSError: the file cannot be read.
        """
    def apply(self, module: GraphModule) -> GraphModule:
        """Returns the `torch.fx.GraphModule` with its nodes in this plan's order, recompiled. It
        drops each value after its last use. Kernels get their memory from PyTorch's allocator, not
        from the pool.

        Raises:
            PlanError: the plan is not for this module, or is for several streams.
        """
    def export(self, graph: Graph, path: _Path) -> None:
        """Writes the plan in the format of another tool.

        Args:
            graph: the graph that the plan is for.
            path: of the file. Its ending names the format: ``.pickle`` for PyTorch's memory viewer,
                ``.json`` or ``.json.gz`` for Perfetto and ``chrome://tracing``, ``.dot`` for
                Graphviz.

        Raises:
            PlanError: the plan is invalid.
            ValueError: no format has that ending.
            OSError: the file cannot be written.
        """
    def summary(self, graph: Graph) -> str:
        """The plan's figures for people. If operators run again, it also lists for each module
        which activations are kept and which are made again, with identical layers as one.

        Args:
            graph: the graph that the plan is for.

        Raises:
            PlanError: the plan is invalid.
        """
    def fits(self, memory: int | str) -> bool:
        """Whether the plan's total is within an amount of memory.

        The total contains the step's tensors only: leave room for what else the device holds.

        Args:
            memory: bytes, or text such as ``"24GiB"``.

        Raises:
            ValueError: `memory` is not an amount of bytes.
        """
    def _repr_html_(self) -> str:
        """The plan's figures as a table, for notebooks."""
    def report(self, graph: Graph, path: _Path, *, limits: Iterable[int | str] = ()) -> None:
        """Writes one HTML page that explains the plan, and that needs no network.

        It shows live bytes over the step, what is alive at the peak, the map of the pool, and what
        sets the bound. It needs ``pip install 'roam-torch[report]'``.

        Args:
            graph: the graph that the plan is for.
            path: of the page.
            limits: memory limits as in ``memory=`` of `roam.compile`. The page lists what a plan
                takes within each limit, and the time of its extra runs.

        Raises:
            PlanError: the plan is invalid; or there are limits, and it is for several streams
                (code ``invalid_memory_limit``).
            RoamError: Bokeh is not installed (code ``report_unavailable``).
            ValueError: a limit is not valid.
            OSError: the page cannot be written.
        """
    def to_json(self) -> bytes:
        """The JSON, see ``docs/reference/formats.md``. Equal plans give equal bytes."""
    @classmethod
    def from_json(cls, data: bytes, *, max_bytes: int | None = None) -> Plan:
        """Reads a plan from its JSON, compressed or not. Arguments and errors as for
        :meth:`load`.
        """
    def __reduce__(self) -> tuple[Callable[[bytes], Plan], tuple[bytes]]: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

def baseline(
    graph: Graph, order: str = "program", layout: str = "size", *, reuse: bool = True
) -> Candidate:
    """What one order and one layout need by themselves, without any search, for comparisons.

    The result is not a plan: it may need more than program order, and cannot be run.

    Args:
        graph: the step.
        order: ``program``, ``lescea``, ``depth_first``, ``eager_updates``, ``memory_aware_updates``
            (the published rule for weight updates; Shu et al., arXiv 2310.19295), ``early_frees``,
            ``reversed`` or ``hill_valley``; or one of PyTorch's Inductor: ``inductor_lpmf``,
            ``inductor_bfs`` or ``inductor_dfs``.
        layout: ``size``, ``area``, ``lifetime``, ``first_fit`` (blocks by falling size, size times
            lifetime, or lifetime, or as they are made; each at the lowest free offset),
            ``skyline`` (LLFB), ``weighted`` (valleys filled by weighted times) or ``tree`` (the
            published subgraph tree; ``tree:100`` searches no leaf of more than 100 tensors); or one
            of another project: ``executorch``, ``tvm_size``, ``tvm_conflicts``, ``tvm_hill_climb``
            or ``xla``. With ``caching_allocator`` or
            ``caching_allocator_expandable`` (expandable segments), PyTorch's allocator for CUDA
            takes the place of the pool: ``pool_bytes`` is what it reserves in the long run for all
            tensors except persistent ones (in program order without reuse, this is what eager
            PyTorch reserves), and ``outside_bytes`` is 0. See docs/reference/baselines.md.
        reuse: whether an output may take the memory of an input that dies, if the graph permits it.

    Raises:
        PlanError: there is no order or layout of that name.
    """

def baseline_order(graph: Graph, order: str, *, reuse: bool = True) -> _Numbers:
    """The order that one method finds: the numbers of the operators, first to last. The methods
    have the names that :func:`roam.baseline` lists for `order`.

    For tests and benchmarks.
    """

def caching_allocator_bytes(
    events: Sequence[tuple[int, int | None]], *, expandable: bool = False
) -> _Numbers:
    """What PyTorch's caching allocator for CUDA reserves after each of a sequence of events, by its
    rules.

    For tests and benchmarks: it is how ``roam.baseline`` counts, and can be checked against a
    recorded sequence.

    Args:
        events: (id, bytes) for an allocation, (id, None) for its free.
        expandable: whether segments are expandable.

    Raises:
        ValueError: an id is in use already, or is freed while it is not there, or is too large.
    """

def optimize(
    graph: Graph,
    streams: int = 1,
    reuse: bool = True,
    time_limit_s: float | None = None,
    exact: _Exact | str = "auto",
    progress: Callable[[str, float], Any] | None = None,
    *,
    speed: float | None = None,
    stream_model: _StreamModel | str = "happens_before",
    enough_bytes: int = 0,
    worth_bytes: int = 0,
    memory_limit_bytes: int | None = None,
) -> Plan:
    """Plans a graph; see :func:`roam.optimize`, which takes a `torch.fx.GraphModule` as well."""

def verify(graph: Graph, plan: Plan) -> None:
    """Checks that a plan is valid for a graph and that every figure it claims is true.

    Shares no code with the planner.

    Raises:
        PlanError: it is not; `code` tells how.
    """

def choose_residency(
    sizes: Sequence[int],
    ways: Sequence[Sequence[tuple[int, Sequence[tuple[int, int]]]]],
    room: Sequence[int],
) -> tuple[list[int], int, int, int]:
    """Chooses for each tensor a way to be kept, so that few bytes are moved within the room.

    Args:
        sizes: bytes of each tensor.
        ways: for each tensor, how it may be kept: what that moves, in bytes, and the first and the
            last moment of each time that it is in memory. The first is in memory wherever another
            one is.
        room: for each moment, the bytes that there are for them.

    Returns:
        For each tensor the place of the chosen way in its list; what the ways move; what any choice
        moves at least; by how much the choice exceeds the room at its worst moment.

    Raises:
        ValueError: a tensor has no size or no way, or a way is in memory at no moment of these.
    """

def compare_routes(graph: Graph, reuse: bool = True, programs: bool = True) -> _Routes | None:
    """The peak that the heuristics reach for a graph, and the peak that each exact route reaches
    from the best order of the heuristics.

    For tests and benchmarks. Peaks are in bytes. The keys of integer programs are left out if
    `programs` is false. The result is None for a graph without operators. Ctrl-C takes effect only
    once everything is done.
    """

@final
class Buffers:
    """Buffers to pack: pieces of memory, each needed over the half-open interval of times from
    `lower` to before `upper`. Immutable.

    :func:`pack` finds out whether they can be packed.

    >>> from roam.layout import Buffers
    >>> len(Buffers(lower=[0, 3], upper=[3, 9], size_bytes=[4, 4]))
    2

    Args:
        lower: for each buffer the first time at which it is needed. All numbers are whole and in
            [0, 2^63).
        upper: the first time at which it is not needed any more.
        size_bytes: bytes; may be 0.
        alignment_bytes: the offset must be a multiple of this power of two; 1 if None.
        gaps: for each buffer the times within its lifetime at which it is not needed, each as
            ``(lower, upper)``, or as ``(lower, upper, first, end)`` if its bytes from `first` to
            before `end` are needed even then.
        offsets: for each buffer the only offset at which it may lie, in bytes, or None.
        hints: for each buffer an offset with which the search begins, in bytes, or None. The result
            may have another one.
        ids: for each buffer its name in files; if None, its place in the list.

    Raises:
        LayoutError: there are too few or too many values, a negative value, a gap of another form,
            or an id that a file cannot contain.
        OverflowError: a number that does not fit into 63 bits.
    """

    def __new__(
        cls,
        lower: Iterable[SupportsIndex],
        upper: Iterable[SupportsIndex],
        size_bytes: Iterable[SupportsIndex],
        *,
        alignment_bytes: Iterable[SupportsIndex] | None = None,
        gaps: Iterable[Iterable[tuple[int, int] | tuple[int, int, int, int]]] | None = None,
        offsets: Iterable[SupportsIndex | None] | None = None,
        hints: Iterable[SupportsIndex | None] | None = None,
        ids: Iterable[str] | None = None,
    ) -> Buffers: ...
    @classmethod
    def read_csv(cls, path: _Path) -> Buffers:
        """Reads buffers from a CSV file in the format of MiniMalloc (docs/reference/formats.md).

        Raises:
            FormatError: the file is not of that form; `code` tells how.
            OSError: the file cannot be read.
        """
    def write_csv(self, path: _Path, packing: Packing | None = None) -> None:
        """Writes the buffers, or with a packing the buffers and where each lies, to a CSV file in
        the form that MiniMalloc writes.

        Raises:
            LayoutError: the packing is not one of these buffers.
            OSError: the file cannot be written.
        """
    @property
    def ids(self) -> tuple[str, ...]:
        """Names in files."""
    @property
    def lower(self) -> _Numbers:
        """First time at which each is needed. Shape [len], read-only."""
    @property
    def upper(self) -> _Numbers:
        """First time at which each is not needed any more. Shape [len], read-only."""
    @property
    def size_bytes(self) -> _Numbers:
        """Bytes of each. Shape [len], read-only."""
    @property
    def alignment_bytes(self) -> _Numbers:
        """What each offset must be a multiple of. Shape [len], read-only."""
    @property
    def gaps(self) -> tuple[tuple[tuple[int, int] | tuple[int, int, int, int], ...], ...]:
        """Times at which each is not needed, or only some of its bytes, by time."""
    @property
    def offsets(self) -> tuple[int | None, ...]:
        """The only offset at which each may lie, if there is one."""
    @property
    def hints(self) -> tuple[int | None, ...]:
        """The offsets with which the search begins, if there are any."""
    @property
    def digest(self) -> str:
        """SHA-256 of the CSV that :meth:`write_csv` writes, in hexadecimal. Files that describe the
        same buffers in other forms have the same digest.
        """
    def __len__(self) -> int: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Packing:
    """An offset for each of some buffers. Read-only."""

    @property
    def offsets(self) -> _Numbers:
        """Offset of each buffer in the pool, in bytes. Shape [number of buffers], read-only."""
    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool: the largest offset + size."""
    @property
    def live_bytes(self) -> int:
        """Most bytes needed at any time, gaps taken into account."""
    @property
    def lower_bound_bytes(self) -> int:
        """No packing takes less."""
    @property
    def bound_route(self) -> _BoundRoute:
        """How `lower_bound_bytes` was proved: ``floor`` (live bytes, or a single or fixed buffer)
        or ``exhaustive`` (a search showed that no smaller pool is possible).
        """
    @property
    def gap(self) -> float:
        """Pool / lower bound - 1; 0 if both are 0."""
    @property
    def method(self) -> str:
        """The method that found it, for example ``weighted`` or ``canonical``."""
    @property
    def status(self) -> _Status:
        """``optimal`` (no packing takes less), ``feasible``, or ``timed_out`` (feasible, but the
        time limit or Ctrl-C cut the search short).
        """
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class ShardingProblem:
    """Nodes with strategies, costs of pairs, and a memory limit. Read-only."""

    FORBIDDEN: int
    """A strategy, or a pair of strategies, that is not allowed costs this much or more."""

    def __new__(
        cls,
        name: str,
        costs: Sequence[Sequence[int]],
        bytes: Sequence[Sequence[int]],
        lifetimes: Sequence[tuple[int, int]],
        edges: Sequence[tuple[int, int, int]],
        matrices: Sequence[Sequence[int]],
        limit_bytes: int | None = None,
    ) -> ShardingProblem:
        """Makes a problem from lists.

        Args:
            name: for people.
            costs: per node, what each strategy costs.
            bytes: per node, what each strategy takes while the node is alive.
            lifetimes: per node, the times at which it is alive, half-open.
            edges: two different nodes and the number of a matrix.
            matrices: costs of pairs of strategies, row by row: a row for each strategy of the first
                node.
            limit_bytes: the most bytes at any time.

        Raises:
            ValueError: lengths or numbers do not fit.
        """
    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ShardingProblem:
        """Reads a file in the format of the contest on intra-operator parallelism (JSON, with or
        without gzip).

        Raises:
            OSError: the file cannot be read.
            FormatError: the file does not contain such a problem (code ``sharding_problem``).
        """
    @property
    def name(self) -> str:
        """The name, as the file says."""
    @property
    def nodes(self) -> int:
        """How many nodes there are."""
    @property
    def edges(self) -> int:
        """How many edges there are."""
    @property
    def limit_bytes(self) -> int | None:
        """The most bytes at any time."""
    def evaluate(self, choice: Sequence[int]) -> tuple[int | None, int]:
        """What a choice of a strategy per node costs (None if it is not allowed), and its most
        bytes at any time.
        """
    def solve(self, *, work: int, time_limit_s: float | None = None) -> ShardingOutcome:
        """Searches for the cheapest choice within the limit, until it is proved to be the cheapest.

        Args:
            work: the most entries of cost matrices that are looked at.
            time_limit_s: wall-clock limit in seconds; no limit where None.
        """
    def solve_alike(self, groups: Sequence[int], *, work: int) -> ShardingOutcome:
        """Searches for the cheapest choice without a limit, in which nodes of a group choose alike
        if that is no dearer than the best that is found when they choose apart.

        Args:
            groups: per node a number; the first nodes of groups are in the order of their numbers.
            work: the most entries of cost matrices that each of the two searches looks at.

        Raises:
            ValueError: nodes of a group have different numbers of strategies, or there is a limit.
        """

@final
class ShardingOutcome:
    """What a search for strategies found. Read-only."""

    @property
    def choice(self) -> list[int] | None:
        """A strategy per node; None if no choice was found that is allowed and within the
        limit.
        """
    @property
    def cost(self) -> int | None:
        """What it costs."""
    @property
    def bound(self) -> int | None:
        """No choice costs less; None if it is proved that there is none."""
    @property
    def is_alike(self) -> bool:
        """Whether nodes of a group were made to choose alike, and nothing was lost by it."""
    @property
    def nodes(self) -> int:
        """How many nodes were left to search, once others were joined."""
    @property
    def edges(self) -> int:
        """How many edges were left to search."""
    @property
    def passes(self) -> int:
        """How many times messages passed."""

def pack(
    buffers: Buffers,
    *,
    work: int = 2_000_000_000,
    time_limit_s: float | None = None,
    target_bytes: int | None = None,
) -> Packing:
    """Packs buffers into one pool that is as small as the search finds.

    The same buffers and work give the same packing on any number of threads, unless the time limit
    ends the search. Every packing is verified. Other Python threads run meanwhile. Ctrl-C ends the
    search with :class:`roam.PackingInterrupted`, a ``KeyboardInterrupt`` that holds the best
    packing so far.

    Args:
        buffers: what to pack.
        work: how long to search, in comparisons. A core makes about 10^9 comparisons in two or
            three seconds. A first packing is always made, even if it takes more work.
        time_limit_s: wall-clock limit in seconds; at its end the best packing so far is returned.
            No limit if None.
        target_bytes: the search ends at a pool that is not larger than this. If None, it looks for
            the smallest pool.

    Raises:
        LayoutError: the buffers cannot be packed as asked, for example because two fixed buffers
            share bytes; `code` tells why.
        PackingInterrupted: Ctrl-C; its ``packing`` is the best so far. A second Ctrl-C is a plain
            ``KeyboardInterrupt``.
        ValueError: the time limit is negative or not a number.
    """

def verify_packing(buffers: Buffers, packing: Packing) -> None:
    """Checks that a packing is valid for buffers and that every figure it claims is true.

    Shares no code with the packer.

    Raises:
        LayoutError: it is not; `code` tells how.
    """

def synthetic_step(family: str, operators: int) -> Graph:
    """A made-up graph, the same every time.

    Args:
        family: a training step: ``deep`` (a transformer of as many layers as it takes), ``wide``
            (very many branches of one layer that are added up) or ``branching`` (a chain of cells
            of several unequal branches each); or operators without phases: ``parallel`` (chains of
            100 operators each), ``linked`` (each reads two results from anywhere before it) or
            ``window`` (each reads up to three of the last 64 results).
        operators: about how many.

    Raises:
        ValueError: there is no such family.
    """

def synthetic_buffers(style: str, count: int, seed: int = 1) -> Buffers:
    """Made-up buffers; equal seeds give equal buffers.

    Args:
        style: ``wide``, ``narrow``, ``skewed``, ``training``, ``replaced`` or ``dissected``
            (docs/benchmarks/index.md).
        count: about how many.
        seed: of the random numbers.

    Raises:
        ValueError: there is no such style.
    """
