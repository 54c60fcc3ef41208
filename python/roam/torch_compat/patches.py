"""Patches: attributes of PyTorch and Python that are replaced for as long as a block runs.

`PATCHES` lists every one, with its reason. `replaced` is the only way to make one: it refuses what
is not listed, and takes every one away again, also after an exception or Ctrl-C.
"""

from __future__ import annotations

import builtins
import functools
import gc
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from roam.interrupts import interrupts_wait
from roam.torch_compat.private import know_functions


class Patch(NamedTuple):
    """Attributes of one object that are replaced for one reason."""

    holder: str
    """Dotted path of the object; in angle brackets for objects that depend on the step."""
    names: tuple[str, ...]
    reason: str
    without: str
    """What breaks without it."""
    optional: bool = False
    """Whether the holder, or an attribute of it, need not be there: a module that nobody has
    imported."""


_IDENTITY = "the user's code gets the identities and classes of the tensors that fakes stand for"
_NO_IDENTITY = (
    "a table keyed by parameters is found empty, or `type(x) is Parameter` goes another way"
)
_REAL = "what only real memory has is refused, at the user's line"
_NO_REAL = "a plan freezes an address or a counter of a fake tensor"
_APART = "a step that looks for fake tensors is refused"
_NO_APART = "a plan is made of the way that the step goes on fake tensors alone"
_TRACER = "a tracer of PyTorch's that a step calls is refused"
_NO_TRACER = (
    "its graph has what depends on arguments as constants, and a plan runs on wrong numbers"
)
_VALUE = "the value of a tensor reaches Python: answered by what a run has shown, or refused"
_NO_VALUE = "a value is frozen into the plan, or PyTorch's own error names no remedy"
_MESSAGE = "a step that prints or logs is refused before it does, and runs beside its plan"
_NO_MESSAGE = "a step prints while it is captured, and not in later calls"
_GENERATOR = "what reads, seeds and sets random generators is recorded as calls"
_NO_GENERATOR = "checkpointing draws another mask when it computes anew"
_COMPILED = "a call of what torch.compile has compiled is recorded as one operator"
_NO_COMPILED = "a step that calls compiled functions or modules is refused"
_NUMBER = "arithmetic on numbers that change from step to step is recorded"
_NO_NUMBER = "a learning rate or step count is frozen as it was at capture"
_PLAIN = "C++ takes a number that changes from step to step for a plain float"
_NO_PLAIN = "a step with such a number is refused"
_OPTIMIZER = "updates of all parameters at once are recorded as one call for each"
_NO_OPTIMIZER = "all gradients are alive at once, or PyTorch chooses other kernels for fakes than for real tensors"
_SCALER = "gradient scalers skip updates by a number that a run knows"
_NO_SCALER = "whether an update is skipped is frozen as it was at capture"
_COLLECTIVE = "collectives that begin with pickling are refused by name"
_NO_COLLECTIVE = "processes wait for each other while one of them captures"
_FILES = "what a step asks of the file system, or changes there, is refused"
_NO_FILES = "a plan keeps the file system's first answer, and changes nothing there any more"
KERNEL_SWITCHES: Final = (
    "_set_deterministic_algorithms", "_set_deterministic_fill_uninitialized_memory", "_set_mkldnn_enabled",
    "_set_mkldnn_deterministic", "_set_onednn_allow_tf32", "_set_nnpack_enabled", "_set_cudnn_enabled",
    "_set_cudnn_benchmark", "_set_cudnn_deterministic", "_set_cudnn_allow_tf32", "_set_cublas_allow_tf32",
    "_set_cublas_allow_bf16_reduced_precision_reduction", "_set_cublas_allow_fp16_reduced_precision_reduction",
    "_set_cublas_allow_fp16_accumulation", "_set_blas_preferred_backend", "_set_linalg_preferred_backend",
    "_set_float32_matmul_precision", "_set_fp32_precision_setter", "_set_default_dtype",
)  # fmt: skip
"""Functions of PyTorch's that set what kernels ask while they run."""
_BESIDE = "a plan beside which Python runs computes what Python looks at"
_NO_BESIDE = "Python reads memory that no kernel has written to yet"
FILES_ASKED: Final = ("access", "iterdir", "listdir", "lstat", "readlink", "scandir", "stat")
"""Functions of `os`, and methods of paths, to which those that look for files lead."""
FILES_CHANGED: Final = (
    "chmod", "link", "mkdir", "remove", "rename", "replace", "rmdir", "symlink", "touch", "truncate", "unlink", "utime",
)  # fmt: skip
"""The same of those that change what is there."""
_SPREAD_RANDOM = (
    "random operators on distributed tensors that move the generator's state are refused"
)
_NO_SPREAD_RANDOM = "all processes draw the same numbers, or the state is left elsewhere"

