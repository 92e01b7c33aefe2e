"""The rules of the source tree: layers, rooms, docstrings, names, and what must not be written anywhere."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

OWN_ROOMS = ("commands", "demo", "options", "supervisor")
"""The rooms of the top layer, which is `weir` itself; all other folders of `weir/` are packages."""

LINKED = ("gateway", "scheduler", "schemas", "worker")
"""The packages that lie in the root; `weir/` has a link to each."""

LAYERS = {
    "weir": 6,
    "gateway": 5,
    "durable": 5,
    "jobs": 5,
    "scheduler": 5,
    "worker": 5,
    "console": 5,
    "cluster": 4,
    "perf": 5,
    "calls": 3,
    "bus": 2,
    "http_server": 2,
    "repository": 2,
    "telemetry": 2,
    "access": 1,
    "runtime": 1,
    "schemas": 0,
}
"""A package imports packages of lower layers, and itself."""

SIDEWAYS = {
    "gateway": {"durable": {"api", "background", "ramps", "settings"}, "jobs": {"api", "records"}},
    "durable": {"jobs": {"records", "run"}},
}
"""What a package may import of another one on its layer: by package, the rooms of the other that are made for it."""

ROOMS = {
    "weir": (
        "errors options",
        "backend demo inference server_process supervisor testing",
        "client",
        "commands server",
        "__main__ pytest_plugin",
    ),
    "gateway": (
        "admin cross_site inflation settings",
        "access addresses http2",
        "context",
        "grpc http nats",
        "platforms",
        "metrics parsed_settings",
        "features",
        "main",
    ),
    "durable": (
        "requests settings",
        "api",
        "records",
        "consumer ramps",
        "background",
        "main",
    ),
    "jobs": (
        "formats records",
        "api run",
    ),
    "scheduler": (
        "placement settings",
        "batching",
        "sequences",
        "model_scheduler",
        "service",
        "ownership",
        "main",
    ),
    "worker": (
        "devices python_stub repository_agents settings",
        "backend_api",
        "execution",
        "cuda ensembles",
        "backends",
        "lifecycle",
        "direct_dispatch sequence_reports",
        "batch_dispatch queries",
        "service",
        "main",
    ),
    "console": (
        "history npm settings",
        "collection",
        "api",
        "main",
    ),
    "cluster": ("access audit counters observation status", "rates"),
    "perf": (
        "inputs load",
        "clients",
        "measurement",
        "load_test report",
    ),
    "calls": (
        "error_classes gateway_api model_control payload_store queues regions request_headers request_templates tracing",
        "traffic",
        "catalog trace_feed",
        "cache readiness",
        "in_flight",
        "outbox responses",
        "dispatch",
        "inference",
    ),
    "bus": (
        "message naming turn",
        "links",
        "nats",
        "observation payloads streams",
        "kv",
    ),
    "http_server": (
        "connection_cap connection_memory own_hosts read_turns routing stall_detection tls",
        "asgi",
        "body_reader client_connection door responses",
        "connection tls_listener",
        "listeners",
    ),
    "access": (
        "principal",
        "keys limits policy",
        "audit",
        "gate",
        "tokens",
    ),
    "repository": (
        "dependencies problems",
        "completion paths",
        "stores",
        "config_text layout scheduler_rules",
        "content_digests validation",
        "loading",
    ),
    "telemetry": (
        "instruments line_writer log_settings metrics_config tracing",
        "access_log logs",
    ),
    "runtime": (
        "certificates child_processes control_groups extras folders log_limiter offload_process processes readiness ticks",
        "archives containment process_memory processors",
        "limits loop_lag memory_ledger offload",
        "role_life",
    ),
    "schemas": (
        "config core",
        "wire",
        "kserve",
    ),
}
"""The rooms of each package, which are its folders and top modules, lowest first. A room imports rooms of earlier lines."""

OUTSIDE_OF_SCHEMAS = {"numpy", "msgpack", "msgspec", "pydantic", "orjson", "rapidjson", "google"}
"""What layer 0 may import besides the standard library; of google protobuf alone."""

STUB = "worker/python_stub/"
OUTSIDE_OF_STUB = {"numpy", "msgpack", "triton_python_backend_utils"}
"""The stub runs in the users' environment, so it stands alone: these, the standard library, and its own `_weir_*`."""

MAX_MODULES_IN_FOLDER = 16

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
VAGUE_BUT_GIVEN = {
    "triton_python_backend_utils": "Triton's name, which users' models import",
    "test_triton_python_backend_utils": "its tests",
}

UNSAFE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
"""Loading what they read runs code of whoever wrote it."""

MACHINE_FOLDERS = {"home", "root", "work", "tmp", "usr", "opt", "mnt", "Users", "var"}


