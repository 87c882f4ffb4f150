"""A package's own source as an environment: what is public, what is cut out, how it is run.

A tree is {path: text}, bytes that are no UTF-8 as latin-1. Nothing of a package is ever imported
here: it is read as text, cut as a syntax tree, and run in jaxrl/tasks/sandbox.py only, where a tree
is a value of the program (``FILES``) and modules are loaded from it. What a program may read is
therefore exactly its tree: no verifier, no original, no installed copy.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib.metadata
import re
from collections.abc import Iterator, Mapping, Sequence

from jaxrl.agents.journal import digest

Tree = Mapping[str, str]
Function = ast.FunctionDef

MOST_BYTES = 1_000_000  # of a tree
# What a stripped tree never holds: compiled files, caches, history, old tests.
LITTER = re.compile(r"(^|/)(__pycache__|\.git|\.hg|tests?|test_[^/]*|.*\.egg-info)(/|$)|\.py[co]$")
HOLE = 'raise NotImplementedError("to be written")'

# The module that a program loads its tree by, and what it is called by: function (or any name) of a
# module, arguments -> a plain value, or the error that was raised.
LOADER = """
import sys, types, importlib.machinery

class _Loader:
    def __init__(self, path): self.path = path
    def create_module(self, spec): return None
    def exec_module(self, module):
        module.FILES, module.BOOT = FILES, BOOT
        exec(compile(FILES[self.path], self.path, "exec"), module.__dict__)

class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        stem = name.replace(".", "/")
        for file, package in ((stem + "/__init__.py", True), (stem + ".py", False)):
            if file in FILES:
                return importlib.machinery.ModuleSpec(name, _Loader(file), is_package=package)

sys.meta_path.insert(0, _Finder)

def _plain(value, depth=0):
    if isinstance(value, (str, int, float, complex, bytes, bool, type(None))):
        kind = next(k for k in (bool, int, float, complex, str, bytes, type(None))
                    if isinstance(value, k))
        return value if type(value) is kind else kind(value)
    if depth > 8: raise TypeError("too deep")
    if isinstance(value, dict):
        return {_plain(k, depth + 1): _plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return {_plain(x, depth + 1) for x in value}
    many = []
    for x in value:
        many.append(_plain(x, depth + 1))
        if len(many) > 1000: raise TypeError("too long")
    return tuple(many) if isinstance(value, tuple) else many

def check(module, name, args):
    try:
        found = getattr(importlib.import_module(module), name)
        return {"value": _plain(found(*args) if callable(found) else found)}
    except Exception as error:
        return {"raised": type(error).__name__}
"""

# An adversary: whatever can be reached from inside and is, or holds, the function that was cut out.
# It goes by the name: another function so called elsewhere costs a task, no copy is overlooked.
HUNTER = """
import ast, marshal, gc

def _codes(code):
    yield code
    for x in code.co_consts:
        if hasattr(x, "co_code"): yield from _codes(x)

def _is_hole(code):
    return "NotImplementedError" in code.co_names

def hunt(module, name):
    found = []
    for path, text in sorted(FILES.items()):
        data = text.encode("latin-1", "replace")
        for start in (0, 16):
            try: codes = list(_codes(marshal.loads(data[start:])))
            except Exception: continue
            if any(c.co_name == name and not _is_hole(c) for c in codes):
                found.append("compiled: " + path)
                break
        if "def " + name + "(" in text:
            start = text.index("def " + name + "(")
            if "NotImplementedError" not in text[start:start + 4000]:
                found.append("source: " + path)
    saved, FILES_ = sys.meta_path[0], sys.meta_path.pop(0)
    try:
        importlib.import_module(module)
        found.append("installed copy: " + module)
    except ImportError:
        pass
    sys.meta_path.insert(0, saved)
    try: importlib.import_module(module)
    except Exception: pass
    for one in gc.get_objects():
        code = getattr(one, "__code__", None) if isinstance(one, types.FunctionType) else None
        if code is not None and code.co_name == name and not _is_hole(code):
            found.append("in memory: " + str(code.co_filename))
    return sorted(set(found))
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Package:
    """A package as it was published."""

    name: str
    version: str
    licence: str
    tree: Tree

    @property
    def digest(self) -> str:
        """Of all that is in it."""
        return digest([self.name, self.version, dict(self.tree)])


@dataclasses.dataclass(frozen=True)
class Entry:
    """A public function: where it is, what it says of itself, calls of it that its documentation
    shows (texts of tuples of literals)."""

    module: str
    name: str
    signature: str
    doc: str
    lines: int
    shown: Sequence[str]


@functools.cache
def installed(name: str) -> Package:
    """A pure Python distribution of this environment, read as text.

    ValueError if it is not installed, holds compiled modules, or is over MOST_BYTES.
    """
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"world.packages: {name!r} is not installed") from error
    files = [str(path) for path in found.files or ()]
    compiled = [path for path in files if path.endswith((".so", ".pyd"))]
    if compiled:
        raise ValueError(f"world.packages: {name!r} holds {compiled[0]}; allowed: pure Python")
    kept = [path for path in files if path.endswith(".py") and ".." not in path.split("/")]
    tree = {path: found.locate_file(path).read_text(encoding="utf-8") for path in sorted(kept)}  # type: ignore[attr-defined]
    about = found.metadata.json
    licence = str(about.get("license_expression") or about.get("license") or "unknown")
    return checked(Package(name, found.version, licence.splitlines()[0][:80], tree))


