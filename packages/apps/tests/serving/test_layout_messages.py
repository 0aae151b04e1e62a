"""Parse the configurations of layouts by the protobuf messages of TensorFlow Serving and Triton themselves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gaudi_apps.inference.serving.layouts import Signature, Tensor, make_serving_config, make_triton_config

pytestmark = pytest.mark.skipif("DEPLOY" not in os.environ, reason="DEPLOY is not set; nox -s deploy sets it")
ONNX = Signature(
    [Tensor("images", "UINT8", (-1, -1, 3))],
    [Tensor("boxes_yxyx", "FP32", (200, 4)), Tensor("labels", "INT32", (200,)), Tensor("probabilities", "FP32", (5,))],
)
SAVED = Signature([Tensor("encoded", "STRING", ())], [Tensor("num_detections", "INT32", ())])


def test_tritons_message_takes_the_configuration() -> None:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    text = make_triton_config("cells", "onnx", ONNX, 4, 2.5)
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert (config.name, config.platform, config.max_batch_size) == ("cells", "onnxruntime_onnx", 4)
    assert config.dynamic_batching.max_queue_delay_microseconds == 2500
    (images,) = config.input
    assert (images.name, images.data_type, list(images.dims)) == ("images", model_config_pb2.TYPE_UINT8, [-1, -1, 3])
    shapes = [(one.name, list(one.dims), one.label_filename) for one in config.output]
    assert shapes == [("boxes_yxyx", [200, 4], ""), ("labels", [200], ""), ("probabilities", [5], "labels.txt")]

    config = text_format.Parse(make_triton_config("cells", "saved_model", SAVED, 1, 0), model_config_pb2.ModelConfig())
    (encoded,) = config.input
    assert (encoded.data_type, list(encoded.dims)) == (model_config_pb2.TYPE_STRING, [1])
    assert encoded.HasField("reshape")
    assert list(encoded.reshape.shape) == []
    assert config.parameters["TF_SIGNATURE_DEF"].string_value == "serving_default"


def test_the_message_of_tensorflow_serving_takes_the_configuration() -> None:
    from google.protobuf import text_format
    from tensorflow_serving.config import model_server_config_pb2

    text = make_serving_config(["cells", "other"])
    config = text_format.Parse(text, model_server_config_pb2.ModelServerConfig())
    found = [(one.name, Path(one.base_path), one.model_platform) for one in config.model_config_list.config]
    assert found == [(name, Path("/models") / name, "tensorflow") for name in ("cells", "other")]
