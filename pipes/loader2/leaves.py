"""What a batch is made of: a pickle stream of its structure, and leaves whose memory travels beside the stream.

Leaves are dense CPU tensors and numpy arrays without objects. Everything else is pickled plainly (protocol 5, classes
by reference), not with torch.multiprocessing's reductions, which would open a descriptor for each tensor. Bytes,
bytearrays and strings of 64 KiB and more, and PEP 574 buffers of that size (pyarrow), are kept out of the stream too.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from pipes.loader2.blame import find_culprit

__all__ = ["INTEGERS", "LARGE", "Content", "Leaf", "collect", "rebuild"]

#: Leaves of at least this many bytes travel in a slab; it is also the size at which pickle streams an object by itself.
LARGE = 1 << 16
#: Of an element's size: the integers by which its bytes are copied where its own dtype cannot be.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_TORCH_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# The formats that `memoryview.cast` takes.
_CASTS = frozenset("bBhHiIlLqQnNfdc?P")
_DTYPE_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}
# Those that numpy has too: a tensor of an array is one operation of torch's, one of a buffer two, which costs thrice.
_NUMPY_DTYPES = {
    name: np.dtype(name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}


class Leaf(NamedTuple):
    """One tensor or array of a batch and where its bytes lie in this process."""

    # The reference keeps the memory, and so the addresses, for as long as the batch is being packed.
    value: Any
    first: int
    low: int
    high: int
    nbytes: int
    strides: tuple[int, ...] | None

    @property
    def compact(self) -> bool:
        """Whether the memory it spans holds nothing between its elements: dense in any order, or overlapping."""
        return self.high - self.low <= self.nbytes


class Content:
    """A batch taken apart: the stream's pieces, the leaves, and the out-of-band buffers."""

    def __init__(self) -> None:
        self.stream: list[Any] = []
        self.leaves: list[Leaf] = []
        self.buffers: list[memoryview] = []

    def write(self, data: Any) -> None:
        self.stream.append(data)

    def keep_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True
        self.buffers.append(raw)
        return False

    def add(self, value: Any, first: int, nbytes: int, strides: tuple[int, ...] | None = None) -> int:
        """Add a leaf whose first element is at address `first`; `strides` in bytes, None when it is C-contiguous."""
        low, high = first, first + nbytes
        if strides is not None:
            high = first + value.itemsize
            for stride, size in zip(strides, value.shape, strict=True):
                low += min(0, (size - 1) * stride)
                high += max(0, (size - 1) * stride)
        self.leaves.append(Leaf(value, first, low, high, nbytes, strides))
        return len(self.leaves) - 1


class _Pickler(pickle.Pickler):
    def __init__(self, content: Content) -> None:
        super().__init__(content, protocol=5, buffer_callback=content.keep_buffer)
        self._content = content

    def reducer_override(self, value: Any) -> Any:
        cls = type(value)
        if cls is np.ndarray:
            return self._array(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value) if cls is torch.Tensor else self._subclass(value)
        if cls is memoryview:
            return _reduce_memoryview(value)
        return NotImplemented

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        dtype = array.dtype
        if dtype.hasobject or dtype.kind not in "biufcmMSUV":
            return NotImplemented
        plain = dtype.isbuiltin == 1 and dtype.kind != "V" and dtype.metadata is None
        address = array.__array_interface__["data"][0]
        strides = None if array.flags.c_contiguous else array.strides
        index = self._content.add(array, address, array.nbytes, strides)
        # What `np.broadcast_to` gives stays read-only, because one write to it changes many elements.
        repeats = strides is not None and 0 in strides and not array.flags.writeable
        return _array, (index, dtype.str if plain else dtype, array.shape, repeats)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.requires_grad:
            raise TypeError("it requires grad, and a graph of gradients cannot leave its process; use .detach()")
        if not (tensor.is_cpu or tensor.is_meta):
            raise TypeError(
                f"it is on {tensor.device}, and workers hand over memory of the CPU: make it there (.cpu()), and move "
                "the batch to the device in the main process"
            )
        if tensor.layout is not torch.strided:
            return _reduce_sparse(tensor)
        if tensor.is_quantized:
            return _reduce_quantized(tensor)
        if tensor.is_nested or tensor.is_meta:
            return NotImplemented
        state = tensor.__dict__ or None
        tensor = tensor.resolve_conj().resolve_neg()
        if not tensor.data_ptr() and tensor._is_zerotensor():
            tensor = tensor.clone()
        size = tensor.itemsize
        strides = None if tensor.is_contiguous() else tuple(step * size for step in tensor.stride())
        index = self._content.add(tensor, tensor.data_ptr(), tensor.nbytes, strides)
        storage = tensor.untyped_storage()
        if tensor.nbytes and self._content.leaves[index].high > storage.data_ptr() + storage.nbytes():
            raise TypeError("its storage was made smaller than it is (with resize_), so that it has no values")
        arguments = index, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
        return (_tensor, arguments) if state is None else (_tensor, arguments, state, None, None, _set_state)

    def _subclass(self, tensor: torch.Tensor) -> Any:
        cls: Any = type(tensor)
        if (
            cls.__reduce_ex__ is not torch.Tensor.__reduce_ex__
            or cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        ):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.as_subclass(torch.Tensor)
            return _as_subclass, (plain, cls), tensor.__dict__ or None, None, None, _set_state


