"""Decode the fields of a sample by their extension: images, JSON, text, class numbers, numpy arrays.

    >>> decode({"__key__": "a", "json": b'{"k": 1}', "cls": b"3", "bin": b"raw"})
    {'__key__': 'a', 'json': {'k': 1}, 'cls': 3, 'bin': b'raw'}

As a stage: `.webdataset().map(decode)`, or with settings `.map(Decoder(images="torch"))`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pipes.arguments import whole
from pipes.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["NUMBERS", "TEXTS", "Decoder", "decode"]

_IMAGES = frozenset(("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"))
TEXTS = frozenset(("txt", "text", "transcript"))
NUMBERS = frozenset(("cls", "cls2", "index", "inx", "id"))
_NPY = b"\x93NUMPY"
_PICKLES = frozenset(("pkl", "pickle", "pt", "pth", "pyd"))


class Decoder:
    """A picklable function from a sample with bytes or streams to the same sample with values.

    >>> import numpy as np
    >>> from io import BytesIO
    >>> array = BytesIO(); np.save(array, np.arange(3))
    >>> Decoder()({"__key__": "a", "npy": array.getvalue(), "txt": b"hello"})
    {'__key__': 'a', 'npy': array([0, 1, 2]), 'txt': 'hello'}

    By the last extension ("seg.png" is a PNG): images become `images`: "numpy" (uint8, height x width x channels),
    "torch" (uint8, channels x height x width) or "pil", converted to `mode` ("RGB"; "L" has no channel axis in numpy;
    None keeps the file's own), turned upright as its EXIF data says if `upright`, and refused before its pixels are
    unpacked if it has more than `max_pixels`, which stands beside Pillow's own `Image.MAX_IMAGE_PIXELS`; where `images`
    is a function, what that makes of the file's bytes, without Pillow; `json`; `txt` and `text` as str; `cls`, `cls2`,
    `index`, `id` as int; `npy` as an array.
    `pkl`, `pickle`, `pt` and `pth` files, and `npy` arrays of Python objects, can run code when they are read, so they
    stay bytes unless `unsafe=True`. All else stays bytes. 16-bit images need `mode=None`, "I" or "F".
    Streams are read and closed. The sample itself is not changed; a new one of its own type comes back.

    Raises:
        DataError: a field does not decode; names the sample's key and the field.
        ImportError: an image, and Pillow is not installed.
        ValueError: `images` is none of the three and no function, or `max_pixels` is less than 1.
    """

    def __init__(
        self,
        images: Literal["numpy", "pil", "torch"] | Callable[[bytes], Any] = "numpy",
        *,
        mode: str | None = "RGB",
        unsafe: bool = False,
        upright: bool = False,
        max_pixels: int = 89_478_485,  # 256 MiB of RGB, where Pillow starts to warn
    ) -> None:
        if not callable(images) and images not in ("numpy", "pil", "torch"):
            raise ValueError(f"images={images!r} is not one of 'numpy', 'pil', 'torch', and no function")
        max_pixels = whole("max_pixels", max_pixels)
        if max_pixels < 1:
            raise ValueError(f"max_pixels={max_pixels} is less than 1")
        self.images = images
        self.mode = mode
        self.unsafe = unsafe
        self.upright = upright
        self.max_pixels = max_pixels

    def __repr__(self) -> str:
        return (
            f"Decoder(images={self.images!r}, mode={self.mode!r}, unsafe={self.unsafe}, "
            f"upright={self.upright}, max_pixels={self.max_pixels})"
        )

    def __call__(self, sample: Any) -> Any:
        decoded = {}
        for field, value in sample.items():
            if field[:2] == "__":
                decoded[field] = value
                continue
            try:
                if not isinstance(value, bytes | str | int | float) and callable(getattr(value, "read", None)):
                    stream, value = value, value.read()
                    stream.close()
                decoded[field] = self.value(field, value) if isinstance(value, bytes) else value
            except ImportError:
                raise
            except Exception as error:
                where = f"sample {sample.get('__key__')!r}: field {field!r}"
                raise DataError(f"{where} does not decode: {type(error).__name__}: {error}") from error
        return type(sample)(decoded)

    def value(self, field: str, data: bytes) -> Any:
        """One field's bytes as a value; bytes again when the extension is not known."""
        extension = field.rpartition(".")[2].lower()
        if extension in _IMAGES:
            return self.images(data) if callable(self.images) else self._image(data)
        if extension == "json":
            return json.loads(data)
        if extension in TEXTS:
            return data.decode("utf-8")
        if extension in NUMBERS:
            return int(data)
        if extension == "npy":
            return _array(data, self.unsafe)
        if self.unsafe and extension in _PICKLES:
            return _unpickle(extension, data)
        return data

    def _image(self, data: bytes) -> Any:
        try:
            from PIL import Image as pillow
            from PIL import ImageOps
        except ImportError as error:
            raise ImportError('decoding images needs Pillow: pip install "pipes[images]"') from error
        with pillow.open(io.BytesIO(data)) as opened:
            width, height = opened.size
            if width * height > self.max_pixels:
                raise ValueError(f"an image of {width} x {height} has more than max_pixels={self.max_pixels}")
            if opened.mode.startswith("I;16") and self.mode not in (None, "I", "F", opened.mode):
                raise ValueError(f"16 bits a pixel are cut off in mode {self.mode!r}; mode=None keeps them")
            turned: Image = ImageOps.exif_transpose(opened) if self.upright else opened
            image = turned.convert(self.mode) if self.mode is not None else turned
            image.load()
        if self.images == "pil":
            return image
        import numpy

        array = numpy.array(image)
        if self.images == "numpy":
            return array
        import torch

        tensor = torch.from_numpy(array)
        return tensor.permute(2, 0, 1).contiguous() if tensor.ndim == 3 else tensor.unsqueeze(0)


def _array(data: bytes, unsafe: bool) -> Any:
    import numpy

    if not data.startswith(_NPY) and not unsafe:
        raise ValueError("it is no .npy file")  # numpy.load would open a zip archive lazily
    try:
        return numpy.load(io.BytesIO(data), allow_pickle=unsafe)
    except ValueError as error:
        # An array of Python objects is a pickle behind numpy's header; what has no such header is no array at all.
        if not unsafe and data.startswith(_NPY) and "allow_pickle" in str(error):
            return data
        raise


def _unpickle(extension: str, data: bytes) -> Any:
    if extension in ("pt", "pth"):
        import torch

        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    import pickle

    return pickle.loads(data)


decode = Decoder()
