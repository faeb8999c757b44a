"""Break the code in small ways and see which tests notice: ``python -m benchmarks.mutations run FOLDER``.

``record FOLDER`` copies the tree, runs all tests once and notes which functions of the packages each test enters.
``run FOLDER`` draws mutations from a seed: a comparison turned round, + for −, another constant, a condition negated,
an argument or a statement dropped, None returned; at most one to a function. Each is applied in a copy of the tree, and
the tests that enter its function are run: those of the short tier, then the long tier's, each up to a limit of time.
``report FOLDER`` prints the shares that either tier notices, and what none does. A run that was stopped is continued.
"""

import argparse
import ast
import copy
import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("captum_norm", "alignment")
TIERS = ("short", "long")
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "node_modules", "__pycache__", ".*_cache", "build", "dist")
TESTS = 80
"""The most tests of a tier that are run for a mutation: of each test function some of its cases."""
MEMORY = 8 * 2**30
"""The most bytes that a process of tests may take, so that a mutation in a loop does not take all there are."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}


@dataclass(frozen=True)
class Mutation:
    """A change of the text of a file.

    Attributes:
        path: the file, relative to the root.
        function: first line of the function around it, decorators included.
        start: offset in the file, in bytes.
        end: likewise.
        line: line number.
        before: the text there.
        after: the text instead.
    """

    path: str
    function: int
    start: int
    end: int
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.path}:{self.line}: {before}  ->  {after}"


def other_operators(node: ast.expr) -> Iterator[ast.expr]:
    """An expression with another operator."""
    changed: Any = copy.deepcopy(node)
    match node:
        case ast.Compare():
            changed.ops[0] = COMPARISONS[type(node.ops[0])]()
            yield changed
        case ast.BinOp() if type(node.op) in OPERATORS and not isinstance(node.left, ast.Constant):
            changed.op = OPERATORS[type(node.op)]()
            yield changed
        case ast.BoolOp():
            changed.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
            yield changed
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield node.operand


def only_checks(node: ast.AST) -> bool:
    """Whether a node is an argument that changes nothing where the code is right."""
    return isinstance(node, ast.keyword) and node.arg == "strict"


def other_operands(node: ast.expr) -> Iterator[ast.expr]:
    """An expression with another constant, the other branch, or an argument less."""
    changed: Any = copy.deepcopy(node)
    match node:
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.IfExp():
            changed.test = ast.UnaryOp(ast.Not(), node.test)
            yield changed
        case ast.Call() if len(node.args) + len(node.keywords) > 1 and not any(map(only_checks, node.keywords)):
            (changed.keywords or changed.args).pop()
            yield changed


def mutants(node: ast.AST) -> Iterator[tuple[Any, ast.expr]]:
    """Nodes to replace and what to write for them."""
    match node:
        case ast.If():
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
        case ast.Return() if node.value is not None and not isinstance(node.value, ast.Constant):
            yield node.value, ast.Constant(None)
        case ast.Expr(value=ast.Call()):
            yield node, ast.Constant(None)
        case ast.expr():
            yield from ((node, mutant) for of in (other_operators, other_operands) for mutant in of(node))


def inside_functions(node: ast.AST, function: int | None = None) -> Iterator[tuple[ast.AST, int]]:
    """All nodes inside functions, each with the first line of its function, but neither types nor words of messages."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Raise | ast.JoinedStr) or only_checks(child):
                continue
            inside = function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = min(part.lineno for part in (child, *child.decorator_list))
            elif function is not None:
                yield child, function
            yield from inside_functions(child, inside)


