"""Every kind of content crosses unchanged, and what cannot is named by its path."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import gc
import pathlib
import threading
import types
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from wire import Wire, same

from pipes.loader2.leaves import LARGE, collect
from pipes.loader2.packing import pack
from pipes.loader2.slabs import ALIGNMENT

pytestmark = pytest.mark.usefixtures("closes_descriptors")

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


class NamedDict(dict[str, Any]):
    name = ""


class NamedList(list[Any]):
    pass


class Color(enum.Enum):
    RED = 1


class Tagged(torch.Tensor):
    tag = ""


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


@pytest.mark.parametrize("count", [0, 3, LARGE + 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(wire: Wire, dtype: torch.dtype, count: int) -> None:
    tensor = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    got = wire.carry({"flat": tensor, "zero-d": tensor.sum() * 0 if dtype is torch.float32 else tensor[:1].view(-1)})
    same(got["flat"], tensor)
    if count > 3:
        assert got["flat"].data_ptr() % ALIGNMENT == 0
        assert wire.lent == 1


N = 300
BIG = torch.arange(N * N * 3, dtype=torch.float32).view(N, N, 3)
LAYOUTS = {
    "contiguous": BIG,
    "transposed": BIG.transpose(0, 2),
    "permuted": BIG.permute(2, 1, 0),
    "channels_last": torch.arange(2 * 3 * 100 * 100.0).view(2, 3, 100, 100).to(memory_format=torch.channels_last),
    "gaps": BIG[::2, ::3],
    "column": BIG[:, :, 1],
    "offset": BIG[3:, :, :],
    "expanded": torch.arange(float(N)).expand(N, N),
    "expanded from zero-d": torch.tensor(5.0).expand(N, N),
    "overlapping": torch.arange(1000.0).as_strided((900, 100), (1, 1)),
    "conjugate": torch.complex(BIG, BIG).conj(),
    "negative": torch.complex(BIG, BIG).conj().imag,
    "small transposed": torch.arange(12).view(3, 4).t(),
    "small gaps": torch.arange(12)[::3],
    "zero-d": torch.tensor(3),
    "empty": torch.empty(0, 5),
    "empty transposed": torch.empty(5, 0, 7).transpose(0, 2),
    "one row": BIG[:1],
}


@pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_of_a_dense_tensor(wire: Wire, tensor: torch.Tensor) -> None:
    got = wire.carry([tensor])[0]
    same(got, tensor)
    got.fill_(1)


@pytest.mark.parametrize("name", ["contiguous", "transposed", "permuted", "channels_last", "small transposed"])
def test_strides_of_dense_tensors_are_kept(wire: Wire, name: str) -> None:
    tensor = LAYOUTS[name]
    assert wire.carry(tensor).stride() == tensor.stride()


ARRAYS = {
    "float": np.arange(100_000.0),
    "fortran": np.asfortranarray(np.arange(40_000.0).reshape(200, 200)),
    "reversed": np.arange(100_000)[::-1],
    "reversed twice": np.arange(90_000).reshape(300, 300)[::-1, ::-2],
    "gaps": np.arange(90_000).reshape(300, 300)[::2, 1::3],
    "broadcast": np.broadcast_to(np.arange(300), (300, 300)),
    "read-only": np.frombuffer(bytes(100_000), np.uint8),
    "zero-d": np.array(3.5),
    "empty": np.empty((0, 3)),
    "zero width": np.empty(5, "S0"),
    "bool": np.ones(100_000, bool),
    "half": np.ones(50_000, np.float16),
    "long double": np.ones(50_000, np.longdouble),
    "big endian": np.arange(50_000, dtype=">i4"),
    "datetime": np.arange(50_000).astype("M8[ms]"),
    "timedelta": np.arange(5).astype("m8[D]"),
    "strings": np.array(["a", "é" * 5] * 30_000),
    "bytes": np.array([b"a", b"bcd"]),
    "structured": np.zeros(9_000, [("a", "i4"), ("b", "f8", (3,)), ("c", "S3")]),
    "structured with objects": np.array([(1, "x"), (2, [3])], [("n", "i4"), ("o", object)]),
    "aligned": np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "objects": np.array([1, "a", None, {"k": np.arange(3)}], dtype=object),
    "variable strings": np.array(["a", "longer than a short string" * 3], dtype=np.dtypes.StringDType()),
    "records": np.zeros(9_000, [("a", "i4"), ("b", "f8")]).view(np.recarray),
    "masked": np.ma.masked_array(np.arange(20_000), np.arange(20_000) % 2 == 0),
    "scalar": np.float32(1.5),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS.keys())
def test_every_kind_of_array(wire: Wire, array: Any) -> None:
    got = wire.carry({"a": array})["a"]
    same(got, array)
    if isinstance(array, np.ma.MaskedArray):
        np.testing.assert_array_equal(got.mask, array.mask)


def tagged() -> torch.Tensor:
    tensor = BIG.as_subclass(Tagged)
    tensor.tag = "t"
    return tensor


OTHERS: dict[str, Any] = {
    "none": None,
    "scalars": [True, 1, 2.5, 1j, "text", b"bytes", float("nan"), 1 << 100, decimal.Decimal("1.5")],
    "long text": ["é" * 70_000, "a" * 70_000],
    "long bytes": {"a": b"x" * 65_535, "b": b"y" * 65_536, "c": bytes(5_000_000)},
    "bytearrays": [bytearray(b"abc"), bytearray(100_000)],
    "memoryviews": [
        memoryview(b"abc"),
        memoryview(bytearray(100_000)),
        memoryview(array.array("d", range(20_000))).cast("B").cast("d", [100, 200]),
        memoryview(b""),
        memoryview(bytes(range(100)))[::2],
    ],
    "typed array": array.array("i", range(50_000)),
    "many ints": list(range(200_000)),
    "sets": [{1, 2}, frozenset({"a"})],
    "namedtuple": Point(BIG, Point(1, b"x" * 70_000)),
    "dataclass": Sample(BIG, 3, extra=[np.arange(5)]),
    "frozen dataclass": Frozen(BIG[0]),
    "subclasses": [NamedDict(a=BIG), NamedList([1, BIG])],
    "ordered": collections.OrderedDict(b=1, a=BIG),
    "default dict": collections.defaultdict(list, {"a": [BIG]}),
    "deque": collections.deque([1, 2], maxlen=3),
    "namespace": types.SimpleNamespace(a=1),
    "library types": [Color.RED, uuid.UUID(int=5), pathlib.PurePath("a/b"), datetime.datetime(2020, 1, 1)],
    "functions and types": [len, Sample, torch.float32, np.dtype("f4"), torch.Size([1, 2]), torch.device("cpu")],
    "empty containers": [[], (), {}, set()],
    "subclass": tagged(),
    "parameter": torch.nn.Parameter(BIG[0], requires_grad=False),
    "meta": torch.empty(3, 4, device="meta"),
}


UNUSUAL = {
    "sparse coo": lambda: torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3)),
    "sparse coalesced": lambda: torch.eye(500).to_sparse(),
    "sparse csr": lambda: torch.eye(400).to_sparse_csr(),
    "sparse csc": lambda: torch.eye(4).to_sparse_csc(),
    "sparse bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "sparse bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "quantised": lambda: torch.quantize_per_tensor(BIG, 0.5, 3, torch.qint8),
    "quantised per channel": lambda: torch.quantize_per_channel(
        torch.ones(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*[Qq]uantiz")
@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL.keys())
def test_tensors_that_are_not_dense(wire: Wire, make: Callable[[], torch.Tensor]) -> None:
    value = make()
    same(wire.carry({"t": value})["t"], value)


@pytest.mark.parametrize("value", OTHERS.values(), ids=OTHERS.keys())
def test_everything_else(wire: Wire, value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.is_meta:
        got = wire.carry(value)
        assert (got.shape, got.device) == (value.shape, value.device)
    else:
        same(wire.carry(value), value)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors(wire: Wire, layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(5, 3)], layout=layout)
    got = wire.carry({"n": nested})["n"]
    assert got.is_nested
    assert got.layout is layout
    for one, other in zip(got.unbind(), nested.unbind(), strict=True):
        same(one, other)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_not_kept_by_torch(wire: Wire) -> None:
    before = len(torch._utils._sparse_tensors_to_validate)
    wire.carry([UNUSUAL["sparse coo"](), UNUSUAL["sparse csr"]()])
    assert len(torch._utils._sparse_tensors_to_validate) == before


def test_a_tensor_with_attributes(wire: Wire) -> None:
    tensor = torch.arange(3)
    tensor.note = {"by": "us"}  # type: ignore[attr-defined]
    same(wire.carry(tensor), tensor)


def test_pyarrow_tables_travel_without_a_copy(wire: Wire) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"a": np.arange(100_000), "b": ["x", "yz"] * 50_000})
    got = wire.carry({"t": table})["t"]
    assert got.equals(table)
    assert wire.lent == 1
    column = got["a"]
    del got
    assert wire.lent == 1
    del column
    gc.collect()
    assert wire.lent == 0


structures = st.recursive(
    st.none()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, min_side=0, max_side=3)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.builds(Point, inner, inner)
        | st.builds(Sample, inner, st.integers())
    ),
    max_leaves=12,
)


@given(structures)
def test_any_structure(value: Any) -> None:
    wire = Wire()
    same(wire.carry(value), value)
    wire.pool.close()


def lock() -> Any:
    return threading.Lock()


class Failing:
    def __reduce__(self) -> Any:
        raise OSError("disk on fire")


class Attribute:
    def __init__(self, value: Any) -> None:
        self.value = value


PATHS: dict[str, tuple[Any, str, type[Exception]]] = {
    "nested": ({"x": [1, 2, lock()]}, r'batch\["x"\]\[2\] \(lock\)', TypeError),
    "root": (lock(), r"batch \(lock\)", TypeError),
    "grad": ([Point(0, torch.ones(3, requires_grad=True))], r"batch\[0\]\.y \(Tensor\).*requires grad", TypeError),
    "large grad": ({1: BIG.clone().requires_grad_() * 2}, r"batch\[1\] \(Tensor\).*detach", TypeError),
    "attribute": ([Attribute({"k": lock()})], r'batch\[0\]\.value\["k"\]', TypeError),
    "dataclass": (Sample(None, 1, extra=lock()), r"batch\.extra", TypeError),
    "lambda": ([lambda: 1], r"batch\[0\] \(function\).*lambda", Exception),
    "own error": ((Failing(),), r"batch\[0\] \(Failing\).*OSError: disk on fire", OSError),
    "generator": ({"g": iter(x for x in "a")}, r'batch\["g"\] \(generator\)', TypeError),
    "object array": (np.array([[1, lock()]], dtype=object), r"batch\[0, 1\]", TypeError),
    "key": ({lock(): 1}, r"batch \(dict\)", TypeError),
    "deque": (collections.deque([1, lock()]), r"batch\[1\]", TypeError),
}


@pytest.mark.parametrize(("batch", "path", "cause"), PATHS.values(), ids=PATHS.keys())
def test_what_cannot_travel_is_named_by_its_path(wire: Wire, batch: Any, path: str, cause: type[Exception]) -> None:
    with pytest.raises(TypeError, match=path) as caught:
        pack(batch, wire.pool)
    assert isinstance(caught.value.__cause__, cause)
    assert wire.lent == 0


def test_a_cycle_with_something_that_cannot_travel(wire: Wire) -> None:
    cycle: list[Any] = []
    cycle += [cycle, {"c": cycle}, lock()]
    with pytest.raises(TypeError, match=r"batch\[1\] \(dict\).*lock"):
        pack(cycle, wire.pool)


def test_collect_keeps_a_bare_stream_small() -> None:
    content = collect({"x": BIG, "b": bytes(1 << 20), "n": [1] * 10})
    assert sum(len(piece) for piece in content.stream if len(piece) < LARGE) < 400