class Source(NamedTuple):
    """One Python file: its path relative to the checkout, its lines, its syntax tree and all nodes of that."""

    path: str
    lines: list[str]
    tree: ast.Module
    nodes: list[ast.AST]

    @property
    def package(self) -> str:
        return package_of(module_of(self.path))

    @property
    def room(self) -> str:
        return room_of(module_of(self.path))


def module_of(path: str) -> str:
    """The module in a file: "weir.worker.main" for `worker/main.py`."""
    name = path.removesuffix(".py").replace("/", ".")
    return f"weir.{name}" if name.partition(".")[0] in LINKED else name


def package_of(module: str) -> str:
    """The package of a module: "bus" for `weir.bus.links`, "weir" for `weir.commands.serve`; "" for others."""
    top, _, rest = module.partition(".")
    if top != "weir":
        return ""
    first = rest.partition(".")[0]
    return first if first in LAYERS else "weir"


def room_of(module: str) -> str:
    """The room of a module, which follows its package in its name; "" for the package itself."""
    return f"{module}...".split(".")[1 if package_of(module) == "weir" else 2]


def source(path: str, text: str) -> Source:
    tree = ast.parse(text)
    return Source(path, text.splitlines(), tree, list(ast.walk(tree)))


def paths(*folders: str) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


PRODUCT = paths("weir", *LINKED)
EVERYTHING = PRODUCT + paths("tests", "examples", "benchmarks", "docs")

Rule = Callable[[Source], Iterator[str]]


def imports(of: Source) -> Iterator[tuple[int, str, int]]:
    """(line, module, level of a relative import) of each import, wherever it stands."""
    for node in of.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            is_package = node.module == "weir" or f"{node.module}".removeprefix("weir.") in LAYERS
            names = [f"{node.module}.{alias.name}" for alias in node.names] if is_package else [node.module or ""]
            yield from ((node.lineno, name, node.level) for name in names)


def calls(of: Source) -> Iterator[tuple[ast.Call, str]]:
    """(call, dotted name of the callee) of each call whose callee has a name."""
    for node in of.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node, ast.unparse(node.func)


def strings(of: Source) -> Iterator[tuple[int, str]]:
    for node in of.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def docstrings(of: Source) -> Iterator[tuple[int, str, str]]:
    """(line, name, docstring) of the module and of each class and function that has one."""
    for node in of.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "lineno", 1), getattr(node, "name", of.path), text


def imports_against_the_layers(of: Source) -> Iterator[str]:
    for line, module, level in imports(of):
        package = package_of(module)
        if level:
            yield f"{of.path}:{line}: relative import"
        elif room_of(module) in SIDEWAYS.get(of.package, {}).get(package, set()):
            continue
        elif package in LAYERS and package != of.package and LAYERS[package] >= LAYERS[of.package]:
            yield f"{of.path}:{line}: {of.package} (layer {LAYERS[of.package]}) imports {module} ({LAYERS[package]})"


def imports_against_the_rooms(of: Source) -> Iterator[str]:
    order = {name: number for number, names in enumerate(ROOMS.get(of.package, ())) for name in names.split()}
    if not of.room or of.path.startswith(STUB):
        return
    if of.room != "__init__" and of.room not in order:
        yield f"{of.path}: room {of.room} has no place in ROOMS"
        return
    for line, module, _ in imports(of):
        imported = room_of(module)
        is_other = package_of(module) == of.package and imported in order and imported != of.room
        if is_other and order[imported] >= order.get(of.room, len(order)):
            yield f"{of.path}:{line}: room {of.room} imports room {imported}"


def foreign_imports_of_schemas(of: Source) -> Iterator[str]:
    if of.package == "schemas":
        allowed = sys.stdlib_module_names | OUTSIDE_OF_SCHEMAS | {"weir"}  # the layers say what of it
        yield from _imports_outside(of, allowed)


def foreign_imports_of_the_stub(of: Source) -> Iterator[str]:
    if of.path.startswith(STUB):
        own = {Path(other).stem for other in PRODUCT if Path(other).stem.startswith("_weir_")}
        yield from _imports_outside(of, sys.stdlib_module_names | OUTSIDE_OF_STUB | own)


def _imports_outside(of: Source, allowed: frozenset[str]) -> Iterator[str]:
    for line, module, _ in imports(of):
        if module.partition(".")[0] not in allowed:
            yield f"{of.path}:{line}: imports {module}"


def docstrings_that_lead_elsewhere(of: Source) -> Iterator[str]:
    """A docstring stands alone: it does not begin with "See …", which leaves the reader to look for it."""
    for line, name, text in docstrings(of):
        if "See the module" in text or re.match(r"See\b", text):
            yield f"{of.path}:{line}: {name}: {text.splitlines()[0]}"


def public_classes_without_docstring(of: Source) -> Iterator[str]:
    for node in of.tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
            yield f"{of.path}:{node.lineno}: {node.name}"