PATCHES: Final = (
    # Values and memory of tensors.
    Patch("torch.Tensor", ("item", "__bool__", "__float__", "numpy"), _VALUE, _NO_VALUE),
    Patch("torch.Tensor", ("__repr__", "__str__", "__format__"), "printing a tensor shows its values", _NO_VALUE),
    Patch("torch.Tensor", ("data_ptr", "storage"), _REAL, _NO_REAL),
    Patch("torch.UntypedStorage", ("data_ptr", "_cdata", "device"), _REAL, _NO_REAL),
    Patch("torch.TypedStorage", ("data_ptr",), _REAL, _NO_REAL),
    Patch("torch._subclasses.fake_tensor.FakeTensor", ("_version", "_cdata"), _REAL, _NO_REAL),
    Patch("torch._subclasses.fake_tensor.FakeTensor", ("data",), "`x.data = y` is recorded",
          "no operator shows the assignment, and a plan leaves the old memory in place"),
    Patch("torch._subclasses.fake_tensor.FakeTensor", ("__new__",), "notes whether a capture's fakes are all gone",
          "caches of functions are searched after every capture, or fakes stay in them"),
    Patch("torch._subclasses.fake_tensor.FakeTensor", ("__torch_dispatch__",),
          "an operator that another thread runs on a step's tensors is refused", "a plan leaves it out"),
    Patch("torch.Tensor", ("tolist", "__array__", "__dlpack__", "untyped_storage", "_typed_storage", "__reduce_ex__",
                           "__deepcopy__"), _BESIDE, _NO_BESIDE),
    Patch("torch.Tensor", ("data",), "a step that runs beside its plan and gives a tensor other data leaves the plan",
          "kernels write to the data that the tensor had before"),
    *(Patch(holder, names, "a step that runs beside its plan and changes how kernels compute leaves the plan",
            "kernels that wait for the plan compute in another way", optional=True)
      for holder, names in (("torch._C", KERNEL_SWITCHES), ("torch", ("set_num_threads", "set_flush_denormal")),
                            ("os", ("putenv", "unsetenv")), ("torch.backends.m.ContextProp", ("__set__",)))),
    Patch("torch", ("asarray", "to_dlpack", "tensor_split"), _BESIDE, _NO_BESIDE),
    Patch("torch.Tensor", ("tensor_split",), _BESIDE, _NO_BESIDE),
    Patch("threading.Thread", ("start",), "a step that runs beside its plan leaves that before other threads run",
          "a thread reads memory that no kernel has written to yet"),
    Patch("concurrent.futures.ThreadPoolExecutor", ("submit",), "as for threads", "as for threads"),
    # Identity.
    Patch("torch._subclasses.fake_tensor.FakeTensor", ("__hash__", "__class__", "__dict__"), _IDENTITY, _NO_IDENTITY),
    Patch("torch._subclasses.fake_tensor.FakeTensor", ("__reduce_ex__", "__deepcopy__", "__dlpack__"),
          "pickling fakes is refused; copies are recorded, and in `roam.fake` they are of the same mode",
          "a fake tensor leaves the step in a file or a copy; models that copy modules cannot be built of fakes"),
    Patch("copy", ("_reconstruct",), "copies of random generators of Python's or NumPy's are refused",
          "a plan freezes what chance has decided at capture"),
    Patch("torch.utils.dlpack", ("to_dlpack",), "handing a fake's memory to others is refused", _NO_REAL),
    Patch("builtins", ("print",), _MESSAGE, _NO_MESSAGE),
    Patch("logging.Logger", ("_log", "handle"), _MESSAGE, _NO_MESSAGE),
    Patch("logging.Logger", ("isEnabledFor",), "whether a logger takes messages is guarded", "a plan goes on in silence"),
    Patch("<the standard streams>", ("write",), _MESSAGE, _NO_MESSAGE),
    Patch("builtins", ("id", "hash", "vars", "dir"), _IDENTITY, _NO_IDENTITY),
    Patch("sys", ("getrefcount", "getsizeof"), _IDENTITY, _NO_IDENTITY),
    Patch("gc", ("get_referrers", "get_referents"), _IDENTITY, _NO_IDENTITY),
    Patch("torch._guards", ("detect_fake_mode",), _APART, _NO_APART),
    Patch("torch._subclasses.fake_tensor", ("is_fake",), _APART, _NO_APART),
    Patch("torch.utils._python_dispatch", ("_get_current_dispatch_mode", "_get_current_dispatch_mode_stack",
                                           "is_in_torch_dispatch_mode"), _APART, _NO_APART),
    Patch("torch._C", ("_len_torch_dispatch_stack", "_dispatch_keys"), _APART, _NO_APART),
    # Tracers of PyTorch's.
    *(Patch(holder, names, _TRACER, _NO_TRACER) for holder, names in (
        ("torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode", ("__enter__",)),
        ("torch.fx.experimental.proxy_tensor._MakefxTracer", ("trace",)),
        ("torch._guards.TracingContext", ("__init__",)),
        ("torch._C", ("_create_graph_by_tracing", "_create_function_from_trace", "_create_function_from_trace_with_dict")),
        ("torch._C.ScriptModule", ("_create_method_from_trace",)),
        ("torch.cuda.graphs.graph", ("__enter__",)),
    )),
    Patch("<globals of the user's functions>", ("type",), _IDENTITY, _NO_IDENTITY),
    Patch("<globals of the user's functions>", ("len",), "the length of a tensor may follow from a symbol",
          "a step that asks for it needs a plan for each length"),
    # Kernels that PyTorch chooses by what a fake tensor cannot tell.
    Patch("torch._C._nn", ("cross_entropy_loss",), "by the number of ignored targets, C++ chooses other kernels",
          "the plan divides by another number than the eager step"),
    Patch("torch", ("ctc_loss",), "C++ writes lengths given as lists to real memory", "PyTorch reads a fake's memory"),
    Patch("torch._VF", ("_pad_packed_sequence",), "its shape is read from values that a plan holds for",
          "PyTorch reads a fake's memory"),
    Patch("torch._C.ScriptFunction", ("__call__",), "TorchScript runs other kernels once it has optimized itself",
          "the second run of a plan differs from eager's"),
    Patch("torch._C.ScriptMethod", ("__call__",), "TorchScript runs other kernels once it has optimized itself",
          "the second run of a plan differs from eager's"),
    Patch("transformers.utils.import_utils", ("is_fake_tensor",), "it takes other attention masks for fake tensors",
          "the plan has other kernels than the eager step", optional=True),
    Patch("torch.nn.init", ("_no_grad_trunc_normal_",), "it draws until no value is too large, which no fake tells",
          "`roam.fake` does not end, or raises, on models that draw weights so"),
    Patch("torch.utils", ("swap_tensors", "weakref"), "`Module.to` swaps fakes, to which fake modes keep weak references",
          "`roam.fake` and steps raise on models that are moved or cast"),
    Patch("torch.cuda.amp.common", ("amp_definitely_not_available",), "autocast for CUDA works without a device",
          "an estimate for CUDA has float32 instead of half precision"),
    Patch("torch.cuda", ("is_bf16_supported",), "bfloat16 is allowed without a device",
          "an estimate for CUDA refuses bfloat16"),
    # Autograd.
    Patch("torch._C", ("_will_engine_execute_node",), "hooks on several gradients ask by the real leaf's node",
          "such hooks never run at capture, and a plan leaves them out"),
    Patch("torch.autograd", ("_engine_run_backward",), "a backward pass into a history from before the step is refused",
          "gradients of the earlier graph are missing"),
    Patch("torch.nn.parallel.DistributedDataParallel", ("forward",), "what its reducer does in C++ is recorded",
          "gradients are not reduced, or processes wait for each other while one of them captures", optional=True),
    # Compiled functions and modules inside of the step.
    Patch("torch._dynamo.eval_frame", ("_is_eager_on_nested_compile", "_callback_from_stance"), _COMPILED, _NO_COMPILED,
          optional=True),
    Patch("torch._dynamo.eval_frame", ("set_eval_frame",), "before PyTorch 2.15 calls of compiled functions are refused",
          "Dynamo looks at fake tensors, and later steps of the process fail, or end it", optional=True),
    Patch("torch._inductor.output_code.CompiledFxGraph", ("__call__",), _COMPILED, _NO_COMPILED, optional=True),
    Patch("torch._functorch._aot_autograd.runtime_wrappers._AutogradBackwardCompiler", ("get_or_compile",), _COMPILED,
          _NO_COMPILED, optional=True),
    Patch("torch.compiler", ("_is_compiling_flag",), "what compiled functions read is seen, in the branches for compilers too",
          "a later change of it goes unnoticed"),
    # Numbers.
    Patch("math", ("sqrt", "exp", "expm1", "log", "log1p", "log2", "log10", "pow", "hypot", "fabs", "fmod", "copysign",
                   "remainder", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh",
                   "acosh", "atanh", "degrees", "radians", "erf", "erfc", "gamma", "lgamma", "isfinite", "isnan", "isinf"),
          _NUMBER, _NO_NUMBER),
    Patch("numpy", ("isfinite", "isnan", "isinf"), _NUMBER, _NO_NUMBER, optional=True),
    Patch("json.encoder", ("c_make_encoder",), "the encoder in Python asks a number that changes for its value",
          "the one in C asks the user's own function what to write for such a number"),
    Patch("torch.nn.utils.clip_grad", ("float",), _NUMBER, _NO_NUMBER),
    Patch("torch.optim._adafactor", ("max", "min"), _NUMBER, _NO_NUMBER),
    Patch("torch.optim.asgd", ("max", "min"), _NUMBER, _NO_NUMBER),
    Patch("torch", ("tensor", "as_tensor"), _NUMBER, _NO_NUMBER),
    Patch("torch.Tensor", ("new_tensor",), _NUMBER, _NO_NUMBER),
    Patch("torch.Tensor", ("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli"),
          _PLAIN, _NO_PLAIN),
    Patch("torch", ("normal", "bernoulli"), _PLAIN, _NO_PLAIN),
    *(Patch(holder, ("dropout", "dropout_"), _PLAIN, _NO_PLAIN) for holder in ("torch", "torch._VF")),
    # Loaders of data.
    Patch("torch.utils.data.DataLoader", ("__iter__",), "a step that goes through a loader with processes is refused",
          "processes are started in a trace, and end with an error that names no remedy"),
    # Optimizers, schedulers, scalers.
    Patch("torch", ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"), _OPTIMIZER, _NO_OPTIMIZER),
    Patch("torch.optim.optimizer", ("_foreach_supported_types",), _OPTIMIZER, _NO_OPTIMIZER),
    Patch("torch.utils._foreach_utils", ("_foreach_supported_types",), _OPTIMIZER, _NO_OPTIMIZER),
    Patch("torch.amp.GradScaler", ("_lazy_init_scale_growth_tracker", "step", "_maybe_opt_step"), _SCALER, _NO_SCALER),
    Patch("<classes of schedulers>", ("step",), "a scheduler's `step` is called after each run",
          "the step is refused, since its rates change"),
    # Random generators.
    Patch("torch", ("get_rng_state", "set_rng_state", "manual_seed", "seed", "initial_seed"),
          _GENERATOR, _NO_GENERATOR),
    Patch("torch.random", ("get_rng_state", "set_rng_state", "manual_seed", "seed", "initial_seed"),
          _GENERATOR, _NO_GENERATOR),
    Patch("torch.cuda", ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "seed", "seed_all",
                         "initial_seed"), _GENERATOR, _NO_GENERATOR),
    Patch("torch.cuda.random", ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "seed", "seed_all",
                                "initial_seed"), _GENERATOR, _NO_GENERATOR),
    # Distributed tensors.
    Patch("torch.distributed.device_mesh.DeviceMesh", ("__init__", "mesh"), "a mesh of real ranks is used among fake tensors",
          "models that two meshes share cannot be built without memory", optional=True),
    Patch("torch.distributed.tensor._sharding_prop.ShardingPropagator", ("propagate_op_sharding_non_cached",),
          "operators that run for the layouts of distributed tensors are not recorded",
          "a plan has operators and memory that no eager step has", optional=True),
    Patch("torch.distributed.tensor._dispatch", ("is_rng_supported_mesh",), _SPREAD_RANDOM, _NO_SPREAD_RANDOM, optional=True),
    Patch("torch.distributed.tensor._random.OffsetBasedRNGTracker", ("_distribute_region", "_compute_rng_offsets"),
          _SPREAD_RANDOM, _NO_SPREAD_RANDOM, optional=True),
    Patch("torch.distributed.tensor._ops._mask_buffer.MaskBuffer", ("materialize_mask",),
          "masks of lookups in spread tables are put back after a trace",
          "after a trace that was refused the eager step finds a fake mask", optional=True),
    Patch("torch.distributed.tensor.DTensor", ("__hash__",), _IDENTITY, _NO_IDENTITY, optional=True),
    *(Patch(f"torch.distributed.fsdp._fully_shard.{name}", ("alloc_storage", "free_storage"),
            "memory of gathered parameters that is given back is other memory when it is taken again",
            "a plan holds all gathered parameters at once, or resizes the memory of fakes", optional=True)
      for name in ("_fsdp_param", "_fsdp_param_group")),
    Patch("torch.distributed.fsdp._fully_shard._fsdp_param", ("_chunk_with_empty",),
          "of the parts of a parameter only those are made that a rank asks for",
          "`roam plan --world 512` makes 512 fake tensors of every parameter", optional=True),
    # Processes and the environment.
    *(Patch(module, ("open",), "a step that opens files is refused", "what it reads is frozen, and what it writes is lost")
      for module in ("builtins", "io")),
    Patch("os", (*FILES_ASKED, *FILES_CHANGED), _FILES, _NO_FILES, optional=True),
    Patch("pathlib.Path", (*FILES_ASKED, *FILES_CHANGED), _FILES, _NO_FILES, optional=True),
    Patch("torch.distributed", ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
                                "send_object_list", "recv_object_list"), _COLLECTIVE, _NO_COLLECTIVE, optional=True),
    Patch("torch._C._distributed_c10d.Work", ("get_future", "result"), "the handles of recorded collectives hold no results",
          "a plan returns None where eager PyTorch returns tensors", optional=True),
    Patch("torch.distributed.distributed_c10d",
          ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
           "recv_object_list"), _COLLECTIVE, _NO_COLLECTIVE, optional=True),
    Patch("torch.distributed.distributed_c10d", ("_get_object_coll_device",),
          "collectives of objects that the user has imported by name are refused by name",
          "a step is refused for the tensors into which objects are pickled", optional=True),
    Patch("torch.distributed.distributed_c10d", ("_new_group_with_tag",), "a step that makes a process group is refused",
          "each trace makes a group, and two traces are said to differ", optional=True),
    Patch("os._Environ", ("__getitem__", "__iter__", "__len__", "__setitem__", "__delitem__"),
          "guards compare the environment variables that a step reads", "a change of one goes unnoticed"),
    Patch("inspect", ("_check_instance",), "`inspect.getattr_static` reads attributes past the class",
          "an attribute that a step reads so is not guarded"),
    *(Patch(f"importlib.machinery.{name}", ("exec_module",), "modules are executed outside of a trace",
            "a module that is first imported in a step keeps fake tensors")
      for name in ("SourceFileLoader", "SourcelessFileLoader", "ExtensionFileLoader")),
    Patch("zipimport.zipimporter", ("exec_module",), "modules are executed outside of a trace",
          "a module that is first imported in a step keeps fake tensors"),
    Patch("<the optimizer that `roam.parallelize` is given>", ("step",), "a step has to update by its argument",
          "the certified memory lacks the optimizer's state"),
    Patch("<classes of the user's objects>", ("__getattribute__", "__setattr__", "__delattr__"),
          "notes which attributes a step reads", "all attributes are guarded and faked, or refused"),
    Patch("<classes of the user's objects>", ("__getattr__",), "fakes have what the classes of their parameters define",
          "code that asks for it, as by hasattr, goes another way"),
)  # fmt: skip
"""Everything that is replaced while a step is traced, watched or run."""

