"""A graph on its way to a worker: by cloudpickle, so lambdas, closures, script and notebook functions travel.

Contract
- `ship` copies functions and classes of `__main__`, and of modules that a worker could not import (run by a test runner
  or loaded from a path), by value, with the globals that they use as these are now. All else travels by name.
- `unship` gives the worker's `__main__` (and stand-ins of those modules) the functions and classes that came along, so
  that the worker can pickle their instances plainly and main finds its own classes again.
- What cannot travel is an UnpicklableStageError that names the way to the culprit. A function that drags along a global
  or closure variable over 64 MiB is warned about by name.
"""

from __future__ import annotations

import functools
import importlib.machinery
import io
import linecache
import os
import pickle
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import torch

from pipes.errors import UnpicklableStageError
from pipes.loader2.leaves import INTEGERS

__all__ = ["can_be_imported", "find_unpicklable", "reduced_tensor", "ship", "unship"]

#: Bytes from which a global or closure variable is warned about.
BIG = 64 * 2**20

# The dtypes that torch's pickling knows; float8, complex32 and unsigned integers raise when they are loaded.
_PICKLED = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}

# Whether a module is pickled by value is a setting of the whole process in cloudpickle.
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A worker forked while another thread ships must find neither this lock nor cloudpickle's own taken.
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def ship(obj: Any, label: str = "") -> bytes:
    """Return `obj` as bytes for `unship` in another process of the same program.

    >>> add = unship(ship(lambda x: x + 1))
    >>> add(1)
    2

    Raises UnpicklableStageError, which names the way from `label` to what cannot travel.
    """
    try:
        packed, functions = _dump(obj)
    except Exception as error:
        raise UnpicklableStageError(
            f"cannot be sent to a worker process: {find_unpicklable(obj, label) or _reason(error)}. "
            "Make it inside the worker (at the first use, or when iteration starts), or leave it out in __getstate__"
        ) from error
    if len(packed) > BIG:
        for function in functions:
            _warn_if_big(function)
    return packed


def unship(data: bytes) -> Any:
    """Return the object that `ship` packed, and make its classes known under their names."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    obj = unpickler.load()
    while (met := unpickler.load()) is not None:
        named, nested, sources = met
        for (module, name), value in named.items():
            setattr(_module(module), name, value)
        for kind, qualname in nested:
            kind.__qualname__ = qualname
        for file, lines in sources.items():
            linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    return obj


def _module(name: str) -> types.ModuleType:
    if name not in sys.modules:
        parent, _, child = name.rpartition(".")
        stand_in = types.ModuleType(name, "Stands for a module that only the main process has.")
        if parent:
            setattr(_module(parent), child, stand_in)
        sys.modules[name] = stand_in
    return sys.modules[name]


class _Shipper(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that notes which named things it met in modules that a worker cannot import."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.named: dict[tuple[str, str], Any] = {}
        # cloudpickle makes Outer.Inner anew as Inner, which main would not find.
        self.nested: list[tuple[type, str]] = []
        # Of notebook cells and the like, whose lines no file holds: for tracebacks.
        self.sources: dict[str, list[str]] = {}
        self.functions: list[types.FunctionType] = []
        self.foreign: dict[str, bool] = {"__main__": True}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType):
            module, top = getattr(obj, "__module__", None), obj.__qualname__.partition(".")[0]
            if isinstance(module, str) and self._is_foreign(module):
                named = getattr(sys.modules[module], top, None)
                # What is made inside a function does not need it, and it may use what cannot travel.
                local = "<locals>" in obj.__qualname__
                if isinstance(named, type | types.FunctionType) and named.__module__ == module and not local:
                    self.named[module, top] = named
                if isinstance(obj, type) and top != obj.__qualname__:
                    self.nested.append((obj, obj.__qualname__))
            if isinstance(obj, types.FunctionType):
                self.functions.append(obj)
        elif isinstance(obj, functools._lru_cache_wrapper) and self._needs_value(obj):
            return functools.lru_cache(**obj.cache_parameters()), (obj.__wrapped__,)
        elif type(obj) is functools.cached_property:
            return _cached_property, (obj.func, obj.attrname)  # Python 3.11 has a lock in it
        elif isinstance(obj, types.CodeType):
            file = obj.co_filename
            if file in linecache.cache and not os.path.exists(file):
                self.sources[file] = linecache.getlines(file)
            # cloudpickle drops the file's name, which tracebacks need.
            return _code_of_file, (file, *self.dispatch_table[types.CodeType](obj))
        return reduced_tensor(obj) or super().reducer_override(obj)

    def take(self) -> tuple[dict[tuple[str, str], Any], list[tuple[type, str]], dict[str, list[str]]]:
        """Return what was met since the last time."""
        met = self.named, self.nested, self.sources
        self.named, self.nested, self.sources = {}, [], {}
        return met

    def _needs_value(self, obj: Any) -> bool:
        """Return whether a worker would not find `obj` under its name."""
        module = sys.modules.get(obj.__module__)
        return module is None or self._is_foreign(obj.__module__) or getattr(module, obj.__qualname__, None) is not obj

    def _is_foreign(self, module: str) -> bool:
        if module not in self.foreign:
            self.foreign[module] = module in sys.modules and not can_be_imported(module)
            if self.foreign[module]:
                cloudpickle.register_pickle_by_value(sys.modules[module])
        return self.foreign[module]

    def close(self) -> None:
        for module, foreign in self.foreign.items():
            if foreign and module != "__main__":
                cloudpickle.unregister_pickle_by_value(sys.modules[module])


def reduced_tensor(obj: Any) -> tuple[Any, ...] | None:
    """Return how to pickle a tensor of a dtype that torch's own pickling does not know; None for anything else."""
    if type(obj) is torch.Tensor and obj.dtype not in _PICKLED and obj.itemsize in INTEGERS and _is_dense(obj):
        return _view, (obj.resolve_conj().view(INTEGERS[obj.itemsize]), obj.dtype)
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.requires_grad)