def vague_names(of: Source) -> Iterator[str]:
    if of.path.startswith("tests/support/fakes/site/"):
        return  # named as the packages that they stand in for
    for name in (*Path(of.path).parent.parts, Path(of.path).stem):
        if VAGUE_NAMES & set(name.split("_")) and name not in VAGUE_BUT_GIVEN:
            yield f"{of.path}: {name}"


def unsafe_loading(of: Source) -> Iterator[str]:
    for line, module, _ in imports(of):
        if module.partition(".")[0] in UNSAFE_MODULES:
            yield f"{of.path}:{line}: imports {module}"
    for call, name in calls(of):
        if name in ("eval", "exec", "yaml.load", "yaml.unsafe_load"):
            yield f"{of.path}:{call.lineno}: calls {name}"
        for keyword in call.keywords:
            if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False":
                yield f"{of.path}:{call.lineno}: allow_pickle"


def unmarked_asserts(of: Source) -> Iterator[str]:
    """`python -O` removes asserts: none may guard anything, and one that only informs the type checker is marked."""
    for node in of.nodes:
        if isinstance(node, ast.Assert) and "noqa: S101" not in of.lines[node.lineno - 1]:
            yield f"{of.path}:{node.lineno}: assert"


def listening_everywhere(of: Source) -> Iterator[str]:
    """No address but loopback by default. A comparison with an address of the user is not a default."""
    compared = [operand for node in of.nodes if isinstance(node, ast.Compare) for operand in node.comparators]
    for node in of.nodes:
        if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::") and node not in compared:
            yield f"{of.path}:{node.lineno}: {node.value!r}"


def machine_paths(of: Source) -> Iterator[str]:
    """Tests of images and services name the folders of those."""
    if str(of.path).startswith(("tests/deploy/", "tests/support/deploy/")):
        return
    for line, text in strings(of):
        parts = text.split("/")
        if len(parts) > 2 and not parts[0] and parts[1] in MACHINE_FOLDERS and parts[2]:
            yield f"{of.path}:{line}: {text!r}"


def limits_of_time(of: Source) -> Iterator[str]:
    """Whether a test passes does not depend on how busy the machine is, unless it is marked `timing`."""
    if not Path(of.path).name.startswith("test_") or not CLOCKS.search("\n".join(of.lines)):
        return
    for function in of.nodes:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if "pytest.mark.timing" in map(ast.unparse, function.decorator_list):
            continue
        spans = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and _reads_clock(node.value)
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value.op, ast.Sub)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Assert):
                for less in _smaller_sides(node.test):
                    if _reads_clock(less) or (isinstance(less, ast.Name) and less.id in spans):
                        yield f"{of.path}:{node.lineno}: {ast.unparse(node.test)}"


CLOCKS = re.compile(r"\b(time\.(time|monotonic|perf_counter|process_time)(_ns)?|get_running_loop\(\)\.time)\(\)")


def _reads_clock(node: ast.expr) -> bool:
    return CLOCKS.search(ast.unparse(node)) is not None


def _smaller_sides(test: ast.expr) -> Iterator[ast.expr]:
    for node in ast.walk(test):
        if isinstance(node, ast.Compare):
            terms = [node.left, *node.comparators]
            for left, operator, right in zip(terms, node.ops, terms[1:], strict=False):
                if isinstance(operator, ast.Lt | ast.LtE):
                    yield left
                elif isinstance(operator, ast.Gt | ast.GtE):
                    yield right


PRODUCT_RULES: list[Rule] = [
    imports_against_the_layers,
    imports_against_the_rooms,
    foreign_imports_of_schemas,
    foreign_imports_of_the_stub,
    docstrings_that_lead_elsewhere,
    public_classes_without_docstring,
    unmarked_asserts,
    listening_everywhere,
]
RULES: list[Rule] = [vague_names, unsafe_loading, machine_paths, limits_of_time]


@functools.cache
def breaches() -> dict[str, list[str]]:
    """What each rule finds. Each file is parsed once, and its tree dropped: all trees together take 400 MB."""
    found: dict[str, list[str]] = defaultdict(list)
    products = set(PRODUCT)
    for path in EVERYTHING:
        of = source(path, (ROOT / path).read_text())
        for rule in (*PRODUCT_RULES, *RULES) if path in products else RULES:
            found[rule.__name__] += rule(of)
    return found


@pytest.mark.timeout(180)  # the first one has all files parsed
@pytest.mark.parametrize("rule", PRODUCT_RULES, ids=lambda rule: rule.__name__)
def test_the_product_keeps(rule: Rule) -> None:
    assert breaches()[rule.__name__] == []


@pytest.mark.timeout(180)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps(rule: Rule) -> None:
    assert breaches()[rule.__name__] == []


