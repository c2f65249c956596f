"""Packaging of he_keras and of the command he-keras."""

import ast
import pathlib

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).resolve().parent

REQUIREMENTS = [
    "keras>=3.12,<4",
    "tensorflow>=2.20,<2.22",
    "tensorflow-datasets>=4.9.10,<5",
    "cleverhans>=4.0.0,<5",
    # The search uses four of its private names: tests/project/test_private_names.py.
    "keras-tuner>=1.4.7,<1.5",
    "absl-py>=2.0",
    "numpy>=1.26,<3",
    "ml-collections>=1.0,<2",
    "scikit-learn>=1.4,<2",
    "scipy>=1.10,<2",
    "matplotlib>=3.8,<4",
    "pillow>=10.0",
    "jinja2>=3.1,<4",
    # keras-tuner imports tensorboard and tensorflow-datasets imports importlib_resources, and
    # neither asks for it.
    "tensorboard>=2.20,<3",
    "importlib_resources>=6.0",
    "tqdm>=4.60,<5",
]

# The oldest Python has no onnxruntime that was tried with the others.
ONNX = [
    f"{requirement}; python_version >= '3.11'"
    for requirement in ("onnx>=1.23,<2", "onnxruntime>=1.31,<2", "tf2onnx>=1.17,<2")
]
SERVE = [
    "aiohttp>=3.13.3,<4",
    "orjson>=3.10,<4",
    "prometheus_client>=0.21,<1",
    "pysimdjson>=7.0,<8",
]

EXTRAS = {
    "gpu": ["tensorflow[and-cuda]>=2.20,<2.22"],
    "bench": [
        "torch>=2.4",
        "torchattacks>=3.5",
        "foolbox>=3.3",
        "adversarial-robustness-toolbox>=1.18",
    ],
    "onnx": ONNX,
    "serve": SERVE,
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.7,<10", "mkdocstrings[python]>=1.0,<2"],
    "dev": [
        "ruff>=0.12",
        "mypy>=1.11",
        "pytest>=8.2",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "selenium>=4.20",
        *ONNX,
        *SERVE,
    ],
}


def read_version() -> str:
    """Returns `__version__` without importing the package, whose imports may be missing still."""
    tree = ast.parse((ROOT / "he_keras" / "version.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__version__":
            return ast.literal_eval(node.value)
    raise RuntimeError("he_keras/version.py does not define __version__")


def read_description() -> str:
    """Returns the README, or nothing where a partial copy of the tree has none."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setup(
    name="he_keras",
    version=read_version(),
    description="Hypersphere-embedding adversarial training and robustness evaluation on Keras 3",
    long_description=read_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=find_packages(str(ROOT), include=["he_keras", "he_keras.*"]),
    # What `he-keras` runs before TensorFlow is loaded, and so before the package.
    py_modules=["he_keras_cli"],
    package_data={
        "he_keras": ["py.typed", "**/*.json", "**/*.jinja", "**/*.css", "**/*.js"],
    },
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["he-keras = he_keras_cli:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
