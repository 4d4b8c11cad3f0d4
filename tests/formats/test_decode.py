"""Fields decoded by their extension."""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pipes.errors import DataError
from pipes.formats.decode import Decoder, decode
from pipes.formats.webdataset import Sample
from pipes.utils import StreamWrapper


def picture(kind: str, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (4, 3), 200 if mode == "L" else (10, 200, 30)).save(buffer, kind)
    return buffer.getvalue()


def array() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(6).reshape(2, 3))
    return buffer.getvalue()


def test_everything_by_its_extension() -> None:
    sample = Sample(
        {
            "__key__": "a",
            "seg.PNG": picture("png"),
            "json": b'{"k": [1, null]}',
            "txt": "é".encode(),
            "cls": b" 3\n",
            "npy": array(),
            "bin": b"raw",
            "weights.pt": b"bytes",
            "count": 5,
        }
    )
    done = decode(sample)
    assert type(done) is Sample
    assert done["seg.PNG"].shape == (3, 4, 3)
    assert done["seg.PNG"].dtype == np.uint8
    assert tuple(done["seg.PNG"][0, 0]) == (10, 200, 30)
    assert (done["json"], done["txt"], done["cls"], done["bin"]) == ({"k": [1, None]}, "é", 3, b"raw")
    assert np.array_equal(done["npy"], np.arange(6).reshape(2, 3))
    assert (done["__key__"], done["weights.pt"], done["count"]) == ("a", b"bytes", 5)
    assert sample["cls"] == b" 3\n"


@pytest.mark.parametrize("kind", ["png", "bmp", "gif", "tiff", "webp", "jpeg"])
def test_image_kinds_and_forms(kind: str) -> None:
    data = {"__key__": "a", kind: picture(kind)}
    tensor = Decoder(images="torch")(data)[kind]
    assert tensor.shape == (3, 3, 4)
    assert tensor.dtype == torch.uint8
    assert tensor.is_contiguous()
    image = Decoder(images="pil")(data)[kind]
    assert (image.size, image.mode) == ((4, 3), "RGB")
    assert np.array_equal(np.array(image), decode(data)[kind])
    assert np.array_equal(tensor.permute(1, 2, 0).numpy(), decode(data)[kind])


def test_modes() -> None:
    grey = {"__key__": "a", "png": picture("png", "L")}
    assert decode(grey)["png"].shape == (3, 4, 3)
    assert Decoder(mode=None)(grey)["png"].shape == (3, 4)
    assert Decoder("torch", mode="L")(grey)["png"].shape == (1, 3, 4)
    assert Decoder("pil", mode=None)(grey)["png"].mode == "L"


def test_alpha_in_every_form() -> None:
    buffer = io.BytesIO()
    Image.new("RGBA", (4, 3), (1, 2, 3, 4)).save(buffer, "png")
    data = {"__key__": "a", "png": buffer.getvalue()}
    assert Decoder(mode="RGBA")(data)["png"][2, 3].tolist() == [1, 2, 3, 4]
    assert Decoder("torch", mode="RGBA")(data)["png"][:, 2, 3].tolist() == [1, 2, 3, 4]
    assert Decoder("pil", mode="RGBA")(data)["png"].getpixel((3, 2)) == (1, 2, 3, 4)
    assert decode(data)["png"][2, 3].tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("images", ["numpy", "torch", "pil"])
