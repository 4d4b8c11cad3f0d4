"""The two base classes of pipes, and the registry of chained names."""

from __future__ import annotations

import difflib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar

from torch.utils.data import Dataset, IterableDataset

from pipes.as_built import attributes_to_send
from pipes.context import Context
from pipes.errors import GraphError
from pipes.iteration import iterate, load_state_into, state_of
from pipes.node import built_at
from pipes.run import Node, Run
from pipes.shares import rank_to_send
from pipes.tree import parameters_of, tree_of
from pipes.user_run import UserRun

__all__ = [
    "DataChunk",
    "IterDataPipe",
    "MapDataPipe",
    "Shard",
    "chained_name",
    "functional_datapipe",
    "length_of",
    "lengths_of",
    "no_length",
    "parameters_of",
    "refuse_length",
]

T_co = TypeVar("T_co", covariant=True)

if TYPE_CHECKING:
    from pipes._chained import ChainedIter, ChainedMap
else:

    class ChainedIter(Generic[T_co]):
        """Types only: the chained methods are set by `functional_datapipe`."""

    class ChainedMap(Generic[T_co]):
        """Types only: the chained methods are set by `functional_datapipe`."""


T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
Class = TypeVar("Class", bound=type)

_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
# What running leaves on a pipe and no copy of it takes along.
_UNSAVED = frozenset(
    {
        "_as_built",
        "_pipes_epoch",
        "_pipes_seed",
        "_seed_epoch",
        "_generation",
        "_iteration",
        "_sharding_told",
        "_sent_by",
    }
)
_CATALOGUES = ("pipes.iter", "pipes.map")

# A shard is (number of this stream, number of streams); the whole is one stream of one.
Shard = tuple[int, int]
WHOLE: Shard = (0, 1)


class DataChunk(list[T], Generic[T]):
    """A batch: a list with torchdata's `items` and `raw_iterator()`.

    >>> chunk = DataChunk([1, 2])
    >>> chunk == [1, 2], chunk.items, list(chunk.raw_iterator())
    (True, [1, 2], [1, 2])
    """

    @property
    def items(self) -> list[T]:
        return list(self)

    def raw_iterator(self) -> Iterator[T]:
        return iter(self)

    def as_str(self, indent: str = "") -> str:
        return f"{indent}[{', '.join(str(item) for item in self)}]"


