"""Packaging of megatron_kd. Exact pins for a CPU environment live in tools/constraints-cpu.txt, here only ranges."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="megatron-kd",
    version="0.1.0",
    description="Large-scale knowledge distillation for Megatron-Core and Megatron-Bridge",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12,<3.13",
    packages=find_packages(include=["megatron_kd", "megatron_kd.*"]),
    package_data={"megatron_kd": ["plan/models/*.json"]},
    install_requires=[
        "torch>=2.11",
        "megatron-core>=0.19.2",
        "nvidia-modelopt>=0.47",
        "omegaconf>=2.3",
        "transformers>=5.8,<=5.12.1",
        "numpy",
        "safetensors",
        "xxhash>=3.4",
        "zstandard>=0.22",
        "fsspec",
        "rich>=13",
        "matplotlib>=3.8",
    ],
    extras_require={
        "gpu": ["transformer-engine[pytorch]>=2.20", "triton>=3.6"],
        "stream": ["nixl>=1.5"],
        "s3": ["s3fs"],
        "dev": ["pytest>=8", "pytest-timeout", "hypothesis", "psutil", "liger-kernel", "moto>=5", "flask", "flask-cors", "py-partiql-parser", "s3fs"],
    },
    entry_points={"console_scripts": ["megatron-kd=megatron_kd.cli.main:main"]},
)
