"""The catalog of experiments: names, files in configs/, former names, and what --list shows."""

import functools
import importlib
import pathlib
import runpy

import pytest
from experiments import ENTRIES, NAMES
from programs import ROOT, assert_one_line_error, run_here

from he_keras import experiment
from he_keras.experiment import catalog
from he_keras.experiment.catalog import papers

CONFIGS = sorted((ROOT / "configs").glob("*.py"))


@pytest.fixture
def run(monkeypatch, capfd):
    return functools.partial(run_here, monkeypatch, capfd)


def test_every_file_of_the_catalog_has_one_to_edit():
    assert {path.stem for path in CONFIGS} == set(catalog.FILES)
    folder = pathlib.Path(catalog.__file__).parent
    others = {"__init__", "experiment_entry", "papers"}
    assert {path.stem for path in folder.glob("*.py")} == {*catalog.FILES, *others}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_file_to_edit_is_the_one_of_the_catalog(path):
    mine = runpy.run_path(str(path))
    original = importlib.import_module(f"he_keras.experiment.catalog.{path.stem}")
    assert mine["get_config"]().to_dict() == original.get_config().to_dict()
    if hasattr(original, "get_search"):
        assert mine["get_search"]() == original.get_search()
    for entry in original.experiments():
        arguments = [entry.argument] if entry.argument else []
        assert mine["get_config"](*arguments).name == entry.name
    assert path.stem in mine["__doc__"] and len(path.read_text().splitlines()) < 25


def test_names_are_distinct():
    entries = list(catalog.entries())
    assert len({entry.name for entry in entries}) == len(entries) == 92
    assert len({entry.reference() for entry in entries}) == len(entries)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("he_cifar10:trades,m_he", "catalog/he_cifar10.py:trades,m_he"),
        ("configs/nowhere/he_cifar10.py:alp,he", "catalog/he_cifar10.py:alp,he"),
        ("quickstart_digits", "catalog/quickstart_digits.py"),
    ],
)
def test_a_name_is_a_file(given, found):
    assert catalog.path_of(given).endswith(found)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(
        ValueError, match="expected an existing FILE.py; received somewhere/mine.py"
    ):
        catalog.path_of("somewhere/mine.py")


def test_a_file_that_exists_is_taken(tmp_path):
    path = tmp_path / "he_cifar10.py"
    path.touch()
    assert catalog.path_of(f"{path}:trades,he") == f"{path}:trades,he"


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("configs/cifar10_trades_m_he.py", "he_cifar10:trades,m_he"),
        ("configs/cifar10_small_fast_at_12.py", "cifar10_large_epsilon:12,none"),
        ("configs/cifar10_small_fast_at_16.py:elle_a", "cifar10_large_epsilon:16,elle_a"),
        ("configs/mnist_pas_small.py", "pas_mnist:linf,small"),
        ("imagenet_llr", "llr:imagenet"),
    ],
)
def test_a_former_name_is_answered_with_the_present_one(run, tmp_path, former, now):
    answer = run("train", f"--config={former}", f"--output_dir={tmp_path / 'run'}")
    assert_one_line_error(answer, f"{former} is now --config={now}")


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("he_cifar10:trades,mhe", ["HEAD one of linear, he, m_he; received he_cifar10:trades,mhe"]),
        ("he_imagenet:resnet-18,he", ["NETWORK one of resnet-50, resnet-152"]),
        ("rat:cifar10,vgg-16,trades", ["expected --config=rat:DATA,NETWORK,BASE,TERMS"]),
        ("pas_mnist:linf", ["expected --config=pas_mnist:THREAT,SCHEDULE"]),
        ("pas_cifar10:vgg16,linear,twice", ["CYCLES one of whole, restarts"]),
        ("llr:cifar10", ["EXPERIMENT one of cifar10_paper, cifar10_released, imagenet"]),
        ("cifar10_small:fast", ["METHOD one of fast_at, standard"]),
        ("cifar10_budget:gradalign", ["NAME one of pgd_at, he, ema"]),
        ("cifar10_large_epsilon:8,none", ["EPSILON one of 12, 16"]),
    ],
)
def test_a_wrong_argument_is_answered_with_the_valid_ones(run, tmp_path, argument, parts):
    answer = run("train", f"--config={argument}", f"--output_dir={tmp_path / 'run'}")
    assert_one_line_error(answer, "Invalid argument of", *parts)
    assert "Traceback" not in answer[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [["--config=quickstart_digits"], ["--config", "quickstart_digits"]]
)
def test_an_experiment_is_trained_by_its_name(run, tmp_path, form):
    code, out, err = run("train", *form, "--smoke", f"--output_dir={tmp_path / 'run'}")
    assert code == 0, err
    assert experiment.read_config(tmp_path / "run").name == "quickstart_digits_smoke"


def test_list_shows_every_experiment(run):
    code, out, err = run("train", "--list")
    assert (code, err) == (0, "")
    for name in NAMES:
        entry = ENTRIES[name]
        assert f"{name}: {entry.title}" in out
        assert f"{entry.command()}\n" in out
        assert not entry.published or entry.published in out
    assert "published: clean 84.30, PGD-20 61.83 (scale-1 logits, no adaptive attack)." in out
    code, out, err = run("search", "--list")
    assert code == 0 and [line[:4] for line in out.splitlines() if line[0] != " "] == [
        "cifa",
        "digi",
    ]


def test_list_with_a_configuration_shows_its_header(run):
    code, out, err = run("train", "--list", "--config=he_cifar10:alp,he")
    assert (code, err) == (0, "")
    assert out.strip() == ENTRIES["cifar10_alp_he"].header()
    assert "the l2 norm" in out and "(followed) s = 20, m = 0.3" in out


def test_headers_quote_the_tables_of_the_papers():
    title = ENTRIES["cifar10_trades_m_he"].title
    assert title == "CIFAR-10, TRADES + m-HE: Table 10 of the HE paper."
    assert papers.quoted("he_table_10", "TRADES+m-HE", "clean") == "clean 84.30"
    for name, table in papers.tables().items():
        rows = table["cells"]["rows"].values() if "cells" in table else ()
        for row in rows:
            if "experiment" in row and "changes" not in row and name.startswith("he_table_"):
                assert ENTRIES[row["experiment"]].published