def _reduce_memoryview(view: memoryview) -> Any:
    if view.format.removeprefix("@") not in _CASTS:
        # No memoryview can be cast to it: an array with that dtype gives one.
        return _memoryview_of, (np.asarray(view), view.readonly)
    data = view if view.c_contiguous else memoryview(view.tobytes() if view.readonly else bytearray(view.tobytes()))
    return _memoryview, (pickle.PickleBuffer(data), view.format, view.shape, view.readonly)


def _reduce_sparse(tensor: torch.Tensor) -> Any:
    # torch's own rebuilding puts every sparse tensor into a global list, which only torch.load empties.
    if tensor.layout is torch.sparse_coo:
        return _sparse_coo, (tensor._indices(), tensor._values(), tuple(tensor.shape), tensor.is_coalesced())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        outer, inner = tensor.crow_indices(), tensor.col_indices()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        outer, inner = tensor.ccol_indices(), tensor.row_indices()
    else:
        return NotImplemented
    return _sparse_compressed, (outer, inner, tensor.values(), tuple(tensor.shape), tensor.layout)


def _reduce_quantized(tensor: torch.Tensor) -> Any:
    # torch's own way is torch.save for each tensor, and warns of its own TypedStorage.
    if tensor.dtype not in (torch.quint8, torch.qint8, torch.qint32) or not tensor.is_cpu:
        return NotImplemented
    if tensor.qscheme() == torch.per_tensor_affine:
        return _quantized, (tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point())
    if tensor.qscheme() == torch.per_channel_affine:
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return _quantized, (tensor.int_repr(), scales, zeros, tensor.q_per_channel_axis())
    return NotImplemented


def _quantized(values: torch.Tensor, scale: Any, zero: Any, axis: int | None = None) -> torch.Tensor:
    if axis is None:
        return torch._make_per_tensor_quantized_tensor(values, scale, zero)
    return torch._make_per_channel_quantized_tensor(values, scale, zero, axis)


def _sparse_coo(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], coalesced: bool) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=coalesced)


def _sparse_compressed(
    outer: torch.Tensor, inner: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], layout: torch.layout
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(outer, inner, values, shape, layout=layout, check_invariants=False)


def _as_subclass(plain: torch.Tensor, cls: Any) -> torch.Tensor:
    typed: torch.Tensor = plain.as_subclass(cls)
    return typed


def _set_state(value: Any, state: dict[str, Any]) -> None:
    value.__dict__.update(state)


def _memoryview_of(array: np.ndarray[Any, Any], readonly: bool) -> memoryview:
    view = memoryview(array)  # type: ignore[arg-type]
    return view.toreadonly() if readonly else view


def _memoryview(buffer: Any, form: str, shape: tuple[int, ...], readonly: bool) -> memoryview:
    view = memoryview(buffer).cast("B")
    if view.nbytes:
        view = view.cast(form, shape)  # type: ignore[call-overload]
    elif len(shape) == 1:
        view = view.cast(form)  # type: ignore[call-overload]
    return view.toreadonly() if readonly else view