USERS_GLOBALS: Final = "<globals of the user's functions>"
SCHEDULERS: Final = "<classes of schedulers>"
STREAMS: Final = "<the standard streams>"
REAL_OPTIMIZER: Final = "<the optimizer that `roam.parallelize` is given>"
USERS_CLASSES: Final = "<classes of the user's objects>"

_identity = id  # during a trace the name means another function
Replacement = tuple[Any, str, Any]
"""Of an object's attribute of that name, by the last."""


class Unlisted(LookupError):
    """A patch that `PATCHES` does not have."""


def resolved(path: str) -> Any:
    """The object at a dotted path, of modules that are imported; None if there is none."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        found: Any = sys.modules.get(".".join(parts[:end]))
        if found is not None:
            for part in parts[end:]:
                if isinstance(found, types.ModuleType):  # which may import what it is asked for
                    found = vars(found).get(part)
                else:
                    found = getattr(found, part, None)
            return found
    return None


@contextmanager
def replaced(replacements: Iterable[Replacement], *, of: str | None = None) -> Iterator[None]:
    """With other attributes in place; the old ones come back, whatever ends the block.

    Args:
        replacements: what to put where, one after the other.
        of: `SCHEDULERS`, `STREAMS` or `REAL_OPTIMIZER` for objects that depend on the step; else
            holders are looked up in `PATCHES`.

    Raises:
        Unlisted: a replacement that `PATCHES` does not have.
    """
    with _undone() as stack:
        with interrupts_wait():
            wanted = list(replacements)
            if type(replacements) is not Listed:
                _check_listed(wanted, of)
            know_functions()
            put: list[_Put] = []
            stack.callback(_put_all_back, put)
            for holder, name, value in wanted:
                if name in ("__class__", "__dict__"):
                    stack.enter_context(_in_class(holder, name, value))
                else:
                    put.append(_put(holder, name, value))
        yield


class Listed(list[Replacement]):
    """Replacements of holders that `PATCHES` has, to be put in place again and again."""

    def __init__(self, replacements: Iterable[Replacement]) -> None:
        """Checks them.

        Raises:
            Unlisted: one is of a holder that `PATCHES` does not have.
        """
        super().__init__(replacements)
        _check_listed(self, None)


@contextmanager
def methods_added(methods: Iterable[tuple[type, str, Callable[..., Any]]]) -> Iterator[None]:
    """With methods in classes of the user's, which get back their own of these names, if they have
    any; the user's code sees no call of it.
    """
    names = _names_of(USERS_CLASSES)
    with _undone() as stack:
        with interrupts_wait():
            for kind, name, method in methods:
                if name not in names:
                    raise Unlisted(
                        f"{name} of {USERS_CLASSES} is not in roam.torch_compat.patches.PATCHES"
                    )
                table = type.__dict__["__dict__"].__get__(kind)  # past a metaclass
                if name in table:
                    stack.callback(type.__setattr__, kind, name, table[name])
                else:
                    stack.callback(type.__delattr__, kind, name)
                type.__setattr__(kind, name, method)
        yield


@contextmanager
def globals_added(tables: Iterable[dict[str, Any]], name: str, value: Any) -> Iterator[None]:
    """With a global of that name in those tables of the user's functions that have none."""
    if name not in _names_of(USERS_GLOBALS):
        raise Unlisted(f"{name} of {USERS_GLOBALS} is not in roam.torch_compat.patches.PATCHES")
    with _undone() as stack:
        with interrupts_wait():
            for table in tables:
                if name not in table:
                    table[name] = value
                    stack.callback(table.pop, name, None)
        yield


