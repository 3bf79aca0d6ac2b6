"""Package metadata. Exact versions that were tested together are in requirements.txt and requirements/."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


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
    package_data={"verl_memopt": ["py.typed", "config/yaml/*.yaml", "config/yaml/*/*.yaml"]},
    install_requires=[re.sub(r"^torch==.*", "torch>=2.11,<2.14", line) for line in requirements("requirements.txt")],
    extras_require={
        "cpu": requirements("requirements/cpu.txt"),
        "gpu": ["vllm==0.32.0"],
        "flash-attn": ["flash-attn>=2.8"],
        "torchao": ["torchao>=0.18,<0.19"],
        "wandb": ["wandb>=0.18"],
        "dev": requirements("requirements/dev.txt"),
        "docs": ["mkdocs-material>=9.5"],
    },
    entry_points={"console_scripts": ["verl-memopt=verl_memopt.cli:main"]},
)
