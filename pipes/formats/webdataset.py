"""Group the members of a WebDataset shard into samples.

The convention (https://github.com/webdataset/webdataset, "The WebDataset Format"): consecutive files with the same
path up to the first dot of the base name are one sample, and what follows that dot is the field's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pipes.errors import DataError

__all__ = ["Sample", "group_samples", "split_path"]


def _plain(key: Any) -> Any:
    return key[1:] if isinstance(key, str) and key.startswith(".") else key


class Sample(dict[str, Any]):
    """One sample: its fields by name, and its key under "__key__".

    >>> sample = Sample({"__key__": "a/0001", "jpg": b"...", "cls": b"3"})
    >>> sample["cls"], sample[".cls"], ".jpg" in sample, sample.get(".txt")
    (b'3', b'3', True, None)
    >>> sample[".cls"] = 3; sample["cls"], list(sample)
    (3, ['__key__', 'jpg', 'cls'])

    Names have no leading dot; with one, as torchdata spelled them, they mean the same field.
    """

    __slots__ = ()

    def __missing__(self, key: Any) -> Any:
        plain = _plain(key)
        if plain is key:
            raise KeyError(f"{key!r}; sample {dict.get(self, '__key__')!r} has {[k for k in self if k != '__key__']}")
        return self[plain]

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or dict.__contains__(self, _plain(key))

    def __setitem__(self, key: str, value: Any) -> None:
        dict.__setitem__(self, _plain(key), value)

    def __delitem__(self, key: str) -> None:
        dict.__delitem__(self, _plain(key))

    def get(self, key: str, default: Any = None) -> Any:
        return dict.get(self, _plain(key), default)

    def pop(self, key: str, *default: Any) -> Any:
        return dict.pop(self, _plain(key), *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        return dict.setdefault(self, _plain(key), default)

    def copy(self) -> Sample:
        return Sample(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Sample, (dict(self),)  # half the time of item by item


def split_path(path: str) -> tuple[str, str] | None:
    """A member's path as (sample key, field); None when its base name has no extension.

    >>> split_path("v1.2/s0001.seg.json"), split_path("v1.2/README"), split_path("v1.2/.hidden")
    (('v1.2/s0001', 'seg.json'), None, None)
    """
    base = path.rfind("/") + 1
    dot = path.find(".", base)
    if dot <= base or dot + 1 == len(path):
        return None
    return path[:dot], path[dot + 1 :]


def group_samples(items: Iterable[tuple[str, Any]], on_skip: Callable[[str], object] | None = None) -> Iterator[Sample]:
    """Consecutive `(path, data)` as samples.

    >>> list(group_samples([("a.jpg", b"1"), ("a.cls", b"2"), ("b.jpg", b"3")]))
    [{'__key__': 'a', 'jpg': b'1', 'cls': b'2'}, {'__key__': 'b', 'jpg': b'3'}]

    Paths without an extension belong to no sample; `on_skip(path)` is told of each. Values are passed on as they are.

    Raises:
        AssertionError: a path is not a str.
        DataError: a sample has a field twice, which is named.
    """
    current: str | None = None
    fields: dict[str, Any] = {}
    for path, data in items:
        if not isinstance(path, str):
            raise AssertionError(f"the path of a member must be str, got {type(path)}")
        split = split_path(path)
        if split is None:
            if on_skip is not None:
                on_skip(path)
            continue
        key, field = split
        if key != current:
            if current is not None:
                yield Sample(fields)
            current, fields = key, {"__key__": key}
        if field in fields:
            raise DataError(f"sample {key!r} has the field {field!r} twice: {path!r} is the second")
        fields[field] = data
    if current is not None:
        yield Sample(fields)
