"""Ask a server over real connections: right answers, and the right refusal of everything else."""

from __future__ import annotations

import http.client
import io
import json
import socket
import sys
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from PIL import Image

import gaudi_apps
from gaudi_apps.cli import run_commands
from gaudi_apps.inference import predictor
from gaudi_apps.inference.serving.flags import ServeFlags
from gaudi_apps.inference.serving.models import ServedModel
from gaudi_apps.inference.serving.server import PATHS
from gaudi_datasets.errors import MissingExtraError
from gaudi_models.classifiers import build_classifier
from gaudi_models.weights import WeightsMetadata, read_weights, write_weights

# pytest shares conftest.py with tests by its fixtures alone.
Start = Callable[..., Any]
PNG = b"\x89PNG\r\n\x1a\n"
KINDS = ("JPEG", "PNG", "WEBP")


def encode(size: tuple[int, int], kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, kind, **options)
    return buffer.getvalue()


def make_png_head(width: int, height: int) -> bytes:
    head = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\x00\x00\x00"
    return PNG + b"\x00\x00\x00\x0d" + head + zlib.crc32(head).to_bytes(4, "big") + bytes(64)


def make_webp_head(width: int, height: int) -> bytes:
    chunk = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + len(chunk).to_bytes(4, "little") + chunk + bytes(64)
    return b"RIFF" + len(body).to_bytes(4, "little") + body


def make_many_scans() -> bytes:
    """Make a JPEG that is whole, but for its first scan, which comes a thousand times."""
    photo = encode((64, 64), "JPEG", progressive=True)
    begin = photo.index(b"\xff\xda")
    end = photo.index(b"\xff", begin + 2)
    while photo[end + 1] == 0:
        end = photo.index(b"\xff", end + 1)
    return photo[:begin] + 1000 * photo[begin:end] + photo[end:]


def hide_scans() -> bytes:
    """Make a JPEG whose scans are in what looks like a segment, and is none for a decoder that starts again there."""
    photo = encode((64, 64), "JPEG")
    begin = photo.index(b"\xff\xda")
    scans = 200 * b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00"
    return photo[:begin] + b"\xff\x02" + (len(scans) + 2).to_bytes(2, "big") + scans + photo[begin:]


def make_two_heads() -> bytes:
    """Make a PNG whose second head is of 900 million pixels; Pillow would believe that one."""
    photo = encode((8, 8), "PNG")
    return photo[:33] + make_png_head(30_000, 30_000)[8:33] + photo[33:]


@cache
def read_description(text: str) -> Any:
    """Read a description and check it by the rules of its own, which takes far longer than an answer does."""
    document = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(document)
    return document


def check(answer: Any, schema: str, document: Any) -> Any:
    """Validate an answer by the description that the server gives, and return it."""
    description = read_description(json.dumps(document))
    jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{schema}", **description}).validate(answer.document)
    return answer.document


# Of the server that many tests ask.
COUNTS = (
    'gaudi_requests_total{path="/predict",status="200"}',
    "gaudi_images_total",
    "gaudi_batch_size_sum",
    "gaudi_queue_length",
)


@pytest.fixture(scope="module")
def schema(server: Any) -> Any:
    return server.ask("GET", "/openapi.json").document


def test_answers_are_those_of_the_detector(server: Any, schema: Any, weights: Path, images: list[bytes]) -> None:
    detector, before = gaudi_apps.Detector.load(weights), [server.count(name) for name in COUNTS]
    with ThreadPoolExecutor(len(images)) as pool:
        answers = list(pool.map(lambda image: server.post("/predict", image), images))
    counts = []
    for answer, image in zip(answers, images, strict=True):
        found, expected = check(answer, "Detections", schema), detector.predict(image)
        assert answer.status == 200
        assert (found["height"], found["width"]) == (expected.height, expected.width)
        rows = found["detections"]
        assert [(one["category_id"], one["class"]) for one in rows] == [
            (row["category_id"], name) for row, name in zip(expected.to_coco(), expected.names, strict=True)
        ]
        np.testing.assert_allclose(
            [one["bbox"] for one in rows], [row["bbox"] for row in expected.to_coco()], atol=0.01
        )
        np.testing.assert_allclose([one["score"] for one in rows], expected.scores, atol=1e-4)
        counts.append(len(rows))
    assert sum(counts) > 10
    assert [server.count(name) - count for name, count in zip(COUNTS, before, strict=True)] == [6, 6, 6, 0]
    assert server.count("gaudi_queue_length") == 0


