"""Origins: whose code a function, class or object is from, and what code names."""

from __future__ import annotations

import builtins
import dis
import functools
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from typing import Final

import torch

from roam.own_code import is_own_module
from roam.state.classes import module_of, mro_of, qualname_of

# Packages whose functions and classes are not entered, beside the standard library: they are taken
# to stay as they are.
_LIBRARIES: Final = (
    *(
        "torch",
        "torchvision",
        "torchaudio",
        "torchgen",
        "functorch",
        "triton",
        "numpy",
        "scipy",
        "pandas",
        "sklearn",
    ),
    # What PyTorch requires, and what that requires.
    *("filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy"),
    *(
        "transformers",
        "tokenizers",
        "safetensors",
        "huggingface_hub",
        "accelerate",
        "datasets",
        "matplotlib",
        "PIL",
        "typing_extensions",
    ),
    *("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics"),
    *("peft", "pyarrow", "trl"),
    # These write a tensor operation as text, and keep what they have made of it.
    *("einops", "einx"),
    # These save, load, show or fetch what others have made.
    *("cloudpickle", "dill", "graphviz", "plotly", "requests", "seaborn", "yaml"),
    *("pytest", "_pytest", "hypothesis", "mip", "cffi"),
)
# Packages whose objects only watch a training run: their attributes change at every step, and no
# result depends on them.
_WATCHERS: Final = (
    *(
        "tqdm",
        "wandb",
        "tensorboard",
        "tensorboardX",
        "mlflow",
        "rich",
        "loguru",
        "pytest",
        "_pytest",
        "hypothesis",
    ),
    *("torch.utils.tensorboard", "torch.profiler", "torch.autograd.profiler"),
    *("torch._dynamo", "torch._inductor"),  # compilers, which change whenever they compile
)
# Those that tell people about a run. `csv` writes through objects of a module in C.
REPORTERS: Final = (
    "_csv", "loguru", "mlflow", "rich", "tensorboard", "tensorboardX", "torch.utils.tensorboard", "tqdm", "wandb",
)  # fmt: skip
# Packages whose objects say where tensors are and who talks to whom: they stay as they are made.
_MESHES: Final = (
    "torch.distributed.device_mesh",
    "torch.distributed.distributed_c10d",
    "torch._C._distributed_c10d",
    "torch.distributed.tensor.placement_types",
    "torch._C._distributed",
    "torch.distributed.tensor._dtensor_spec",
    "torch.distributed.fsdp",
)
# Standard library modules whose objects are mere holders of attributes.
_HOLDERS: Final = frozenset(
    {
        *("builtins", "types", "argparse", "collections", "queue", "weakref"),
        *("concurrent.futures._base", "configparser", "fractions", "optparse", "statistics"),
    }
)
# Standard library modules whose functions make classes for others, with their own name for the
# class's module.
_MAKERS: Final = frozenset({"abc", "types"})
_PYTORCH: Final = os.path.dirname(torch.__file__) + os.sep
_STANDARD: Final = frozenset(sys.stdlib_module_names)


@functools.cache
def is_in(module: str, packages: tuple[str, ...]) -> bool:
    """Whether a module is one of these, or lies in one of these packages."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in _STANDARD


def is_library(module: object) -> bool:
    """Whether a module is one of the standard library, of PyTorch or of another known library. A
    module of the user's may have the name of such a library.
    """
    return type(module) is str and (
        (
            (_is_standard(module) or is_in(module, _LIBRARIES) or is_in(module, _WATCHERS))
            and not _is_of_user(module.partition(".")[0])
        )
        or is_own_module(module)
    )


_PLACES: Final = tuple(
    os.path.normcase(sysconfig.get_path(name)) + os.sep
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_installed: Final[dict[str, bool]] = {}
"""By the names of packages that have been imported: whether the user wrote them."""


def _is_of_user(package: str) -> bool:
    """Whether a package with a library's name lies where no library is installed."""
    known = _installed.get(package)
    if known is None:
        module = sys.modules.get(package)
        if module is None:
            return False  # it may be imported later
        known = _installed[package] = _lies_elsewhere(package, module)
    return known


