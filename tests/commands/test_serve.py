"""``captum-norm serve``: answers over a real socket, in order, whatever clients send."""

import asyncio
import errno
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from aiohttp import ClientSession, TCPConnector, web

import captum_norm as cn
from captum_norm.commands import serve
from captum_norm.commands.serve import ServeOptions, Service
from captum_norm.loading import load
from tests.commands.calls import refused
from tests.generation.servers import Said, completions

TEXT, ANSWER = "a dog sees the", " cat"
JSON = {"Content-Type": "application/json"}


def started(model: str, token: str | None = None, **options: Any) -> tuple[Service, int]:
    """A service in threads of this process, and its port."""
    service, listening = (
        Service(ServeOptions(model=model, **options), token, web),
        socket.create_server(("127.0.0.1", 0)),
    )
    for target in (lambda: asyncio.run(service.listen(listening)), service.work):
        threading.Thread(target=target, daemon=True).start()
    return service, listening.getsockname()[1]


@pytest.fixture(scope="module")
def port(gpt2: str) -> int:
    return started(gpt2)[1]


def sent(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, content, JSON | {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    found = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return found


def asked(port: int, body: Any, **headers: str) -> tuple[int, Any]:
    status, _, content = sent(port, "POST", "/explain", body, **headers)
    return status, json.loads(content)


def test_an_answer_is_the_apis(port: int, gpt2: str) -> None:
    model, tokenizer = load(gpt2)
    expected: Any = cn.GenerationAttribution(cn.DecompX(model), tokenizer).attribute(TEXT, ANSWER, segments="word")
    status, content = asked(port, {"prompt": TEXT, "answer": ANSWER, "method": "decompx", "segments": "word"})
    assert status == 200
    assert content["scores"] == expected.seq_attr.tolist()
    assert content["segment_scores"] == expected.segment_attr.tolist()
    assert content["outputs"][0]["name"] == expected.outputs[0].name
    assert (content["model"], content["method"], content["gap"]) == (gpt2, "decompx", None)
    status, headers, page = sent(port, "GET", content["page"])
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"<!doctype html>" in page[:20].lower()
    assert headers.items() >= serve._HEADERS.items()


def test_what_a_server_answered(port: int, gpt2: str) -> None:
    model, tokenizer = load(gpt2)
    prompt, answer = tokenizer(TEXT)["input_ids"], tokenizer(ANSWER)["input_ids"]
    record = completions(Said(model, tokenizer, prompt, answer, tokenizer.sep_token_id, text=TEXT))
    status, content = asked(port, record | {"method": "decompx"})
    assert status == 200
    assert content["gap"][1] < 1e-5
    for choice in record["response"]["choices"]:
        choice["logprobs"]["token_logprobs"] = [-30.0] * len(choice["token_ids"])
    status, content = asked(port, record)
    assert (status, "expected 0.5 on average" in content["error"]) == (400, True)
    assert asked(port, record | {"max_gap": 40})[0] == 200


def test_the_description_has_what_may_be_asked(port: int) -> None:
    status, headers, content = sent(port, "GET", "/openapi.json")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    described = json.loads(content)
    assert set(described["paths"]) == {"/explain", "/page/{name}", "/openapi.json"}
    schemas = described["paths"]["/explain"]["post"]["requestBody"]["content"]["application/json"]["schema"]["oneOf"]
    assert {name for schema in schemas for name in schema["properties"]} == {
        *serve._KINDS,
        "prompt",
        "request",
        "response",
    }


GOOD = {"prompt": TEXT, "answer": ANSWER}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "the request is not JSON"),
        (b"{", 400, "the request is not JSON"),
        (b"\xff\xfe", 400, "the request is not JSON"),
        (b"[" * 200_000, 400, "is not JSON"),
        (b'{"prompt": ' + b"[" * 200_000, 400, "is not JSON"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", 400, "the request is not JSON"),
        (b" " * (serve._LARGEST_BODY + 1), 413, "Maximum request body size"),
        ([], 400, "expected an object with a prompt"),
        ({}, 400, "expected an object with a prompt"),
        ({"prompt": TEXT, "response": {}}, 400, "expected an object with a prompt"),
        ({"prompt": None}, 400, "got the prompt None"),
        ({"prompt": 7}, 400, "got the prompt 7"),
        ({"prompt": [[1]]}, 400, "got the prompt"),
        ({"prompt": [{"role": "user", "content": TEXT}]}, 400, "no chat template"),
        ({"prompt": "a dog " * 1000}, 400, "takes at most"),
        ({"response": 7}, 400, "got the response 7"),
        ({"response": {"choices": [{"text": 3}]}, "request": {"prompt": TEXT}}, 400, "got text=3"),
        (b'{"prompt": NaN}', 400, "got the prompt nan"),
        (b'{"prompt": "a", "max_gap": NaN, "response": {}}', 400, "expected an object with a prompt"),
        (GOOD | {"answer": 3}, 400, "got 'answer': 3"),
        (GOOD | {"choice": True}, 400, "got 'choice': True"),
        (GOOD | {"segments": {}}, 400, "got 'segments': {}"),
        (GOOD | {"segments": [3]}, 400, "the segment 3 is not in the prompt"),
        (GOOD | {"out": "/etc/passwd"}, 400, "got 'out'"),
        (GOOD | {"model": "gpt2"}, 400, "got 'model'"),
        (GOOD | {"method": "os:system"}, 400, "got method='os:system'; expected one of"),
        (GOOD | {"method": "decompxx"}, 400, "did you mean decompx?"),
        ({"prompt": TEXT, "generate": 10**9}, 400, "at most 4,096"),
        ({"prompt": TEXT, "generate": 10**400}, 400, "generate"),
        (GOOD | {"generate": 3}, 400, "a given answer is not generated"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(port: int, body: Any, status: int, message: str) -> None:
    found, content = asked(port, body)
    assert (found, message in content["error"]) == (status, True), content
    assert "\n" not in content["error"]
    assert asked(port, GOOD)[0] == 200


def test_pages_elsewhere_reach_nothing(port: int) -> None:
    """Neither by a name of theirs for this machine, nor by a form; and not without a path."""
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[::1", "a b"):
        assert asked(port, GOOD, Host=host)[0] == 403
    assert asked(port, GOOD, Host="localhost")[0] == 200
    status, content = asked(port, GOOD, Content_Type="text/plain")
    assert (status, content["error"]) == (415, "send JSON, with Content-Type: application/json")
    for method, path, expected in (("GET", "/page/1", 404), ("GET", "/", 404), ("GET", "/explain", 405)):
        status, headers, content = sent(port, method, path)
        assert (status, headers.items() >= serve._HEADERS.items()) == (expected, True)
        assert json.loads(content)["error"]


def test_a_token_is_asked_for(gpt2: str) -> None:
    _, port = started(gpt2, "secret")
    for value in ("", "secret", "Bearer secre", "Bearer sécret", "\xff", "Basic secret"):
        assert asked(port, GOOD, Authorization=value)[0] == 401
    status, content = asked(port, GOOD, Authorization="Bearer secret", Host="explain.example")
    assert status == 200
    assert sent(port, "GET", content["page"])[0] == 200  # its name is secret
    assert sent(port, "GET", "/openapi.json")[0] == 401


def test_a_full_queue_refuses_and_pages_are_forgotten(gpt2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_MOST_PAGES", 3)
    service, port = started(gpt2, queue=2)
    going_on, answer = threading.Event(), service.answer
    monkeypatch.setattr(service, "answer", lambda body: going_on.wait(60) and answer(body))
    with ThreadPoolExecutor(8) as clients:
        found = [clients.submit(asked, port, GOOD) for _ in range(8)]
        while sum(one.done() for one in found) < 5:
            going_on.wait(0.01)
        going_on.set()
        statuses = sorted(one.result()[0] for one in found)
    assert statuses == [200] * 3 + [429] * 5  # one in work, two wait
    pages = [asked(port, GOOD)[1]["page"] for _ in range(4)]
    assert [sent(port, "GET", page)[0] for page in pages] == [404, 200, 200, 200]
    assert len(service.pages) == 3


def test_a_bug_is_no_end(gpt2: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _, port = started(gpt2)
    with monkeypatch.context() as changed:
        changed.setattr(serve, "explain_answer", lambda *_: 1 / 0)
        status, content = asked(port, GOOD)
        assert (status, content["error"]) == (500, "captum-norm failed; its terminal says where")
    assert "ZeroDivisionError" in caplog.text
    assert asked(port, GOOD)[0] == 200


async def _asked_at_once(port: int, bodies: list[Any], answered: list[int]) -> None:
    async with ClientSession(connector=TCPConnector(limit=0)) as session:

        async def ask(number: int, body: Any) -> None:
            async with session.post(f"http://127.0.0.1:{port}/explain", json=body) as response:
                assert response.status == 200
                assert (await response.json())["prompt"] == body["prompt"]
            answered.append(number)

        await asyncio.gather(*(ask(number, body) for number, body in enumerate(bodies)))


def bodies(count: int) -> list[Any]:
    words = ["a", "dog", "sees", "the", "cat", "runs"]
    return [
        {"prompt": " ".join(words[(number >> place) % 6] for place in range(8)), "answer": " cat"}
        for number in range(count)
    ]


@pytest.mark.long
def test_200_requests_at_once_are_answered_in_order(gpt2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service, port = started(gpt2, queue=256)
    came, put = list[bytes](), service.jobs.put_nowait

    def noted(job: Any) -> None:
        came.append(job[0])
        put(job)

    monkeypatch.setattr(service.jobs, "put_nowait", noted)
    asked_for, answered = bodies(200), list[int]()
    asyncio.run(_asked_at_once(port, asked_for, answered))
    assert [json.loads(body) for body in came] == [asked_for[number] for number in answered]


# Shells let their background ignore Ctrl-C.
PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from captum_norm.cli import main; "
)
PROGRAM += "sys.exit(main(sys.argv[1:]))"


class Processes(list["subprocess.Popen[str]"]):
    """Commands, run as users do."""

    def start(self, model: str, port: int = 0) -> int:
        """Start one and return its port."""
        words = ["serve", "--model", model, "--port", str(port), "--queue", "256"]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.append(process)
        assert process.stdout is not None
        return int(process.stdout.readline().partition("127.0.0.1:")[2].partition(",")[0])


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    for process in made:
        process.kill()
        process.communicate()


@pytest.mark.long
@pytest.mark.rest
def test_memory_does_not_grow(gpt2: str, processes: Processes) -> None:
    port, sizes = processes.start(gpt2), list[int]()
    process = psutil.Process(processes[0].pid)
    for count in (100, 50, 100):
        asyncio.run(_asked_at_once(port, bodies(count), []))
        sizes.append(process.memory_info().rss)
    # 64 pages and the allocators are full after the first ones; 100 more pages of a quarter of a megabyte are 25.
    assert sizes[-1] - sizes[1] < 12 << 20, sizes


@pytest.mark.long
def test_a_killed_server_starts_again_at_once(gpt2: str, processes: Processes) -> None:
    port = processes.start(gpt2)
    with ThreadPoolExecutor(20) as clients:
        found = [clients.submit(asked, port, body) for body in bodies(20)]
        found[0].result()
        processes[0].kill()
        errors = [one.exception() for one in found]
    gone = (ConnectionResetError, ConnectionRefusedError, RemoteDisconnected)
    assert all(error is None or isinstance(error, gone) for error in errors)
    assert processes.start(gpt2, port) == port
    assert asked(port, GOOD)[0] == 200


@pytest.mark.long
@pytest.mark.parametrize("busy", [False, True])
def test_ctrl_c_ends_it(gpt2: str, busy: bool, processes: Processes) -> None:
    port = processes.start(gpt2)
    with ThreadPoolExecutor(30) as clients:
        found = [clients.submit(asked, port, body) for body in bodies(30 * busy)]
        for one in found[:1]:
            one.result()
        processes[0].send_signal(signal.SIGINT)
        assert processes[0].communicate(timeout=60)[1] == "captum-norm: interrupted\n"
        assert processes[0].returncode == 130
        assert all(isinstance(one.exception(timeout=60), OSError | None) for one in found)


@pytest.mark.parametrize("interrupted", [False, True])
def test_nothing_is_said_of_a_socket_that_ctrl_c_closed_before_it_was_served(interrupted: bool) -> None:
    class Starting:
        async def listen(self, listening: socket.socket) -> None:
            if interrupted:
                listening.close()
            raise OSError(errno.EBADF, "Bad file descriptor")

    ends = nullcontext() if interrupted else pytest.raises(OSError, match="Bad file")
    with socket.create_server(("127.0.0.1", 0)) as listening, ends:
        serve._listen(cast(Service, Starting()), listening)


def test_the_command_refuses_what_it_cannot_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CAPTUM_NORM_TOKEN", raising=False)
    assert "got --host 0.0.0.0 and no --token" in refused(capsys, "serve", "--host", "0.0.0.0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen at 127.0.0.1" in refused(capsys, "serve", "--port", str(taken.getsockname()[1]))
    assert "cannot listen at nowhere.invalid" in refused(capsys, "serve", "--host", "nowhere.invalid", "--token", "a")
    assert "expected a port from 0 to 65535" in refused(capsys, "serve", "--port", "70000")
    assert "there is no such folder" in refused(capsys, "serve", "--model", "./missing", "--port", "0")
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert "pip install 'captum-norm[serve]'" in refused(capsys, "serve", "--port", "0")
    assert not list(Path().iterdir())
