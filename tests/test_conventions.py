"""The project's own rules, as tests: format, lint, types, layers, mirrored tests, no trace of a machine."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "scaling_slurm"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" and "_data" not in path.parts)


def run_tool(module: str, *arguments: str) -> None:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed: it comes with the extra 'dev'")
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_format():
    run_tool("ruff", "format", "--check", ".")


def test_lint():
    run_tool("ruff", "check", ".")


def test_types():
    run_tool("mypy")


def test_layers():
    if importlib.util.find_spec("importlinter") is None:
        pytest.skip("import-linter is not installed: it comes with the extra 'dev'")
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_what_it_holds_and_has_its_test(module: Path):
    assert ast.get_docstring(ast.parse(module.read_text())), f"{module.name} has no docstring"
    if module.name == "__main__.py":
        return
    mirror = ROOT / "tests" / module.relative_to(PACKAGE).with_name(f"test_{module.name}")
    assert mirror.is_file(), f"{mirror.relative_to(ROOT)} is missing"


def test_no_path_of_a_machine_in_tracked_files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    pattern = re.compile(r"/(?:root|home/[a-z]+)/\w")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".yaml", ".j2", ".sh", ".toml", ".sbatch"} and path != Path(__file__):
            found += [f"{name}: {match[0]}" for match in pattern.finditer(path.read_text())]
    assert not found