def test_every_package_has_a_layer_and_rooms() -> None:
    packages = {path.parent.name for path in ROOT.glob("weir/*/__init__.py")} - {*OWN_ROOMS}
    assert packages | {"weir"} == LAYERS.keys() == ROOMS.keys()


def test_a_package_is_linked_or_lies_in_weir() -> None:
    """A package in the root has a link, else a checkout would lack it; git keeps the link, not what it leads to."""
    links = {path.name: path.readlink().as_posix() for path in (ROOT / "weir").iterdir() if path.is_symlink()}
    assert links == {name: f"../{name}" for name in LINKED}
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} & LAYERS.keys() == {*LINKED, "weir"}


def test_the_table_of_the_architecture_has_every_package_and_its_rooms() -> None:
    """Rooms are the subfolders that have modules, and the console's page."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = {}
    for layer, folder, rooms in re.findall(r"^\| (\d) \| `([\w/]+)/` \|([^|]*)\|", page, re.MULTILINE):
        listed[folder] = (int(layer), set(re.findall(r"`(\w+)`", rooms)))
    found = {}
    for package, layer in LAYERS.items():
        folder = package if package in (*LINKED, "weir") else f"weir/{package}"
        rooms = {path.parent.name for path in (ROOT / folder).glob("*/*.py")} | {
            name for name in ("web",) if (ROOT / folder / name).is_dir()
        }
        found[folder] = (layer, rooms - LAYERS.keys() if package == "weir" else rooms)
    assert listed == found


def test_the_table_of_the_contributors_has_every_package() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (\d) \| (.*) \|$", page, re.MULTILINE)
    listed = {name: int(layer) for layer, text in rows for name in re.findall(r"`(\w+)`", text)}
    assert listed == LAYERS | dict.fromkeys(OWN_ROOMS, LAYERS["weir"])


def test_every_room_exists() -> None:
    named = {(package, room) for package, lines in ROOMS.items() for line in lines for room in line.split()}
    existing = {(package_of(module), room_of(module)) for module in map(module_of, PRODUCT)}
    assert named - existing == set()


def test_no_folder_holds_more_than_can_be_looked_through() -> None:
    modules = Counter(str(Path(path).parent) for path in PRODUCT if not path.endswith("__init__.py"))
    assert {folder: count for folder, count in modules.items() if count > MAX_MODULES_IN_FOLDER} == {}


def test_given_names_are_still_needed() -> None:
    assert VAGUE_BUT_GIVEN.keys() <= {Path(path).stem for path in EVERYTHING}


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (imports_against_the_layers, "weir/bus/a.py", "def f():\n    from weir.gateway.context import GatewayContext"),
        (imports_against_the_layers, "weir/bus/a.py", "import weir.telemetry.logs"),
        (imports_against_the_layers, "worker/a.py", "from weir.scheduler import service"),
        (imports_against_the_layers, "worker/a.py", "from . import service"),
        (imports_against_the_layers, "gateway/a.py", "from weir.durable.consumer.runner import RequestRunner"),
        (imports_against_the_rooms, "worker/devices/a.py", "from weir.worker.execution.instance import ModelInstance"),
        (imports_against_the_rooms, "worker/devices/a.py", "from weir.worker import service"),
        (imports_against_the_rooms, "worker/nowhere/a.py", ""),
        (foreign_imports_of_schemas, "schemas/a.py", "import nats"),
        (foreign_imports_of_the_stub, STUB + "a.py", "from weir.schemas.core.tensors import Tensor"),
        (docstrings_that_lead_elsewhere, "weir/bus/a.py", 'class A:\n    """See the module."""'),
        (docstrings_that_lead_elsewhere, "weir/bus/a.py", 'def f():\n    """See `Bus`."""'),
        (public_classes_without_docstring, "weir/bus/a.py", "class A:\n    pass"),
        (vague_names, "weir/bus/tensor_utils.py", ""),
        (unsafe_loading, "weir/bus/a.py", "import pickle"),
        (unsafe_loading, "weir/bus/a.py", "numpy.load(file, allow_pickle=True)"),
        (unsafe_loading, "weir/bus/a.py", "eval(text)"),
        (unmarked_asserts, "weir/bus/a.py", "assert user.is_admin"),
        (listening_everywhere, "gateway/a.py", "listen('0.0.0.0')"),
        (limits_of_time, "tests/test_a.py", "def test_a():\n    assert time.monotonic() - began_s < 5"),
        (limits_of_time, "tests/test_a.py", "def test_a():\n    t_s = time.time() - began_s\n    assert 0 < t_s < 1"),
        (machine_paths, "weir/bus/a.py", f"open('{'/home'}/somebody/file')"),
    ],
)
def test_each_rule_finds_what_breaks_it(rule: Rule, path: str, text: str) -> None:
    assert list(rule(source(path, text)))