def _lies_elsewhere(package: str, module: types.ModuleType) -> bool:
    """Whether a package lies neither with the standard library, nor with PyTorch, nor where it has
    been installed.
    """
    places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    place = next(filter(None, places), None)
    if not isinstance(place, str) or package == "__main__":
        return False  # it is built in
    path = os.path.normcase(os.path.abspath(place))
    if is_installed(path) or path.startswith(_PYTORCH) or "-packages" in path or ".zip" in path:
        return False
    for name in importlib.metadata.packages_distributions().get(package, [package]):
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        root = os.path.normcase(os.path.abspath(str(found.locate_file("")))) + os.sep
        if path.startswith(root) or "editable" in (found.read_text("direct_url.json") or ""):
            return False  # one that is developed where it lies
    return True


def is_installed(file: str) -> bool:
    """Whether a file lies where the standard library or packages are installed."""
    return os.path.normcase(file).startswith(_PLACES)


def is_library_code(code: types.CodeType, names: Mapping[str, object]) -> bool:
    """Whether a function is of a library, told by its code and its module's names.

    PyTorch generates functions whose module has no name; their code names a file of PyTorch.
    """
    module = names.get("__name__")
    if module is None:
        return code.co_filename.startswith(_PYTORCH)
    return is_library(module)


def is_pytorchs(names: dict[str, object]) -> bool:
    """Whether global names are those of a module of PyTorch's."""
    module = names.get("__name__")
    return type(module) is str and is_in(module, ("torch",))


def is_watcher(kind: type) -> bool:
    """Whether objects of a class only watch a training run, and change at every step."""
    module = _home_of(kind)
    return type(module) is str and is_in(module, _WATCHERS)


def is_reporter(value: object) -> bool:
    """Whether a value is, or is from, a package that tells people about a training run."""
    kind = type(value)
    if kind is types.ModuleType:
        return reports(vars(value).get("__name__"))
    if kind in (types.FunctionType, types.BuiltinFunctionType):
        return reports(value.__module__)
    return _is_of_reporter(value if issubclass(kind, type) else kind)


@functools.lru_cache(maxsize=1024)
def _is_of_reporter(kind: type) -> bool:
    return reports(_home_of(kind))


def reports(module: object) -> bool:
    """Whether a module is one of a package that tells people about a training run."""
    return (
        type(module) is str
        and is_in(module, REPORTERS)
        and not _is_of_user(module.partition(".")[0])
    )


def is_opaque(kind: type) -> bool:
    """Whether objects of a class hold nothing that a step's results could depend on, as far as roam
    can know: locks, loggers, progress bars. A library's other objects, such as configurations, hold
    values of the user's and are entered.
    """
    module = _home_of(kind)
    return (
        type(module) is str
        and (
            (_is_standard(module) and module not in _HOLDERS and module != "__main__")
            or is_in(module, _WATCHERS)
            or is_in(module, _MESHES)
        )
        and not _is_of_user(module.partition(".")[0])
    )


def _home_of(kind: type) -> object:
    """The module that a class is from. One that is made as the program runs has the name of the
    module that makes classes.
    """
    for base in mro_of(kind):
        module = module_of(base)
        if type(module) is not str or module not in _MAKERS:
            return module
        if vars(sys.modules[module]).get(qualname_of(base)) is base:
            return module
    return module_of(kind)


def nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_code(constant)


@functools.lru_cache(maxsize=256)
def instructions_of(code: types.CodeType) -> list[dis.Instruction]:
    """The instructions of code, without those of the functions inside it."""
    return list(dis.get_instructions(code))


