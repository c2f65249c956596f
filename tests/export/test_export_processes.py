"""An exported model as others use it: TensorFlow alone, and TensorFlow's own command."""

import os
import subprocess
import sys

import numpy as np
import pytest
from exported_models import NAMES, hypersphere_model, random_images

import he_keras as he

pytestmark = pytest.mark.slow

# As a server does: this package cannot be imported, not even by accident.
READER = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "he_keras":
            raise ImportError(f"blocked: {name}")


sys.meta_path.insert(0, Blocker())
try:
    import he_keras
except ImportError:
    pass
else:
    sys.exit("he_keras can be imported")

import numpy as np
import tensorflow as tf

folder, inputs, outputs = sys.argv[1:]
model = tf.saved_model.load(folder)
images = np.load(inputs)
files = tf.constant([tf.io.encode_png(image).numpy() for image in images["serve_uint8"]])
given = {"serve_bytes": files, **{name: tf.constant(images[name]) for name in images}}
results = {}
for signature, value in given.items():
    answer = model.signatures[signature](images=value)
    for name, value in answer.items():
        # Text as bytes of fixed length: a file without pickles.
        array = value.numpy()
        results[f"{signature} {name}"] = array.astype("S") if array.dtype == object else array
np.savez(outputs, **results)
"""


@pytest.fixture(scope="module")
def model():
    return hypersphere_model()


@pytest.fixture(scope="module")
def version(model, tmp_path_factory):
    return he.export_saved_model(model, tmp_path_factory.mktemp("served") / "insects", NAMES)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    images, floats = random_images(5)
    path = tmp_path_factory.mktemp("inputs") / "inputs.npz"
    np.savez(path, serve_uint8=images, serving_default=floats)
    return path


def run(*command):
    answer = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def saved_model_cli(*arguments):
    return run(sys.executable, "-m", "tensorflow.python.tools.saved_model_cli", *arguments)


def test_plain_tensorflow_without_he_keras(model, version, inputs, tmp_path):
    run(sys.executable, "-c", READER, version, inputs, tmp_path / "outputs.npz")
    with np.load(inputs) as given, np.load(tmp_path / "outputs.npz") as answers:
        expected = model.predict(given["serving_default"], verbose=0)
        assert len(answers.files) == 3 * 6
        for name in ("serving_default", "serve_uint8", "serve_bytes"):
            np.testing.assert_allclose(answers[f"{name} logits"], expected, rtol=0, atol=1e-5)
            np.testing.assert_array_equal(answers[f"{name} classes"], expected.argmax(axis=1))
            best = [NAMES[number].encode() for number in expected.argmax(axis=1)]
            assert answers[f"{name} labels"][:, 0].tolist() == best


def test_saved_model_cli_show(version):
    shown = saved_model_cli("show", "--dir", version, "--all")
    for part in (
        "signature_def['serving_default']",
        "signature_def['serve_uint8']",
        "signature_def['serve_bytes']",
        "inputs['images'] tensor_info",
        "shape: (-1, 8, 8, 3)",
        "dtype: DT_UINT8",
        "outputs['cosines'] tensor_info",
        "outputs['labels'] tensor_info",
    ):
        assert part in shown


@pytest.mark.parametrize("signature", ["serving_default", "serve_uint8"])
def test_saved_model_cli_run(model, version, inputs, tmp_path, signature):
    saved_model_cli(
        "run",
        "--dir",
        version,
        "--tag_set",
        "serve",
        "--signature_def",
        signature,
        "--inputs",
        f"images={inputs}[{signature}]",
        "--outdir",
        tmp_path,
    )
    with np.load(inputs) as given:
        expected = model.predict(given["serving_default"], verbose=0)
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), expected, rtol=0, atol=1e-5)
    labels = np.load(tmp_path / "labels.npy", allow_pickle=True)
    assert labels[0, 0].decode() == NAMES[expected[0].argmax()]
