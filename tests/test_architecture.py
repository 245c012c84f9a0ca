"""The shape of the code: one direction of imports, one training loop, one writer, no pickle."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "feddumap"
FILES = sorted(SOURCE.rglob("*.py"))

# From the bottom up: a module may import from its own layer and from those before it.
LAYERS = [
    ["errors", "seeds", "types", "files", "runtime", "stopping"],
    ["tensors", "config", "curves", "memory", "events"],
    ["data", "models", "fleet", "selection"],
    ["training"],
    ["algorithm", "device", "pruning"],
    ["server", "menu"],
    ["groups"],
    ["recipes"],
    ["cohort", "rounds"],
    ["runs"],
    ["api", "demo"],
    ["grid"],
    ["grid_jobs"],
    ["terminal"],
    ["overview", "story", "grid_view", "report", "export", "flower"],
    ["bench", "paper"],
    ["cli"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imports(path: Path) -> list[str]:
    """The parts of the package that a file imports, type checking's imports aside."""
    found: list[str] = []

    class Visitor(ast.NodeVisitor):
        def visit_If(self, node: ast.If) -> None:
            if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
                self.generic_visit(node)

        def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
            assert node.level == 0, f"{path} has a relative import"
            module = node.module or ""
            if module == "feddumap":
                found.extend(alias.name for alias in node.names if not alias.name.startswith("__"))
            elif module.startswith("feddumap."):
                found.append(module.split(".")[1])

    Visitor().visit(ast.parse(path.read_text()))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    assert part in LEVEL, f"{part} has no place in LAYERS"
    for other in imports(path):
        assert LEVEL[other] <= LEVEL[part], f"{part} imports {other}, which is above it"


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
    others = {"pruning/lanczos.py", "pruning/gap.py", "device/reports.py"}
    assert users_of("autograd.grad", "backward") - others == {"training/model.py"}
    assert users_of("_foreach_add_") == {"training/optimizers.py", "training/loop.py"}
    assert users_of("optim.SGD", "optim.Adam") == set()


def test_only_the_loop_takes_a_step() -> None:
    """A rule around another one hands its step on, and does nothing else with it."""
    assert users_of("step") == {"training/loop.py", "training/optimizers.py"}
    tree = ast.parse((SOURCE / "training" / "optimizers.py").read_text())
    steps = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "step"]
    handed_on = [node for step in steps for node in ast.walk(step) if is_step(node)]
    assert len(handed_on) == sum(map(is_step, ast.walk(tree))) == 2  # masked and watched


def is_step(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "rule.step"


def test_runs_are_written_in_one_place() -> None:
    """Whoever else writes files makes them from runs, in a place that the user names."""
    others = {"report/page.py", "report/commands.py", "export/writing.py"}
    others |= {"flower/project.py", "flower/federation.py"}
    writers = users_of("write_text", "write_bytes", "save_file", "to_bytes")
    assert writers - others <= {"runs.py", "memory.py", "files.py", "data/dataset.py"}


def test_nothing_is_unpickled() -> None:
    assert users_of("torch.load", "pickle.load", "pickle.loads", "Unpickler", "torch.save") == set()
    for path in FILES:
        assert "allow_pickle=True" not in path.read_text()


def test_no_global_randomness() -> None:
    names = ("torch.manual_seed", "random.seed", "np.random.seed", "np.random.rand", "torch.randperm")
    assert users_of(*names) <= {"models/filling.py"}


def test_no_clock_inside_an_algorithm() -> None:
    timers = users_of("perf_counter", "time.time", "monotonic", "sleep")
    assert {name for name in timers if not name.startswith("flower/")} <= {"api.py", "terminal.py"}


def test_files_stay_readable() -> None:
    long = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: lines for name, lines in long.items() if lines > 400} == {}
