"""Rules of the code base: imports run in one direction without cycles, and each half works without the other's libraries."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "bessemer"

# From the bottom up. A package may import from packages on lower levels, and from its own.
FLOORS = [
    ("common", "__init__"),
    ("recipe", "run", "storage"),
    ("text",),
    ("run_tasks",),
    ("corpus",),
    ("tokens",),
    ("model",),
    ("distributed",),
    ("checkpoint",),
    ("guard",),
    ("train",),
    ("export", "evaluate"),
    ("launch",),
    ("plan",),
    ("report",),
    ("check", "ladder"),
    ("workflow",),
    ("api",),
    ("cli",),
    ("__main__",),
]
HEIGHT = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FORBIDDEN = {
    ("train", "corpus"),
    ("corpus", "train"),
    ("guard", "train"),
    ("plan", "tokens"),
    ("plan", "corpus"),
    ("report", "train"),
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, at its top or inside its functions."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "bessemer":
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "bessemer"}
    return found


def room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in HEIGHT else None


FILES = sorted(SOURCE.rglob("*.py"))


def test_every_package_has_a_level() -> None:
    there = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in FILES}
    assert there == set(HEIGHT)


def test_imports_run_downward() -> None:
    for path in FILES:
        here = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for module in imports(path):
            there = room(module)
            if there is not None and there != here:
                assert HEIGHT[there] <= HEIGHT[here], f"{path.relative_to(SOURCE)} imports {module} from above"
                assert (here, there) not in FORBIDDEN, f"{path.relative_to(SOURCE)} imports {module}"


def test_files_have_no_import_cycles() -> None:
    name_of = {
        path: ".".join(("bessemer", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for path in FILES
    }
    known = set(name_of.values())
    graph = {name_of[path]: {m for m in imports(path) if m in known and m != name_of[path]} for path in FILES}
    # A package's __init__ does not depend on a module that imports another name from the package.
    for name in graph:
        graph[name] = {m for m in graph[name] if not name.startswith(m + ".")}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"import circle: {' -> '.join((*way[way.index(name) :], name))}"
        if name not in done:
            for there in graph[name]:
                visit(there, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_type_checkers_see_every_public_name() -> None:
    """A name of EXPORTS in __init__.py needs an import in __init__.pyi."""
    code, stub = (ast.parse((SOURCE / name).read_text(encoding="utf-8")) for name in ("__init__.py", "__init__.pyi"))
    [exports] = [
        node.value for node in code.body if isinstance(node, ast.Assign) and "EXPORTS" in ast.unparse(node.targets[0])
    ]
    imports = (alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names)
    assert set(ast.literal_eval(exports)) == {alias.asname or alias.name for alias in imports}


def run_without(blocked: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python without the `blocked` packages."""
    guard = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {blocked!r}: raise ImportError('blocked: ' + name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    return subprocess.run([sys.executable, "-c", guard + code], capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize(
    ("blocked", "modules"),
    [
        ("ray numba pyarrow resiliparse fastwarc gigatoken plotly", "train.loop train.state export.hugging_face workflow.stages"),
        ("torch safetensors transformers tensorboard plotly", "workflow.stages corpus.pipeline tokens.build tokens.loader"),
        ("torch pyarrow", "model.recipe_defaults plan.local_plan"),
        ("ray pyarrow numba resiliparse numpy", "corpus corpus.inputs"),
    ],
    ids=["training", "data", "plans", "names of inputs"],
)  # fmt: skip
def test_each_half_works_without_the_other(blocked: str, modules: str) -> None:
    done = run_without(tuple(blocked.split()), "\n".join(f"import bessemer.{module}" for module in modules.split()))
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("cold")
def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, bessemer.cli\n"
        "try: bessemer.cli.run_command(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'pyarrow', 'numba', 'rich', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_data_runs_code() -> None:
    """Stored, queued and transmitted data is JSON, Arrow or arrays: nothing that runs code when it is read."""
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
                assert not {name.split(".")[0] for name in names} & modules, path
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.search(rf"\bimport ({'|'.join(modules)})\b", node.value), f"{path}: a program in a string"
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert any(one.arg == "weights_only" and ast.unparse(one.value) == "True" for one in node.keywords), (
                    path
                )
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.unparse(node.value) == "False", path


def test_files_stay_small() -> None:
    large = {
        str(path.relative_to(SOURCE)): lines for path in FILES if (lines := len(path.read_text().splitlines())) > 450
    }
    assert not large, f"is there a second thing in them? {large}"


def test_functions_stay_short() -> None:
    long = {
        f"{path.relative_to(SOURCE)}:{node.name}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    }
    assert not long


# Attributes of other modules and classes that the code sets, with the reason.
FOREIGN_ATTRIBUTES = {
    "common/console.py: sys.stderr": "the stream that each message goes to, as sys documents",
    "common/console.py: setattr(sys, name, ...)": "standard streams that were closed, as sys documents",
    "common/extensions.py: sys.modules": "pydantic and dataclasses look for the module of a user's class there",
    "common/interrupt.py: sys.unraisablehook": "a hook, as sys documents",
    "distributed/tensor.py: module.__class__": "FSDP2 and checkpoints need DTensors under the parameters' names; parametrize renames",
    "evaluate/task_files.py: lm_eval.api.task.tqdm": "its progress bar has no switch, and TQDM_DISABLE is read at import",
    "storage/hub.py: constants.HF_HUB_OFFLINE": "transformers 4.57 asks the hub about a local tokenizer whatever its arguments",
    "storage/hub.py: sys.modules": "transformers has no switch against loading torchao, which takes a second",
    "train/device.py: setattr(torch.utils.deterministic, 'fill_uninitialized_memory', ...)": "a setting that torch documents",
    "train/precision.py: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": "a setting that torch documents",
    "train/precision.py: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": "a setting that torch documents",
}


def foreign_attributes(code: str) -> set[str]:
    """Return attributes of imported modules and classes, and classes of objects, that a file assigns or deletes."""
    tree = ast.parse(code)
    owners = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            owners |= {alias.asname or alias.name.split(".")[0] for alias in node.names}

    def is_foreign(target: ast.expr) -> bool:
        while isinstance(target, ast.Attribute):
            target = target.value
        return isinstance(target, ast.Name) and target.id in owners

    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            if node.attr == "__class__" or is_foreign(node):
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            owner = node.value
            if ast.unparse(owner) == "sys.modules" or (isinstance(owner, ast.Attribute) and owner.attr == "__dict__"):
                found.add(ast.unparse(owner))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("setattr", "delattr") and is_foreign(node.args[0]):
                found.add(f"{name}({', '.join(map(ast.unparse, node.args[:2]))}, ...)")
            elif name.startswith("sys.modules.") and not name.endswith((".get", ".keys", ".items", ".values")):
                found.add("sys.modules")
    return found


def test_no_unlisted_attribute_is_patched_at_run_time() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in FILES
        for name in foreign_attributes(path.read_text(encoding="utf-8"))
    }
    assert found == set(FOREIGN_ATTRIBUTES)


@pytest.mark.parametrize(
    "patch",
    ["import a\na.b = 1", "import a.b as c\nc.d.e = 1", "from a import B\nB.c = 1", "import a\nsetattr(a.b, 'c', 1)",
     "import a\ndel a.b", "import a\na.b, c = 1, 2", "x.__class__ = y", "import sys\nsys.modules['a'] = None",
     "import a\nfor a.b in c: pass", "import a\na.b += 1", "class A: pass\nA.b = 1", "import a\na.__dict__['b'] = 1"],
)  # fmt: skip
def test_a_patch_is_detected(patch: str) -> None:
    assert foreign_attributes(patch)
    assert not foreign_attributes("import os\nos.environ['A'] = '1'\nself.a = os.b\nx.y = 1")


def code_lines(path: Path) -> int:
    """Return the number of lines with code, without blank lines, comments and docstrings."""
    text, held = path.read_text(encoding="utf-8"), set[int]()
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            held.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(held)


def budgets() -> dict[tuple[str, ...], int]:
    """Return the packages of each row of the table in docs/architecture.md, with the limit on their code lines."""
    page = (SOURCE.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`\w+/`(?:, )?)+) \| ([\d,]+) \|", page, re.MULTILINE)
    return {tuple(re.findall(r"\w+", names)): int(number.replace(",", "")) for names, number in rows}


def test_packages_keep_their_budgets() -> None:
    lines = Counter[str]()
    for path in FILES:
        lines[path.relative_to(SOURCE).parts[0]] += code_lines(path)
    rows = budgets()
    assert {name for names in rows for name in names} == set(lines) - {"__init__.py", "__main__.py"}
    over = {names: total for names, limit in rows.items() if (total := sum(lines[name] for name in names)) > limit}
    assert not over


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_test_module_imports_another() -> None:
    """Shared test code is in helper modules and fixtures, so that a test file can be split or deleted."""
    tests = Path(__file__).parent
    names = {path.stem for path in tests.rglob("test_*.py")}
    for path in sorted(tests.rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom):
                imported = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Import):
                imported = [part for alias in node.names for part in alias.name.split(".")]
            else:
                continue
            assert not names.intersection(imported), f"{path.relative_to(tests)} imports {imported}"
