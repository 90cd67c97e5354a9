"""Which file a name means, and what a name that means none is told."""

from pathlib import Path

import pytest

from scaling_slurm import resources
from scaling_slurm.errors import ConfigError


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """The clusters/ folders of the working directory, the user and the package, all empty."""
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "checkout" / "scaling_slurm")
    monkeypatch.setenv("SCALING_HOME", str(tmp_path / "home"))
    places = (tmp_path / "work" / "clusters", tmp_path / "home" / "clusters", tmp_path / "checkout" / "clusters")
    for place in places:
        place.mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    return places


def test_the_first_hit_wins(folders: tuple[Path, Path, Path]) -> None:
    for place in reversed(folders):
        (place / "booster.yaml").touch()
        assert resources.find("clusters", "booster").resolve() == place / "booster.yaml"
        assert resources.list_names("clusters")["booster"].resolve() == place / "booster.yaml"


def test_names_from_all_places(folders: tuple[Path, Path, Path]) -> None:
    for place, name in zip(folders, ("c.yaml", "a.yaml", "b.yaml"), strict=True):
        (place / name).touch()
    (folders[2] / "notes.txt").touch()
    (folders[2] / ".hidden.yaml").touch()
    assert list(resources.list_names("clusters")) == ["a", "b", "c"]


def test_a_path_comes_before_names(folders: tuple[Path, Path, Path]) -> None:
    (folders[0] / "lab.yaml").touch()
    Path("lab.yaml").touch()
    assert resources.find("clusters", "lab.yaml") == Path("lab.yaml")
    assert resources.find("clusters", "./lab.yaml") == Path("lab.yaml")
    assert resources.find("clusters", "lab") == Path("clusters/lab.yaml")


def test_a_name_may_carry_its_suffix_but_never_means_a_file_without_one(folders: tuple[Path, Path, Path]) -> None:
    (folders[2] / "lab.yaml").touch()
    Path("lab").touch()
    assert resources.find("clusters", "lab.yaml") == resources.find("clusters", "lab") == folders[2] / "lab.yaml"


def test_templates_by_short_and_full_name(tmp_path: Path, folders: tuple[Path, Path, Path]) -> None:
    template = tmp_path / "checkout" / "templates" / "train.sbatch.j2"
    template.parent.mkdir()
    template.touch()
    assert resources.find("templates", "train") == resources.find("templates", "train.sbatch.j2") == template


def test_installed_data_comes_before_a_folder_beside_the_package(
    tmp_path: Path, folders: tuple[Path, Path, Path]
) -> None:
    assert resources.shipped_folder("clusters") == folders[2]
    installed = tmp_path / "checkout" / "scaling_slurm" / "_data" / "clusters"
    installed.mkdir(parents=True)
    assert resources.shipped_folder("clusters") == installed


@pytest.mark.parametrize(
    ("scaling_home", "xdg", "expected"),
    [("~/s", "/xdg", "/users/me/s"), ("", "/xdg", "/xdg/scaling"), ("", "", "/users/me/.config/scaling")],
)
def test_user_folder(monkeypatch: pytest.MonkeyPatch, scaling_home: str, xdg: str, expected: str) -> None:
    monkeypatch.setenv("HOME", "/users/me")
    monkeypatch.setenv("SCALING_HOME", scaling_home)
    monkeypatch.setenv("XDG_CONFIG_HOME", xdg)
    assert resources.user_folder() == Path(expected)


def test_in_a_checkout_the_users_own_goes_before_the_shipped(
    folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders[2].parent)
    assert resources.search_path("clusters") == [folders[1], Path("clusters")]


def refused(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resources.find("clusters", name)
    return str(caught.value)


def test_unknown_name(folders: tuple[Path, Path, Path]) -> None:
    (folders[1] / "booster.yaml").touch()
    (folders[2] / "lumi.yaml").touch()
    places = ", ".join(map(str, folders))
    assert refused("boster") == f"there is no cluster 'boster'; did you mean booster?; searched in {places}"
    assert refused("zzz") == f"there is no cluster 'zzz'; there is booster, lumi; searched in {places}"


def test_unknown_path(folders: tuple[Path, Path, Path]) -> None:
    (folders[0] / "booster.yaml").touch()
    (folders[1] / "lumi.yaml").touch()
    assert refused("clusters/boster.yaml") == (
        f"clusters/boster.yaml does not exist; did you mean clusters/booster.yaml?; searched in {folders[0]}"
    )
    assert refused("clusters/") == f"clusters/ is a directory; there is clusters/booster.yaml; searched in {folders[0]}"
    assert "does not exist; there is none" in refused("elsewhere/booster.yaml")