def test_exif_orientation_by_choice(kind: str, images: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying on its side: turn it a quarter clockwise
    buffer = io.BytesIO()
    Image.new("RGB", (4, 3)).save(buffer, kind, exif=exif)
    data = {"__key__": "a", kind: buffer.getvalue()}

    def shape(value: Any) -> tuple[int, ...]:
        return tuple(np.array(value).shape) if images != "torch" else tuple(value.permute(1, 2, 0).shape)

    assert shape(Decoder(images)(data)[kind]) == (3, 4, 3)
    assert shape(Decoder(images, upright=True)(data)[kind]) == (4, 3, 3)


@pytest.mark.parametrize("mode", ["RGB", None])
@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_truncated_images_are_errors_that_name_the_sample(kind: str, mode: str | None) -> None:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, kind)
    whole = buffer.getvalue()
    for size in (0, 10, len(whole) // 4, len(whole) // 2, len(whole) * 3 // 4):
        with pytest.raises(DataError, match=rf"sample 'd/a': field '{kind}' does not decode"):
            Decoder(mode=mode)({"__key__": "d/a", kind: whole[:size]})


def test_large_images_are_refused_before_they_are_unpacked() -> None:
    data = {"__key__": "d/a", "png": picture("png")}
    assert Decoder(max_pixels=12)(data)["png"].shape == (3, 4, 3)
    with pytest.raises(DataError, match=r"'d/a': field 'png' does not decode: .* 4 x 3 has more than max_pixels=11"):
        Decoder(max_pixels=11)(data)


def test_images_can_be_written_to() -> None:
    done = decode({"__key__": "a", "png": picture("png")})
    done["png"][0, 0, 0] = 1
    assert done["png"][0, 0, 0] == 1


def test_streams_are_read_and_closed() -> None:
    stream = StreamWrapper(io.BytesIO(b"[1]"), name="a.json")
    assert decode({"__key__": "a", "json": stream}) == {"__key__": "a", "json": [1]}
    assert stream.closed


@pytest.mark.parametrize(
    ("field", "data"), [("jpg", b"no image"), ("json", b"{"), ("cls", b"x"), ("txt", b"\xff"), ("x.npy", b"")]
)
def test_errors_name_sample_and_field(field: str, data: bytes) -> None:
    with pytest.raises(DataError, match=rf"sample 'd/a': field '{field}' does not decode"):
        decode({"__key__": "d/a", field: data})


class Evil:
    def __reduce__(self) -> Any:
        return (sys.exit, ("code ran",))


def objects(value: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([value, None], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def weights(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_no_code_runs_from_data() -> None:
    data = {"__key__": "a", "npy": objects(Evil()), "x.pyd": pickle.dumps(Evil())}
    data |= {field: pickle.dumps(Evil()) for field in ("pkl", "PKL", "x.pickle")}
    data |= {field: weights(Evil()) for field in ("pt", "x.pth")}
    assert decode(data) == data
    for field in data.keys() - {"__key__"}:
        with pytest.raises(SystemExit, match="code ran"):
            Decoder(unsafe=True)({"__key__": "a", field: data[field]})


def test_a_pickle_that_calls_itself_an_array_is_no_array() -> None:
    with pytest.raises(DataError, match="field 'npy' does not decode"):
        decode({"__key__": "a", "npy": pickle.dumps(Evil())})


def test_a_zip_archive_that_calls_itself_an_array_is_no_array() -> None:
    file = io.BytesIO()
    np.savez(file, x=np.arange(2))
    with pytest.raises(DataError, match="field 'npy' does not decode"):
        decode({"__key__": "a", "npy": file.getvalue()})


def test_pickles_by_choice() -> None:
    data = {"__key__": "a", "pkl": pickle.dumps([1]), "pt": weights({"w": torch.ones(2)}), "npy": objects("x")}
    done = Decoder(unsafe=True)(data)
    assert done["pkl"] == [1]
    assert torch.equal(done["pt"]["w"], torch.ones(2))
    assert done["npy"].tolist() == ["x", None]


def test_16_bits_a_pixel_are_kept_or_refused() -> None:
    depths = np.array([[0, 300, 65535]], dtype=np.uint16)
    buffer = io.BytesIO()
    Image.fromarray(depths).save(buffer, "png")
    data = {"__key__": "a", "png": buffer.getvalue()}
    assert np.array_equal(Decoder(mode=None)(data)["png"], depths)
    assert Decoder("torch", mode=None)(data)["png"].tolist() == depths[None].tolist()
    for mode in ("RGB", "L"):
        with pytest.raises(DataError, match="mode=None keeps them"):
            Decoder(mode=mode)(data)


def test_a_decoder_of_ones_own() -> None:
    sample = {"__key__": "a", "seg.PNG": b"1", "cls": b"3"}
    assert Decoder(len)(sample) == {"__key__": "a", "seg.PNG": 1, "cls": 3}
    with pytest.raises(DataError, match=r"sample 'a': field 'seg\.PNG' does not decode: ValueError"):
        Decoder(images=float)({"__key__": "a", "seg.PNG": b"x"})


def test_settings() -> None:
    decoder = pickle.loads(pickle.dumps(Decoder("torch", mode="L", unsafe=True)))
    assert repr(decoder) == "Decoder(images='torch', mode='L', unsafe=True, upright=False, max_pixels=89478485)"
    with pytest.raises(ValueError, match="images='jax' is not one of"):
        Decoder("jax")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_pixels=0 is less than 1"):
        Decoder(max_pixels=0)


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r'pip install "pipes\[images\]"'):
        decode({"__key__": "a", "png": b""})
    assert decode({"__key__": "a", "cls": b"1"})["cls"] == 1