@pytest.mark.parametrize(("accept", "kind"), [("*/*", "JPEG"), ("image/png", "PNG"), ("image/png,image/jpeg", "JPEG")])
def test_the_drawn_image_is_that_of_the_detector(
    server: Any, weights: Path, images: list[bytes], accept: str, kind: str
) -> None:
    answer = server.post("/draw", images[1], Accept=accept)
    drawn = Image.open(io.BytesIO(answer.body))
    expected = gaudi_apps.Detector.load(weights).predict(images[1]).draw()
    assert (drawn.format, answer.headers["Content-Type"]) == (kind, f"image/{kind.lower()}")
    assert drawn.size == expected.size
    difference = np.abs(np.asarray(drawn, np.float32) - np.asarray(expected, np.float32))
    assert difference.mean() < (0.01 if kind == "PNG" else 6)


@pytest.mark.parametrize("path", ["/predict", "/draw"])
def test_a_query_is_refused_by_name(server: Any, schema: Any, images: list[bytes], path: str) -> None:
    for query in ("score_threshold=0.9", "score_threshold"):
        answer = server.post(f"{path}?{query}", images[0])
        assert (answer.status, check(answer, "Error", schema)["error"]["status"]) == (400, 400)
        assert "'score_threshold'" in check(answer, "Error", schema)["error"]["message"]


