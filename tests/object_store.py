"""An S3 server on this machine, which counts requests, and refuses those it is told to."""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "bucket"


class Request(NamedTuple):
    """A request, such as ``GET /bucket/text``."""

    method: str
    path: str
    query: str


class Refusal(NamedTuple):
    """An error in S3's words."""

    status: str
    code: str
    message: str


DENIED = Refusal("403 Forbidden", "AccessDenied", "Access Denied")
FULL = Refusal("400 Bad Request", "QuotaExceeded", "The quota of the bucket is exceeded")


class ObjectStore:
    """A server with a bucket, the requests that it answered in their order, and what says which it refuses."""

    def __init__(self, port: int) -> None:
        self.requests: list[Request] = []
        self.refuse: Callable[[Request], Refusal | None] = lambda _: None
        self._application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", port, self._answer, threaded=True, request_handler=_Quiet)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.files = S3FileSystem(use_listings_cache=False)
        self.files.call_s3("create_bucket", Bucket=BUCKET)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    @contextmanager
    def refusing(self, refuse: Callable[[Request], Refusal | None]) -> Iterator[None]:
        """Refuse some requests inside the context."""
        self.refuse = refuse
        try:
            yield
        finally:
            self.refuse = lambda _: None

    def tree(self, prefix: str = "") -> dict[str, bytes]:
        """The contents of all objects whose names begin so."""
        paths = self.files.find(BUCKET)
        names = [path.removeprefix(f"{BUCKET}/") for path in paths]
        return {name: self.files.cat_file(f"{BUCKET}/{name}") for name in names if name.startswith(prefix)}

    def put(self, name: str, content: bytes) -> str:
        """Write an object; return its URL."""
        self.files.pipe_file(f"{BUCKET}/{name}", content)
        return f"s3://{BUCKET}/{name}"

    def uploads(self) -> list[Any]:
        """Unfinished uploads."""
        found: list[Any] = self.files.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads", [])
        return found

    def _answer(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        request = Request(environment["REQUEST_METHOD"], environment["PATH_INFO"], environment["QUERY_STRING"])
        refusal = self.refuse(request)
        if refusal is None:
            self.requests.append(request)
            answer: Iterable[bytes] = self._application(environment, start)
            return answer
        environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
        body = f"<Error><Code>{refusal.code}</Code><Message>{refusal.message}</Message></Error>".encode()
        start(refusal.status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [] if request.method == "HEAD" else [body]


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        pass


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port


def environment(port: int) -> Mapping[str, str]:
    """What tells the libraries, in every process, to use the server on a port."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }
