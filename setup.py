"""Package metadata: each folder at the top is the subpackage of the same name.

The mapping is here and nowhere else, so that a ZIP of the repository installs as a clone does.
``greenroom`` itself is a PEP 420 namespace: bare names such as ``persistence`` would collide.
"""

from pathlib import Path

from setuptools import find_packages, setup

FOLDERS = ("actors", "core", "http_front", "persistence", "serve")

# No project URLs: there is no public host of this project to name yet.
setup(
    name="greenroom",
    version="0.1.0",  # the only place; the rest reads it from the installed metadata
    description="Python functions and classes as replicated HTTP endpoints, in pure Python",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        f"greenroom.{name}"
        for name in find_packages(include=[*FOLDERS, *(f"{folder}.*" for folder in FOLDERS)])
    ],
    package_dir={f"greenroom.{folder}": folder for folder in FOLDERS},
    package_data={"": ["py.typed"], "greenroom.http_front.admin": ["dashboard.html"]},
    install_requires=[
        "thespian==4.0.1",  # its inside is used in actors/transport
        "cloudpickle>=3.0",
        "falcon>=4.0",
        "gunicorn>=27.0",
        "httptools>=0.8",  # takes a space behind a length
        "websockets>=16.1",  # answers 400 to a key that is not ASCII
        "starlette>=0.49.1",
        "pydantic>=2.12",
        "orjson>=3.10",
        "click>=8.2.1",  # 8.2.0 loses flags
        "rich>=13",
        "pyyaml>=6.0",  # imported by commands that read or write a configuration file
        "setproctitle>=1.3",
        "psutil>=6.0",
        "typing_extensions>=4.6",
    ],
    extras_require={
        "all": ["greenroom[cluster,grpc,otel,postgres,uvloop]"],
        "uvloop": ["uvloop>=0.21"],  # workers and replicas use it where it is installed
        "cluster": [
            "cryptography>=44.0.1"
        ],  # makes cluster files: keygen, start --bind, rotate-key
        "postgres": ["psycopg[binary]>=3.2"],  # start --store postgresql://...
        "otel": [
            "opentelemetry-api>=1.25",
            "opentelemetry-sdk>=1.25",
            "opentelemetry-exporter-otlp-proto-http>=1.25",
        ],
        "grpc": ["grpcio>=1.66", "grpcio-health-checking>=1.66", "grpcio-reflection>=1.66"],
        "examples": ["scikit-learn>=1.5", "fastapi>=0.140"],
    },
    entry_points={
        "console_scripts": ["greenroom=greenroom.serve.cli.main:main"],
        "pytest11": ["greenroom=greenroom.serve.testing"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Framework :: AsyncIO",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Typing :: Typed",
    ],
)