REFUSED = {
    "nothing": (b"", 415),
    "text": (b"hello " * 10, 415),
    "a GIF": (encode((8, 8), "GIF"), 415),
    "a RIFF that is no WebP": (b"RIFF\x00\x00\x00\x00WAVEfmt " + bytes(50), 415),
    "a form": (b"--x\r\nContent-Disposition: form-data; name=file\r\n\r\n" + encode((8, 8), "PNG"), 415),
    **{f"half of a {kind}": (encode((90, 90), kind)[: len(encode((90, 90), kind)) // 2], 422) for kind in KINDS},
    "the head of a JPEG": (b"\xff\xd8\xff\xe0", 422),
    "a JPEG of a thousand scans": (make_many_scans(), 422),
    "a JPEG of a hundred thousand segments": (b"\xff\xd8" + 100_000 * b"\xff\xe5\x00\x02", 422),
    "a JPEG of half a megabyte of fill bytes": (b"\xff\xd8" + 400_000 * b"\xff", 422),
    "a JPEG of scans behind a reserved marker": (hide_scans(), 422),
    "a PNG of two heads": (make_two_heads(), 422),
    "a PNG of 900 million pixels": (make_png_head(30_000, 30_000), 413),
    "a WebP of 268 million pixels": (make_webp_head(16_384, 16_384), 413),
    "a PNG without pixels": (make_png_head(0, 8), 422),
    "one row of pixels too many": (encode((1000, 1001), "JPEG"), 413),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("path", ["/predict", "/draw"])
def test_what_is_no_image_that_is_taken_is_refused(server: Any, schema: Any, path: str, what: str) -> None:
    body, status = REFUSED[what]
    refused = f'gaudi_requests_total{{path="{path}",status="{status}"}}'
    before = server.count(refused)
    answer = server.post(path, body)
    assert answer.status == status
    assert check(answer, "Error", schema)["error"]["status"] == status
    assert answer.refusal["remedy"]
    assert server.count(refused) == before + 1
    assert server.post("/predict", encode((1000, 1000), "PNG")).status == 200


def test_what_follows_a_photo_is_no_part_of_it(server: Any, weights: Path) -> None:
    """As the video that some phones append, in which bytes happen to look like those of scans."""
    photo = encode((64, 64), "JPEG")
    answer = server.post("/predict", photo + 200 * b"\xff\xda\x00\x02 ")
    assert (answer.status, answer.document["width"]) == (200, 64)


def test_a_drawing_that_no_jpeg_holds_is_refused(server: Any) -> None:
    long = encode((65_600, 10), "PNG")
    assert server.post("/draw", long).status == 413
    assert server.post("/draw", long, Accept="image/png").status == 200


@pytest.mark.costly
def test_the_memory_of_what_waits_is_bounded(
    start: Start, gate: Any, images: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gaudi_apps.inference.serving.service.BODY_BYTES", 2 * len(images[1]) - 1)
    monkeypatch.setattr("gaudi_apps.inference.serving.service.BODIES", 0)
    server = start(max_batch=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, "/predict", images[1])
        assert gate.sizes.get(timeout=600) == 1
        refused = server.post("/predict", images[1])
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        gate.open()
        assert first.result().status == 200
    assert server.post("/predict", images[1]).status == 200


@pytest.mark.costly
def test_images_of_clients_that_left_are_not_decoded(
    start: Start, gate: Any, images: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, prepared = ServedModel.prepare, list[int]()

    def prepare_later(model: ServedModel, encoded: bytes, **options: Any) -> Any:
        prepared.append(len(encoded))
        gate.pass_through(0)
        return prepare(model, encoded, **options)

    monkeypatch.setattr(ServedModel, "prepare", prepare_later)
    server = start(decoders=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, "/predict", images[0])
        assert gate.sizes.get(timeout=600) == 0
        for _ in range(3):
            server.begin(images[1]).close()
            server.wait_for_end_of("/predict", 499)
        gate.open()
        assert first.result().status == 200
    assert prepared == [len(images[0])]


@pytest.mark.costly
def test_a_connection_too_many_is_told_so(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    monkeypatch.setattr("gaudi_apps.inference.serving.server.MOST_CONNECTIONS", 0)
    refused = server.ask("GET", "/healthz")
    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")


def read_all(server: Any, request: bytes) -> bytes:
    """Send bytes, and return all that comes until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port)) as opened:
        opened.sendall(request)
        with opened.makefile("rb") as answers:
            return answers.read()


def test_a_refusal_closes_its_connection(server: Any) -> None:
    request = b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    answers = read_all(server, request)
    assert answers.count(b"HTTP/1.1 ") == answers.count(b"HTTP/1.1 404") == 1


def test_a_length_without_end_is_answered_once(server: Any) -> None:
    answers = read_all(server, b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % 10**28)
    assert answers.count(b"HTTP/1.1 ") == answers.count(b"HTTP/1.1 413") == 1


def test_a_client_that_asks_before_it_sends_is_told_no(server: Any) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as opened:
        opened.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 999999\r\n\r\n")
        assert read_raw(opened).status == 413


LARGE = 16 * 2**20


@pytest.fixture
def large(start: Start, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start a server whose drawings are larger than what the system keeps of what is sent."""
    monkeypatch.setattr(ServedModel, "draw", lambda *_: bytes(LARGE))
    return start()


def ask_slowly(server: Any, image: bytes) -> socket.socket:
    """Ask for a drawing, and read nothing."""
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    opened.connect(("127.0.0.1", server.port))
    opened.sendall(b"POST /draw HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(image) + image)
    server.wait_for_end_of("/draw", 200)
    return opened


def test_a_stop_waits_until_answers_are_taken(large: Any, images: list[bytes]) -> None:
    with ask_slowly(large, images[0]) as opened:
        large.stop()
        assert len(read_raw(opened).body) == LARGE
    large.join()
    assert not large.error


@pytest.mark.costly
def test_a_client_that_does_not_take_its_answer_is_closed(
    start: Start, images: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()

    def draw_impatiently(*_: object) -> bytes:
        object.__setattr__(server.flags, "timeout_s", 0.01)  # from now on
        return bytes(LARGE)

    monkeypatch.setattr(ServedModel, "draw", draw_impatiently)
    with ask_slowly(server, images[0]) as opened:
        server.stop()
        server.join()  # the stop waits for what is not sent
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            read_raw(opened)


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server: Any, schema: Any) -> None:
    opened = server.begin(encode((8, 8), "PNG"), announced=10**12)
    answer = read_raw(opened)
    assert check(answer, "Error", schema)["error"]["status"] == answer.status == 413
    assert answer.headers["Connection"] == "close"


def test_a_body_that_is_larger_than_announced_by_chunks_is_refused(server: Any, schema: Any) -> None:
    def chunks() -> Iterable[bytes]:
        yield encode((8, 8), "PNG")
        yield from [bytes(2**16)] * 40

    answer = server.post("/predict", chunks())
    assert check(answer, "Error", schema)["error"]["status"] == answer.status == 413


def read_raw(opened: socket.socket) -> Any:
    """Read an answer as conftest.py does, which no test can import."""

    class Reply:
        def __init__(self) -> None:
            reply = http.client.HTTPResponse(opened)
            reply.begin()
            self.status, self.headers, self.body = reply.status, reply.msg, reply.read()

        @property
        def document(self) -> Any:
            return json.loads(self.body)

    return Reply()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/predict", 405),
        ("PUT", "/draw", 405),
        ("POST", "/", 405),
        ("GET", "/../etc/x", 404),
        ("POST", "/x", 404),
        ("POST", "/predict/", 404),
        ("HEAD", "/predict", 405),
    ],
)
def test_other_paths_and_methods_are_refused_as_json(
    server: Any, schema: Any, method: str, path: str, status: int
) -> None:
    answer = server.ask(method, path, bytes(200_000) if method not in ("GET", "HEAD") else None)
    assert answer.status == status
    assert method == "HEAD" or check(answer, "Error", schema)["error"]["status"] == status
    assert ("Allow" in answer.headers) == (status == 405)


@pytest.mark.costly
def test_a_slow_body_and_a_slow_head_are_ended(start: Start, images: list[bytes]) -> None:
    server = start(timeout_s=1.0)
    answer = read_raw(server.begin(images[0][:50], announced=len(images[0])))
    assert (answer.status, answer.document["error"]["status"]) == (408, 408)
    with socket.create_connection(("127.0.0.1", server.port)) as opened:
        opened.sendall(b"POST /predict HTTP/1.1\r\nHost: ")
        assert opened.recv(100) == b""


@pytest.mark.costly
def test_a_full_queue_refuses_and_a_slow_network_too(start: Start, gate: Any, images: list[bytes]) -> None:
    server = start(max_queue=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, "/predict", images[0])
        assert gate.sizes.get(timeout=600) == 1
        refused = server.post("/predict", images[1])
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        assert server.count("gaudi_queue_length") == 1
        gate.open()
        assert first.result().status == 200
    assert server.post("/predict", images[1]).status == 200


@pytest.mark.costly
def test_an_image_that_is_not_answered_in_time_is_refused(start: Start, gate: Any, images: list[bytes]) -> None:
    server = start(timeout_s=1.0, max_batch=1)
    assert server.post("/predict", images[0]).status == 503  # it is being computed
    refused = server.post("/predict", images[0])  # it waits
    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
    gate.open()


@pytest.mark.costly
def test_a_client_that_leaves_is_not_waited_for(start: Start, gate: Any, images: list[bytes]) -> None:
    server = start(max_batch=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, "/predict", images[0])
        assert gate.sizes.get(timeout=600) == 1
        server.begin(images[1]).close()
        server.wait_for_end_of("/predict", 499)
        server.begin(images[1][:20], announced=1000).close()
        server.wait_for_end_of("/predict", 499)
        gate.open()
        assert first.result().status == 200
    assert server.count("gaudi_images_total") == server.count("gaudi_batch_size_count") == 1


@pytest.mark.costly
def test_a_stop_finishes_what_is_in_flight(start: Start, gate: Any, images: list[bytes]) -> None:
    server = start()
    kept, second = server.connect(), server.connect()
    for one in (kept, second):
        one.request("GET", "/healthz")
        assert one.getresponse().read()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, "/predict", images[0])
        assert gate.sizes.get(timeout=600) == 1
        arriving = server.begin(images[1][:40], announced=len(images[1]))
        assert server.ask("GET", "/healthz").status == 200  # so what came before has been accepted
        server.stop()
        status = 200
        while status != 503:  # until the loop has come to it, which then closes the connection
            kept.request("GET", "/readyz")
            reply = kept.getresponse()
            status = reply.status if reply.read() else 0
        second.request("POST", "/predict", images[2])
        refused = second.getresponse()
        assert (refused.status, json.loads(refused.read())["error"]["status"]) == (503, 503)
        arriving.sendall(images[1][40:])
        gate.open()
        assert first.result().status == 200
        assert read_raw(arriving).status == 200
    server.join()
    assert not server.error
    with pytest.raises(ConnectionRefusedError):
        server.ask("GET", "/healthz")


@pytest.mark.costly
def test_before_the_network_is_loaded_requests_are_refused(
    start: Start, gate: Any, images: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = ServedModel.load

    def load_later(*arguments: Any, **options: Any) -> ServedModel:
        gate.pass_through(0)
        return load(*arguments, **options)

    monkeypatch.setattr(ServedModel, "load", load_later)
    server = start(waits=False)
    gate.sizes.get(timeout=600)
    assert server.ask("GET", "/healthz").status == 200
    assert server.ask("GET", "/readyz").status == server.post("/predict", images[0]).status == 503
    assert b"being loaded" in server.ask("GET", "/").body
    gate.open()
    while server.ask("GET", "/readyz").status != 200:
        pass
    assert server.post("/predict", images[0]).status == 200


@pytest.mark.costly
def test_a_fault_of_the_network_tells_nothing(
    start: Start, images: list[bytes], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    server = start()

    def fail(*_: object) -> None:
        raise ValueError("secret\x1b[31m of /root")

    monkeypatch.setattr(ServedModel, "predict", fail)
    answer = server.post("/predict", images[0])
    assert answer.status == answer.refusal["status"] == 500
    assert b"secret" not in answer.body
    told = capfd.readouterr().err
    assert "secret\\x1b" in told
    assert "Traceback" not in told


def test_the_page_runs_its_own_script_alone(server: Any) -> None:
    first, second = (server.ask("GET", "/") for _ in range(2))
    policy = first.headers["Content-Security-Policy"]
    nonce = policy.partition("script-src 'nonce-")[2].partition("'")[0]
    assert len(nonce) > 20
    assert first.body.count(b"nonce=") == first.body.count(f'nonce="{nonce}"'.encode()) == 2
    assert nonce.encode() not in second.body
    assert policy.startswith("default-src 'none'")
    assert first.headers["X-Content-Type-Options"] == "nosniff"


def test_all_paths_are_described(schema: Any) -> None:
    assert schema["paths"].keys() == PATHS.keys()


def test_those_that_look_after_servers_may_ask_for_heads_alone(server: Any) -> None:
    answers = [server.ask("HEAD", path) for path in ("/healthz", "/readyz", "/metrics", "/")]
    assert [(one.status, one.body) for one in answers] == [(200, b"")] * 4


def test_ready_names_the_classes(server: Any, schema: Any) -> None:
    ready = check(server.ask("GET", "/readyz"), "Ready", schema)
    assert (ready["kind"], ready["classes"]) == ("detector", ["red", "blue and <b>bold</b>"])
    check(server.ask("GET", "/healthz"), "Health", schema)


@pytest.mark.costly
def test_a_classifier_names_classes(start: Start, images: list[bytes], tmp_path: Path) -> None:
    classes = [{"name": name} for name in ("blue", "green", "red")]
    path = tmp_path / "weights.safetensors"
    model = build_classifier("resnet18", 3, image_size=32, padding="symmetric")
    write_weights(model, path, metadata=WeightsMetadata("symmetric", classes, 32, "resnet18"))
    server = start(model_dir=path, top=2)
    found = check(server.post("/predict", images[0]), "Classes", server.ask("GET", "/openapi.json").document)
    expected = gaudi_apps.Classifier.load(path).predict(images[0], top=2)
    assert [one["class"] for one in found["classes"]] == list(expected.names)
    assert [one["label"] for one in found["classes"]] == expected.labels.tolist()
    np.testing.assert_allclose([one["probability"] for one in found["classes"]], expected.probabilities, atol=1e-4)
    assert Image.open(io.BytesIO(server.post("/draw", images[0]).body)).format == "JPEG"


@pytest.mark.slow
def test_a_batch_gives_what_its_images_give_alone(
    detector_network: Any, noise_images: list[bytes], images: list[bytes]
) -> None:
    model = ServedModel(gaudi_apps.Detector(detector_network, ["a", "b"]), "detector", {"score_threshold": 0.05}, 10**6)
    prepared = [model.prepare(one) for one in (*noise_images, *images)]
    together, alone = model.predict(prepared), [model.predict([one])[0] for one in prepared]
    for one, other in zip(together, alone, strict=True):
        assert len(one) == len(other)
        np.testing.assert_allclose(np.sort(one.scores), np.sort(other.scores), atol=1e-3)
    assert sum(map(len, alone)) > 50


@pytest.mark.costly
def test_weights_are_read_once(start: Start, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = list[Path]()

    def read_and_tell(path: Path) -> Any:
        paths.append(path)
        return read_weights(path)

    monkeypatch.setattr(predictor, "read_weights", read_and_tell)
    start()
    assert paths == [weights]


def test_a_port_that_is_taken_is_named(run_main: Callable[..., Any], weights: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_main(run_commands.main, ["serve", "--model_dir", weights, "--port", port])
    assert (done.status, done.error.flag) == (74, "--port")


def test_a_host_that_cannot_be_one_is_named(run_main: Callable[..., Any], weights: Path) -> None:
    done = run_main(run_commands.main, ["serve", "--model_dir", weights, "--port", 0, "--host", "a..b"])
    assert (done.status, done.error.flag) == (74, "--port")


@pytest.mark.parametrize("host", ["", " "])
def test_an_empty_host_is_not_all_of_them(run_main: Callable[..., Any], host: str) -> None:
    done = run_main(run_commands.main, ["serve", "--model_dir", "x", "--port", 0, "--host", host])
    assert (done.status, done.error.flag) == (64, "--host")
    with pytest.raises(ValueError, match="--host"):
        ServeFlags("x", host=host)


def test_a_flag_of_the_other_kind_is_refused(run_main: Callable[..., Any], weights: Path) -> None:
    done = run_main(run_commands.main, ["serve", "--model_dir", weights, "--port", 0, "--top", 3])
    assert (done.status, done.error.flag) == (64, "--top")


def test_a_missing_run_ends_the_program(run_main: Callable[..., Any], tmp_path: Path) -> None:
    done = run_main(run_commands.main, ["serve", "--model_dir", tmp_path / "none", "--port", 0])
    assert done.status == 66
    assert "Traceback" not in done.err


@pytest.mark.parametrize("name", ["tornado", "prometheus_client"])
def test_a_missing_extra_is_named(run_main: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ours = tuple(f"gaudi_apps.inference.serving.{each}" for each in ("server", "service"))
    for module in [one for one in sys.modules if one.startswith((*ours, f"{name}."))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    done = run_main(run_commands.main, ["serve", "--model_dir", "x"])
    assert done.status == 78
    assert isinstance(done.error, MissingExtraError)
    assert done.error.remedy == "pip install 'gaudi-apps[serve]'"


@pytest.mark.parametrize(
    "flag",
    [
        "--port 70000",
        "--max_batch 0",
        "--top 6",
        "--score_threshold .01",
        "--timeout_s 0",
        "--max_megapixels 100",
        "--max_megapixels 1e-9",
    ],
)
def test_a_value_out_of_bounds_is_refused(run_main: Callable[..., Any], flag: str) -> None:
    assert run_main(run_commands.main, ["serve", "--model_dir", "x", *flag.split()]).status == 64
