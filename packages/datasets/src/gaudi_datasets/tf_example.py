"""`tf.train.Example`, the content of a record, encoded and decoded without TensorFlow.

Its messages (tensorflow/core/example) are described here, in a pool of descriptors of their own, so that they do not
meet those that a loaded TensorFlow registers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from gaudi_datasets.errors import DataError

Kind = Literal["bytes", "int64", "float"]

_LIST_OF: dict[Kind, str] = {"bytes": "bytes_list", "int64": "int64_list", "float": "float_list"}
_MESSAGES = """
name: "gaudi_datasets/example.proto" package: "tensorflow" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type_name: ".tensorflow.BytesList"
          label: LABEL_OPTIONAL type: TYPE_MESSAGE oneof_index: 0 }
  field { name: "float_list" number: 2 type_name: ".tensorflow.FloatList"
          label: LABEL_OPTIONAL type: TYPE_MESSAGE oneof_index: 0 }
  field { name: "int64_list" number: 3 type_name: ".tensorflow.Int64List"
          label: LABEL_OPTIONAL type: TYPE_MESSAGE oneof_index: 0 }
}
message_type {
  name: "Features"
  field { name: "feature" number: 1 type_name: ".tensorflow.Features.FeatureEntry"
          label: LABEL_REPEATED type: TYPE_MESSAGE }
  nested_type {
    name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 type_name: ".tensorflow.Feature" label: LABEL_OPTIONAL type: TYPE_MESSAGE }
  }
}
message_type {
  name: "Example"
  field { name: "features" number: 1 type_name: ".tensorflow.Features" label: LABEL_OPTIONAL type: TYPE_MESSAGE }
}
"""


# Larger values are put into the message by hand, in a third of the time: protobuf copies what it gets three times.
_LARGE = 2**12


def _make_example_class() -> Any:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_MESSAGES, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


_Example = _make_example_class()


def encode_features(features: Mapping[str, tuple[Kind, Sequence[Any]]]) -> bytes:
    """Serialize an Example; the same features give the same bytes, in whatever order they come.

    Args:
        features: kind and values of each, by name; there may be no value.
    """
    small, large = _Example().features, {}
    for name, (kind, values) in features.items():
        if kind == "bytes" and len(values) == 1 and len(values[0]) > _LARGE:
            large[name] = values[0]
            continue
        content = getattr(small.feature[name], _LIST_OF[kind])
        if values:
            content.value.extend(values)
        else:
            content.SetInParent()  # so that its kind is told
    parts = [small.SerializeToString(deterministic=True)]
    for name, value in sorted(large.items()):
        feature = _delimit(1, _delimit(1, [value]))
        parts += _delimit(1, [*_delimit(1, [name.encode()]), *_delimit(2, feature)])
    return b"".join(_delimit(1, parts))


def _delimit(number: int, content: list[bytes]) -> list[bytes]:
    """A field of a message, in parts: its number, its length, and its content (protobuf.dev, "Encoding")."""
    length, head = sum(map(len, content)), bytearray([number << 3 | 2])
    while length >= 128:
        head.append(length % 128 | 128)
        length //= 128
    return [bytes([*head, length]), *content]


class ExampleFeatures:
    """The features of one record, taken with the type and number that they must have.

    Args:
        content: a serialized Example.
        place: what messages call the record.

    Raises:
        DataError: it is no Example.
    """

    def __init__(self, content: bytes, place: object) -> None:
        try:
            self._feature = _Example.FromString(content).features.feature
        except Exception as error:  # protobuf's DecodeError, or a ValueError, by the implementation of protobuf
            raise DataError(f"{place}: is no tf.train.Example ({error}); convert the data again") from None
        self._place = place

    def __contains__(self, name: str) -> bool:
        return name in self._feature

    def many(self, kind: Kind, name: str, count: int | None = None, default: list[Any] | None = None) -> list[Any]:
        """All values of a feature.

        Args:
            kind: of the values; a feature without a kind has no values of any.
            name: of the feature.
            count: how many there must be, when it matters.
            default: what stands for a feature that is missing; None when it must not be.

        Raises:
            DataError: it is missing, of another kind, or has another number of values.
        """
        if name not in self._feature:  # looking it up would add it
            if default is None:
                raise self.fault(name, "is missing")
            return default
        feature = self._feature[name]
        found = feature.WhichOneof("kind")
        if found not in (_LIST_OF[kind], None):
            raise self.fault(name, f"is a {found}; it must be a {_LIST_OF[kind]}")
        values = list(getattr(feature, _LIST_OF[kind]).value)
        if count is not None and len(values) != count:
            raise self.fault(name, f"has {len(values)} values; it must have {count}")
        return values

    def one(self, kind: Kind, name: str, default: Any = None) -> Any:
        """The only value of a feature; raises as `many` does."""
        return self.many(kind, name, 1, None if default is None else [default])[0]

    def fault(self, name: str, what: str) -> DataError:
        """The error that names this record, its image and the feature."""
        named = next((each for each in ("image/source_id", "image/filename") if each in self._feature), None)
        ids = self._feature[named].bytes_list.value if named else ()
        image = f" (image {' '.join(ids[0].decode(errors='replace').split())})" if ids else ""
        return DataError(f"{self._place}{image}: feature {name}: {what}; convert the data again")
