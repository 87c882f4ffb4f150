"""The rules of the house, each a function from a source tree to its violations.

``test_house.py`` runs them on this tree and tries each on planted violations.
"""

import ast
import functools
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

RULES: list[Callable[[Path], list[str]]] = []

HOST_WING = ("pool", "tasks", "agents", "evaluate")
ROOMS_BELOW_TRAIN = (
    "model",
    "algorithms",
    "kernels.drift",
    "kernels.routers",
    "batch",
    "mesh",
    "pool",
    "tasks.contract",
    "evaluate",
    "forecast.chips",
)

# What a room may import of ours, besides itself. A dotted entry opens one file of a room.
FLOORS = {
    "kernels": (),
    "batch": (),
    "mesh": (),
    # A sampler speaks the pool's records, which hold no jax.
    "model": (
        "batch",
        "mesh",
        "kernels.routers",
        "kernels.readings",
        "pool.contract",
        "pool.rollout",
    ),
    "algorithms": ("batch", "kernels"),
    "train": ROOMS_BELOW_TRAIN,
    "serve": ROOMS_BELOW_TRAIN,
    "pool": (),
    "tasks": ("pool.rollout",),
    "evaluate": ("pool", "tasks.contract"),
    "agents": ("pool", "tasks", "evaluate"),
}

# Where a third party may be imported: rooms, or files.
CONFINED = {
    "flax": ("model/",),
    "optax": ("train/",),
    "orbax": ("train/checkpoint.py", "model/versions.py"),
}

# What a start of a run would wait for; in these rooms it is imported where it is used.
SLOW = ("grain", "matplotlib", "scipy")
STARTED = ("model", "train", "pool", "tasks", "evaluate")

DRAWERS = {"util", "utils", "common", "misc", "helper", "helpers", "shared", "stuff"}
CONFIG_NAMES = re.compile(r"(^|_)(config|cfg|conf|settings|sections)$")


def rule(check: Callable[[Path], list[str]]) -> Callable[[Path], list[str]]:
    """Register a rule."""
    RULES.append(check)
    return check


@functools.cache
def parsed(text: str) -> ast.Module:
    """A file's syntax tree; each rule reads all files."""
    return ast.parse(text)


def sources(root: Path, *folders: str) -> Iterator[tuple[str, ast.Module]]:
    """(path relative to root, syntax tree) of each python file under the folders."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root).as_posix(), parsed(path.read_text())


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import, wherever it stands; a relative one keeps its dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "importlib.import_module",
            "import_module",
            "__import__",
        ):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)


def within(name: str, prefix: str) -> bool:
    """Is the dotted name the prefix or below it?"""
    return name == prefix or name.startswith(prefix + ".")


def room(path: str) -> str:
    """``jaxrl/train/step.py`` -> ``train``; ``jaxrl/batch.py`` -> ``batch``."""
    return path.split("/")[1].removesuffix(".py")


def package_of(requirement: str) -> str:
    """``ml-collections>=1.1`` -> ``ml_collections``, the name that is imported."""
    name = re.split(r"[^\w.-]", requirement)[0].replace("-", "_")
    return {"absl_py": "absl", "orbax_checkpoint": "orbax", "PyYAML": "yaml"}.get(name, name)


def docstring_lines(tree: ast.AST) -> set[int]:
    """Lines of all docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                lines.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def code_lines(text: str) -> set[int]:
    """Lines that hold code: no docstrings, comments or blanks."""
    silent = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(parsed(text))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_protocol(node: ast.ClassDef) -> bool:
    """Does the class describe others instead of doing something?"""
    return any(ast.unparse(base).split("[")[0].split(".")[-1] == "Protocol" for base in node.bases)


@rule
def floors(root: Path) -> list[str]:
    """Imports go strictly down, and are absolute."""
    found = []
    for path, tree in sources(root, "jaxrl"):
        here = room(path)
        for line, name in imports(tree):
            if name.startswith("."):
                found.append(f"{path}:{line}: relative import {name}; write it from jaxrl")
            elif name.split(".")[0] in ("configs", "experiments", "tests"):
                found.append(f"{path}:{line}: jaxrl may not import {name}")
            elif within(name, "jaxrl") and here in FLOORS:
                allowed = [f"jaxrl.{entry}" for entry in (here, *FLOORS[here])]
                if not any(within(name, entry) for entry in allowed):
                    found.append(f"{path}:{line}: {here} may not import {name}; allowed: {allowed}")
    return found