@contextmanager
def _undone() -> Iterator[ExitStack]:
    """A stack that is closed at the end of the block, with Ctrl-C kept back."""
    stack = ExitStack()
    try:
        yield stack
    finally:
        with interrupts_wait():
            stack.close()


@contextmanager
def _in_class(kind: type, name: str, value: Any) -> Iterator[None]:
    """Puts an attribute into a class that the class itself has no way to set, such as what
    `x.__class__` gives.
    """
    (table,) = gc.get_referents(vars(kind))
    table[name] = value
    _forget_lookups(kind)
    try:
        yield
    finally:
        del table[name]
        _forget_lookups(kind)


def _forget_lookups(kind: type) -> None:
    kind._roam = None  # type: ignore[attr-defined]
    del kind._roam  # type: ignore[attr-defined]


@dataclass(slots=True, eq=False)
class _Put:
    """What comes back to a place that something else stands in.

    Attributes:
        original: what was there, `_NOTHING` if nothing.
        is_own: whether the holder itself had it, and no base.
    """

    holder: Any
    name: str
    original: Any
    is_own: bool


_standing: dict[tuple[int, str], list[_Put]] = {}
"""For each place in which something stands now, by the holder's identity and the name, what comes
back, in the order in which it was put aside. Blocks of several threads may end in any order.
"""
_places = threading.RLock()  # a finalizer may put something somewhere too


