"""Pytest plugin: run the tests of a GPU with an emulated device, to find tensors in host memory. Needs no GPU.

    python -m pytest -p bench.check.emulated_device --tier all kernels/tests tests/model -k "triton or gpu"

Tests are selected as on a machine with a GPU, and `cuda` tensors are wrappers around host memory that report the
device `cuda`. Triton kernels run under the interpreter, which accepts wrappers only: a kernel that gets a tensor in
host memory raises as a compiled kernel does, and so does a torch operation over tensors of both devices. Tests marked
`gpu`, and those that load a whole model (fixture `load`), are not run, because they use streams, graphs or the memory
of a real device. Since interpreted kernels are slow, a test function runs with two of its cases, for MAX_LAUNCHES
launches each; the summary names the kernels that no test launched.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable, Generator, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

import chatcache_kernels.triton
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import InterpretedFunction

from tests.model import drive
from tests.support import machine

CUDA = torch.device("cuda", 0)
MIXED = {"aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_", "aten::_index_put_impl_"}
"""Operations that accept tensors of two devices."""
MAX_LAUNCHES = 6
"""A test ends before its next launch: by then it has shown where its tensors are."""

_test = SimpleNamespace(num_launches=0)
_launched: set[str] = set()


class EmulatedTensor(Tensor):
    """A tensor that reports the device `cuda` and keeps its data in `host`."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> EmulatedTensor:
        """Wrap a tensor in host memory."""
        wrapper = Tensor._make_wrapper_subclass(
            cls, host.shape, host.stride(), host.storage_offset(), dtype=host.dtype, device=torch.device("meta")
        )
        wrapper.host = host
        return wrapper

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return `cuda:0`; torch itself uses `meta`, since a build for CPUs has no guard for `cuda`."""
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Return True."""
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Return False, so that contents are compared."""
        return False

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return the contents."""
        return f"EmulatedTensor({self.host!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation over the contents. Raises: RuntimeError if some of the tensors are in host memory."""
        return run_operation(func, args, kwargs or {})


class EmulatedDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Make `cuda` a device that keeps its tensors in host memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation that creates tensors, or that has emulated ones."""
        return run_operation(func, args, kwargs or {})


class EmulatedFunctions(TorchFunctionMode):
    """Replace functions of torch that need a driver before they dispatch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        kwargs = dict(kwargs or {})
        if func is Tensor.tolist:
            return unwrap(args[0]).tolist()
        if func is Tensor.pin_memory:
            return args[0].clone()
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], EmulatedTensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(each) if isinstance(each, list) else each for each in index)
            args = args[0], index, *args[2:]
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is Tensor.to:
            return move(args[0], args[1:], kwargs)
        if func in (torch.tensor, torch.as_tensor) and is_cuda(kwargs.get("device")):
            return EmulatedTensor(func(*args, **kwargs | {"device": "cpu"}))
        return func(*args, **kwargs)