@rule
def third_parties(root: Path) -> list[str]:
    """flax, optax and orbax stay in their rooms; kernels are jax alone; no jax on the host wing."""
    found = []
    for path, tree in sources(root, "jaxrl"):
        for line, name in imports(tree):
            top = name.split(".")[0]
            if top in CONFINED and not any(
                path.startswith(f"jaxrl/{place}") for place in CONFINED[top]
            ):
                found.append(f"{path}:{line}: {top} is imported in {', '.join(CONFINED[top])} only")
            if room(path) in HOST_WING and top in (
                "jax",
                "jaxlib",
                "flax",
                "optax",
                "orbax",
                "chex",
            ):
                found.append(f"{path}:{line}: the host wing may not import {top}")
            if room(path) == "kernels" and top not in (
                "jax",
                "jaxtyping",
                "jaxrl",
                *sys.stdlib_module_names,
            ):
                found.append(f"{path}:{line}: a kernel imports jax and jaxtyping, not {top}")
    return found


@rule
def slow_imports(root: Path) -> list[str]:
    """What is slow to load and not needed for a first step does not stand at a file's top."""
    return [
        f"{path}:{line}: {name} is slow to load; import it where it is used"
        for path, tree in sources(root, "jaxrl")
        for node in tree.body
        if room(path) in STARTED and isinstance(node, ast.Import | ast.ImportFrom)
        for line, name in imports(node)
        if name.split(".")[0] in SLOW
    ]


@rule
def dependencies(root: Path) -> list[str]:
    """What is imported is declared in pyproject.toml, and what all must install is imported."""
    project = root / "pyproject.toml"
    declared = tomllib.loads(project.read_text())["project"] if project.exists() else {}
    base = {package_of(entry) for entry in declared.get("dependencies", ())}
    extras = declared.get("optional-dependencies", {})
    more = {package_of(entry) for name in extras if name != "test" for entry in extras[name]}
    found, used = [], set()
    for path, tree in sources(root, "jaxrl", "configs"):
        for line, name in imports(tree):
            top = name.split(".")[0]
            used.add(top)
            if top not in {"", "jaxrl", "configs", *sys.stdlib_module_names, *base, *more}:
                found.append(f"{path}:{line}: {top} is not among pyproject.toml's dependencies")
    found += [f"pyproject.toml: {name} is imported nowhere" for name in sorted(base - used)]
    return found


@rule
def outside(root: Path) -> list[str]:
    """configs import ml_collections and each other; sweeps their lists; oracles numpy alone."""
    found = []
    for path, tree in sources(root, "configs", "experiments", "tests/papers"):
        names = [name for _, name in imports(tree)]
        folder, tops = path.split("/")[0], {name.split(".")[0] for name in names}
        lists = all(within(name, "jaxrl.sweep") for name in names)
        if folder == "configs" and not tops <= {"ml_collections", "configs", "typing"}:
            found.append(f"{path}: configs import ml_collections and configs, not {sorted(tops)}")
        elif folder == "experiments" and path.count("/") == 1 and not lists:
            found.append(f"{path}: a sweep imports nothing but jaxrl.sweep, not {sorted(names)}")
        elif folder == "tests" and not tops <= {"numpy", *sys.stdlib_module_names}:
            found.append(f"{path}: an oracle imports numpy alone, not {sorted(tops)}")
    return found


@rule
def sizes(root: Path) -> list[str]:
    """In code lines: kernel body 25, function 60, kernel file 200, algorithm 120, any file 400."""
    found = []
    for path, tree in sources(root, "jaxrl", "configs", "experiments", "tests"):
        if path == "tests/kernels/cases.py":
            continue
        code = code_lines((root / path).read_text())
        limit = (
            200
            if path.startswith("jaxrl/kernels/")
            else 120
            if path.startswith("jaxrl/algorithms/")
            else 400
        )
        if len(code) > limit:
            found.append(f"{path}: {len(code)} code lines; at most {limit}")
        for function in functions(tree):
            where = f"{path}:{function.lineno}: {function.name}"
            end = function.end_lineno or function.lineno
            whole = code & set(range(function.lineno, end + 1))
            body = code & set(range(function.body[0].lineno, end + 1))
            if len(whole) > 60 and not path.startswith("configs/"):
                found.append(f"{where} has {len(whole)} code lines; at most 60")
            if len(body) > 25 and path.startswith("jaxrl/kernels/"):
                found.append(f"{where}'s body has {len(body)} code lines; at most 25")
    return found


@rule
def tree_shape(root: Path) -> list[str]:
    """Rooms are flat and named for what they hold; ``__init__`` is a sign; no file is empty."""
    found = []
    for path, tree in sources(root, "jaxrl", "configs", "experiments", "tests"):
        names = path.removesuffix(".py").split("/")
        if DRAWERS & set(names):
            found.append(f"{path}: a drawer; name the file for what it holds")
        if names[0] == "jaxrl" and len(names) > 3:
            found.append(f"{path}: rooms are flat")
        signed = ast.get_docstring(tree) is not None
        if names[-1] == "__init__" and (not signed or len(tree.body) > 1):
            found.append(f"{path}: an __init__ holds a docstring and nothing else")
        held = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
        if names[-1] != "__init__" and len(held) <= signed:
            found.append(f"{path}: an empty file; write it when there is something in it")
    return found