def _put(holder: Any, name: str, value: Any) -> _Put:
    """Replaces an attribute."""
    with _places:
        own = vars(holder) if hasattr(holder, "__dict__") else {}
        is_own = name in own
        original = own[name] if is_own else getattr(holder, name, _NOTHING)
        # A module's global of a builtin's name goes before the builtin.
        if original is _NOTHING and not hasattr(builtins, name):
            raise AttributeError(f"{holder!r} does not have the attribute {name!r}")
        setattr(holder, name, value)
        one = _Put(holder, name, original, is_own)
        _standing.setdefault((_identity(holder), name), []).append(one)
        return one


def _put_all_back(put: list[_Put]) -> None:
    """Puts the originals back, the last replacement's first, all of them even if one cannot be."""
    try:
        while put:
            _put_back(put.pop())
    finally:
        if put:
            _put_all_back(put)


def _put_back(one: _Put) -> None:
    with _places:
        holder, name, original = one.holder, one.name, one.original
        place = _identity(holder), name
        standing = _standing[place]
        at = standing.index(one)
        del standing[at]
        if at < len(standing):  # what another thread has put there since stays
            standing[at].original, standing[at].is_own = original, one.is_own
            return
        if not standing:
            del _standing[place]
        if one.is_own:
            setattr(holder, name, original)
            return
        delattr(holder, name)
        if original is not _NOTHING and not hasattr(holder, name):
            setattr(holder, name, original)  # such as a slot's


_NOTHING: Final = object()


def _check_listed(wanted: Iterable[Replacement], of: str | None) -> None:
    holders: dict[str, Any] = {}
    for holder, name, _ in wanted:
        if of is not None:
            is_listed = name in _names_of(of)
        else:
            paths = _paths_of(name)
            for path in paths:
                if path not in holders:
                    holders[path] = resolved(path)
            is_listed = any(holders[path] is holder for path in paths)
        if not is_listed:
            raise Unlisted(f"{name} of {holder!r} is not in roam.torch_compat.patches.PATCHES")


@functools.cache
def _paths_of(name: str) -> tuple[str, ...]:
    """Of the objects of which an attribute of that name may be replaced."""
    return tuple(
        patch.holder
        for patch in PATCHES
        if name in patch.names and not patch.holder.startswith("<")
    )


@functools.cache
def _names_of(holder: str) -> frozenset[str]:
    return frozenset(name for patch in PATCHES if patch.holder == holder for name in patch.names)