def move(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run `x.to(...)`; the result shares memory with `x` only if neither dtype nor device changes."""
    kwargs.pop("non_blocking", None)
    given = [*args, *kwargs.values()]
    targets = [each.device if isinstance(each, Tensor) else each for each in given if not isinstance(each, torch.dtype)]
    target = next((each for each in targets if isinstance(each, str | torch.device)), x.device)
    dtypes = [each.dtype if isinstance(each, Tensor) else each for each in given]
    dtype = next((each for each in dtypes if isinstance(each, torch.dtype)), x.dtype)
    if is_cuda(target) == isinstance(x, EmulatedTensor):
        return x if dtype == x.dtype else torch.ops.aten._to_copy(x, dtype=dtype)
    host = unwrap(x).to(dtype, copy=True)
    return EmulatedTensor(host) if is_cuda(target) else host


def is_cuda(device: Any) -> bool:
    """Return whether an argument names the emulated device."""
    return device is not None and torch.device(device).type == "cuda"


def run_operation(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a torch operation on contents; wrap its result if it is on the emulated device."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    emulated = [one for one in tensors if isinstance(one, EmulatedTensor)]
    target = kwargs.get("device")
    is_emulated = bool(emulated) if target is None else is_cuda(target)
    name = func._schema.name
    if name == "aten::copy_":
        is_emulated = isinstance(args[0], EmulatedTensor)
    elif emulated and name not in MIXED:
        check_devices(func, tensors)
    kwargs = (
        kwargs
        | ({"device": "cpu"} if target is not None else {})
        | ({"pin_memory": False} if "pin_memory" in kwargs else {})
    )
    result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    if not is_emulated:
        return result.clone() if emulated and name == "aten::_to_copy" else result
    wrapped = tree_map(lambda leaf: EmulatedTensor(leaf) if isinstance(leaf, Tensor) else leaf, result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)  # type: ignore[no-untyped-call]


def check_devices(func: Any, tensors: list[Tensor]) -> None:
    """Raise RuntimeError, as torch does, if one of the tensors is in host memory and no scalar."""
    if any(one.ndim and not isinstance(one, EmulatedTensor) for one in tensors):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found cuda:0 and cpu")


def unwrap(leaf: Any) -> Any:
    """Return the contents of an emulated tensor, and anything else as it is."""
    return leaf.host if isinstance(leaf, EmulatedTensor) else leaf


def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> Any:
    """Interpret a kernel. Raises: ValueError, as Triton does, for a tensor in host memory."""
    for position, value in [*enumerate(args), *given.items()]:
        if isinstance(value, Tensor) and not isinstance(value, EmulatedTensor):
            name = kernel.fn.__name__
            raise ValueError(f"{name}: pointer argument {position} cannot be accessed from Triton (cpu tensor?)")
    _launched.add(kernel.fn.__name__)
    _test.num_launches += 1
    if _test.num_launches > MAX_LAUNCHES:
        raise EnoughLaunches
    given = {option: unwrap(value) for option, value in given.items()}
    return _interpret(kernel, *map(unwrap, args), grid=grid, warmup=warmup, **given)


_interpret = InterpretedFunction.run


class EnoughLaunches(BaseException):
    """The test has launched MAX_LAUNCHES kernels. No `Exception`, so that no test handles it."""


class NoEvent:
    """A CUDA event or stream: work on the emulated device is done at once."""

    def __init__(self, *args: object, **options: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., bool]:
        """Return a method that does nothing."""
        return lambda *args, **options: True


def pytest_configure() -> None:
    """Select tests as on a machine with a GPU, but interpret kernels."""
    for module in pkgutil.iter_modules(chatcache_kernels.triton.__path__):
        importlib.import_module(f"chatcache_kernels.triton.{module.name}")
    drive.KERNELS = CUDA
    machine.has_gpu = lambda: True  # type: ignore[assignment]
    requirements = cast("MutableMapping[str, machine.Requirement]", machine.REQUIREMENTS)
    requirements["gpu"] = machine.Requirement("no CUDA device", lambda: True)
    requirements["interpreter"] = machine.Requirement("Triton kernels are compiled on a GPU", lambda: False)


@contextmanager
def _compiled() -> Iterator[None]:
    """Make tests choose the device `cuda`, as where kernels are compiled."""
    with mock.patch.dict(os.environ, TRITON_INTERPRET="0"):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Generator[None, object, object]:
    """Return `cuda` from the fixture `triton_device`."""
    with _compiled() if fixturedef.argname == "triton_device" else nullcontext():
        return (yield)


@pytest.fixture(autouse=True, scope="session")
def emulated_device() -> Iterator[None]:
    """Emulate the device for all tests."""
    device = EmulatedDevice()  # type: ignore[no-untyped-call]
    with pytest.MonkeyPatch.context() as patch, device, EmulatedFunctions():
        for name in ("_lazy_init", "synchronize"):
            patch.setattr(torch.cuda, name, lambda *args: None)
        for name in ("Event", "Stream", "current_stream"):
            patch.setattr(torch.cuda, name, NoEvent)
        chip = SimpleNamespace(major=9, minor=0, multi_processor_count=3)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
        patch.setattr(InterpretedFunction, "run", launch)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """End a test after MAX_LAUNCHES."""
    _test.num_launches = 0
    try:
        return (yield)
    except EnoughLaunches:
        return True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of a real device or of the size of its memory; keep the first and the middle case of others."""
    dropped = [item for item in items if _needs_real_device(item)]
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item not in dropped:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {item for cases in functions.values() for item in (cases[0], cases[len(cases) // 2])}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _needs_real_device(item: pytest.Item) -> bool:
    loads_model = "load" in cast("pytest.Function", item).fixturenames
    return loads_model or item.get_closest_marker("gpu") is not None or "over_2_31_elements" in item.name


def list_kernels() -> set[str]:
    """Return the names of the kernels that the package launches."""
    found: set[str] = set()
    for module in pkgutil.iter_modules(chatcache_kernels.triton.__path__):
        names = vars(importlib.import_module(f"chatcache_kernels.triton.{module.name}")).items()
        found |= {name for name, value in names if isinstance(value, InterpretedFunction) and name.endswith("_kernel")}
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the kernels that tests launched, and name the others; `run_tests.check_kernels` reads this."""
    missing = ", ".join(sorted(list_kernels() - _launched)) or "-"
    terminalreporter.write_line(f"kernels launched by tests: {len(list_kernels() & _launched)}; by none: {missing}")
