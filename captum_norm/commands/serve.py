"""Runs ``captum-norm serve``, which explains answers over HTTP, one at a time, in the order in which they came."""

import asyncio
import logging
import os
import queue
import secrets
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from captum_norm.checks import check_choice, check_count, quoted
from captum_norm.commands import shared
from captum_norm.commands.explain import ExplainOptions, explain_answer
from captum_norm.commands.program import Command, Options, option
from captum_norm.errors import CaptumNormError, InvalidInputError
from captum_norm.loading import LANGUAGE_MODEL, Quantization
from captum_norm.methods import METHODS
from captum_norm.results.tables import json_text

_LARGEST_BODY, _MOST_PAGES, _MOST_TOKENS = 1 << 23, 64, 4096
_PAGES, _LOOPBACK = ("/page/{name}", "/openapi.json"), ("127.0.0.1", "localhost")
_port = shared.whole_number("a port from 0 to 65535", lambda number: number < 1 << 16)
_KINDS: dict[str, Any] = dict.fromkeys(("method", "answer", "contrast"), str)
_KINDS |= {"segments": str | list, "generate": int, "choice": int, "max_gap": float | int}
_HEADERS = {"Cache-Control": "no-store", "Content-Security-Policy": "frame-ancestors 'none'"}
_HEADERS |= {"Cross-Origin-Resource-Policy": "same-origin", "X-Content-Type-Options": "nosniff"}
_HEADERS |= {"Referrer-Policy": "no-referrer"}  # who knows the address of a page may read it


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Options):
    """The options of ``captum-norm serve``."""

    model: str = option("a model: a folder, or a name on the Hugging Face hub", LANGUAGE_MODEL, metavar="NAME_OR_PATH")
    quantize: Quantization | None = shared.quantize_option()
    device: str = shared.device_option()
    host: str = option("the address to listen at", "127.0.0.1", metavar="ADDRESS")
    port: int = option("the port to listen at; 0 for a free one", 8765, parse=_port, metavar="N")
    token: str | None = option("what requests must send, Authorization: Bearer TOKEN (default: CAPTUM_NORM_TOKEN)")
    queue: int = option("refuse requests while so many wait", 32, parse=shared.positive, metavar="N")


def _run(options: ServeOptions) -> None:
    from captum_norm.commands.terminal import Terminal

    token = options.token or os.environ.get("CAPTUM_NORM_TOKEN")
    if token is None and options.host not in _LOOPBACK:
        raise InvalidInputError(f"got --host {options.host} and no --token; without one, only {_LOOPBACK[0]} is served")
    try:
        from aiohttp import web

        listening = socket.create_server((options.host, options.port))
    except ModuleNotFoundError as error:
        raise InvalidInputError("serve needs aiohttp: pip install 'captum-norm[serve]'") from error
    except OSError as error:
        raise InvalidInputError(f"cannot listen at {options.host}, port {options.port}: {error}") from error
    with listening:
        service = Service(options, token, web)
        threading.Thread(target=_listen, args=(service, listening), daemon=True).start()
        Terminal().say(f"listening at http://{options.host}:{listening.getsockname()[1]}, see /openapi.json")
        service.work()


def _listen(service: "Service", listening: socket.socket) -> None:
    try:
        asyncio.run(service.listen(listening))
    except OSError:
        if listening.fileno() >= 0:  # Ctrl-C has not closed it
            raise


