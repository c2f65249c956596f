"""The transfer matrix: closed forms on linear models, NumPy beside it, and the files."""

import functools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from attack_victims import (
    CLASSES,
    THREAT,
    cosine_model,
    functional,
    images,
    labels,
    linear,
)

import he_keras as he
from he_keras.attacks import PGD
from he_keras.attacks.projected_gradient import ProjectedGradient
from he_keras.evaluation.transfer_matrix import (
    TransferMatrix,
    plot_transfer,
    transfer_matrix,
    write_transfer,
)

pytestmark = pytest.mark.usefixtures("op_by_op")

PIXELS = 12
EPSILON = THREAT.epsilon


@functools.cache
def directions():
    """Two similar linear classifiers of two classes: logits (d.x, -d.x)."""
    first = np.random.default_rng(2).normal(size=PIXELS)
    second = first + np.random.default_rng(3).normal(size=PIXELS)
    return {"first": first - first.mean(), "second": second - second.mean()}


def two_classes(direction):
    kernel = tf.constant(np.stack([direction, -direction], axis=1), tf.float32)
    return lambda batch: tf.reshape(batch, [-1, PIXELS]) @ kernel


def pair():
    return {name: two_classes(direction) for name, direction in directions().items()}


@functools.cache
def examples():
    """Sixty images near the boundary of the first model, every seventh with the wrong label."""
    batch = np.random.default_rng(4).uniform(0.1, 0.9, size=(60, 2, 2, 3)).astype(np.float32)
    truth = (batch.reshape(-1, PIXELS) @ directions()["first"] < 0).astype(int)
    truth[::7] = 1 - truth[::7]
    return batch, truth


def by_hand():
    """The matrix in NumPy: the strongest image of a linear model is a corner of the ball."""
    batch, truth = examples()
    sign = np.where(truth == 0, 1.0, -1.0)[:, None]
    rows = []
    for source in directions().values():
        x_adv = np.clip(batch.reshape(-1, PIXELS) - EPSILON * sign * np.sign(source), 0.0, 1.0)
        rows.append([_accuracy(x_adv, sign, target) for target in directions().values()])
    clean = [_accuracy(batch.reshape(-1, PIXELS), sign, each) for each in directions().values()]
    return np.array(rows), np.array(clean)


def _accuracy(flat, sign, direction):
    margin = sign[:, 0] * (flat @ direction)
    assert np.abs(margin).min() > 1e-4
    return np.mean(margin > 0)


@pytest.mark.fast_cases("fgsm", "pgd-20")
@pytest.mark.parametrize("attack", ["fgsm", "pgd-20", "mim-20"])
def test_two_linear_models_as_by_hand(attack):
    matrices = transfer_matrix(pair(), examples(), THREAT, [attack], batch_size=25, step_size=0.01)
    (matrix,) = matrices
    accuracy, clean = by_hand()
    # No two cells are equal: rows and columns cannot have been mixed up.
    assert len({*accuracy.ravel(), *clean}) == 6
    np.testing.assert_allclose(matrix.robust_accuracy, accuracy, atol=1e-9)
    np.testing.assert_allclose(matrix.clean_accuracy, clean, atol=1e-9)
    assert (matrix.attack, matrix.names, matrix.num_examples) == (attack, ("first", "second"), 60)


def test_the_last_iterate_of_every_image_counts():
    """What the source gets wrong from the start is attacked too, or the target would hold it."""
    matrices = transfer_matrix(pair(), examples(), THREAT, ["mim-20"], step_size=0.01)
    (stopped,) = matrices
    assert stopped.settings["keep"] == "last" and stopped.settings["stop_when_broken"] is False
    batch, truth = examples()
    source, target = pair().values()
    resting = he.attacks.MIM(THREAT, 20, step_size=0.01)(source, batch, truth).x_adv
    rested = np.mean(target(resting).numpy().argmax(axis=1) == truth)
    assert rested > stopped.robust_accuracy[0][1]


def models():
    return {"linear": linear, "he": cosine_model(), "arc": cosine_model(scale=3.0)}


@functools.cache
def matrix_of_three():
    return transfer_matrix(models(), (images(), labels()), THREAT, ["pgd-6"], 8)[0]


@pytest.mark.slow
def test_the_diagonal_is_the_attack_itself():
    given = models(), (images(), labels()), THREAT
    for matrix in (matrix_of_three(), *transfer_matrix(*given, ["mim-6"], 8)):
        for number, model in enumerate(models().values()):
            attack = he.attacks.get(matrix.attack, THREAT, keep="last", stop_when_broken=False)
            direct = attack(model, images(), labels()).robust_accuracy
            assert matrix.robust_accuracy[number][number] == pytest.approx(direct)
            clean = (np.asarray(model(images())).argmax(axis=1) == labels()).mean()
            assert matrix.clean_accuracy[number] == pytest.approx(clean)


