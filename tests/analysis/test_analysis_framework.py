"""The contract of analyses: subjects, registry, options, and the two files."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest
from analysis_subjects import linear_model, subject
from own_names import forget

from he_keras import analysis
from he_keras.analysis.analysis import option_defaults, plain

FOLDER = pathlib.Path(analysis.__file__).parent
IMAGES, LABELS = [[0.2, 0.4], [0.6, 0.8]], [0, 1]


@pytest.fixture
def registered():
    """A small analysis, whose name is forgotten afterwards."""

    @analysis.register("sizes")
    class Sizes(analysis.Analysis):
        """Counts."""

        def __init__(self, factor=2.0, count=3, flag=False, word="a", parts=(1, 2)):
            self.factor, self.count, self.flag = factor, count, flag
            self.word, self.parts = word, parts

        def measure(self, subjects):
            return {each.name: [np.float32(self.factor), np.nan] for each in subjects}

        def draw(self, numbers, figure):
            figure.subplots().plot(np.array(next(iter(numbers.values())), float))

    yield Sizes
    forget("sizes")


def one(name="mine"):
    return subject(linear_model(np.eye(2)), IMAGES, LABELS, name=name, settings={"seed": 7})


# Registry


def test_every_registered_file_is_found():
    sources = [path.read_text() for path in FOLDER.glob("*.py")]
    written = [name for text in sources for name in re.findall(r'^@register\("(.*)"\)', text, re.M)]
    assert len(written) >= 7
    assert sorted(written) == analysis.names()


@pytest.mark.parametrize("name", analysis.names())
def test_every_analysis_has_a_summary_and_checked_options(name):
    built = analysis.get(name)
    assert built.name == name
    assert analysis.summaries()[name].endswith(".")
    assert json.loads(json.dumps(plain(built.options))) == plain(built.options)
    assert set(built.options) == set(option_defaults(type(built)))
    if "seed" in built.options:
        with pytest.raises(ValueError, match="received seed=-1"):
            analysis.get(name, seed=-1)


def test_a_name_is_registered_once(registered):
    with pytest.raises(ValueError, match="registered twice; expected a new name; received 'sizes'"):
        analysis.register("sizes")(type("Other", (analysis.Analysis,), {}))
    assert analysis.register("sizes")(registered) is registered


def test_unknown_names_list_the_valid_ones(registered):
    with pytest.raises(ValueError, match="Unknown analysis; expected one of .*sizes.*'size'"):
        analysis.get("size")
    wanted = "Unknown option of sizes; expected one of factor, count, flag, word, parts; received f"
    with pytest.raises(ValueError, match=wanted):
        analysis.get("sizes", f=1)
    with pytest.raises(ValueError, match=wanted):
        analysis.from_text("sizes", ["f=1"])
    with pytest.raises(ValueError, match=r"expected one of \(it has none\); received x"):
        analysis.get("class-weights", x=1)


def test_options_as_text(registered):
    built = analysis.from_text(
        "sizes", ["factor=51/255", "count=7", "flag=True", "word=b=c", "parts=4,5,6"]
    )
    assert built.options == {
        "factor": 0.2,
        "count": 7,
        "flag": True,
        "word": "b=c",
        "parts": (4, 5, 6),
    }
    assert analysis.from_text("sizes", ["flag=false"]).flag is False
    assert analysis.from_text("sizes", []).options == registered().options


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["count=7.5"], "expected count of type int; received count='7.5'"),
        (["factor=big"], "expected factor of type float; received factor='big'"),
        (["flag=maybe"], "expected flag of type bool; received flag='maybe'"),
        (["parts=1,x"], "expected parts of type int; received parts='x'"),
        (["count"], "expected key=value, each key once; received 'count'"),
        (["count=1", "count=2"], "each key once; received 'count=2'"),
    ],
)
def test_options_that_are_no_such_text(registered, texts, expected):
    with pytest.raises(ValueError, match=expected):
        analysis.from_text("sizes", texts)


# Subjects


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"images": np.array([[0.2, 1.4], [0.6, 0.8]])}, ValueError, "bounds"),
        ({"labels": np.array([0])}, ValueError, "Invalid labels"),
        ({"threat": 8 / 255}, TypeError, "Invalid threat"),
        ({"model": "model.keras"}, TypeError, "Cannot analyse this object.*received str"),
    ],
)
def test_subjects_are_checked(change, error, message):
    good = one()
    with pytest.raises(error, match=message):
        dataclasses.replace(good, **change)


def test_subjects_that_an_analysis_cannot_compare(registered, tmp_path):
    sizes = registered()
    with pytest.raises(ValueError, match=r"at least 1 models under different names; received \[\]"):
        sizes.run([], tmp_path / "a")
    with pytest.raises(ValueError, match=r"received \['mine', 'mine'\]"):
        sizes.run([one(), one()], tmp_path / "a")
    three_classes = subject(linear_model(np.eye(2)), IMAGES, [0, 2])
    with pytest.raises(ValueError, match=r"expected 0\.\.1; received 2"):
        sizes.run([three_classes], tmp_path / "a")
    assert not (tmp_path / "a").exists()


# Files


def test_run_writes_numbers_with_all_they_depend_on(registered, tmp_path):
    sizes = registered(factor=1.5)
    content = sizes.run([one("a"), one("b")], tmp_path / "new")
    stored = json.loads((tmp_path / "new" / "sizes.json").read_text())
    assert stored == content
    assert stored["numbers"] == {"a": [1.5, None], "b": [1.5, None]}
    assert stored["options"] == {
        "factor": 1.5,
        "count": 3,
        "flag": False,
        "word": "a",
        "parts": [1, 2],
    }
    assert stored["subjects"][1]["name"] == "b"
    assert stored["subjects"][0]["settings"] == {"seed": 7}
    assert stored["subjects"][0]["num_examples"] == 2
    assert stored["subjects"][0]["threat"]["epsilon"] == 0.1
    assert stored["environment"]["keras"]
    assert (tmp_path / "new" / "sizes.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["sizes.json", "sizes.png"]


def test_an_unwritable_folder_is_found_before_measuring(registered, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(registered, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match="Cannot write the analysis"):
        registered().run([one()], tmp_path / "file" / "x")


def test_plain_data():
    given = {1: (np.float32(0.5), np.arange(2), np.bool_(True)), "x": [float("inf"), None, "t"]}
    assert plain(given) == {"1": [0.5, [0, 1], True], "x": [None, None, "t"]}
    with pytest.raises(TypeError):
        plain({"model": object()})


def test_the_base_class_measures_nothing():
    with pytest.raises(TypeError, match="a method `measure`; received Analysis"):
        analysis.Analysis().measure([one()])
    with pytest.raises(TypeError, match="a method `draw`; received Analysis"):
        analysis.Analysis().draw({}, None)
    assert analysis.Analysis().table({}) == ""