def _array(index: int, dtype: Any, shape: tuple[int, ...], repeats: bool) -> Any:
    raise pickle.UnpicklingError("a leaf of a batch makes sense only to `rebuild`")


def _tensor(index: int, dtype: str, shape: tuple[int, ...]) -> Any:
    raise pickle.UnpicklingError("a leaf of a batch makes sense only to `rebuild`")


#: (buffer, offset of the first element, strides in bytes or None when C-contiguous) of leaf number i.
Locate = Callable[[int], tuple[Any, int, tuple[int, ...] | None]]


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: Any, buffers: Any, locate: Locate) -> None:
        super().__init__(stream, buffers=buffers)
        self._locate = locate

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__:
            if name == "_tensor":
                return _TensorBuilder(self._locate)
            if name == "_array":
                return _ArrayBuilder(self._locate)
        return super().find_class(module, name)


class _TensorBuilder:
    def __init__(self, locate: Locate) -> None:
        self._locate = locate

    def __call__(self, index: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = _TORCH_DTYPES[name]
        count = 1
        for size in shape:
            count *= size
        if not count:
            # `torch.empty` warns about complex32.
            return torch.empty(0, dtype=torch.uint8).view(dtype).view(shape)
        buffer, offset, strides = self._locate(index)
        if name in _NUMPY_DTYPES:
            return torch.from_numpy(np.ndarray(shape, _NUMPY_DTYPES[name], buffer, offset, strides))
        if strides is None:
            return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(shape)
        steps = [stride // dtype.itemsize for stride in strides]
        span = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        return torch.frombuffer(buffer, dtype=dtype, count=span, offset=offset).as_strided(shape, steps)


class _ArrayBuilder:
    def __init__(self, locate: Locate) -> None:
        self._locate = locate

    def __call__(self, index: int, dtype: Any, shape: tuple[int, ...], repeats: bool) -> np.ndarray[Any, Any]:
        if not (np.dtype(dtype).itemsize and all(shape)):
            return np.empty(shape, dtype)
        buffer, offset, strides = self._locate(index)
        array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, buffer, offset, strides)
        array.flags.writeable = not (repeats and strides)
        return array


def rebuild(stream: Any, buffers: Any, locate: Locate) -> Any:
    """The batch again: `stream` is a file of the pieces in order, `locate` finds a leaf's memory by its number.

    >>> import io
    >>> content = collect({"x": torch.arange(3), "n": 1})
    >>> data = bytearray(content.leaves[0].value.numpy())
    >>> rebuild(io.BytesIO(b"".join(content.stream)), (), lambda index: (data, 0, None))
    {'x': tensor([0, 1, 2]), 'n': 1}
    """
    return _Unpickler(stream, buffers, locate).load()


def collect(batch: Any) -> Content:
    """Take a batch apart; raises TypeError naming the path of what cannot travel, with the original as its cause.

    >>> collect({"x": [1, torch.ones(2, requires_grad=True)]})
    Traceback (most recent call last):
    TypeError: batch["x"][1] (Tensor) cannot travel from a worker: TypeError: it requires grad, ...
    """
    content = Content()
    try:
        _Pickler(content).dump(batch)
    except Exception as error:
        path, value, cause = find_culprit(batch, error, _failure)
        # Its notes come after; from Python 3.14 on pickle adds some.
        reason = traceback.format_exception_only(cause)[0].strip()
        told = f"{path} ({type(value).__name__}) cannot travel from a worker: {reason}{_advice(value)}"
        raise TypeError(told) from cause
    return content


def _advice(value: Any) -> str:
    if hasattr(value, "read"):
        return "; read it in a stage before, by .map or .read_from_stream"
    if isinstance(value, Iterator):
        return "; make a list of it, or use .flatmap, which gives its elements one by one"
    return ""


def _failure(value: Any) -> Exception | None:
    try:
        _Pickler(Content()).dump(value)
    except Exception as error:
        return error
    return None
