"""The shape of the code: one direction of imports, no cycles, one training loop, one writer, no pickle."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "feddumap"
FILES = sorted(SOURCE.rglob("*.py"))

# From the bottom up: a module may import from its own layer and from those before it.
LAYERS = [
    ["errors", "config", "config_sections", "system"],
    ["core"],
    ["data", "models"],
    ["training"],
    ["pruning", "device"],
    ["screening", "attacks"],
    ["methods"],
    ["engine", "runs"],
    ["report"],
    ["run", "progress"],
    ["sweep", "export", "flower"],
    ["paper", "bench", "cli"],
    ["__init__", "__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in FILES}


def part_of(module: str) -> str:
    """The layer's name for a module: its first part below the package."""
    return module.split(".")[1] if "." in module else "__init__"


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of the package that a module imports, anywhere in it, type checking's imports aside."""
    found: set[str] = set()

    class Visitor(ast.NodeVisitor):
        def visit_If(self, node: ast.If) -> None:
            if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
                self.generic_visit(node)

        def visit_Import(self, node: ast.Import) -> None:
            found.update(alias.name for alias in node.names if alias.name.split(".")[0] == "feddumap")

        def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
            assert node.level == 0, f"{module} has a relative import"
            if (node.module or "").split(".")[0] != "feddumap":
                return
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module or "")

    Visitor().visit(ast.parse(MODULES[module].read_text()))
    return frozenset(found - {"feddumap", module})


@pytest.mark.parametrize("module", [module for module in MODULES if module != "feddumap"])
def test_imports_go_one_way(module: str) -> None:
    part = part_of(module)
    assert part in LEVEL, f"{part} has no place in LAYERS"
    for other in imports(module):
        assert LEVEL[part_of(other)] <= LEVEL[part], f"{module} imports {other}, which is above it"


def test_no_two_modules_import_each_other() -> None:
    """No cycle, within a layer either: modules can be ordered so that each imports only earlier ones."""
    left = {module: set(imports(module)) & set(MODULES) for module in MODULES}
    while free := [module for module, needs in left.items() if not needs]:
        for module in free:
            del left[module]
        for needs in left.values():
            needs.difference_update(free)
    assert left == {}, f"a cycle goes through some of {sorted(left)}"


def test_the_test_sees_every_kind_of_import() -> None:
    """Plain, from a package, and inside a function."""
    assert "feddumap.engine.forkserver" in imports("feddumap.cli.train")
    assert "feddumap.system.console" in imports("feddumap.cli.train")
    assert "feddumap.progress" in imports("feddumap.cli.train")  # inside a function
    assert "feddumap.training.samples" not in imports("feddumap.core.algorithm")  # for type checking only


@cache
def calls(path: Path) -> set[str]:
    """Dotted names of everything a file calls."""
    return {
        ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    }


def users_of(*names: str) -> set[str]:
    return {
        str(path.relative_to(SOURCE))
        for path in FILES
        if any(call == name or call.endswith(f".{name}") for call in calls(path) for name in names)
    }


def test_there_is_one_training_loop() -> None:
    """Whoever else differentiates looks at curvature or answers a question, and moves no parameter."""
    others = {"pruning/curvature/lanczos.py", "pruning/curvature/gap.py", "device/surveys.py"}
    others |= {"engine/forkserver.py"}  # tries whether a fork can
    differentiating = {"training/torch_model.py", "training/chain_model.py"}
    assert users_of("autograd.grad", "backward") - others == differentiating
    assert users_of("_foreach_add_") == {"training/optimizers.py", "training/loop.py"}
    assert users_of("optim.SGD", "optim.Adam") == set()


def test_only_the_loop_takes_a_step() -> None:
    """A rule around another one hands its step on, and does nothing else with it."""
    assert users_of("step") == {"training/loop.py", "training/optimizers.py"}
    tree = ast.parse((SOURCE / "training" / "optimizers.py").read_text())
    steps = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "step"]
    handed_on = [node for step in steps for node in ast.walk(step) if is_step(node)]
    assert len(handed_on) == sum(map(is_step, ast.walk(tree))) == 2  # masked and with_gradient_hook


def is_step(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "rule.step"


def test_runs_are_written_in_one_place() -> None:
    """Whoever else writes files makes them from runs, in a place that the user names."""
    others = {"report/page/document.py", "cli/compare.py", "export/writer.py"}
    others |= {"flower/local/project.py", "flower/local/federation.py", "flower/node.py"}
    writers = users_of("write_text", "write_bytes", "save_file", "to_bytes")
    allowed = {f"runs/{name}.py" for name in ("directory", "checkpoints", "records")}
    allowed |= {"device/state.py", "system/atomic_files.py", "data/cache.py"}
    assert writers - others <= allowed


def test_nothing_is_unpickled() -> None:
    assert users_of("torch.load", "pickle.load", "pickle.loads", "Unpickler", "torch.save") == set()
    for path in FILES:
        assert "allow_pickle=True" not in path.read_text()


def test_no_global_randomness() -> None:
    names = ("torch.manual_seed", "random.seed", "np.random.seed", "np.random.rand", "torch.randperm")
    assert users_of(*names) <= {"models/initialization.py"}


def test_no_clock_inside_an_algorithm() -> None:
    timers = users_of("perf_counter", "time.time", "monotonic", "sleep")
    shown = {"progress.py", "sweep/status.py", "system/console.py"}
    allowed = {"engine/session.py", "system/supervisor.py", *shown}
    assert {name for name in timers if not name.startswith("flower/")} <= allowed


def test_files_stay_readable() -> None:
    long = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: lines for name, lines in long.items() if lines > 400} == {}
