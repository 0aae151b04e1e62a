"""A server that speaks S3 over HTTP on loopback, and a proxy before it that answers as stores do on bad days."""

from __future__ import annotations

import http.client
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from gaudi_datasets.commands.data_flags import AnnotatedImages, CocoFlags
from gaudi_datasets.detection.records import write_records
from gaudi_datasets.detection.scenes import make_scenes

BUCKET, FORMER = "bucket", "former"
LISTS = "list-type"  # in the paths of requests for lists of files
SECRET = "a-secret-that-nothing-prints"
_REFUSALS = {"503": (503, "SlowDown"), "403": (403, "AccessDenied"), "expired": (400, "ExpiredToken")}


class Bucket:
    """Tell what was asked of the store, and choose how it answers.

    Attributes:
        faults: one for each of the next requests: "503", "403", "expired", "cut", "stall", "damage" and "spoil"
            (of what is received or sent), "late" (a list of files as it was at `remember`), or "" for none.
        moto: host and port of the server behind the proxy.
        client: of the server, past the proxy.
        aimed: faults of requests of a method whose paths have a part.
        always: the fault of all requests that have none of their own.
        requests: method and path of each request so far.
        stalled: is set once a request stalls.
        released: lets those that stall end.
    """

    def __init__(self, moto: tuple[str, int]) -> None:
        self.moto = moto
        own = {"aws_access_key_id": "testing", "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
        self.client = boto3.client("s3", endpoint_url=f"http://{moto[0]}:{moto[1]}", **own)
        self.faults: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.always = ""
        self.aimed: list[tuple[str, str, str]] = []
        self.requests: list[tuple[str, str]] = []
        self.stalled, self.released = threading.Event(), threading.Event()

    def aim(self, method: str, part: str, *faults: str) -> None:
        """Choose the answers to the next requests of a method whose paths have a part."""
        self.aimed += [(method, part, fault) for fault in faults]

    def next_fault(self, method: str, path: str) -> str:
        for each in self.aimed:
            if method == each[0] and each[1] in path:
                self.aimed.remove(each)
                return each[2]
        try:
            return self.faults.get_nowait()
        except queue.Empty:
            return self.always

    def add_faults(self, *faults: str) -> None:
        for fault in faults:
            self.faults.put(fault)

    def count(self, method: str, part: str) -> int:
        return sum(each == method and part in path for each, path in self.requests)

    def upload(self, folder: Path, prefix: str) -> None:
        for path in sorted(folder.iterdir()):
            self.put(f"{prefix}/{path.name}", path.read_bytes())

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def get(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return content

    def list(self, prefix: str) -> set[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return {each["Key"].removeprefix(prefix).lstrip("/") for each in found}

    def remember(self) -> None:
        """Keep the bucket as it is, for the lists that lag behind from now on."""
        self.client.create_bucket(Bucket=FORMER)
        for name in self.list(""):
            self.client.put_object(Bucket=FORMER, Key=name, Body=self.get(name))

    def flip(self, key: str) -> None:
        """Change a byte in the middle of a file."""
        content = bytearray(self.get(key))
        content[len(content) // 2] ^= 1
        self.put(key, bytes(content))

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=key)


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.bucket.requests.append((self.command, self.path))
        fault = self.bucket.next_fault(self.command, self.path)
        if fault == "stall":
            self.bucket.stalled.set()
            self.bucket.released.wait()
            self.close_connection = True
            return
        if fault in _REFUSALS:
            status, code = _REFUSALS[fault]
            content = f"<Error><Code>{code}</Code><Message>{SECRET}</Message></Error>".encode()
            self._send(status, [("Content-Type", "application/xml")], content, len(content))
            return
        if fault == "spoil" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        connection = http.client.HTTPConnection(*self.bucket.moto)
        path = self.path.replace(f"/{BUCKET}?", f"/{FORMER}?") if fault == "late" else self.path
        connection.request(self.command, path, body=body, headers=dict(self.headers))
        answer = connection.getresponse()
        content, length = answer.read(), int(answer.getheader("Content-Length") or 0)
        connection.close()
        skipped = ("content-length", "transfer-encoding", "connection")
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in skipped]
        if fault == "cut":
            content, self.close_connection = content[: len(content) // 2], True
        elif fault == "damage" and content:
            content = bytes([content[0] ^ 1]) + content[1:]
        self._send(answer.status, headers, content, length)

    def _send(self, status: int, headers: list[tuple[str, str]], content: bytes, length: int) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that are gone."""


@pytest.fixture(scope="session")
def moto() -> Iterator[tuple[str, int]]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture
def bucket(moto: tuple[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    """Begin with an empty bucket, and name the proxy as the store of this process and of those that it starts."""
    found = Bucket(moto)
    connection = http.client.HTTPConnection(*moto)
    connection.request("POST", "/moto-api/reset")
    assert connection.getresponse().status == 200
    connection.close()
    found.client.create_bucket(Bucket=BUCKET)
    server = _Server(("127.0.0.1", 0), type("Proxy", (_Proxy,), {"bucket": found}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _forget_connections()
    yield found
    found.released.set()
    server.shutdown()
    server.server_close()


def _forget_connections() -> None:
    """Have the next test open its own: file systems are kept by their arguments, which do not name the server."""
    import s3fs

    from gaudi_datasets.fetching import stores

    stores._open_file_system.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "scenes"
    make_scenes(folder, train=24, val=8, seed=0, image_size=(120, 120))
    return folder


def open_scenes(scenes: Path, split: str) -> AnnotatedImages:
    return CocoFlags(str(scenes / "annotations" / f"instances_{split}.json"), scenes / split)


@pytest.fixture(scope="session")
def records(scenes: Path) -> Path:
    """Write records of boxes, in three shards a split."""
    folder = scenes.parent / "records"
    for split in ("train", "val"):
        annotations, images = open_scenes(scenes, split).read()
        write_records(annotations, images, folder, split, shards=3, keep_empty=split == "val")
    return folder