@pytest.mark.slow
def test_the_order_of_the_models_only_permutes():
    names = ["arc", "linear", "he"]
    shuffled = transfer_matrix(
        {name: models()[name] for name in names}, (images(), labels()), THREAT, ["pgd-6"], 8
    )[0]
    first = matrix_of_three()
    order = [first.names.index(name) for name in names]
    expected = np.array(first.robust_accuracy)[np.ix_(order, order)]
    np.testing.assert_allclose(shuffled.robust_accuracy, expected)
    assert shuffled.names == tuple(names)


def test_batches_and_kinds_of_data_change_nothing():
    batches = tf.data.Dataset.from_tensor_slices((images(), labels())).batch(3)
    (again,) = transfer_matrix(models(), batches, THREAT, ["pgd-6"], 20)
    assert again.robust_accuracy == matrix_of_three().robust_accuracy


class Recording(ProjectedGradient):
    """Notes what it is called with."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def __call__(self, model, images, labels, example_ids=None):
        self.calls.append((model, tuple(example_ids)))
        return super().__call__(model, images, labels, example_ids)


def recording(**options):
    return Recording(THREAT, 2, **{"keep": "last", "stop_when_broken": False, **options})


def test_images_are_crafted_once_for_each_source_block_by_block():
    attack, two = recording(), pair()
    transfer_matrix(two, examples(), THREAT, [attack], batch_size=25)
    blocks = [tuple(range(0, 25)), tuple(range(25, 50)), tuple(range(50, 60))]
    assert attack.calls == [(model, block) for model in two.values() for block in blocks]


def test_options_reach_attacks_given_by_name():
    two = {"he": cosine_model(), "linear": functional()}
    unit, direct = (
        transfer_matrix(two, (images(), labels()), THREAT, ["pgd-6"], logit_scale=scale, seed=3)[0]
        for scale in ("unit", "model")
    )
    assert unit.settings["logit_scale"] == "unit" and unit.settings["seed"] == 3
    expected = PGD(THREAT, 6, keep="last", stop_when_broken=False, logit_scale="unit", seed=3)
    crafted = expected(cosine_model(), images(), labels())
    assert unit.robust_accuracy[0][0] == pytest.approx(crafted.robust_accuracy)
    # The scale of a linear head is 1 anyway.
    assert unit.robust_accuracy[1] == direct.robust_accuracy[1]


@pytest.mark.slow
def test_attacks_that_draw_on_other_examples_see_them_whatever_the_batches():
    two = {"he": cosine_model(), "linear": functional()}
    settings = {"num_targets": 2, "step_size": 0.01}
    one, whole = (
        transfer_matrix(two, (images(6), labels(6)), THREAT, ["feature-3"], size, **settings)[0]
        for size in (1, 6)
    )
    assert one.robust_accuracy == whole.robust_accuracy


def test_progress_is_shown_if_asked_for(capsys):
    transfer_matrix(pair(), examples(), THREAT, ["fgsm"])
    assert capsys.readouterr().err == ""
    transfer_matrix(pair(), examples(), THREAT, ["fgsm"], show_progress=True)
    shown = capsys.readouterr().err
    assert shown.startswith("transfer 100%") and shown.endswith("fgsm on second\n")


def three_classes(batch):
    return tf.concat([linear(batch)[:, :3]], axis=1)


def probabilities(batch):
    return tf.nn.softmax(linear(batch))


MISTAKES = {
    "one model": ({"models": {"a": linear}}, "expected at least two"),
    "no mapping": ({"models": [linear, linear]}, "expected a mapping"),
    "same names": ({"models": {1: linear, "1": linear}}, "different names"),
    "classes": ({"models": {"a": linear, "b": three_classes}}, "number of classes.*'b': 3"),
    "shapes": (
        {"models": {"a": linear, "b": keras.Sequential([keras.Input((4, 4, 3))])}},
        r"does not fit.*\(2, 2, 3\); received b: ",
    ),
    "softmax": ({"models": {"a": probabilities, "b": linear}}, "received a: .*probabilities"),
    "not callable": ({"models": {"a": linear, "b": 3}}, "Cannot attack this object"),
    "stops": ({"stop_when_broken": True}, "to the end.*received pgd"),
    "minimum norm": ({"attacks": ["deepfool"]}, "to the end.*received deepfool"),
    "ensemble": ({"attacks": ["autoattack"]}, "to the end.*received autoattack"),
    "same attacks": ({"attacks": ["fgsm", "fgsm"]}, "Attacks must have different names"),
    "batch size": ({"batch_size": 0}, "batch_size"),
    "labels": ({"examples": (images(), labels() + CLASSES)}, "Label outside the classes"),
    "no examples": ({"examples": tf.data.Dataset.range(0)}, "No examples"),
    "threat": ({"threat": 0.03}, "expected a ThreatModel"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_before_any_attack(mistake):
    changed, message = MISTAKES[mistake]
    attack = recording()
    arguments = {
        "models": {"a": linear, "b": functional()},
        "examples": (images(), labels()),
        "threat": THREAT,
        "attacks": [attack],
        **changed,
    }
    if "stop_when_broken" in changed:
        arguments["attacks"] = ["pgd"]
    with pytest.raises((ValueError, TypeError), match=message):
        transfer_matrix(**arguments)
    assert not attack.calls


def matrix(attack="mim-20"):
    return TransferMatrix(
        attack=attack,
        names=("PGD-AT", "a/rather long name of a run"),
        robust_accuracy=((0.1, 0.625), (0.75, 0.375)),
        clean_accuracy=(0.875, 1.0),
        num_examples=8,
        threat=THREAT.get_config(),
        settings={"num_steps": 20},
    )


def test_the_table():
    lines = matrix().table().splitlines()
    assert lines[0].startswith("mim-20 (linf, epsilon 0.05, pixels 0 to 1, 8 examples)")
    assert lines[1].split(None, 2) == ["crafted", "for", "PGD-AT  a/rather long name of a run"]
    assert lines[2].split() == ["(clean)", "87.50%", "100.00%"]
    assert lines[3].split() == ["PGD-AT", "10.00%", "62.50%"]
    assert lines[4].split()[-2:] == ["75.00%", "37.50%"]
    assert len({len(line) for line in lines[1:]}) == 1


def test_the_files(tmp_path):
    folder = tmp_path / "new" / "folder"
    path = write_transfer(folder, (matrix(), matrix("transfer:a/b c")))
    assert path == folder / "transfer.json"
    pictures = ["transfer-mim-20.png", "transfer-transfer-a-b-c.png"]
    assert sorted(file.name for file in folder.iterdir()) == [*pictures, "transfer.json"]
    content = json.loads(path.read_text())
    assert content["schema_version"] == 1 and content["environment"]["he_keras"]
    assert content["matrices"][0] == {
        "attack": "mim-20",
        "names": ["PGD-AT", "a/rather long name of a run"],
        "robust_accuracy": [[0.1, 0.625], [0.75, 0.375]],
        "clean_accuracy": [0.875, 1.0],
        "num_examples": 8,
        "threat": {"norm": "linf", "epsilon": 0.05, "bounds": [0.0, 1.0]},
        "settings": {"num_steps": 20},
        "data": None,
    }


def test_what_was_computed_can_be_written(tmp_path):
    computed = [matrix_of_three(), matrix()]
    path = write_transfer(tmp_path, computed)
    written = json.loads(path.read_text())["matrices"]
    assert [each["robust_accuracy"] for each in written] == [
        [list(row) for row in each.robust_accuracy] for each in computed
    ]


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="Cannot write the transfer matrices"):
        write_transfer(tmp_path / "file", [matrix()])


def test_the_picture_shows_every_number_where_it_belongs(tmp_path, monkeypatch):
    from matplotlib import colors, figure

    kept, save = [], figure.Figure.savefig

    def keep(drawn, *arguments, **options):
        kept.append(drawn)
        save(drawn, *arguments, **options)

    monkeypatch.setattr(figure.Figure, "savefig", keep)
    assert plot_transfer(matrix(), tmp_path / "map.png") == tmp_path / "map.png"
    (axes,) = kept[0].axes
    shown = {text.get_position(): text.get_text() for text in axes.texts}
    cells = {(0, 0): "10.0", (1, 0): "62.5", (0, 1): "75.0", (1, 1): "37.5"}
    assert {place: shown[place] for place in cells} == cells
    assert sorted(shown.values()) == sorted([*cells.values(), "87.5", "100.0"])
    below, beside = axes.get_xticklabels(), axes.get_yticklabels()
    assert [" ".join(label.get_text().split()) for label in below] == list(matrix().names)
    assert [label.get_text() for label in beside][0] == "clean"
    # The white-box cells are framed, and dark cells have light numbers.
    assert [patch.get_center().round().tolist() for patch in axes.patches] == [[0, 0], [1, 1]]
    light = [text.get_text() for text in axes.texts if text.get_color() == "white"]
    assert light == ["10.0", "37.5"]
    for text in axes.texts:
        assert _contrast(text, axes.images[0].get_cmap(), colors) > 4.5


def _contrast(text, colour_map, colors):
    """The contrast of WCAG 2 between a number and its cell."""
    both = colour_map(float(text.get_text()) / 100.0), text.get_color()
    first, second = (_luminance(np.array(colors.to_rgb(colour))) for colour in both)
    return (max(first, second) + 0.05) / (min(first, second) + 0.05)


def _luminance(colour):
    linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]