def _caller() -> tuple[str, int]:
    """Return file and line of the nearest frame outside this package and the import machinery."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


# Stages of torchdata that nothing here needs, or that stand elsewhere.
_ELSEWHERE = {
    "prefetch": "leave it out: the workers of a DataLoader2 work ahead, and load_files_by_s3 reads ahead",
    "fullsync": "DistributedReadingService ends an epoch on all ranks at once",
    "sharding_round_robin_dispatch": "use sharding_filter(); the main process deals what can be read once only",
}


@functools.lru_cache(maxsize=64)  # the engine asks every pipe for optional attributes, and a search takes 0.4 ms
def _hint(name: str, chained: frozenset[str]) -> str:
    if name in _ELSEWHERE:
        return f"; {_ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, chained, n=1)
    return f"; did you mean '.{near[0]}'?" if near else "; `dir(pipe)` lists the chained names"


class _Described(Node):
    """What both bases share: where a pipe was built, how it prints, and unknown names that suggest the nearest."""

    functions: ClassVar[dict[str, Callable[..., Any]]] = {}
    _built: tuple[str, int]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = super().__new__(cls)
        self.__dict__["_built"] = _caller()
        return self

    @classmethod
    def parameters_of(cls, pipe: Node) -> dict[str, Any]:
        """Return what `pipes.datapipe.parameters_of` does."""
        return parameters_of(pipe)

    def __repr__(self) -> str:
        return tree_of(self)

    def __str__(self) -> str:
        return repr(self)

    def __bool__(self) -> bool:
        return True

    if not TYPE_CHECKING:  # for a type checker, a name that nobody defines is a mistake

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_"):
                missing = not all(module in sys.modules for module in _CATALOGUES)
                if missing:
                    for module in _CATALOGUES:
                        import_module(module)
                    if name in type(self).functions:
                        return getattr(self, name)
                hint = _hint(name, frozenset(type(self).functions))
            else:
                hint = ""
            raise AttributeError(f"'{type(self).__qualname__}' object has no attribute '{name}'{hint}")

    @classmethod
    def register_datapipe_as_function(cls, name: str, maker: Callable[..., Any], **_ignored: Any) -> None:
        """Make `.name(...)` build `maker(self, ...)` on every pipe of this family; a taken name is refused."""
        known = cls.functions.get(name)
        # The same definition run again, as a notebook's cell or a reloaded module, takes the place of the older.
        again = known is not None and (known.__module__, known.__qualname__) == (maker.__module__, maker.__qualname__)
        if known is not None and not again:
            raise GraphError(
                f"the chained name '{name}' is already taken by {known.__qualname__}; choose another, "
                f"or apply your class with .then({maker.__name__}, ...)"
            )
        if (hasattr(cls, name) and not again) or not name.isidentifier():
            raise GraphError(
                f"'{name}' cannot be a chained name: it is an attribute of {cls.__name__} or no identifier"
            )

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return maker(self, *args, **kwargs)

        what = (maker.__doc__ or "").split("\n\n")[0]
        method.__doc__ = f"{what}\n\nReturns `{maker.__qualname__}(self, ...)`, whose documentation says more."
        method.__name__, method.__qualname__ = name, f"{cls.__name__}.{name}"
        cls.functions[name] = maker
        setattr(cls, name, method)

    @classmethod
    def register_function(cls, name: str, function: Callable[..., Any]) -> None:
        """Make `.name(...)` call `function(self, ...)` on every pipe of this family."""
        cls.register_datapipe_as_function(name, function)


class IterDataPipe(ChainedIter[T_co], _Described, IterableDataset[T_co]):
    """A pipe that is iterated: describes one stage and what feeds it, runs nothing until `iter`.

    Subclass it and write `__iter__`; add `state_dict()` and `load_state_dict(state)` for a resume that does not
    replay, or set `stateless = True` when each element is passed on before the next one is taken.

    >>> from pipes.iter import IterableWrapper
    >>> class Doubled(IterDataPipe):
    ...     stateless = True
    ...     def __init__(self, source): self.source = source
    ...     def __iter__(self):
    ...         for element in self.source: yield 2 * element
    >>> list(IterableWrapper(range(3)).then(Doubled).batch(2))
    [[0, 2], [4]]
    """

    functions: ClassVar[dict[str, Callable[..., Any]]] = {}
    #: For code written against torch, whose own `__getstate__` asks for it; never set here.
    getstate_hook: ClassVar[None] = None
    stateless: ClassVar[bool] = False
    run_class: ClassVar[type[Run]] = UserRun
    _own_iter: ClassVar[Callable[[Any], Iterator[Any]] | None] = None
    # Makes the run of the built-in stage that a user's class with its own __iter__ derives from.
    _stage_maker: ClassVar[Callable[[Any, Context, str], Run] | None] = None
    _stage_run_class: ClassVar[type[Run] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("__iter__")
        if own is None:
            return
        built_in = cls._make_run is not IterDataPipe._make_run or cls.run_class is not UserRun
        if cls._own_iter is None and built_in:
            cls._stage_maker, cls._stage_run_class = cls._make_run, cls.run_class
        cls._own_iter, cls._levels = own, 5
        cls.__iter__ = _managed(own)  # type: ignore[method-assign]
        cls.run_class, cls._make_run = UserRun, _make_user_run  # type: ignore[method-assign]

    def __iter__(self) -> Iterator[T_co]:
        return iterate(self)

    def __len__(self) -> int:
        try:
            return type(self)._length(self, WHOLE)
        except RecursionError:
            raise no_length(self, "the graph is too deep to count; raise Python's recursion limit") from None

    def state_dict(self) -> dict[str, Any]:
        """Return where the newest iteration of the graph that ends in this pipe stands, as plain JSON data.

        It is that after the last element given, also after `break`; after the end, that of the next epoch's start.
        A class with a `state_dict` of its own gives its own state instead: ask a stage below it, or a DataLoader2.
        Raises StateError for a graph with some of the children of a fork or demux, and after an error.

        >>> from pipes.iter import IterableWrapper
        >>> pipe = IterableWrapper(range(6)).shuffle(3)
        >>> iterator = iter(pipe)
        >>> first, state = next(iterator), pipe.state_dict()
        >>> rest = list(iterator)
        >>> again = IterableWrapper(range(6)).shuffle(3)
        >>> again.load_state_dict(state)
        >>> list(again) == rest
        True
        """
        return state_of(self)

    def load_state_dict(self, state: Any, *, on_changed_data: str = "raise") -> None:
        """Go on, from the next `iter` on, where `state` was saved by an equal graph; an iterator in use is replaced.

        `on_changed_data` is that of `DataLoader2.load_state_dict`. Raises StateError, and changes nothing, for a state
        that is damaged, or of another graph.
        """
        load_state_into(self, state, on_changed_data)

    def __add__(self, other: Any) -> Any:
        return self.concat(other)

    def _length(self, shard: Shard) -> int:
        """Return how many elements this stage gives to `shard`; raise `no_length(self)` when it cannot be known."""
        raise no_length(self)

    def _make_run(self, context: Context, stage: str) -> Run:
        return IterDataPipe._run_class(self)(self, context, stage)

    def _run_class(self) -> type[Run]:
        """Return the run class of the built-in stage, also in a user's subclass that has an `__iter__` of its own."""
        return type(self)._stage_run_class or type(self).run_class

    def _is_replayed(self) -> bool:
        cls = type(self)
        return cls._own_iter is not None and not cls._remembers() and not self.stateless

    @classmethod
    def _remembers(cls) -> bool:
        """Return whether a user's class has a state of its own."""
        own, base = cls.state_dict, IterDataPipe.state_dict
        return own is not base and cls.load_state_dict is not IterDataPipe.load_state_dict

    def then(self, stage: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return `stage(self, *args, **kwargs)`: the typed way to chain any class, registered or not."""
        return stage(self, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return attributes_to_send(self, _UNSAVED) | rank_to_send()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.__dict__.get("_sent_by", (0,))[0] == os.getpid():
            del self.__dict__["_sent_by"]  # a copy in one process


def _make_user_run(self: Any, context: Context, stage: str) -> Run:
    return UserRun(self, context, stage)


def _managed(own: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """Wrap a user's `__iter__`: once an iteration, never an element, so that it joins the graph it stands in."""

    @functools.wraps(own)
    def __iter__(self: Any) -> Iterator[Any]:
        if type(self)._own_iter is not own:  # reached through super().__iter__()
            return iter(own(self))
        return iterate(self)

    return __iter__


class MapDataPipe(ChainedMap[T_co], _Described, Dataset[T_co]):
    """A pipe that is read by key: write `__getitem__`, and `__len__` when it is known.

    >>> class Squares(MapDataPipe):
    ...     def __getitem__(self, index): return index * index
    ...     def __len__(self): return 4
    >>> list(Squares().to_iter_datapipe())
    [0, 1, 4, 9]
    """

    functions: ClassVar[dict[str, Callable[..., Any]]] = {}
    _iterable = False

    def __getitem__(self, index: Any) -> T_co:
        raise NotImplementedError(f"{type(self).__name__} has no __getitem__")

    def then(self, stage: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return `stage(self, *args, **kwargs)`: the typed way to chain any class, registered or not."""
        return stage(self, *args, **kwargs)


def functional_datapipe(name: str, enable_df_api_tracing: bool = False) -> Callable[[Class], Class]:
    """Return a class decorator that makes `.name(...)` available on every pipe of the class's family.

    Raises GraphError when the name is taken, TypeError when the class is no pipe. `enable_df_api_tracing` is
    accepted for code written against torchdata; data-frame tracing does not exist here, so True is refused.

    >>> from pipes.iter import IterableWrapper
    >>> @functional_datapipe("doc_negate")
    ... class Negate(IterDataPipe):
    ...     def __init__(self, source): self.source = source
    ...     def __iter__(self): return (-element for element in self.source)
    >>> list(IterableWrapper([1, 2]).doc_negate())
    [-1, -2]
    """
    if enable_df_api_tracing:
        raise ValueError("enable_df_api_tracing=True is not supported: data-frame tracing does not exist here")

    def decorate(cls: Class) -> Class:
        if isinstance(cls, type) and issubclass(cls, IterDataPipe):
            IterDataPipe.register_datapipe_as_function(name, cls)
        elif isinstance(cls, type) and issubclass(cls, MapDataPipe):
            MapDataPipe.register_datapipe_as_function(name, cls)
        else:
            raise TypeError(
                f"functional_datapipe({name!r}) decorates IterDataPipe and MapDataPipe classes, not {cls!r}"
            )
        return cls

    return decorate


def chained_name(cls: type) -> str | None:
    """Return the chained name of a class of pipes, a method of either kind of pipe; None where it has none."""
    catalogues: list[dict[str, Callable[..., Any]]] = [IterDataPipe.functions, MapDataPipe.functions]
    return next((name for known in catalogues for name, maker in known.items() if maker is cls), None)


def no_length(pipe: Any, why: str = "") -> TypeError:
    """Return the TypeError that says which stage has no length."""
    where = built_at(pipe)
    return TypeError(f"{type(pipe).__name__}{where} has no length{': ' + why if why else ''}")


def refuse_length(pipe: Any) -> None:
    """Raise `no_length` for a stage that may leave out elements which fail."""
    if getattr(pipe, "on_error", "raise") != "raise":
        raise no_length(pipe, "it may skip elements, by on_error")


def length_of(source: Any, shard: Shard = WHOLE) -> int:
    """Return the length of a stage's input for `shard`, or raise TypeError naming the stage that has none."""
    if isinstance(source, IterDataPipe) and type(source).__len__ is IterDataPipe.__len__:
        return type(source)._length(source, shard)
    if isinstance(source, Sized):
        return len(source)
    raise no_length(source)


def lengths_of(sources: Sequence[Any], shard: Shard) -> list[int]:
    """Return the lengths of several inputs."""
    return [length_of(source, shard) for source in sources]
