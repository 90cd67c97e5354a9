"""The tree of the README: every file of the package with the first sentence of its docstring."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BEGIN, END = "<!-- tree -->\n", "<!-- /tree -->\n"


def tree() -> str:
    """As a fenced block."""
    return "```text\n" + "\n".join(["scaling_slurm/", *_lines(ROOT / "scaling_slurm", "  ")]) + "\n```\n"


def _lines(folder: Path, indent: str) -> Iterator[str]:
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield f"{indent}{path.name:{28 - len(indent)}}{_sentence(path)}"
    for path in sorted(folder.iterdir()):
        if path.is_dir() and any(path.rglob("*.py")):
            yield f"{indent}{path.name}/"
            yield from _lines(path, indent + "  ")


def _sentence(path: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    return text.split(". ")[0].removesuffix(".")


def replaced(readme: str) -> str:
    """The README with the tree as it is now."""
    before, _, rest = readme.partition(BEGIN)
    return before + BEGIN + tree() + END + rest.partition(END)[2]


if __name__ == "__main__":
    file = ROOT / "README.md"
    file.write_text(replaced(file.read_text()))
