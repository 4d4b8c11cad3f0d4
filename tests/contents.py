"""Every kind of thing that a batch may hold, by name: what is made twice must be equal."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import os
import pathlib
import threading
import types
import uuid
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch

from pipes.loader2.leaves import LARGE

Point = collections.namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Sample:
    image: Any
    label: int
    _: dataclasses.KW_ONLY
    extra: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    image: Any


@attrs.define
class Measured:
    image: Any


class NamedDict(dict[str, Any]):
    name = ""


class NamedList(list[Any]):
    pass


class NamedTuple(tuple[Any, ...]):
    pass


class NamedSet(set[Any]):
    pass


class Text(str):
    pass


class Color(enum.Enum):
    RED = 1


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Tagged(torch.Tensor):
    tag = ""


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and bool(self.value == other.value)

    __hash__ = None  # type: ignore[assignment]


def big() -> torch.Tensor:
    return torch.arange(270_000, dtype=torch.float32).view(300, 300, 3)


SIZES = {"empty": 0, "small": 6, "large": 2 * LARGE}

QUANTISED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = {
    str(value)[6:]: value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and value not in QUANTISED and not str(value).startswith("torch.bits")
}

CONTENTS: dict[str, Callable[[], Any]] = {}


def add(group: str, makers: dict[str, Callable[[], Any]]) -> None:
    CONTENTS.update({f"{group}: {name}": make for name, make in makers.items()})


def of_dtype(dtype: torch.dtype, count: int, step: int) -> torch.Tensor:
    high = 2 if dtype == torch.bool else 120
    values = torch.randint(0, high, (count * step * dtype.itemsize,), generator=torch.Generator().manual_seed(1))
    return values.to(torch.uint8).view(dtype)[::step]


for size, count in SIZES.items():
    add(f"{size} tensor", {name: functools.partial(of_dtype, dtype, count, 1) for name, dtype in DTYPES.items()})
    add(f"{size} strided", {name: functools.partial(of_dtype, dtype, count, 3) for name, dtype in DTYPES.items()})
add("0-d tensor", {name: lambda dtype=dtype: of_dtype(dtype, 1, 1).view(()) for name, dtype in DTYPES.items()})

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda cube: cube,
    "transposed": lambda cube: cube.transpose(0, 2),
    "permuted": lambda cube: cube.permute(2, 1, 0),
    "channels last": lambda cube: cube[None].clone(memory_format=torch.channels_last),
    "gaps": lambda cube: cube[::2, ::3],
    "column": lambda cube: cube[:, :, 1],
    "offset": lambda cube: cube[3:],
    "expanded": lambda cube: cube[:, 0, 0].clone().expand(len(cube), len(cube)),
    "expanded in the middle": lambda cube: cube[:, :1].clone().expand(-1, 9, -1),
    "expanded from 0-d": lambda cube: cube[1, 1, 1].clone().expand(len(cube), len(cube)),
    "overlapping": lambda cube: cube.reshape(-1).as_strided((len(cube), 9), (1, 1)),
    "conjugate": lambda cube: torch.complex(cube, -cube).conj(),
    "conjugate transposed": lambda cube: torch.complex(cube, -cube).mH,
    "negative": lambda cube: torch.complex(cube, -cube).conj().imag,
    "zeros without memory": lambda cube: torch._efficientzerotensor(cube.shape),
    "inference": lambda cube: torch.inference_mode()(lambda: cube * 2)(),
    "one row": lambda cube: cube[:1],
    "no rows": lambda cube: cube[:0],
    "no columns": lambda cube: cube[:, :0].transpose(0, 2),
    "width one": lambda cube: cube[:, :1].contiguous(memory_format=torch.contiguous_format),
}
for name, view in LAYOUTS.items():
    CONTENTS[f"small layout: {name}"] = lambda view=view: view(big()[:8, :8].clone())
    CONTENTS[f"large layout: {name}"] = lambda view=view: view(big())

ARRAYS: dict[str, Callable[[int], Any]] = {
    "bool": lambda n: np.arange(n * n).reshape(n, n) % 3 == 0,
    "float": lambda n: np.arange(float(n * n)),
    "half": lambda n: (np.arange(n * n) % 1000).astype(np.float16),
    "long double": lambda n: np.arange(n * n).astype(np.longdouble) / 3,
    "complex": lambda n: np.arange(n * n) * 1j,
    "uint64": lambda n: np.arange(n * n, dtype=np.uint64) + (1 << 63),
    "fortran": lambda n: np.asfortranarray(np.arange(float(n * n)).reshape(n, n)),
    "reversed": lambda n: np.arange(n * n)[::-1],
    "reversed twice": lambda n: np.arange(n * n).reshape(n, n)[::-1, ::-2],
    "gaps": lambda n: np.arange(n * n).reshape(n, n)[::2, 1::3],
    "read-only": lambda n: np.frombuffer(bytes(range(128)) * n, np.uint8),
    "broadcast": lambda n: np.broadcast_to(np.arange(n), (n, n)),
    "0-d": lambda n: np.array(n + 0.5),
    "empty": lambda n: np.empty((0, n)),
    "zero width": lambda n: np.zeros(n, []),
    "big endian": lambda n: np.arange(n * n, dtype=">i4"),
    "datetime": lambda n: np.arange(n * n).astype("M8[ms]"),
    "timedelta": lambda n: np.arange(n * n).astype("m8[D]"),
    "strings": lambda n: np.array(["a", "é" * 5] * (n * n // 4)),
    "bytes": lambda n: np.array([b"a", b"bcd"] * (n * n)),
    "void": lambda n: np.arange(n * n).view("V8"),
    "structured": lambda n: np.zeros(n * n, [("a", "i4"), ("b", "f8", (3,)), ("c", "S3")]),
    "aligned": lambda n: np.zeros(n * n, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "structured with objects": lambda n: np.array([(1, "x"), (2, [3])] * n, [("n", "i4"), ("o", object)]),
    "objects": lambda n: np.array([1, "a", None, {"k": np.arange(n * n)}], dtype=object),
    "variable strings": lambda n: np.array(["a", "longer than a short string" * n], dtype=np.dtypes.StringDType()),
    "records": lambda n: np.zeros(n * n, [("a", "i4"), ("b", "f8")]).view(np.recarray),
    "masked": lambda n: np.ma.masked_array(np.arange(n * n), np.arange(n * n) % 2 == 0, fill_value=7),
    "with metadata": lambda n: np.zeros(n * n, np.dtype("f8", metadata={"unit": "m"})),
}
for name, build in ARRAYS.items():
    CONTENTS[f"small array: {name}"] = lambda build=build: build(6)
    CONTENTS[f"large array: {name}"] = lambda build=build: build(300)

add(
    "numpy scalar",
    {
        type(value).__name__: lambda value=value: value
        for value in [
            *(np.bool_(True), np.float16(1.5), np.float64(1.5), np.longdouble(1) / 3, np.complex64(1j), np.uint64(7)),
            *(np.str_("é"), np.bytes_(b"a"), np.datetime64("2020-01-01"), np.timedelta64(3, "D"), np.void(b"abc")),
        ]
    },
)


def tagged(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.as_subclass(Tagged)
    tensor.tag = "t"
    return tensor


def noted() -> torch.Tensor:
    tensor = torch.arange(3)
    tensor.note = {"by": "us"}  # type: ignore[attr-defined]
    return tensor


def nested(layout: torch.layout, rows: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(rows, 3), torch.zeros(2 * rows, 3)], layout=layout)


def per_channel(dtype: torch.dtype, zero: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_channel(torch.ones(2, 4), torch.tensor([0.1, 0.2]), zero, 0, dtype)


UNUSUAL: dict[str, Callable[[], Any]] = {
    "sparse coo": lambda: torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3)),
    "sparse coo, large": lambda: torch.sparse_coo_tensor(torch.arange(20_000).expand(2, -1), torch.arange(20_000.0)),
    "sparse coo, not coalesced": lambda: torch.sparse_coo_tensor([[0, 0]], torch.ones(2, 4), (3, 4)),
    "sparse coo, without elements": lambda: torch.zeros(3, 4).to_sparse(),
    "sparse csr": lambda: torch.eye(400).to_sparse_csr(),
    "sparse csr, batched": lambda: torch.ones(2, 3, 3).to_sparse_csr(),
    "sparse csc": lambda: torch.eye(4).to_sparse_csc(),
    "sparse bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "sparse bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "quantised": lambda: torch.quantize_per_tensor(big() / 9e5, 0.01, 3, torch.qint8),
    "quantised to 32 bits": lambda: torch.quantize_per_tensor(torch.ones(5), 0.01, 3, torch.qint32),
    "quantised by channel": lambda: per_channel(torch.quint8, torch.tensor([0, 1])),
    "quantised by channel with float zeros": lambda: per_channel(torch.quint8, torch.tensor([0.0, 1.0])),
    "nested, strided": lambda: nested(torch.strided, 2),
    "nested, jagged": lambda: nested(torch.jagged, 2),
    "nested, strided, large": lambda: nested(torch.strided, 10_000),
    "nested, jagged, large": lambda: nested(torch.jagged, 10_000),
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "parameter": lambda: torch.nn.Parameter(torch.arange(4.0)),
    "frozen parameter, large": lambda: torch.nn.Parameter(big(), requires_grad=False),
    "buffer": lambda: torch.nn.Buffer(torch.arange(4.0)),
    "subclass": lambda: tagged(torch.arange(4.0)),
    "subclass, large": lambda: tagged(big()),
    "with attributes": noted,
    "packed sequence": lambda: torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.zeros(2, 2)]),
    "module": lambda: dict(torch.nn.BatchNorm1d(3).state_dict()),
}
add("tensor", UNUSUAL)
#: torch says of these that they are a prototype, in beta or about to go.
NOTED_BY_TORCH = "ignore:(?s).*([Ss]parse|[Qq]uanti|nested tensors|TypedStorage|ComplexHalf)"


def picture() -> Any:
    from PIL import Image

    return Image.fromarray(np.arange(60_000).astype(np.uint8).reshape(100, 200, 3))


def table() -> Any:
    import pyarrow

    return pyarrow.table({"a": np.arange(100_000), "b": ["x", None] * 50_000})


def tensor_dict() -> Any:
    from tensordict import TensorDict

    return TensorDict({"x": torch.ones(3, 4), "y": big()[:3]}, batch_size=[3])


OTHERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "singletons": lambda: [None, ..., NotImplemented, True],
    "scalars": lambda: [True, 1, 2.5, 1j, float("nan"), -0.0, decimal.Decimal("1.5")],
    "huge ints": lambda: [1 << 100, -(10**6000), 1 << 800_000],
    "text": lambda: ["", "text", "é" * 70_000, "a" * 70_000, "\0"],
    "surrogates": lambda: ["\ud800 abc", "\udcff" * 70_000],
    "bytes": lambda: {"a": b"x" * 65_535, "b": b"y" * 65_536, "c": bytes(5_000_000), "d": b""},
    "bytearrays": lambda: [bytearray(b"abc"), bytearray(100_000), bytearray()],
    "memoryviews": lambda: [
        *(memoryview(b"abc"), memoryview(bytearray(100_000)), memoryview(b""), memoryview(bytes(range(100)))[::2]),
        memoryview(array.array("d", range(20_000))).cast("B").cast("d", [100, 200]),
        memoryview(np.array(3)),
        memoryview(np.asfortranarray(np.arange(6).reshape(2, 3))),
    ],
    "memoryviews of other formats": lambda: [
        *(memoryview(np.arange(3, dtype=">i4")), memoryview(np.zeros(3, np.float16)).toreadonly()),
        memoryview(np.zeros(30_000, [("a", "i4"), ("b", "f8")])),
    ],
    "typed array": lambda: array.array("i", range(50_000)),
    "many ints": lambda: list(range(200_000)),
    "sets": lambda: [{1, 2}, frozenset({"a"}), NamedSet([1])],
    "namedtuple": lambda: Point(big(), Point(1, b"x" * 70_000)),
    "dataclass": lambda: Sample(big(), 3, extra=[np.arange(5)]),
    "frozen dataclass with slots": lambda: Frozen(big()[0]),
    "attrs": lambda: Measured(big()[0]),
    "slots": lambda: Slotted([1, "a"]),
    "subclasses": lambda: [NamedDict(a=big()), NamedList([1, big()]), NamedTuple([1, big()]), Text("t")],
    "ordered": lambda: collections.OrderedDict(b=1, a=big()),
    "default dict": lambda: collections.defaultdict(list, {"a": [big()]}),
    "user dict": lambda: collections.UserDict(a=1),
    "counter": lambda: collections.Counter("abca"),
    "deque": lambda: collections.deque([1, 2], maxlen=3),
    "namespace": lambda: types.SimpleNamespace(a=1),
    "enums": lambda: [Color.RED, Bits.A | Bits.B],
    "library types": lambda: [uuid.UUID(int=5), pathlib.Path("a/b"), datetime.datetime(2020, 1, 1), slice(1, 2), 1 / 3],
    "functions and types": lambda: [len, Sample, torch.float32, np.dtype("f4"), torch.Size([1, 2]), list[int]],
    "devices": lambda: [torch.device("cpu"), torch.strided, torch.contiguous_format],
    "empty containers": lambda: [[], (), {}, set()],
    "mixed keys": lambda: {1: "a", None: "b", (1, 2): "c", Color.RED: "d", b"e": "e"},
    "image": picture,
    "pyarrow table": table,
    "pyarrow slice": lambda: table().slice(10, 70_000),
    "pyarrow record batch": lambda: table().to_batches()[0],
    "tensordict": tensor_dict,
}
add("other", OTHERS)
#: Their packages need not be installed.
NEEDS = {"image": "PIL", "pyarrow": "pyarrow", "tensordict": "tensordict"}


def package_of(name: str) -> str | None:
    """Return the package without which the content cannot be made."""
    kind = name.removeprefix("other: ").split()[0]
    return NEEDS.get(kind)


class Failing:
    def __reduce__(self) -> Any:
        raise OSError("disk on fire")


class Attribute:
    def __init__(self, value: Any) -> None:
        self.value = value


class Unreadable(dict[str, Any]):
    def items(self) -> Any:
        raise KeyError("no looking")


class Unspeakable:
    def __repr__(self) -> str:
        raise ValueError("no words")


def deep(depth: int, inner: Any = None) -> Any:
    for _ in range(depth):
        inner = [inner]
    return inner


def shrunk() -> torch.Tensor:
    tensor = torch.ones(10)
    tensor.untyped_storage().resize_(20)
    return tensor


def cycle() -> list[Any]:
    values: list[Any] = []
    values += [values, {"c": values}, threading.Lock()]
    return values


lock = threading.Lock
#: What cannot travel, the words that say so, and the type of the cause.
REFUSED: dict[str, tuple[Callable[[], Any], str, type[Exception]]] = {
    "nested": (lambda: {"x": [1, 2, lock()]}, r'batch\["x"\]\[2\] \(lock\)', TypeError),
    "root": (lock, r"batch \(lock\)", TypeError),
    "grad": (
        lambda: [Point(0, torch.ones(3, requires_grad=True))],
        r"batch\[0\]\.y \(Tensor\).*requires grad.*detach",
        TypeError,
    ),
    "large grad": (lambda: {1: big().requires_grad_() * 2}, r"batch\[1\] \(Tensor\).*detach", TypeError),
    "subclass with grad": (lambda: [tagged(big()).requires_grad_()], r"batch\[0\] \(Tagged\).*detach", TypeError),
    "sparse grad": (lambda: torch.eye(3).to_sparse().requires_grad_(), r"batch \(Tensor\).*detach", TypeError),
    "attribute": (lambda: [Attribute({"k": lock()})], r'batch\[0\]\.value\["k"\]', TypeError),
    "slot": (lambda: [Slotted({"k": lock()})], r'batch\[0\]\.value\["k"\]', TypeError),
    "dataclass": (lambda: Sample(None, 1, extra=lock()), r"batch\.extra", TypeError),
    "frozen dataclass": (lambda: Frozen([lock()]), r"batch\.image\[0\]", TypeError),
    "lambda": (lambda: [lambda: 1], r"batch\[0\] \(function\).*lambda", Exception),
    "own error": (lambda: (Failing(),), r"batch\[0\] \(Failing\).*OSError: disk on fire", OSError),
    "generator": (lambda: {"g": iter(x for x in "a")}, r'batch\["g"\] \(generator\)', TypeError),
    "module": (lambda: {"m": [os]}, r'batch\["m"\]\[0\] \(module\)', TypeError),
    "object array": (lambda: np.array([[1, lock()]], dtype=object), r"batch\[0, 1\]", TypeError),
    "key": (lambda: {lock(): 1}, r"batch \(dict\)", TypeError),
    "set": (lambda: [{lock()}], r"batch\[0\] \(set\)", TypeError),
    "user dict": (lambda: collections.UserDict(a=lock()), r'batch\["a"\]', TypeError),
    "deque": (lambda: collections.deque([1, lock()]), r"batch\[1\]", TypeError),
    "cycle": (cycle, r"batch\[1\] \(dict\).*lock", TypeError),
    "too deep": (lambda: deep(100_000), r"batch \(list\).*RecursionError", RecursionError),
    "a long path": (lambda: deep(200, lock()), r"batch(\[0\]){50} \(list\).*lock", TypeError),
    "a key of many digits": (lambda: {10**5000: lock()}, r"batch\[<int(, whose| instance) .*>\] \(lock\)", TypeError),
    "a key without words": (lambda: {Unspeakable(): lock()}, r"batch\[<Unspeakable.*>\] \(lock\)", TypeError),
    "a long key": (lambda: {"k" * 10_000: lock()}, r'batch\["k{59}…"\] \(lock\)', TypeError),
    "a mapping that cannot be read": (lambda: [Unreadable(a=lock())], r"batch\[0\] \(Unreadable\)", Exception),
    "a tensor without its memory": (lambda: [shrunk()], r"batch\[0\] \(Tensor\).*storage", TypeError),
    "opaque layout": (lambda: [torch.ones(2, 3).to_mkldnn()], r"batch\[0\] \(Tensor\).*[Oo]paque", Exception),
}