def checked(package: Package) -> Package:
    """ValueError for a tree that is too large or whose paths lead out of it."""
    size = sum(len(text) for text in package.tree.values())
    if size > MOST_BYTES:
        raise ValueError(f"{package.name}: {size} characters; allowed: at most {MOST_BYTES}")
    for path in package.tree:
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"{package.name}: path {path!r}; allowed: below the package")
    return package


def module_of(path: str) -> str:
    """``a/b.py`` -> ``a.b``; ``a/__init__.py`` -> ``a``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def file_of(tree: Tree, module: str) -> str:
    """The inverse. ValueError if the tree has no such module."""
    stem = module.replace(".", "/")
    for path in (f"{stem}/__init__.py", f"{stem}.py"):
        if path in tree:
            return path
    raise ValueError(f"module={module!r}; allowed: one of the tree's")


# What is public.


def _functions(source: ast.Module) -> dict[str, Function]:
    return {node.name: node for node in source.body if isinstance(node, Function)}


def _shown(text: str) -> Iterator[tuple[str, str]]:
    """(function, text of its arguments) of each call with literal arguments in a doctest."""
    for line in re.findall(r"^\s*>>> (.*)$", text, re.M):
        try:
            calls = [node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call)]
        except SyntaxError:
            continue
        for call in calls:
            if isinstance(call.func, ast.Name | ast.Attribute) and not call.keywords:
                name = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
                try:
                    yield name, repr(tuple(ast.literal_eval(one) for one in call.args))
                except (ValueError, SyntaxError, TypeError):
                    continue


@functools.lru_cache(maxsize=64)
def entries(package: Package) -> list[Entry]:
    """Public functions with arguments whose documentation shows calls of them, by place."""
    found = []
    for path, text in package.tree.items():
        if LITTER.search(path):
            continue
        try:
            source = ast.parse(text)
        except SyntaxError:
            continue
        told = [ast.get_docstring(source) or ""]
        functions = _functions(source)
        told += [ast.get_docstring(node) or "" for node in functions.values()]
        calls: dict[str, list[str]] = {}
        for name, arguments in (pair for doc in told for pair in _shown(doc)):
            calls.setdefault(name, []).append(arguments)
        for name, node in functions.items():
            takes = node.args.args or node.args.posonlyargs
            if name.startswith("_") or not takes or node.decorator_list or name not in calls:
                continue
            lines = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
            doc, signature = ast.get_docstring(node) or "", f"{name}({ast.unparse(node.args)})"
            shown = list(dict.fromkeys(calls[name]))
            found.append(Entry(module_of(path), name, signature, doc, lines, shown))
    return found


# What is cut out.


def _called(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def core(source: ast.Module, name: str) -> set[str]:
    """The function and the private functions that nothing else in the module uses."""
    functions, cut = _functions(source), {name}
    while True:
        kept = [node for node in source.body if defines(node) not in cut]
        used = {one for node in kept for one in _called(node)}
        more = {
            other
            for other in functions
            if other.startswith("_") and other not in used and other not in cut
            if any(other in _called(functions[one]) for one in cut)
        }
        if not more:
            return cut
        # A private function that another private one of the core still needs goes with it.
        cut |= more


def defines(node: ast.stmt) -> str:
    """The name that a statement of a module defines as a function; "" for another statement."""
    return node.name if isinstance(node, Function) else ""


def stripped(text: str, name: str) -> str:
    """The module with the function's interface kept (signature, documentation), its body a hole,
    and private functions gone that only it used. ValueError if there is no such function."""
    source = ast.parse(text)
    if name not in _functions(source):
        raise ValueError(f"entry={name!r}; allowed: {sorted(_functions(source))}")
    gone = core(source, name) - {name}
    source.body = [node for node in source.body if defines(node) not in gone]
    node = _functions(source)[name]
    told = node.body[:1] if ast.get_docstring(node) is not None else []
    node.body = [*told, *ast.parse(HOLE).body]
    return ast.unparse(ast.fix_missing_locations(source)) + "\n"


def cleaned(tree: Tree) -> dict[str, str]:
    """Without compiled files, caches, history and old tests."""
    return {path: text for path, text in tree.items() if not LITTER.search(path)}


def needed(tree: Tree, module: str) -> dict[str, str]:
    """The module, what it imports of its tree, and what is no Python."""
    asked, kept = [module], {path for path in tree if not path.endswith(".py")}
    while asked:
        name = asked.pop()
        stem = name.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if path in tree and path not in kept:
                kept.add(path)
                asked += _imports(tree[path], name, path.endswith("__init__.py"))
        if "." in name:
            asked.append(name.rpartition(".")[0])
    return {path: tree[path] for path in tree if path in kept}


def _imports(text: str, module: str, package: bool) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")[
                : None if package and node.level == 1 else -node.level or None
            ]
            base = ".".join([*(parts if node.level else ()), *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


# How it is run.


def program(tree: Tree, boot: int) -> str:
    """A program whose ``check(module, name, args)`` calls a function of the tree, and whose
    ``hunt(module, name)`` looks for what was cut out. ``boot``: what differs between two machines
    that run it (a clock, an address): nothing else does."""
    return f"BOOT = {boot}\nFILES = {dict(sorted(tree.items()))!r}\n{LOADER}\n{HUNTER}"


def sha(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# Ways to write a function anew.


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return node  # the interface stays


def restructured(text: str, name: str) -> str:
    """The same behaviour by other private parts: private functions and local names are called
    otherwise."""
    source = ast.parse(text)
    functions = _functions(source)
    private = {one: f"{one}_anew" for one in core(source, name) if one != name}
    node = functions[name]
    taken = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
    stored = {
        one.id
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store) and one.id not in taken
    }
    outside = {
        one for inner in ast.walk(node) if isinstance(inner, ast.Global) for one in inner.names
    }
    if any(isinstance(one, Function) for inner in node.body for one in ast.walk(inner)):
        stored = set()  # an inner function may hold names by nonlocal
    _Renamed({one: f"{one}_" for one in stored - outside}).visit(node)
    for old, new in private.items():
        functions[old].name = new
    _Renamed(private).visit(source)
    return ast.unparse(ast.fix_missing_locations(source)) + "\n"


def mutants(text: str, name: str) -> list[str]:
    """The module with one small mistake in the function or its private parts, each another: a
    constant off by one, a comparison or a condition turned, a slice moved."""
    spots = len(_spots(ast.parse(text), name))
    found = []
    for place in range(spots):
        source = ast.parse(text)
        _spots(source, name)[place]()
        found.append(ast.unparse(ast.fix_missing_locations(source)) + "\n")
    return found


def _spots(source: ast.Module, name: str) -> list:
    """Mistakes that can be made, each a function that makes it."""
    turned = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
    turned |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In}
    functions, spots = _functions(source), []
    for one in sorted(core(source, name)):
        for node in (inner for part in functions[one].body for inner in ast.walk(part)):
            if isinstance(node, ast.Constant) and type(node.value) is int:
                spots.append(functools.partial(setattr, node, "value", node.value + 1))
            elif isinstance(node, ast.Compare) and type(node.ops[0]) in turned:
                spots.append(
                    functools.partial(node.ops.__setitem__, 0, turned[type(node.ops[0])]())
                )
            elif isinstance(node, ast.If):
                test = ast.UnaryOp(ast.Not(), node.test)
                spots.append(functools.partial(setattr, node, "test", test))
    return spots