def _view(integers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return integers.view(dtype)


def _cached_property(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    if name is not None:
        made.__set_name__(object, name)
    return made


def _code_of_file(file: str, factory: Callable[..., types.CodeType], arguments: tuple[Any, ...]) -> types.CodeType:
    return factory(*arguments).replace(co_filename=file)


def can_be_imported(module: str) -> bool:
    """Return whether a worker finds the package that `module` belongs to.

    >>> can_be_imported("os.path"), can_be_imported("__main__")
    (True, False)
    """
    package = module.partition(".")[0]
    if package == "__main__":
        return False
    if package in sys.builtin_module_names:
        return True
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(package, None) if find_spec is not None else None
        if isinstance(spec, importlib.machinery.ModuleSpec):
            return True
    return False


def _dump(obj: Any) -> tuple[bytes, list[types.FunctionType]]:
    file = io.BytesIO()
    with _lock:
        shipper = _Shipper(file)
        try:
            shipper.dump(obj)
            # Naming a class can bring in further ones; None ends the list.
            while shipper.named or shipper.nested or shipper.sources:
                shipper.dump(shipper.take())
            shipper.dump(None)
            return file.getvalue(), shipper.functions
        finally:
            shipper.close()


def find_unpicklable(obj: Any, label: str = "") -> str:
    """Say which part of `obj` cannot travel, or "" when all of it can.

    >>> import threading
    >>> lock = threading.Lock()
    >>> find_unpicklable({"fn": lambda: lock}, "stage 3 Mapper")
    "stage 3 Mapper: ['fn']: global 'lock': cannot pickle '_thread.lock' object"
    """
    error = _failure(obj)
    if error is None:
        return ""
    path, seen = [label] if label else [], {id(obj)}
    while (found := _failing_part(obj, seen)) is not None:
        name, obj, error = found
        seen.add(id(obj))
        if name:
            path.append(name)
    return ": ".join([*path, _reason(error)])


def _failing_part(obj: Any, seen: set[int]) -> tuple[str, Any, Exception] | None:
    for name, part in _parts(obj):
        error = None if id(part) in seen else _failure(part)
        if error is not None:
            return name, part, error
    return None


def _failure(obj: Any) -> Exception | None:
    try:
        _dump(obj)
    except Exception as error:
        return error
    return None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is pickled along with `obj`, each with its place."""
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield "a key", key
            yield f"[{_short(key)}]", value
    elif isinstance(obj, list | tuple):
        for index, value in enumerate(obj):
            yield f"[{index}]", value
    elif isinstance(obj, set | frozenset):
        for value in obj:
            yield "an element", value
    elif isinstance(obj, types.FunctionType):
        yield from _parts_of_function(obj)
    elif isinstance(obj, types.MethodType):
        yield f"the object of the method {obj.__func__.__name__}", obj.__self__
        yield f"the method {obj.__func__.__name__}", obj.__func__
    elif isinstance(obj, functools.partial):
        yield "the function of partial", obj.func
        yield from ((f"argument {index}", value) for index, value in enumerate(obj.args))
        yield from ((f"argument {name!r}", value) for name, value in obj.keywords.items())
    elif isinstance(obj, type):
        yield from ((f"class {obj.__qualname__}, attribute {name!r}", value) for name, value in vars(obj).items())
    elif not isinstance(obj, types.ModuleType | types.CodeType):
        yield from _parts_of_object(obj)


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, value in _closure(function):
        yield f"closure variable {name!r}", value
    for name, value in _globals(function):
        yield f"global {name!r}", value
    for value in function.__defaults__ or ():
        yield "a default argument", value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield f"default of argument {name!r}", value
    yield from ((f"attribute {name!r}", value) for name, value in vars(function).items())


def _parts_of_object(obj: Any) -> Iterator[tuple[str, Any]]:
    try:
        reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:
        return
    if not isinstance(reduced, tuple):
        return
    state = reduced[2] if len(reduced) > 2 else None
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            yield from ((str(name), value) for name, value in part.items())
        elif part is not None:
            yield "its state", part
    yield "", reduced[0]
    yield from (("", value) for value in reduced[1])
    for items in reduced[3:5]:
        yield from (("an item", value) for value in items or ())


def _closure(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # not bound yet


def _globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    codes, names = [function.__code__], dict[str, None]()
    while codes:
        code = codes.pop()
        names.update(dict.fromkeys(code.co_names))
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    for name in names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _warn_if_big(function: types.FunctionType) -> None:
    if not _travels_by_value(function):
        return
    for kind, parts in (("global", _globals(function)), ("closure variable", _closure(function))):
        for name, value in parts:
            if isinstance(value, types.ModuleType | types.FunctionType | type):
                continue
            size = _size(value)
            if size > BIG:
                code = function.__code__
                warnings.warn(
                    f"the {kind} {name!r} ({size / 2**20:.0f} MiB) is copied into every worker process, because "
                    f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno}) uses it: load it inside the "
                    "worker, or from a file that is mapped into memory",
                    stacklevel=4,
                )


def _travels_by_value(function: types.FunctionType) -> bool:
    module = sys.modules.get(function.__module__)
    named = getattr(module, function.__qualname__, None)
    return named is not function or not can_be_imported(function.__module__ or "__main__")


def _size(value: Any) -> int:
    buffers: list[pickle.PickleBuffer] = []
    try:
        inline = len(cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append))
        return inline + sum(buffer.raw().nbytes for buffer in buffers)
    except Exception:
        return 0


def _short(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= 40 else f"{text[:37]}..."
