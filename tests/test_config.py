"""One TOML file -> one frozen object, or one sentence."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from blocktrain import config
from blocktrain.errors import BadConfig
from blocktrain.learning.objective import Recipe

Sentence = Callable[[BaseException], str]


@dataclass(frozen=True)
class Section:
    rate: float = 0.5
    steps: int = 3


@dataclass(frozen=True)
class Settings:
    name: str = "plain"
    count: int = 1
    section: Section = field(default_factory=Section)


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def refused(folder: Path, text: str) -> BadConfig:
    with pytest.raises(BadConfig) as caught:
        config.load(written(folder, text), Settings)
    return caught.value


def test_values_come_from_the_file_and_the_rest_stays_as_declared(tmp_path: Path) -> None:
    path = written(tmp_path, 'name = "x"\n[section]\nrate = 0.25\n')
    assert config.load(path, Settings) == Settings("x", 1, Section(0.25, 3))


def test_an_empty_file_gives_what_is_declared(tmp_path: Path) -> None:
    assert config.load(written(tmp_path, ""), Settings) == Settings()


def test_an_unknown_key_is_named_with_the_nearest_known_one(
    tmp_path: Path, sentence: Sentence
) -> None:
    text = sentence(refused(tmp_path, "coutn = 3"))
    assert "'coutn'" in text
    assert "did you mean 'count'?" in text
    assert "run.toml" in text


def test_a_key_like_no_other_gets_the_list(tmp_path: Path, sentence: Sentence) -> None:
    text = sentence(refused(tmp_path, "zzzzzz = 3"))
    assert "name, count, section" in text


def test_an_unknown_key_in_a_section_names_the_section(tmp_path: Path, sentence: Sentence) -> None:
    text = sentence(refused(tmp_path, "[section]\nrates = 1.0"))
    assert "[section]" in text
    assert "did you mean 'rate'?" in text


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('count = "three"', "count"),
        ("count = 1.5", "count"),
        ("count = true", "count"),
        ("name = 3", "name"),
        ("section = 3", "section"),
        ('[section]\nrate = "fast"', "section.rate"),
    ],
)
def test_a_wrong_type_is_named_with_its_place(
    tmp_path: Path, text: str, place: str, sentence: Sentence
) -> None:
    assert place in sentence(refused(tmp_path, text))


def test_a_missing_file(tmp_path: Path, sentence: Sentence) -> None:
    with pytest.raises(BadConfig) as caught:
        config.load(tmp_path / "nowhere.toml", Settings)
    assert "nowhere.toml" in sentence(caught.value)


@pytest.mark.parametrize("body", [b"name = ", b"[section", b"\xff\xfe", b"a = 1\na = 2"])
def test_not_toml(tmp_path: Path, body: bytes, sentence: Sentence) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(body)
    with pytest.raises(BadConfig) as caught:
        config.load(path, Settings)
    assert "is not TOML" in sentence(caught.value)


def test_a_value_that_its_owner_refuses(tmp_path: Path) -> None:
    path = written(tmp_path, "[shape]\nwidth = 30\nheads = 4\n")
    with pytest.raises(BadConfig, match="width 30 does not divide into 4 heads"):
        config.load(path, Recipe)


def test_the_recipe_reads_every_section(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        'micro = 64\n[shape]\nobjective = "denoise"\n[task]\nspan = 8\n[noise]\noverlap = 0.2\n'
        "[rates]\nmatrix = 0.01\n",
    )
    recipe = config.load(path, Recipe)
    told = (recipe.micro, recipe.shape.objective, recipe.task.span, recipe.noise.overlap)
    assert told == (64, "denoise", 8, 0.2)
    assert recipe.rates.matrix == 0.01


def test_an_objective_that_does_not_exist(tmp_path: Path, sentence: Sentence) -> None:
    path = written(tmp_path, '[shape]\nobjective = "dream"\n')
    with pytest.raises(BadConfig) as caught:
        config.load(path, Recipe)
    assert "dream" in sentence(caught.value)


def test_the_cache_folder_is_the_users_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "mine"))
    assert config.cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("BLOCKTRAIN_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert config.cache_folder().name == "blocktrain"
    monkeypatch.delenv("BLOCKTRAIN_CACHE")
    assert config.cache_folder().name == "blocktrain"


def test_a_childs_environment_is_ours_with_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "a")
    monkeypatch.setenv("CHANGED", "b")
    child = config.environment(CHANGED="c", NEW="d")
    assert (child["KEPT"], child["CHANGED"], child["NEW"]) == ("a", "c", "d")
