"""The folders at the top of the repository are found however the package was installed."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("templates", "clusters", "configs")
LIST = (
    "import scaling_slurm.resources as r; print(r.__file__); "
    f"[print(kind, name, path.is_file()) for kind in {KINDS} for name, path in r.list_names(kind).items()]"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is in the repository, so that a build leaves nothing in it."""
    copy = tmp_path_factory.mktemp("source") / "checkout"
    copy.mkdir()
    for name in ("scaling_slurm", *KINDS):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def build(project: Path, target: str, folder: Path) -> Path:
    """A wheel or sdist by the build backend itself, without network or isolation."""
    script = f"import sys; from hatchling.build import build_{target} as build; print(build(sys.argv[1]))"
    ended = subprocess.run(
        [sys.executable, "-c", script, str(folder)], cwd=project, capture_output=True, text=True, check=True
    )
    return folder / ended.stdout.split()[-1]


def expected() -> set[str]:
    suffixes = {"templates": ".sbatch.j2", "clusters": ".yaml", "configs": ".yaml"}
    return {
        f"{kind} {path.name.removesuffix(suffixes[kind])} True"
        for kind in KINDS
        for path in (ROOT / kind).glob(f"*{suffixes[kind]}")
    }


def found_from(import_path: Path, elsewhere: Path) -> tuple[Path, set[str]]:
    """Where the package lies, and the names that it finds from a directory that is no checkout."""
    environment = {**os.environ, "PYTHONPATH": str(import_path), "SCALING_HOME": str(elsewhere / "none")}
    ended = subprocess.run(
        [sys.executable, "-c", LIST], cwd=elsewhere, env=environment, capture_output=True, text=True, check=True
    )
    module, *names = ended.stdout.splitlines()
    return Path(module), set(names)


@pytest.mark.parametrize("way", ["wheel", "wheel from sdist"])
def test_installed(source: Path, tmp_path: Path, way: str) -> None:
    project = source
    if way == "wheel from sdist":
        with tarfile.open(
            build(source, "sdist", tmp_path)
        ) as archive:  # our own: no filter needed, nor known to 3.11.2
            archive.extractall(tmp_path / "unpacked")
        (project,) = (tmp_path / "unpacked").iterdir()
    wheel = build(project, "wheel", tmp_path)
    installed = tmp_path / "site-packages"
    zipfile.ZipFile(wheel).extractall(installed)  # what pip does for a pure wheel, but for scripts
    module, names = found_from(installed, tmp_path)
    assert module.is_relative_to(installed)
    assert names == expected()
    entry_points = next(installed.glob("*.dist-info")) / "entry_points.txt"
    assert "scaling = scaling_slurm.cli.main:main" in entry_points.read_text()
    assert (installed / "scaling_slurm" / "py.typed").is_file()
    assert not (installed / "tests").exists()


def test_editable(source: Path, tmp_path: Path) -> None:
    """An editable wheel holds a .pth file with the checkout; a profile added there afterwards counts at once."""
    wheel = build(source, "editable", tmp_path)
    installed = tmp_path / "site-packages"
    zipfile.ZipFile(wheel).extractall(installed)
    (checkout,) = (path.read_text().strip() for path in installed.glob("*.pth"))
    assert Path(checkout) == source
    added = source / "clusters" / "added-later.yaml"
    added.touch()
    try:
        module, names = found_from(Path(checkout), tmp_path)
    finally:
        added.unlink()
    assert module.is_relative_to(source)
    assert names == expected() | {"clusters added-later True"}


@pytest.mark.parametrize("editable", [False, True])
def test_pip_install_gives_the_command(source: Path, tmp_path: Path, editable: bool) -> None:
    """pip into an environment that sees this one's packages: the console script starts and finds a shipped run."""
    pytest.importorskip("pip")
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True, check=True
    ).stdout.strip()
    outside = [path for path in sys.path if path.endswith("-packages")]
    (Path(site) / "outside.pth").write_text("\n".join(outside) + "\n")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, *["-e"][: int(editable)]]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*command, str(source)], check=True, env=clean, cwd=tmp_path, capture_output=True)
    shown = subprocess.run(
        [environment / "bin" / "scaling", "config", "show", "tiny"],
        env={**clean, "SCALING_HOME": str(tmp_path / "none")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.startswith("name: tiny\n")
