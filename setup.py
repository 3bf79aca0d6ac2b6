"""Package metadata with ranges of versions. requirements.txt and requirements/ have those that were tested together."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

INSTALL_REQUIRES = [
    "torch>=2.11,<2.14",
    "transformers>=5.16.1,<6",
    "ray>=2.60,<3",
    "tensordict>=0.15,<0.16",
    "hydra-core>=1.3.8,<1.4",
    "codetiming>=1.4,<2",
    "cloudpickle>=3,<4",
    "safetensors>=0.6.2,<1",
    "numpy>=2.0,<3",
    "blake3>=1.0,<2",
    "pyarrow>=17",
    "rich>=13",
    "psutil>=6",
    "matplotlib>=3.9,<4",
    "tensorboard>=2.21,<3",
]


def requirements(name: str) -> list[str]:
    lines = (HERE / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-"))]


setup(
    name="verl-memopt",
    version=re.search(r'__version__ = "(.+)"', (HERE / "verl_memopt/__init__.py").read_text()).group(1),
    description="Reinforcement-learning post-training of language models when device memory is scarce",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["verl_memopt", "verl_memopt.*"]),
    package_data={"verl_memopt": ["py.typed", "config/yaml/*.yaml", "config/yaml/*/*.yaml", "plan/example.json"]},
    install_requires=INSTALL_REQUIRES,
    extras_require={
        "cpu": requirements("requirements/cpu.txt"),
        "gpu": ["vllm>=0.32,<0.33"],
        "flash-attn": ["flash-attn>=2.8"],
        "fla": ["fla-core>=0.6"],
        "torchao": ["torchao>=0.18,<0.19"],
        "math": ["math-verify>=0.9,<0.10"],
        "wandb": ["wandb>=0.18"],
        "swanlab": ["swanlab>=0.10"],
        "mlflow": ["mlflow>=3"],
        "trackio": ["trackio"],
        "dev": requirements("requirements/dev.txt"),
        "docs": ["mkdocs-material>=9.5", "latex2mathml>=3.77"],
        "peers": ["trl>=1.16,<2", "peft>=0.21", "datasets>=5", "pandas>=2"],
    },
    entry_points={"console_scripts": ["verl-memopt=verl_memopt.cli:main"]},
)
