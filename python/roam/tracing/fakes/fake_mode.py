"""Fake tensors: shapes, strides and storages without memory."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from roam.distributed.agreement import note_rank
from roam.errors import CaptureError
from roam.torch_compat.patches import Replacement, replaced
from roam.torch_compat.private import (
    DataDependentOutputException,
    DeviceContext,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    base_name,
    c_pointer,
    disable_current_modes,
    function_modes,
    has_real_ranks,
    is_dtensor,
    mesh_class,
    pytree,
    schema_of,
)
from roam.tracing.cuda_estimate import absent
from roam.tracing.fakes.imports import clear_fakes, imports_leave


def new_mode() -> FakeTensorMode:
    """A fake mode as capture wants it: without symbolic shapes, so that every size is a number."""
    return FakeTensorMode(shape_env=None, static_shapes=True)


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Block in which PyTorch does not log what fake kernels raise."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


@contextmanager
def fake(device: str = "cpu") -> Iterator[None]:
    """Builds models without memory: tensors made inside have sizes and no data.

    Such a model can be given to `roam.capture`; it cannot be run. Python modules that are first
    imported inside are executed as if the block were not there. Caches of functions
    (`functools.lru_cache`) that hold fakes are emptied afterwards.

    Args:
        device: where the tensors would be, ``"cpu"`` or ``"cuda"``.

    On a machine without a CUDA device, a graph that is captured for ``"cuda"`` is an estimate (see
    `Graph.estimate`).

    Raises:
        CaptureError: for ``"cuda"`` with a PyTorch that was not built for it.

    Example:
        >>> import torch, roam
        >>> with roam.fake():
        ...     model = torch.nn.Linear(10_000, 10_000)
    """
    note_rank()
    inside, around = torch.device(device), _default_device()
    # It draws again until no value is too large, which nobody can tell of fakes.
    replacements: list[Replacement] = [
        (torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor),
        (torch.utils, "swap_tensors", _swapped),
        (FakeTensor, "__deepcopy__", _copied),
    ]
    if absent.is_absent(inside):
        absent.prepare()
        replacements += absent.PRESENT
    replacements += _meshes()
    plain = [(holder, name, getattr(holder, name)) for holder, name, _ in replacements]

    @contextmanager
    def outside() -> Iterator[None]:
        with replaced(plain), around if inside == _default_device() else nullcontext():
            yield

    try:
        with imports_leave(outside), replaced(replacements), new_mode(), Known(), inside:
            yield
    finally:
        clear_fakes()


_swap_tensors: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors


def _swapped(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchanges two tensors, as `Module.to` and its like do with parameters that are fakes. Fake
    modes keep weak references to all fakes, and PyTorch refuses what anybody refers to.
    """
    are_fakes = isinstance(one, FakeTensor) and isinstance(other, FakeTensor)
    unknown = SimpleNamespace(getweakrefs=lambda _: ())
    with replaced([(torch.utils, "weakref", unknown)]) if are_fakes else nullcontext():
        _swap_tensors(one, other)


def _copied(fake: Any, memo: dict[int, Any]) -> Any:
    """A copy of a fake for `copy.deepcopy`, by which `nn.TransformerEncoder` makes its layers. The
    one of PyTorch copies the fake mode too.
    """
    if id(fake) in memo:
        return memo[id(fake)]
    if not fake.is_leaf:  # PyTorch's says why it cannot be copied
        return torch.Tensor.__deepcopy__(fake, memo)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        made = fake.clone()
    if isinstance(fake, torch.nn.Parameter):  # its copy gets no gradient and no other attributes
        made = memo[id(fake)] = torch.nn.Parameter(made, fake.requires_grad)
        return made
    memo[id(fake)] = made.requires_grad_(fake.requires_grad)
    made.grad = copy.deepcopy(fake.grad, memo)
    own = {*vars(made), "_roam_known"}
    given = {name: value for name, value in vars(fake).items() if name not in own}
    vars(made).update(copy.deepcopy(given, memo))
    return made


def _meshes() -> Iterator[Replacement]:
    """What stands in for meshes of devices. If the values of their ranks are known, meshes are made
    and asked outside of any mode.
    """
    kind = mesh_class()
    if kind is None:
        return
    plain, ranks = kind.__init__, kind.mesh.fget

    def init(mesh: Any, *args: Any, **kwargs: Any) -> None:
        args, kwargs = pytree.tree_map_only(FakeTensor, _known, (args, kwargs))
        is_fake = any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values()))
        with nullcontext() if is_fake else disable_current_modes():
            plain(mesh, *args, **kwargs)

    def ranks_of(mesh: Any) -> Any:
        with disable_current_modes() if has_real_ranks(mesh) else nullcontext():
            return ranks(mesh)

    yield kind, "__init__", init
    yield kind, "mesh", property(ranks_of)


def _known(fake: Any) -> Any:
    """The values of a fake tensor; the fake itself if they are not known."""
    return getattr(fake, "_roam_known", fake)


def _default_device() -> torch.device:
    """As `torch.get_default_device`, which asks CUDA for its current device."""
    modes = reversed(function_modes())
    return next((mode.device for mode in modes if type(mode) is DeviceContext), torch.device("cpu"))


class Known(TorchDispatchMode):
    """Knows the values of small tensors that are made from numbers alone, for constructors that
    read them: `torch.linspace(0, rate, depth).tolist()`. Enter it inside of a fake mode. In
    addition to fakes, the same operators run on real tensors on the CPU. Random and uninitialized
    values are not known.
    """

    MOST_ELEMENTS = 4096

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lost: dict[int, torch.UntypedStorage] = {}
        """Storages of real tensors whose fakes were written to with what is not known."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        are_known = all(self._real(tensor) is not None for tensor in given)
        if func is torch.ops.aten._local_scalar_dense.default and are_known:
            with disable_current_modes():
                return self._real(given[0]).item()
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not are_known:
                raise
            real = self._run(func, args, kwargs)
            device = given[0].device
            result = pytree.tree_map_only(
                torch.Tensor,
                lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device),
                real,
            )
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        is_small = all(tensor.numel() <= self.MOST_ELEMENTS for tensor in (*given, *made))
        if are_known and is_small and not _is_arbitrary(func):
            for fake, real in zip(
                made, pytree.tree_leaves(self._run(func, args, kwargs)), strict=True
            ):
                fake._roam_known = real  # type: ignore[attr-defined]
        elif schema_of(func).is_mutable:
            for tensor in [real for real in map(self._real, given) if real is not None]:
                storage = tensor.untyped_storage()
                self._lost[c_pointer(storage)] = storage
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The results of a kernel on real tensors."""
        with disable_current_modes():
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._real, (args, kwargs))
            return func(*args, **({**kwargs, "device": "cpu"} if "device" in kwargs else kwargs))

    def _real(self, tensor: torch.Tensor) -> Any:
        """The value of a fake tensor; None if it is not known."""
        if is_dtensor(tensor):
            return None
        real = getattr(tensor, "_roam_known", None) if isinstance(tensor, FakeTensor) else tensor
        return None if real is None or c_pointer(real.untyped_storage()) in self._lost else real


def _is_arbitrary(func: Any) -> bool:
    """Whether results of a kernel do not depend on its arguments alone."""
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    return (
        is_random
        or func.namespace != "aten"
        or "empty" in base_name(func)
        or base_name(func) == "resize_"
    )


def mode_of(tensors: list[torch.Tensor]) -> FakeTensorMode:
    """The mode that the tensors' fakes belong to, or a new mode if all tensors are real.

    Raises:
        CaptureError: they come from different modes, or from one with symbolic shapes.
    """
    modes = {id(t.fake_mode): t.fake_mode for t in tensors if isinstance(t, FakeTensor)}
    if not modes:
        return new_mode()
    if len(modes) > 1:
        raise CaptureError(
            "the step's fake tensors come from different fake modes; build model and batch in one "
            "block `with roam.fake():`",
            code="fake_modes",
        )  # fmt: skip
    (mode,) = modes.values()
    return mode


class StandIns:
    """Fake tensors of one mode that stand for fakes of other modes and for real tensors, and share
    memory as these do.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._bases: dict[int, torch.Tensor] = {}
        self._made: dict[int, tuple[Any, torch.Tensor]] = {}

    def of(self, value: Any, name: str) -> Any:
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                _refuse_symbols(name)
            return value
        if any(
            not isinstance(size, int)
            for size in (*value.shape, *value.stride(), value.storage_offset())
        ):
            _refuse_symbols(name)
        if value.layout is not torch.strided:
            raise CaptureError(
                f"{name} has layout {value.layout}; only strided tensors are planned: use dense "
                "tensors",
                code="layout",
            )
        if id(value) not in self._made:
            storage = value.untyped_storage()
            with self.mode:
                base = self._bases.get(c_pointer(storage))
                if base is None:
                    base = torch.empty(storage.nbytes(), dtype=torch.uint8, device=value.device)
                    self._bases[c_pointer(storage)] = base
                whole = base[: base.numel() // value.itemsize * value.itemsize].view(value.dtype)
                view = whole.as_strided(value.shape, value.stride(), value.storage_offset())
            self._made[id(value)] = value, view
        return self._made[id(value)][1]


def _refuse_symbols(name: str) -> None:
    raise CaptureError(
        f"the shape of {name} is symbolic, and a plan is for shapes that are numbers; trace with "
        "example inputs of fixed shapes",
        code="fx_symbolic",
    )