class Service:
    """Takes requests on one thread, and explains them in their order on the one that works, which Ctrl-C ends."""

    def __init__(self, options: ServeOptions, token: str | None, web: Any) -> None:
        self.base = ExplainOptions(model=options.model, quantize=options.quantize, device=options.device)
        self.model, self.tokenizer = self.base.load(answers=True)
        self.token, self.web, self.pages = token, web, dict[str, bytes]()
        self.jobs: queue.Queue[tuple[bytes, Future[tuple[int, str]]]] = queue.Queue(options.queue)

    async def listen(self, listening: socket.socket) -> None:
        """Take requests as long as the process lives."""
        web = self.web
        app = web.Application(client_max_size=_LARGEST_BODY, middlewares=[web.middleware(partial(self.guard))])
        app.add_routes([web.post("/explain", self.explain), *(web.get(path, self.page) for path in _PAGES)])
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.SockSite(runner, listening, backlog=512).start()
        await asyncio.Event().wait()

    async def guard(self, request: Any, handler: Any) -> Any:
        """Refuse strangers, and answer errors as JSON."""
        try:
            sent, needed = request.headers.get("Authorization", ""), f"Bearer {self.token}"
            # Without a token, a page elsewhere may give its own name this machine's address.
            if self.token is None and request.host.partition(":")[0] not in _LOOPBACK:
                raise self.web.HTTPForbidden(text=f"got the host {quoted(request.host)}; expected {_LOOPBACK[0]}")
            granted = self.token is None or request.path.startswith("/page/")
            if not granted and not secrets.compare_digest(sent.encode(errors="replace"), needed.encode()):
                raise self.web.HTTPUnauthorized(text="send the header Authorization: Bearer TOKEN")
            response = await handler(request)
        except self.web.HTTPException as error:
            response = self.web.json_response({"error": error.text}, status=error.status)
        response.headers.update(_HEADERS)
        return response

    async def explain(self, request: Any) -> Any:
        """Wait for an explanation."""
        if request.content_type != "application/json":  # which a page elsewhere cannot send unasked
            raise self.web.HTTPUnsupportedMediaType(text="send JSON, with Content-Type: application/json")
        job = Future[tuple[int, str]]()
        try:
            self.jobs.put_nowait((await request.read(), job))
        except queue.Full:
            raise self.web.HTTPTooManyRequests(text=f"{self.jobs.maxsize} requests wait; try again later") from None
        status, text = await asyncio.wrap_future(job)
        return self.web.Response(status=status, text=text, content_type="application/json")

    async def page(self, request: Any) -> Any:
        """Return a page, or the description of requests."""
        if request.path == "/openapi.json":
            return self.web.FileResponse(Path(__file__).with_name("openapi.json"))
        if (html := self.pages.get(request.match_info["name"])) is None:
            raise self.web.HTTPNotFound(text=f"there is no such page; the last {_MOST_PAGES} are kept")
        return self.web.Response(body=html, content_type="text/html", charset="utf-8")

    def work(self) -> None:
        """Explain what was asked, as long as the process lives; who left is not answered."""
        while True:
            body, job = self.jobs.get()
            if job.set_running_or_notify_cancel():
                job.set_result(self.answer(body))

    def answer(self, body: bytes) -> tuple[int, str]:
        """Return status and JSON."""
        try:
            result = explain_answer(*self.asked(body), self.model, self.tokenizer)
            name, kept = secrets.token_urlsafe(16), list(self.pages.items())[1 - _MOST_PAGES :]
            self.pages = dict([*kept, (name, result.file_bytes(".html"))])
            return 200, f'{{"page": "/page/{name}", {result.file_bytes(".json").decode()[1:]}'
        except CaptumNormError as error:
            return 400, json_text({"error": str(error)})
        except Exception:
            logging.getLogger(__name__).exception("a request failed")
            return 500, json_text({"error": "captum-norm failed; its terminal says where"})

    def asked(self, body: bytes) -> tuple[ExplainOptions, Any]:
        """Read options, and a prompt or the content of a response."""
        from captum_norm.generation.responses import parsed

        content = parsed(body.decode(errors="replace"), "the request")
        if not isinstance(content, dict) or ("prompt" in content) == ("response" in content):
            raise InvalidInputError("expected an object with a prompt, or with a request and its response")
        given = {name: entry for name, entry in content.items() if name not in ("prompt", "request", "response")}
        for name, entry in given.items():
            if not isinstance(entry, _KINDS.get(name, ())) or isinstance(entry, bool):
                raise InvalidInputError(f"got {quoted(name)}: {quoted(entry)}; /openapi.json says what is expected")
        check_choice("method", given.get("method", "norm"), METHODS)
        check_count("generate", given.get("generate", 1), _MOST_TOKENS)
        options = replace(self.base, out=[Path("page.html")], target=given.pop("answer", None), **given)
        return (options, content["prompt"]) if "prompt" in content else (replace(options, response=Path()), content)


COMMAND = Command("serve", "explain answers over HTTP", ServeOptions, _run, "captum-norm serve --port 8765")