def protocol_methods(
    trees: list[tuple[str, ast.Module]],
) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """What the Protocols of the tree describe."""
    return [
        member
        for _, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and is_protocol(node)
        for member in functions(node)
    ]


@rule
def no_stubs(root: Path) -> list[str]:
    """A function does something, unless a Protocol describes it or has it do nothing, with why."""
    trees = list(sources(root, "jaxrl"))
    described = protocol_methods(trees)
    names = {member.name for member in described}
    found = []
    for path, tree in trees:
        for function in functions(tree):
            if function in described:
                continue
            why = ast.get_docstring(function)
            said = " ".join(ast.unparse(statement) for statement in function.body[bool(why) :])
            idle = said in ("", "pass", "...") and not (why and function.name in names)
            if idle or said.startswith("raise NotImplemented"):
                found.append(f"{path}:{function.lineno}: {function.name} is a stub")
    return found


@rule
def docstrings(root: Path) -> list[str]:
    """Public things explain themselves; a Protocol's methods explain those that satisfy it."""
    trees = list(sources(root, "jaxrl", "configs"))
    explained = {member.name for member in protocol_methods(trees)}
    found = []
    for path, tree in trees:
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        shown: list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] = [*classes]
        for body in (tree.body, *(node.body for node in classes if not node.name.startswith("_"))):
            shown += [
                node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
        for node in shown:
            if not (node.name.startswith("_") or node.name in explained or ast.get_docstring(node)):
                found.append(f"{path}:{node.lineno}: {node.name} has no docstring")
        if not ast.get_docstring(tree):
            found.append(f"{path}:1: the file has no docstring")
    return found


@rule
def no_defaults(root: Path) -> list[str]:
    """No ``config.get``, no getattr with a default, no default on a config's field."""
    found = []
    for path, tree in sources(root, "jaxrl"):
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("get", "setdefault")
            ):
                owner = re.split(r"[.\[]", ast.unparse(node.func.value))
                if any(CONFIG_NAMES.search(part) for part in owner):
                    found.append(
                        f"{path}:{node.lineno}: {ast.unparse(node)} hides a missing config field"
                    )
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "getattr"
                and len(node.args) == 3
            ):
                found.append(f"{path}:{node.lineno}: {ast.unparse(node)} hides a missing attribute")
            if isinstance(node, ast.ClassDef) and (
                node.name.endswith("Config") or node.name == "Algorithm"
            ):
                for member in node.body:
                    if not isinstance(member, ast.AnnAssign) or member.value is None:
                        continue
                    if "ClassVar" not in ast.unparse(member.annotation):
                        name = f"{node.name}.{ast.unparse(member.target)}"
                        found.append(f"{path}:{member.lineno}: {name} has a default")
    return found


@rule
def kernel_form(root: Path) -> list[str]:
    """Kernels take numbers without defaults and report arrays, not means."""
    found = []
    for path, tree in sources(root, "jaxrl/kernels"):
        for function in functions(tree):
            if function.args.defaults or any(function.args.kw_defaults):
                found.append(f"{path}:{function.lineno}: {function.name} has a default argument")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in (
                "mean",
                "average",
                "nanmean",
                "pmean",
                "psum",
            ):
                found.append(
                    f"{path}:{node.lineno}: {ast.unparse(node)} averages; weights.py does that"
                )
    return found


@rule
def method_parts(root: Path) -> list[str]:
    """Every method has its config, its oracle, its test and its row in the README."""
    readme = (root / "README.md").read_text() if (root / "README.md").exists() else ""
    found = []
    for path, _ in sources(root, "jaxrl/algorithms"):
        name = Path(path).stem
        if name in ("__init__", "contract"):
            continue
        for part in (
            f"configs/{name}.py",
            f"tests/papers/{name}.py",
            f"tests/algorithms/test_{name}.py",
        ):
            if not (root / part).exists():
                found.append(f"{path}: {part} is missing")
        if not re.search(rf"^\|.*\balgorithms/{name}\.py\b", readme, re.MULTILINE):
            found.append(f"{path}: README.md has no row with algorithms/{name}.py")
    return found


@rule
def no_loose_ends(root: Path) -> list[str]:
    """A TODO names an issue."""
    found = []
    for path, _ in sources(root, "jaxrl", "configs", "experiments"):
        for number, line in enumerate((root / path).read_text().splitlines(), start=1):
            if re.search(r"#.*\b(TODO|FIXME|XXX)\b(?!.*#\d)", line):
                found.append(f"{path}:{number}: {line.strip()} names no issue")
    return found