@functools.cache
def names_of(code: types.CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """The globals that code and the functions inside it name, in order, and every attribute that
    they name.
    """
    names: dict[str, None] = {}
    attributes: set[str] = set()
    for instruction in chain.from_iterable(map(instructions_of, nested_code(code))):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
            names[instruction.argval] = None
        elif "ATTR" in instruction.opname or "METHOD" in instruction.opname:
            attributes.add(instruction.argval)
    return tuple(names), frozenset(attributes)


_NAMES_BY_TEXT: Final = frozenset(
    {
        *("getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"),
        *("vars", "__dict__", "globals", "__getattribute__", "__setattr__", "__delattr__"),
    }
)
"""What takes attributes, or globals, by names that may stand in the code as texts."""


@functools.cache
def texts_of(code: types.CodeType) -> frozenset[str]:
    """The texts in code, and in the functions inside it, by which it may take attributes and
    globals.
    """
    return frozenset(
        text
        for part in nested_code(code)
        if not _NAMES_BY_TEXT.isdisjoint(part.co_names)
        for text in part.co_consts
        if type(text) is str and text.isidentifier()
    )


_HANDLERS: Final = frozenset({"AttributeError", "Exception", "BaseException", "suppress"})
"""What code names that goes on where there is no such attribute."""


@functools.cache
def asked_names(code: types.CodeType) -> frozenset[str]:
    """The attributes that code, and the functions inside it, may set or delete, or for whose
    absence it may be prepared. Not counted is what a method sets of its own object.
    """
    found = set(texts_of(code))
    for part in nested_code(code):
        if not _HANDLERS.isdisjoint(part.co_names):
            found |= names_of(part)[1]
        for before, instruction in pairwise(instructions_of(part)):
            if instruction.opname in ("STORE_ATTR", "DELETE_ATTR"):
                is_own = "LOAD_FAST" in before.opname and "self" in str(before.argval)
                found.update(() if is_own else (instruction.argval,))
    return frozenset(found)


_MODULES_BY_NAME: Final = frozenset({"__import__", "import_module", "modules"})
"""How code calls what it takes modules from by their names: `sys.modules`, for example."""


def _numbers(*names: str) -> frozenset[int]:
    """The numbers of those of these instructions that this Python has."""
    return frozenset(dis.opmap[name] for name in names if name in dis.opmap)


def _has(code: types.CodeType, instructions: frozenset[int]) -> bool:
    """Whether code has one of these instructions. It may say so if it has none."""
    return not instructions.isdisjoint(code.co_code[::2])


_IMPORTS: Final = _numbers("IMPORT_NAME")


@functools.cache
def imports_of(code: types.CodeType, package: str | None) -> tuple[tuple[str, frozenset[str]], ...]:
    """The modules that code and the functions inside it import, in order, each with the names that
    are taken from it. If the code may get at modules by their names, all its texts count as such.

    Args:
        package: the package from which relative imports start.
    """
    found: dict[str, frozenset[str]] = {}
    if not _MODULES_BY_NAME.isdisjoint(code.co_names):
        found.update((text, frozenset()) for text in code.co_consts if type(text) is str)
    constants: list[object] = []
    for instruction in instructions_of(code) if _has(code, _IMPORTS) else ():
        if instruction.opname == "IMPORT_NAME":
            level, parts = constants[-2:]
            name = "." * level + instruction.argval  # type: ignore[operator]
            try:
                name = importlib.util.resolve_name(name, package)
            except ImportError:
                continue
            taken = frozenset(parts) if isinstance(parts, tuple) else frozenset()
            # `import a.b` gives the name `a`; `from a import b` may take the module `a.b`.
            for module in (
                name,
                name.partition(".")[0],
                *(f"{name}.{part}" for part in sorted(taken)),
            ):
                found[module] = found.get(module, frozenset()) | taken
        elif "CONST" in instruction.opname or instruction.opname == "LOAD_SMALL_INT":
            constants.append(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for module, taken in imports_of(constant, package):
                found[module] = found.get(module, frozenset()) | taken
    return tuple(found.items())


_CONSTANTS: Final = frozenset({"True", "False", "None", "Ellipsis", "NotImplemented", "__debug__"})


def is_added_builtin(name: str) -> bool:
    """Whether a name is found among the built-in ones because somebody has put it there."""
    if name in _CONSTANTS or name not in vars(builtins):
        return False
    value = vars(builtins)[name]
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is not builtins
    return not isinstance(value, type) or value.__module__ != "builtins"