def mutations(path: str, source: bytes) -> Iterator[Mutation]:
    """All mutations of a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, function in inside_functions(ast.parse(source)):
        for place, mutant in mutants(node):
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            before, after = source[start:end].decode(), f"({ast.unparse(mutant)})"
            yield Mutation(path, function, start, end, place.lineno, before, after)


def drawn(tree: Path, seed: int, count: int, paths: Iterable[str] = PACKAGES) -> list[Mutation]:
    """Mutations of packages, at most one for each function."""
    files = sorted(path for package in paths for path in (tree / package).rglob("*.py"))
    every = [m for file in files for m in mutations(str(file.relative_to(tree)), file.read_bytes())]
    random.Random(seed).shuffle(every)
    chosen = {(mutation.path, mutation.function): mutation for mutation in reversed(every)}
    return [mutation for mutation in every if chosen[mutation.path, mutation.function] is mutation][:count]


class Recorder:
    """A plugin of pytest that notes which functions each test enters, its tier and its processor time."""

    def __init__(self, tree: Path) -> None:
        self.tree, self.tests = tree, dict[str, dict[str, Any]]()
        self.entered, self.ours = set[Any](), dict[Any, bool]()
        self.prefixes = tuple(f"{tree / package}{os.sep}" for package in PACKAGES)

    def _trace(self, frame: Any, _event: str, _argument: Any) -> None:
        code = frame.f_code
        if code not in self.ours:
            self.ours[code] = code.co_filename.startswith(self.prefixes)
        if self.ours[code]:
            self.entered.add(code)

    def pytest_runtest_protocol(self) -> None:
        """Begin a test, with its fixtures."""
        self.entered.clear()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        self.begun = time.process_time()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """End it."""
        seconds = time.process_time() - self.begun
        functions = sorted({self._name(code) for code in self.entered})
        self.tests[nodeid] = {"seconds": round(seconds, 3), "functions": functions}

    def pytest_collection_finish(self, session: Any) -> None:
        """Note the tiers."""
        self.long = {item.nodeid for item in session.items if item.get_closest_marker("long")}

    def _name(self, code: Any) -> str:
        return f"{Path(code.co_filename).relative_to(self.tree)}:{code.co_firstlineno}"

    def save(self, path: Path) -> None:
        """Write all notes as JSON."""
        told = {nodeid: test | {"long": nodeid in self.long} for nodeid, test in self.tests.items()}
        path.write_text(json.dumps(told), encoding="utf-8")


def selected(tests: Iterable[tuple[str, dict[str, Any]]], limit: float) -> list[str]:
    """The tests to run, by turns one that enters few functions and one that enters many; first one case of each."""
    groups = defaultdict[str, list[tuple[str, dict[str, Any]]]](list)
    for nodeid, test in sorted(tests, key=lambda pair: (len(pair[1]["functions"]), pair[0])):
        groups[nodeid.partition("[")[0]].append((nodeid, test))
    chosen, seconds, ordered = list[str](), 0.0, list(groups.values())
    mixed = [group for pair in zip(ordered, reversed(ordered), strict=True) for group in pair][: len(ordered)]
    for turn in range(max(map(len, mixed), default=0)):
        for group in mixed:
            if turn < len(group) and len(chosen) < TESTS and seconds + group[turn][1]["seconds"] < limit:
                chosen.append(group[turn][0])
                seconds += group[turn][1]["seconds"]
    return chosen


def fork(tree: Path, arguments: list[str], limit: float | None, recorder: Recorder | None = None) -> str:
    """Run pytest in a process of its own, which has the libraries already: "passed", "failed" or "hung"."""
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        os.environ["PYTHONPATH"] = str(tree)
        for name in [name for name in sys.modules if name.partition(".")[0] in (*PACKAGES, "tests", "benchmarks")]:
            del sys.modules[name]
        quiet = os.open(tree / "pytest.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        import pytest

        options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = pytest.main([*options, *arguments], plugins=[recorder] if recorder else [])
        if recorder is not None:
            recorder.save(tree.parent / "tests.json")
        os._exit(int(code))
    end = None if limit is None else time.monotonic() + limit
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            # Other codes than 1 are errors where modules are imported.
            return "passed" if os.waitstatus_to_exitcode(status) == 0 else "failed"
        if end is not None and time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hung"
        time.sleep(0.05)


def judge(tree: Path, mutation: Mutation, tests: dict[str, dict[str, Any]], limit: float) -> dict[str, Any]:
    """What the tests of each tier say of a mutation: "passed", "failed", "hung", or "" where none enters it."""
    place = f"{mutation.path}:{mutation.function}"
    path = tree / mutation.path
    source = path.read_bytes()
    said = dict.fromkeys(TIERS, "")
    try:
        path.write_bytes(source[: mutation.start] + mutation.after.encode() + source[mutation.end :])
        for tier in TIERS:
            reaching = [
                (nodeid, test)
                for nodeid, test in tests.items()
                if test["long"] == (tier == "long") and place in test["functions"]
            ]
            chosen = selected(reaching, limit / 4)
            if chosen:
                said[tier] = fork(tree, ["-x", *chosen], limit)
            if said[tier] in ("failed", "hung"):
                break
    finally:
        path.write_bytes(source)
    return {"mutation": asdict(mutation), "said": said}


def copied(folder: Path, name: str) -> Path:
    """A copy of the tree as it was when the tests were recorded."""
    tree = folder / name
    if not tree.exists():
        shutil.copytree(ROOT if name == "tree" else folder / "tree", tree, ignore=LEFT_OUT)
    return tree


def record(folder: Path, arguments: list[str]) -> None:
    """Run all tests once."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = copied(folder, "tree")
    preload()
    fork(tree, arguments, None, Recorder(tree))


def run(folder: Path, seed: int, count: int, limit: float, workers: int, paths: Iterable[str]) -> None:
    """Judge the mutations that were not judged yet."""
    tests = json.loads((folder / "tests.json").read_text(encoding="utf-8"))
    results = folder / "results.jsonl"
    judged = {json.dumps(result["mutation"]) for result in read(results)}
    waiting = [m for m in drawn(folder / "tree", seed, count, paths) if json.dumps(asdict(m)) not in judged]
    trees = SimpleQueue[Path]()
    for worker in range(workers):
        trees.put(copied(folder, f"tree{worker}"))
    preload()
    chosen = selected(tests.items(), limit / 4)
    if fork(folder / "tree", chosen, None) != "passed":
        raise RuntimeError(f"the tests fail without a mutation: see {folder / 'tree' / 'pytest.log'}")

    def work(mutation: Mutation) -> None:
        tree = trees.get()
        try:
            result = judge(tree, mutation, tests, limit)
        finally:
            trees.put(tree)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        print(" ".join(f"{tier} {result['said'][tier] or '-':6}" for tier in TIERS), mutation, flush=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, waiting))
    report(folder)


def read(results: Path) -> list[dict[str, Any]]:
    """The results so far."""
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def report(folder: Path) -> None:
    """Print what either tier noticed, and what none did."""
    results, noticed = read(folder / "results.jsonl"), Counter[str]()
    for result in results:
        said = result["said"]
        killer = next((tier for tier in TIERS if said[tier] in ("failed", "hung")), None)
        noticed[killer or ("no test enters it" if not any(said.values()) else "survived")] += 1
        if killer != "short":
            print(f"{killer or 'none':6}", Mutation(**result["mutation"]))
    both = noticed["short"] + noticed["long"]
    print(f"\n{len(results)} mutations: {dict(noticed)}")
    if both:
        print(f"The short tier notices {noticed['short'] / both:.1%} of the {both} that both tiers together notice.")


def preload() -> None:
    """Import what every test imports, once for all processes."""
    import pytest  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from captum import attr  # noqa: F401

    torch.set_num_threads(1)


def main() -> None:
    """Record, run or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "run", "report"])
    parser.add_argument("folder", type=Path, help="for the copies of the tree and the results")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300, help="how many mutations (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=240, help="seconds for a tier's tests (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="mutations at a time (default: %(default)s)")
    parser.add_argument("--tests", nargs="*", default=[], help="what to record, if not all tests")
    parser.add_argument("--paths", nargs="*", default=PACKAGES, help="folders to mutate (default: both packages)")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    if arguments.action == "record":
        record(folder, arguments.tests)
    elif arguments.action == "run":
        run(folder, arguments.seed, arguments.count, arguments.limit, arguments.workers, arguments.paths)
    else:
        report(folder)


if __name__ == "__main__":
    main()
